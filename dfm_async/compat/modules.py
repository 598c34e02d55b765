"""The modules that DFM generates of a federation, made when they are imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from dfm_async.compat.operations import DfmOperation
from dfm_async.compat.session import FEDERATIONS, DfmSession
from dfm_async.federation.federation import Federation
from dfm_async.federation.search_path import find_package
from dfm_async.site import shim


def install(federation: str | os.PathLike[str]) -> Federation:
    """Let this process import what an application for DFM imports: its ``FEDERATION.fed`` modules, and nv_dfm_core.

    It has to be called before the application imports them. Generated code of the federation is not used, and nor is
    nv_dfm_core in this process, even if they are installed. The package of the federation is found without being
    installed, if the file is in one of its folders.

    Args:
        federation: the path of its file, ``federation.dfm.yaml``.

    Raises:
        FederationError: something is wrong with the file.
        ImportError: the real nv_dfm_core was imported before.
        ValueError: another file with the same ``code-package`` was installed before.
    """
    found = Federation.from_yaml(federation, compat=True)
    known = FEDERATIONS.get(found.name)
    if known is not None:
        if known.files != found.files:
            raise ValueError(f"federation {found.name!r} was installed before, from {known.files[0]}")
        return known
    if not shim.install(instead=True):
        raise ImportError("nv_dfm_core was imported before: call dfm_async.compat.install first", name="nv_dfm_core")
    find_package(found, federation)
    FEDERATIONS[found.name] = found
    sys.meta_path.insert(0, _Finder(found))
    return found


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of one federation."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._root = f"{federation.name}.fed"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the federation; or its package, where there is none."""
        if f"{self._root}.".startswith(f"{fullname}.") and fullname != self._root:
            if PathFinder.find_spec(fullname, path) is not None:
                return None
        elif fullname != self._root and not fullname.startswith(f"{self._root}."):
            return None
        else:
            self._names(fullname)  # raises, if there is no such module
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""
        if module.__name__.startswith(self._root):
            vars(module).update(self._names(module.__name__))

    def _names(self, module: str) -> dict[str, Any]:
        """Return the names of a module: the operations, schemas or functions that are in it."""
        kind, *rest = module.removeprefix(self._root).lstrip(".").split(".")
        fed = self._federation
        if not kind or (kind in ("site", "runtime") and not rest):
            return {}
        if kind == "api":
            return self._of("operation", fed.operations, rest, DfmOperation)
        if kind == "schema":
            return self._of("schema", fed.models, rest, lambda found: found)
        if kind not in ("site", "runtime"):
            raise _missing(module, f"federation {fed.name!r} has no {kind!r} (it has: api, runtime, schema, site)")
        site = fed.sites.get(rest[0])
        if site is None:
            raise _missing(module, f"federation {fed.name!r} has no site {rest[0]!r} (it has: {', '.join(fed.sites)})")
        if kind == "runtime":
            return {
                "API_VERSION": fed.api_version,
                "get_session": partial(DfmSession, federation_name=fed.name, homesite=site.name),
            }
        provider = rest[1] if len(rest) > 1 and rest[1] in site.providers else None
        offered = [name for name, group in site.adapters if group == provider]
        operations = {name: site.operations[name] for name in offered}
        groups = rest[1:] if provider is None else rest[2:]
        return self._of("operation", operations, groups, lambda found: DfmOperation(found, provider))

    def _of(self, what: str, items: Mapping[str, Any], groups: list[str], make: Callable[[Any], Any]) -> dict[str, Any]:
        prefix = "".join(f"{group}." for group in groups)
        inside = {name.removeprefix(prefix): found for name, found in items.items() if name.startswith(prefix)}
        if groups and not inside:
            known = ", ".join(items) or "none"
            message = f"federation {self._federation.name!r} has no {what} {prefix[:-1]!r} there (it has: {known})"
            raise _missing(f"{self._root}.{'.'.join(groups)}", message)
        return {name: make(found) for name, found in inside.items() if "." not in name}


def _missing(module: str, message: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(message, name=module)
