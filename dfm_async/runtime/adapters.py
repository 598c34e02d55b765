"""Adapters whose class is named by a path, or whose arguments are bound.

All of it happens at the call: a fake that replaces an operation needs neither its class nor its secrets.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from dfm_async.federation.bindings import Binding, Const, FromParam, FromProvider, FromSecrets, FromSite
from dfm_async.federation.operation import Adapter, CodeKind
from dfm_async.model.constants import fresh
from dfm_async.model.resources import ClassPath
from dfm_async.model.signatures import signature_of
from dfm_async.runtime.context import current_context
from dfm_async.runtime.sources import is_iterator
from dfm_async.site.loading import taken

T = TypeVar("T")

_OFFERED: Final = frozenset({"site", "provider"})
"""The arguments that constructors get if they name them."""
_CONTEXT: Final = "context"


def adapter_arguments(adapter: Adapter) -> dict[str, Any]:
    """Return the constant arguments of an adapter's constructor."""
    return {name: fresh(value) for name, value in {**_own(adapter.code), **adapter.args}.items()}


def _own(code: Any) -> Mapping[str, Any]:
    return code.args if isinstance(code, ClassPath) else {}


def offered_to(adapter: Adapter, kind: type[Any]) -> frozenset[str]:
    """Return which of the site and the provider a constructor gets: those that it names and that are not arguments."""
    return (taken(kind) & _OFFERED) - adapter.args.keys() - _own(adapter.code).keys()


def needs_site(adapter: Adapter) -> bool:
    """Return whether an adapter needs the site: its class is named by a path, or arguments are bound."""
    if adapter.external:
        return False
    if adapter.bindings is not None or isinstance(adapter.code, ClassPath):
        return True
    return isinstance(adapter.code, type) and bool(offered_to(adapter, adapter.code))


_Ready: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The adapter's own code, and its arguments."""


