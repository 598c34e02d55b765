"""``python -m dfm_async.deploy.importing KIT``: imports what a site's settings and federation name, and tells of it.

In a process of its own: what is imported may do anything, and must not do it to whoever wants to know.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dfm_async.errors import DfmError
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import SiteSettings
from dfm_async.model.resources import ClassPath, VaultConfig
from dfm_async.site import shim
from dfm_async.site.building import load_classes
from dfm_async.site.loading import Loader
from dfm_async.targets.flare.installed import load_authorizer, read_settings

__all__ = ["main"]


def _adapters(settings: SiteSettings, local: Path) -> dict[str, str]:
    """Imports the classes of a site; gives what is wrong, by what it is."""
    if settings.federation is None:
        return {}
    federation = Federation.from_yaml(local / settings.federation, compat=settings.compat)
    site = federation.sites.get(settings.site)
    if site is None:
        return {}
    config = site.config(settings.homesite)
    if config.compat:
        shim.install()
    loader = Loader(settings.site, config)
    problems: dict[str, str] = {}
    for adapter in site.adapters.values():
        if isinstance(adapter.code, ClassPath):
            _try(problems, adapter.operation, lambda path=adapter.code.path: loader.load(path, "adapter", _lacks_body))
    _try(problems, "the site object", lambda: load_classes(settings.site, config, loader))
    vault = config.vault.path if isinstance(config.vault, VaultConfig) else None
    if vault is not None and "." in vault:
        _try(problems, "the vault", lambda: loader.load(vault, "vault", lambda _: None))
    return problems


def _lacks_body(kind: type[Any]) -> str | None:
    return None if callable(getattr(kind, "body", None)) else "has no method 'body'"


def _try(problems: dict[str, str], what: str, load: Any) -> None:
    try:
        load()
    except DfmError as error:
        problems[what] = str(error)
    except Exception as error:  # noqa: BLE001 - code of the site: whatever it raises is told
        problems[what] = f"{type(error).__name__}: {error}"


def main(folder: str) -> None:
    """Tells what cannot be imported, as JSON on the last line."""
    local = Path(folder) / "local"
    settings = read_settings(local, "")
    os.environ.update(settings.environment)
    found: dict[str, dict[str, str]] = {"adapters": _adapters(settings, local), "authorizer": {}}
    _try(found["authorizer"], "the authorizer", lambda: load_authorizer(settings))
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
