"""Federations on NVIDIA FLARE: options, startup kits, or a whole federation on this machine."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.deploy.local_flare import LocalFlare as LocalFlare
    from dfm_async.deploy.local_flare import Places as Places
    from dfm_async.deploy.project import Project as Project
    from dfm_async.deploy.project import User as User
    from dfm_async.model.flare import FlareOptions as FlareOptions
    from dfm_async.model.flare import SiteSettings as SiteSettings