class Objects(Protocol):
    """The objects of the job that an adapter is called for."""

    site_object: Any
    """The site object, once it was built."""

    async def adapter(self, adapter: Adapter) -> Any:
        """Build the object of an adapter's class, once."""

    async def site(self) -> Any:
        """Build the site object and its providers, once."""

    async def secret(self, key: str) -> Any:
        """Return a secret of the site."""

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it in a thread."""


class AdapterObject:
    """One adapter in one job. ``body`` takes the operation's arguments, and calls the adapter's own with its own."""

    def __init__(self, adapter: Adapter, objects: Objects) -> None:
        self._adapter = adapter
        self._objects = objects
        self._bindings: Mapping[str, Binding] = adapter.bindings or {}
        self._secrets = any(isinstance(binding, FromSecrets) for binding in self._bindings.values())
        self._on_site = any(isinstance(binding, (FromSite, FromProvider)) for binding in self._bindings.values())
        self._built: Any = None
        self._wants_context = False
        self.body: Callable[..., Any] = {
            CodeKind.ASYNC: self._call,
            CodeKind.SYNC: self._call_blocking,
            CodeKind.GENERATOR: self._generate,
            CodeKind.ASYNC_GENERATOR: self._generate_async,
        }[adapter.kind]

    # the kinds of code

    async def _call(self, /, *args: Any, **kwargs: Any) -> Any:
        code, positional, named = self._ready(args, kwargs) or await self._prepare(args, kwargs)
        found = code(*positional, **named)
        if inspect.isawaitable(found):
            return await found
        if is_iterator(found):
            return found
        raise TypeError(
            f"body of {_path(self._adapter)} returned {type(found).__name__}, which cannot be awaited. If it is not "
            "asynchronous, declare it: is-async: false in a file, is_async=False in Python"
        )

    def _call_blocking(self, /, *args: Any, **kwargs: Any) -> Any:
        code, positional, named = self._ready(args, kwargs) or self._objects.wait(self._prepare(args, kwargs))
        return code(*positional, **named)

    def _generate(self, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self._call_blocking(*args, **kwargs)

    async def _generate_async(self, /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        code, positional, named = self._ready(args, kwargs) or await self._prepare(args, kwargs)
        async with aclosing(code(*positional, **named)) as found:
            async for item in found:
                yield item

    # their arguments

    async def built(self) -> Any:
        """Return the object of the adapter's class."""
        if self._built is None:
            built = await self._objects.adapter(self._adapter)
            self._wants_context = _CONTEXT in _parameters(built.body)
            self._check_names(built.body)
            self._built = built
        return self._built

    def _check_names(self, body: Callable[..., Any]) -> None:
        """Compare the arguments that are bound with those that the adapter's ``body`` has.

        Raises:
            TypeError: it cannot be called with them.
        """
        if self._adapter.bindings is None:
            return
        try:
            signature = signature_of(body)
        except (TypeError, ValueError):
            return  # code without a signature
        context = [_CONTEXT] if self._wants_context else []
        try:
            signature.bind(**dict.fromkeys([*self._bindings, *context]))
        except TypeError as error:
            bound = ", ".join(self._bindings) or "nothing"
            raise TypeError(
                f"body of {_path(self._adapter)} has other arguments than those that are bound ({bound}): {error}. "
                "Write each of them under args in a file (from-operation there takes all parameters of the operation), "
                "or in bind= in Python"
            ) from None

    async def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the adapter's own ``body``, for these of the operation."""
        _, _, named = await self._prepare((), given)
        return named

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready | None:
        """Return what to call, if nothing has to be awaited."""
        site = self._objects.site_object
        if self._built is None or self._secrets or (self._on_site and site is None):
            return None
        return self._with_arguments(self._built, args, kwargs, site, {})

    async def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready:
        objects = self._objects
        built = await self.built()
        site = await objects.site() if self._on_site else None
        secrets = {
            name: await objects.secret(binding.key)
            for name, binding in self._bindings.items()
            if isinstance(binding, FromSecrets) and _given(binding, kwargs) is None
        }
        return self._with_arguments(built, args, kwargs, site, secrets)

    def _with_arguments(
        self, built: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Any, secrets: dict[str, Any]
    ) -> _Ready:
        named = kwargs
        if self._adapter.bindings is not None:
            args = ()
            named = {
                name: self._value(name, binding, kwargs, site, secrets) for name, binding in self._bindings.items()
            }
        if self._wants_context and _CONTEXT not in named:
            named = {**named, _CONTEXT: current_context()}
        return built.body, args, named

    def _value(self, name: str, binding: Binding, given: dict[str, Any], site: Any, secrets: dict[str, Any]) -> Any:
        """Return the value of one argument of the adapter."""
        if isinstance(binding, FromParam):
            return given.get(binding.param)
        found = _given(binding, given)
        if found is not None:  # also a falsy value: it was passed
            return found
        if isinstance(binding, Const):
            return fresh(binding.value)
        if isinstance(binding, FromSecrets):
            return secrets[name]
        if isinstance(binding, FromSite):
            return self._attribute(name, site, binding.attribute)
        return self._attribute(name, self._attribute(name, site, binding.provider), binding.attribute)

    def _attribute(self, argument: str, owner: Any, path: str) -> Any:
        if "__" in path:
            raise AttributeError(f"{self._binding(argument, path)}, which bindings may not read")
        try:
            return operator.attrgetter(path)(owner)
        except AttributeError as error:
            lacks = f"which {type(owner).__qualname__} does not have"
            raise AttributeError(f"{self._binding(argument, path)}, {lacks}: {error}") from error

    def _binding(self, argument: str, path: str) -> str:
        return f"argument {argument!r} of {_path(self._adapter)} is bound to attribute {path!r}"


def _given(binding: Const | FromSecrets | FromSite | FromProvider, given: Mapping[str, Any]) -> Any:
    """Return the value that replaces the binding; None if there is none, or if None was passed, as in DFM."""
    return None if binding.expose_as is None else given.get(binding.expose_as.param)


def _parameters(code: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return signature_of(code).parameters
    except (TypeError, ValueError):
        return {}


def _path(adapter: Adapter) -> str:
    code = adapter.code
    return code.path if isinstance(code, ClassPath) else f"{code.__module__}.{code.__qualname__}"
