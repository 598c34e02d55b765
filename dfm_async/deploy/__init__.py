"""Federations on NVIDIA FLARE: provisioned for their sites, or all of one on this machine."""

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names

if TYPE_CHECKING:
    from dfm_async.deploy.local import LocalFlare
    from dfm_async.deploy.project import Project, User
    from dfm_async.model.flare import SiteSettings

__all__ = ["LocalFlare", "Project", "SiteSettings", "User"]

__getattr__, __dir__ = lazy_names(
    __name__,
    globals(),
    {
        "dfm_async.deploy.local": ["LocalFlare"],
        "dfm_async.deploy.project": ["Project", "User"],
        "dfm_async.model.flare": ["SiteSettings"],
    },
)
