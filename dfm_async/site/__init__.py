"""What the code of operations sees of its site: objects, secrets, cached files; and who may use it."""

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names

if TYPE_CHECKING:
    from dfm_async.site.authorizing import Authorizer, Denied, PipelineRequest, RuleAuthorizer
    from dfm_async.site.objects import DfmContext, Provider, Site, Span
    from dfm_async.site.vaults import EnvironmentVault, FileVault, KeyringVault, Vault

__all__ = [
    "Authorizer",
    "Denied",
    "DfmContext",
    "EnvironmentVault",
    "FileVault",
    "KeyringVault",
    "PipelineRequest",
    "Provider",
    "RuleAuthorizer",
    "Site",
    "Span",
    "Vault",
]

_HOMES = {
    "dfm_async.site.authorizing": ("Authorizer", "Denied", "PipelineRequest", "RuleAuthorizer"),
    "dfm_async.site.objects": ("DfmContext", "Provider", "Site", "Span"),
    "dfm_async.site.vaults": ("EnvironmentVault", "FileVault", "KeyringVault", "Vault"),
}
__getattr__, __dir__ = lazy_names(__name__, globals(), _HOMES)
