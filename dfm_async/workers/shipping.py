"""How the code of operations gets to worker processes.

A function of an importable module travels by its name. What lives in ``__main__``, in a notebook or inside another
function travels by value, with cloudpickle. Only processes that we started ourselves ever unpickle it.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import msgspec

from dfm_async.errors import DfmError, SecretError, ShippingError
from dfm_async.federation.operation import Adapter, Operation
from dfm_async.federation.site import Site
from dfm_async.model.ids import OperationKey
from dfm_async.model.resources import SiteConfig, VaultConfig
from dfm_async.site import shim
from dfm_async.wire.codec import dumps_by_value
from dfm_async.wire.codec.registry import register_all, registered


class _ByName(msgspec.Struct, frozen=True):
    module: str
    qualname: str


class _ByValue(msgspec.Struct, frozen=True):
    data: bytes


class _Shipped(msgspec.Struct, frozen=True):
    adapter: Adapter
    code: _ByName | _ByValue


class ShippedSite(msgspec.Struct, frozen=True, eq=False):
    """The code of a site, ready to be sent.

    Attributes:
        data: what workers load.
        named: the code that travels by its name. The names stay the same when a module is loaded again.
    """

    data: bytes
    named: tuple[Any, ...]

    def same_as(self, other: ShippedSite) -> bool:
        """Return whether workers that have loaded the other run the same code."""
        pairs = zip(self.named, other.named, strict=False)
        return self.data == other.data and all(mine is theirs for mine, theirs in pairs)


def _follow(module: Any, qualname: str) -> Any:
    found = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _by_name(code: Any) -> _ByName | None:
    """Return the name that leads to this code in an importable module, if there is one."""
    module_name, qualname = getattr(code, "__module__", None), getattr(code, "__qualname__", None)
    if module_name is None or qualname is None or module_name == "__main__" or "<" in qualname:
        return None
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__spec__", None) is None:
        return None
    found = _follow(module, qualname)
    if found is code or (isinstance(found, Operation) and _code_of(found) is code):
        return _ByName(module_name, qualname)
    return None


def _code_of(operation: Operation[..., Any]) -> Any:
    # The operation of a class has a function of its own, which wraps the class.
    return getattr(operation.code, "__dfm_code__", operation.code)


def _variables(function: FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yield what a function is pickled with: what it is, its name, and its value."""
    import dis  # only for code that cannot be sent

    codes: list[CodeType] = [function.__code__]
    names: dict[str, None] = {}
    for code in codes:
        names |= {found.argval: None for found in dis.get_instructions(code) if found.opname == "LOAD_GLOBAL"}
        codes += [found for found in code.co_consts if isinstance(found, CodeType)]
    for name in names.keys() & function.__globals__.keys():
        yield "global variable", name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "variable", name, cell.cell_contents
        except ValueError:  # it is not bound yet
            continue
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield "default of parameter", name, parameter.default


def _unpicklable(code: Any, depth: int = 3) -> str:
    """Return which variable prevents that code is pickled; empty if none is found."""
    code = _code_of(code) if isinstance(code, Operation) else code
    found: Iterable[Any] = vars(code).values() if isinstance(code, type) else [code]
    for function in [getattr(each, "__func__", each) for each in found]:
        if not isinstance(function, FunctionType):
            continue
        for kind, name, value in _variables(function):
            try:
                dumps_by_value(value)
            except Exception:  # noqa: BLE001 - pickling runs code of the application
                inner = _unpicklable(value, depth - 1) if depth else ""
                return f"refers to the {kind} {name!r}" + (f", which {inner}" if inner else "")
    return ""


def _reason(error: Exception, code: Any) -> str:
    text, variable = str(error) or type(error).__name__, _unpicklable(code)
    return f"it {variable}: {text}" if variable else text


def ship_site(site: Site, homesite: str, left_out: dict[OperationKey, DfmError] | None = None) -> ShippedSite:
    """Make the operations of a site, and what their code can use there, ready to be sent: also registered codecs.

    Args:
        site: the site.
        homesite: the homesite of the session.
        left_out: gets the operations that cannot be sent, with the reason. They are left out; without it, the first
            of them is raised.

    Raises:
        ShippingError: one of them cannot be; names it and the reason.
        SecretError: the site's vault cannot be.
    """
    shipped: list[_Shipped] = []
    named: list[Any] = []
    for adapter in site.adapters.values():
        code: _ByName | _ByValue | None = _by_name(adapter.code)
        try:
            if code is None:
                code = _ByValue(dumps_by_value(adapter.code))
            # Of a declared signature names and defaults are enough: what types mean was checked before.
            bare = replace(adapter, code=None, declared=adapter.declared and adapter.declared.untyped)
            dumps_by_value((bare.args, bare.declared, bare.advisors))
        except Exception as error:
            failed = ShippingError(adapter.operation, site.name, _reason(error, adapter.code))
            failed.__cause__ = error
            if left_out is None:
                raise failed from error
            left_out[site.name, adapter.operation, adapter.provider] = failed
            continue
        shipped.append(_Shipped(bare, code))
        if isinstance(code, _ByName):
            named.append(adapter.code)
    config = site.config(homesite)
    if not isinstance(config.vault, VaultConfig):
        try:
            dumps_by_value(config.vault)
        except Exception as error:  # noqa: BLE001 - its text may show what it holds
            reason = f"{type(config.vault).__qualname__} cannot be sent to a worker process ({type(error).__name__})"
            raise SecretError(site.name, "", f"{reason}: name its class by VaultConfig(path=...)") from None
    codecs = _shipped_codecs(site.name)
    # What is inside may need the names of nv_dfm_core when it is unpacked.
    data = dumps_by_value((config.compat, dumps_by_value((config, shipped, codecs))))
    return ShippedSite(data, tuple(named))


def _shipped_codecs(site: str) -> list[bytes]:
    found = []
    for codec in registered():
        try:
            found.append(dumps_by_value(codec))
        except Exception as error:
            raise ShippingError(f"codec {codec[1]}", site, str(error) or type(error).__name__) from error
    return found


def load_site(data: bytes) -> tuple[SiteConfig, list[Adapter]]:
    """Rebuild what was shipped, in a worker."""
    compat, inside = pickle.loads(data)  # noqa: S301 - from the process that started us
    if compat:
        shim.install()
    config, listed, codecs = pickle.loads(inside)  # noqa: S301 - from the process that started us
    adapters = []
    for shipped in listed:
        if isinstance(shipped.code, _ByName):
            code = _follow(importlib.import_module(shipped.code.module), shipped.code.qualname)
            if isinstance(code, Operation):
                code = _code_of(code)
        else:
            code = pickle.loads(shipped.code.data)  # noqa: S301 - from the process that started us
        adapters.append(replace(shipped.adapter, code=code))
    register_all([pickle.loads(codec) for codec in codecs])  # noqa: S301 - from the process that started us
    return config, adapters
