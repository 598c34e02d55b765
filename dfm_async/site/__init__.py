"""What the code of operations can use of its site: objects, secrets, cached files; and authorization."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__, moved={"dfm_async.site": "Authorizer=PipelineAuthorizer"}):
    from dfm_async.site.authorizing import Denied as Denied
    from dfm_async.site.authorizing import PipelineAuthorizer as PipelineAuthorizer
    from dfm_async.site.authorizing import PipelineRequest as PipelineRequest
    from dfm_async.site.authorizing import RuleAuthorizer as RuleAuthorizer
    from dfm_async.site.objects import DfmContext as DfmContext
    from dfm_async.site.objects import Provider as Provider
    from dfm_async.site.objects import Site as Site
    from dfm_async.site.objects import Span as Span
    from dfm_async.site.vaults import EnvironmentVault as EnvironmentVault
    from dfm_async.site.vaults import FileVault as FileVault
    from dfm_async.site.vaults import KeyringVault as KeyringVault
    from dfm_async.site.vaults import Vault as Vault
