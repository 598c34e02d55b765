"""Federations on NVIDIA FLARE: provisioned for their sites, or all of one on this machine."""

from dfm_async.deploy.local import LocalFlare
from dfm_async.deploy.project import Project, User

__all__ = ["LocalFlare", "Project", "User"]
