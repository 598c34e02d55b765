"""``python -m dfm_async.deploy.import_check KIT``: imports the code of a site, and reports problems.

It runs in a process of its own, because the imported code can do anything.
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
from dfm_async.site.loading import Loader, lacks_body
from dfm_async.targets.flare.site_code import load_authorizer, read_settings


def _adapters(settings: SiteSettings, local: Path) -> dict[str, str]:
    """Import the classes of a site; return the problems by subject."""
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
            _try(problems, adapter.operation, lambda path=adapter.code.path: loader.load(path, "adapter", lacks_body))
    _try(problems, "the site object", lambda: load_classes(settings.site, config, loader))
    vault = config.vault.path if isinstance(config.vault, VaultConfig) else None
    if vault is not None and "." in vault:
        _try(problems, "the vault", lambda: loader.load(vault, "vault", lambda _: None))
    return problems


def _try(problems: dict[str, str], what: str, load: Any) -> None:
    try:
        load()
    except DfmError as error:
        problems[what] = str(error)
    except Exception as error:  # noqa: BLE001 - code of the site: all its errors are reported
        problems[what] = f"{type(error).__name__}: {error}"


def main(folder: str) -> None:
    """Report what cannot be imported, as JSON on the last line."""
    local = Path(folder) / "local"
    settings = read_settings(local, "")
    os.environ.update(settings.environment)
    found: dict[str, dict[str, str]] = {"adapters": _adapters(settings, local), "authorizer": {}}
    _try(found["authorizer"], "the authorizer", lambda: load_authorizer(settings))
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
