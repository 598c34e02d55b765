"""Build the site object of a job, and its providers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from dfm_async.errors import LoadingError
from dfm_async.model.resources import CacheConfig, ClassPath, SiteConfig, VaultConfig
from dfm_async.site.loading import Loader, construct
from dfm_async.site.objects import DfmContext, Provider, Services, Site

_THEIRS: Final = "nv_dfm_core.exec"
_services: ContextVar[Services | None] = ContextVar("dfm_async_services", default=None)


class BridgedVault:
    """The vault of sites that are subclasses of nv_dfm_core's own: uses the vault of the site that is being built."""

    def __init__(self) -> None:
        found = _services.get()
        if found is None:
            raise RuntimeError("this vault is only for sites that dfm_async builds")
        self._services = found

    def secret_for_key(self, key: str) -> Any:
        """Return a secret."""
        return self._services.secret(key)


def _base(name: str, ours: type[Any]) -> tuple[type[Any], ...]:
    theirs = getattr(sys.modules.get(_THEIRS), name, None)
    return (ours,) if theirs is None else (ours, theirs)


def _lacks_base(name: str, ours: type[Any]) -> Callable[[type[Any]], str | None]:
    def check(kind: type[Any]) -> str | None:
        if issubclass(kind, _base(name, ours)):
            return None
        return f"is not a subclass of dfm_async.site.{name}, nor of {_THEIRS}.{name}"

    return check


def _load(impl: Any, name: str, ours: type[Any], role: str, site: str, loader: Loader) -> type[Any]:
    if impl is None:
        return ours
    check = _lacks_base(name, ours)
    if isinstance(impl, ClassPath):
        return loader.load(impl.path, role, check)
    lacks = check(impl) if isinstance(impl, type) else "is not a class"
    if lacks is not None:
        raise LoadingError(site, role, getattr(impl, "__qualname__", type(impl).__qualname__), lacks)
    return impl  # type: ignore[no-any-return] # it is a class


def load_classes(site: str, config: SiteConfig, loader: Loader) -> dict[str | None, type[Any]]:
    """Return the classes of the site object, at None, and of its providers, by their names. Blocks.

    Raises:
        LoadingError: one cannot be used.
    """
    found: dict[str | None, type[Any]] = {None: _load(config.impl, "Site", Site, "the site object", site, loader)}
    for name, provider in config.providers.items():
        role = f"provider {name!r}"
        found[name] = _load(provider.impl, "Provider", Provider, role, site, loader)
    return found


def build_site(
    config: SiteConfig, context: DfmContext, classes: dict[str | None, type[Any]], keep: Callable[[Any], None]
) -> Any:
    """Build the site object, and its providers, which are attributes of it, from the result of :func:`load_classes`.

    ``keep`` is called with each object as soon as it is built: a constructor after it may raise.

    Raises:
        LoadingError: a constructor does not take its arguments, or raised.
    """
    kind, name = classes[None], context.this_site
    arguments: dict[str, Any] = {
        "dfm_context": context,
        "cache_config": config.cache or CacheConfig(),
        "secrets_vault_config": VaultConfig(),
    }
    if not issubclass(kind, Site):
        arguments.update(_their_configs(config))
    before = _services.set(context.services)
    try:
        site = construct(kind, {**arguments, **_arguments(config.impl)}, name, "the site object")
        keep(site)
        for provider, found in config.providers.items():
            if hasattr(Site, provider):
                reason = f"has an attribute {provider!r} already: rename the provider"
                raise LoadingError(name, f"provider {provider!r}", f"{kind.__module__}.{kind.__qualname__}", reason)
            given = {"site": site, **_arguments(found.impl)}
            built = construct(classes[provider], given, name, f"provider {provider!r}")
            keep(built)
            setattr(site, provider, built)
    finally:
        _services.reset(before)
    return site


def _arguments(impl: Any) -> dict[str, Any]:
    return copy.deepcopy(impl.args) if isinstance(impl, ClassPath) else {}


def _their_configs(config: SiteConfig) -> dict[str, Any]:
    """Return configurations of the classes that nv_dfm_core's own site takes."""
    theirs, cache = sys.modules[_THEIRS], config.cache or CacheConfig()
    options = {"storage_options": cache.storage_options, "base_path": cache.base_path}
    return {
        "cache_config": theirs.FsspecConfig(protocol=cache.protocol, **options),
        "secrets_vault_config": theirs.SecretsVaultConfig(path=f"{__name__}.{BridgedVault.__name__}"),
    }
