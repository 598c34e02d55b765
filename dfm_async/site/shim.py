"""Names of nv_dfm_core that adapters import, for sites where it is not installed.

Only on request, ``Federation(..., compat=True)``, and never instead of the real package. They include what adapters use
at run time and, of what applications use, the language.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Final

_ROOT: Final = "nv_dfm_core"

_SITE: Final = "dfm_async.site.objects"
_RESOURCES: Final = "dfm_async.model.resources"
_COMPAT: Final = "dfm_async.site.compat"
_DISCOVERY: Final = "dfm_async.discovery"
_ROOT_OF_OURS: Final = "dfm_async"

_VERSION: Final = "3.1.31"
"""The version of nv_dfm_core whose names these are."""
_LANGUAGE: Final = ("Advise", "BestOf", "ForEach", "If", "Operation", "Pipeline", "TryFromCache")
_STATEMENTS: Final = ("PlaceParam", "Yield")
_CONDITIONS: Final = (
    "And",
    "Equal",
    "GreaterThan",
    "GreaterThanOrEqual",
    "LessThan",
    "LessThanOrEqual",
    "Not",
    "NotEqual",
    "Or",
)
_TOKENS: Final = ("DISCOVERY_PLACE_NAME", "STATUS_PLACE_NAME", "ErrorToken", "NodeId", "StopToken", "well_known_id")
_ADVISED: Final = (
    "AdvisedDateRange",
    "AdvisedDict",
    "AdvisedError",
    "AdvisedLiteral",
    "AdvisedOneOf",
    "AdvisedSubsetOf",
    "AdvisedValue",
    "Okay",
    "field_advisor",
)
_ADVICE: Final = ("BranchFieldAdvice", "ErrorFieldAdvice", "FieldAdvice", "PartialFieldAdvice", "SingleFieldAdvice")

_SESSION: Final = {
    "Session": ("dfm_async.compat.session", "DfmSession"),
    "configure_session_logging": ("dfm_async.compat.session", "configure_session_logging"),
}
_JOB: Final = {"Job": ("dfm_async.compat.session", "DfmJob"), "JobStatus": (_ROOT_OF_OURS, "JobStatus")}

_MODULES: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "": {},
    "exec": {
        "DfmContext": (_SITE, "DfmContext"),
        "FlowInfo": (_COMPAT, "FlowInfo"),
        "Frame": (_COMPAT, "Frame"),
        "FsspecConfig": (_RESOURCES, "CacheConfig"),
        "PanicError": (_COMPAT, "PanicError"),
        "Provider": (_SITE, "Provider"),
        "SecretsVault": (_COMPAT, "SecretsVault"),
        "SecretsVaultConfig": (_RESOURCES, "VaultConfig"),
        "Site": (_SITE, "Site"),
    },
    "exec._frame": {name: (_COMPAT, name) for name in ("FlowInfo", "Frame")},
    "exec.discovery": {
        "AdviceBuilder": (_COMPAT, "AdviceBuilder"),
        **{name: (_DISCOVERY, name) for name in _ADVISED},
    },
    "api": {
        "NodeParam": ("dfm_async.language.expressions", "Ref"),
        "NodeRef": ("dfm_async.language.expressions", "Ref"),
        "PreparedPipeline": ("dfm_async.planning.plan", "Plan"),
        **{name: (_ROOT_OF_OURS, name) for name in _LANGUAGE},
        **{name: (_COMPAT, name) for name in (*_CONDITIONS, *_STATEMENTS, *_TOKENS)},
    },
    "api.discovery": {
        "PartialError": ("dfm_async.errors", "PartialError"),
        **{name: (_DISCOVERY, name) for name in _ADVICE},
    },
    "api.pydantic": {"PolymorphicBaseModel": (_COMPAT, "PolymorphicBaseModel")},
    "session": {**_SESSION, **_JOB},
    "session._job": _JOB,
    "session._session": _SESSION,
    "telemetry": {
        "SpanBuilder": (_SITE, "Span"),
        "adapter_span": (_COMPAT, "adapter_span"),
        "telemetry_enabled": (_COMPAT, "telemetry_enabled"),
    },
}
"""The modules, and the module and name of each of their names."""


class _Shim(ModuleType):
    """A module whose names are loaded when they are first used."""

    def __init__(self, name: str, homes: dict[str, tuple[str, str]]) -> None:
        super().__init__(name, "Names of nv_dfm_core, as dfm_async provides them.")
        self.__path__: list[str] = []  # it has modules, and none of them is a file
        self.__all__ = sorted(homes)
        self._homes = homes

    def __getattr__(self, name: str) -> Any:
        home = self.__dict__.get("_homes", {}).get(name)
        if home is None:
            known = ", ".join(self.__all__) or "none"
            raise AttributeError(
                f"dfm_async stands in for {_ROOT}, which is not installed, and has no {self.__name__}.{name} "
                f"(it has: {known}). Install nv-dfm-core where the site runs"
            )
        value = getattr(import_module(home[0]), home[1])
        setattr(self, name, value)
        return value


def install(*, instead: bool = False) -> bool:
    """Provide the names, unless nv_dfm_core is installed. Return whether they are provided.

    Adapters can then be imported, in this process, for as long as it lasts.

    Args:
        instead: provide them also if nv_dfm_core is installed, but was not imported.
    """
    found = sys.modules.get(_ROOT)
    if found is not None:
        return isinstance(found, _Shim)
    if not instead and importlib.util.find_spec(_ROOT) is not None:
        return False
    for path, homes in _MODULES.items():
        name = f"{_ROOT}.{path}" if path else _ROOT
        module = _Shim(name, homes)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None, is_package=True)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules[_ROOT].__version__ = _VERSION  # type: ignore[attr-defined] # a name of the module
    return True


def stands_in() -> bool:
    """Return whether this process uses these names, and not those of an installed nv_dfm_core."""
    return isinstance(sys.modules.get(_ROOT), _Shim)
