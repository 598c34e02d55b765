"""Classes that a federation names: imported at the site that needs them, on first use, and built."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from dfm_async.errors import LoadingError
from dfm_async.model.resources import SiteConfig, refusal
from dfm_async.model.signatures import signature_of
from dfm_async.site.shim import stands_in

_THEIRS: Final = "nv_dfm_core"
_MACHINERY: Final = frozenset({"dfm_async", "importlib"})


class Loader:
    """Find the classes of one site.

    A federation may come from an untrusted file. So a path never leads into the standard library, nor into this one;
    ``packages`` of the federation names the others that may be used.
    """

    def __init__(self, site: str, config: SiteConfig) -> None:
        self._site = site
        self._packages = config.packages
        self._known: dict[str, type[Any]] = {}

    def known(self, path: str) -> bool:
        """Return whether the class was loaded before."""
        return path in self._known

    def load(self, path: str, role: str, check: Callable[[type[Any]], str | None]) -> type[Any]:
        """Import the class at a path. Blocks as long as that takes.

        ``check`` returns what the class lacks for its role, which is its purpose in errors; None if nothing.

        Raises:
            LoadingError: it may not be used, does not exist, or is not suitable.
        """
        found = self._known.get(path)
        if found is None:
            reason = refusal(path, self._packages)
            if reason is not None:
                raise LoadingError(self._site, role, path, reason)
            found = self._import(path, role)
        lacks = check(found)
        if lacks is not None:
            raise LoadingError(self._site, role, path, lacks)
        self._known[path] = found
        return found

    def _import(self, path: str, role: str) -> type[Any]:
        module_name, _, name = path.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or module_name
            if module_name == missing or module_name.startswith(f"{missing}."):
                package, _, last = missing.rpartition(".")
                reason = f"cannot be imported: {_absent(package, last)}"
            else:
                reason = f"cannot be imported: its module needs {missing!r}, which is not installed"
            if missing.partition(".")[0] == _THEIRS:
                reason += f". {_advice(missing)}"
            _begin_at_the_module(error)
            raise LoadingError(self._site, role, path, reason) from error
        except BaseException as error:  # a script that was not meant to be imported ends its process
            reason = f"cannot be imported: its module raised {type(error).__name__}: {error}"
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == _THEIRS:
                reason += f". dfm_async stands in for {_THEIRS} and lacks this name: install nv-dfm-core"
            _begin_at_the_module(error)
            raise LoadingError(self._site, role, path, reason) from error
        found = getattr(module, name, None)
        if found is None:
            raise LoadingError(self._site, role, path, f"is not there: module {module_name!r} has no {name!r}")
        if not isinstance(found, type):
            raise LoadingError(self._site, role, path, f"is not a class, but an object of type {type(found).__name__}")
        origin = found.__module__.partition(".")[0]
        if origin in sys.stdlib_module_names:  # a name that some module has imported is not its own
            real = f"{found.__module__}.{found.__qualname__}"
            reason = f"is really {real}, of the standard library, whose classes cannot be used by path"
            raise LoadingError(self._site, role, path, reason)
        return found


def _advice(missing: str) -> str:
    """Return what to do about a missing module of nv_dfm_core."""
    if stands_in():
        return f"dfm_async stands in for {_THEIRS} (compat=True), but not for {missing}: install nv-dfm-core"
    if missing == _THEIRS:
        compat = (
            "Set compat=True for the federation (--compat; 'compat: true' in the settings of a site on NVIDIA FLARE)"
        )
        return f"{compat}, or install nv-dfm-core where that is possible"
    return f"The nv-dfm-core that is installed does not have {missing}: install another version"


def _absent(package: str, module: str) -> str:
    if package:  # it was found, or its own name would be the one that is missing
        return f"package {package!r} has no module {module!r}"
    return (
        f"there is no module {module!r}. Install its package where the site runs, or name the folder that it is in: "
        "PYTHONPATH, or sys.path before the session starts"
    )


def _begin_at_the_module(error: BaseException) -> None:
    """Let the traceback of an import begin at the module, without the frames of the import system."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _MACHINERY:
        trace = trace.tb_next
    error.__traceback__ = trace


# building


def taken(kind: type[Any]) -> frozenset[str]:
    """Return the names of the parameters of a constructor."""
    try:
        return frozenset(signature_of(kind).parameters)
    except (TypeError, ValueError):  # one that is written in C may have no signature
        return frozenset()


def wrong_arguments(kind: type[Any], arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a constructor: their names, never their values."""
    try:
        signature_of(kind).bind(**arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def construct(kind: type[Any], arguments: Mapping[str, Any], site: str, role: str) -> Any:
    """Build an object of a class; ``role``: its purpose, for errors.

    Raises:
        LoadingError: the arguments do not fit, or the constructor raised.
    """
    path = f"{kind.__module__}.{kind.__qualname__}"
    wrong = wrong_arguments(kind, arguments)
    if wrong is not None:
        raise LoadingError(site, role, path, f"cannot be built with its args: {wrong}")
    try:
        return kind(**arguments)
    except BaseException as error:  # whatever the class raises: it fails the call, not the process
        raise LoadingError(site, role, path, f"cannot be built: {type(error).__name__}: {error}") from error


def lacks_body(kind: type[Any]) -> str | None:
    """Return what a class lacks to be an adapter; None if nothing."""
    return None if callable(getattr(kind, "body", None)) else "is not an adapter: it has no body(...)"
