"""Federations on NVIDIA FLARE: provisioned for their sites, or all of one on this machine."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__, moved={"dfm_async.flare": "LocalFlare Project SiteSettings User"}):
    pass
