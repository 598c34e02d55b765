"""Describe federations: sites, operations, how parameters are bound, what calls and transfers cost."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.federation.bindings import Const as Const
    from dfm_async.federation.bindings import ExposedParameter as ExposedParameter
    from dfm_async.federation.bindings import FromParam as FromParam
    from dfm_async.federation.bindings import FromProvider as FromProvider
    from dfm_async.federation.bindings import FromSecrets as FromSecrets
    from dfm_async.federation.bindings import FromSite as FromSite
    from dfm_async.federation.federation import Federation as Federation
    from dfm_async.federation.operation import Operation as Operation
    from dfm_async.federation.site import Site as Site
    from dfm_async.model.http import HttpOptions as HttpOptions
    from dfm_async.model.policies import Cost as Cost
    from dfm_async.model.resources import CacheConfig as CacheConfig
    from dfm_async.model.resources import ClassPath as ClassPath
    from dfm_async.model.resources import SendCost as SendCost
    from dfm_async.model.resources import VaultConfig as VaultConfig
