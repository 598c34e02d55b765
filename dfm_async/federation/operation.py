"""Operations (public signatures) and adapters (the code that implements one at a site)."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Protocol, TypeVar, overload

from dfm_async.discovery.advisors import Advisor, advisor
from dfm_async.federation.bindings import Binding, ExposedParameter
from dfm_async.federation.schemas import plain_data
from dfm_async.language.current_pipeline import current_builder
from dfm_async.model.call_limits import LIMITS, CallLimits
from dfm_async.model.checks import unexpected
from dfm_async.model.policies import Cost, RetryPolicy
from dfm_async.model.resources import ClassPath
from dfm_async.model.signatures import signature_of, unknown_keyword

if TYPE_CHECKING:
    from dfm_async.federation.call_types import Arguments, SiteChoice, Takes, TakesOne, TakesThree, TakesTwo

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V_co = TypeVarWithDefault("V_co", covariant=True, default=R_co)
else:
    V_co = TypeVar("V_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

RESERVED = frozenset({"site", "provider", "after", "retry", "deadline", "fallback"})
"""Arguments of a call inside a pipeline that are not the operation's own."""

DIRECT = frozenset({"site", "provider", "retry", "deadline"})
"""Those of them that direct calls take, too."""

_CONTEXT = "context"
_WHOLE = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Collection)


class CodeKind(Enum):
    """How an adapter's code is called."""

    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"


GENERATORS = frozenset({CodeKind.GENERATOR, CodeKind.ASYNC_GENERATOR})
"""Kinds of code that yield."""


class ExternalCode(Protocol):
    """A program that does the work of an operation: what ``program=`` takes.

    Its ``body_class`` is built once per job at a site, as ``body_class(program=...)`` with this object; operations with
    equal programs share what was built, and ``context.operation`` names the one that is called. It has
    ``async def body(self, context, **arguments)``, which gets every declared argument by its name, streams as lists;
    and ``async def aclose(self)``, called when the job has ended there.
    """

    @property
    def body_class(self) -> type[Any]:
        """The class that runs the program."""


def kind_of(code: Any) -> CodeKind:
    """Return how a function is called."""
    function = inspect.unwrap(code)
    if isinstance(function, functools.partial):
        function = function.func
    if inspect.isasyncgenfunction(function):
        return CodeKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(function):
        return CodeKind.ASYNC
    if inspect.isgeneratorfunction(function):
        return CodeKind.GENERATOR
    return CodeKind.SYNC


def function_of(code: Any) -> Callable[..., Any]:
    """Return the function whose signature counts: the code itself, or its ``body``."""
    return code if inspect.isroutine(code) or not hasattr(code, "body") else code.body  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Signature:
    """What can be passed to an operation, and what it declares about types."""

    parameters: inspect.Signature
    types: Mapping[str, Any]
    """Declared types of parameters; a parameter without one is missing."""
    returns: Any
    """The declared type of the result, or ``typing.Any``. For a generator, of the sequence it makes."""
    wants_context: bool

    @classmethod
    def of(cls, code: Callable[..., Any], *, bound: bool) -> Signature:
        """Read the signature of a function, or of an unbound method if ``bound``."""
        parameters = signature_of(code)
        listed = list(parameters.parameters.values())
        if bound:
            listed = listed[1:]
        wants_context = any(parameter.name == _CONTEXT for parameter in listed)
        listed = [parameter for parameter in listed if parameter.name != _CONTEXT]
        try:
            hints = typing.get_type_hints(code)
        except Exception:  # noqa: BLE001 - annotations can hold anything; one that cannot be read declares nothing
            hints = {}
        returns = hints.pop("return", Any)
        return cls(
            parameters=parameters.replace(parameters=listed),
            types={name: hint for name, hint in hints.items() if name != _CONTEXT},
            returns=returns,
            wants_context=wants_context,
        )

    def with_added(self, exposed: Mapping[str, ExposedParameter]) -> inspect.Signature:
        """Return what can be passed where sites add parameters."""
        listed = list(self.parameters.parameters.values())
        last = [listed.pop()] if listed and listed[-1].kind is inspect.Parameter.VAR_KEYWORD else []
        extra = [found.parameter for name, found in exposed.items() if name not in self.parameters.parameters]
        return self.parameters.replace(parameters=[*listed, *extra, *last])

    @property
    def named(self) -> tuple[Any, ...]:
        """The types that it declares, of parameters and of the result."""
        return (*self.types.values(), self.returns)

    @property
    def whole(self) -> frozenset[str]:
        """The parameters that are declared as lists, or the like: they get one also where a stream comes."""
        return frozenset(name for name, hint in self.types.items() if _is_whole(hint))

    @property
    def untyped(self) -> Signature:
        """The same without types, which may not be picklable: names, defaults, and what is a list."""
        empty = inspect.Parameter.empty
        listed = [parameter.replace(annotation=empty) for parameter in self.parameters.parameters.values()]
        return Signature(inspect.Signature(listed), dict.fromkeys(self.whole, list), Any, self.wants_context)


def _is_whole(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return bool(members) and all(map(_is_whole, members))
    return origin in _WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationOptions:
    """How the code of an operation runs: the options of ``site.operation``, described there."""

    retry: RetryPolicy | None = None
    deadline: float | None = None
    cost: Cost | None = None
    in_process: bool = False
    spread: bool | None = None
    checkpoint: bool = False
    args: Mapping[str, Any] | None = None
    program: ExternalCode | None = None
    limits: CallLimits | None = None

    def updated(self, options: Mapping[str, Any]) -> OperationOptions:
        """Return these options with others in their place, as they are declared: each limit by its own name.

        Raises:
            TypeError: an option does not exist.
            ValueError: a limit is not what it should be.
        """
        known = sorted({found.name for found in fields(self)} - {"limits"} | LIMITS)
        for name in options:
            if name not in known:
                raise TypeError(f"an operation {unexpected(name, known, ('name', 'provider'))}")
        given = {name: value for name, value in options.items() if name not in LIMITS}
        limits = {name: value for name, value in options.items() if name in LIMITS}
        if limits:
            given["limits"] = CallLimits.parse(limits, self.limits)
        return replace(self, **given)


class Operation(Generic[P, R_co, V_co]):
    """An operation that sites offer: its name and its signature. Created by ``@site.operation``, or read from a file.

    A call inside a pipeline records a node; a call outside a pipeline runs the code.

    For type checkers, ``Operation[P, R]`` takes the parameters ``P``, and a call has the type ``R`` of the value that
    it is a placeholder for: for a coroutine function, what it returns. A third type is that of the value which
    :meth:`Session.call` returns, where it differs: for a generator, a list.

    Attributes:
        name: its name in the federation.
        code: the plain function. In code that is type-checked, ``await operation.code(...)`` runs a coroutine function
            outside a pipeline.
    """

    __name__: str

    if not TYPE_CHECKING:

        def __class_getitem__(cls, types: Any) -> Any:
            """Accept two types at run time, as type checkers do."""
            return super().__class_getitem__((*types, types[-1]) if len(types) == 2 else types)

    def __init__(
        self, name: str, code: Callable[P, R_co], signature: Signature, declaration: Declaration | None = None
    ) -> None:
        self.name = name
        self.code: Callable[P, Any] = code
        self.signature = signature
        self.source: Any = code
        """What a site was given: the function, or the class or object with a ``body``."""
        self.options: OperationOptions = OperationOptions()
        """How the site that defined it runs it; a site that offers the same code runs it so, too."""
        self.changed: Callable[[], object] = bool
        """Notify the federation that the operation has changed."""
        self.declaration = declaration
        """Its declaration in a federation file; None if a function defines it."""
        self.exposed: dict[str, ExposedParameter] = {}
        """Extra parameters that it has at some sites."""
        self.advisors: dict[str, Advisor] = {}
        """The advisors of its parameters, at every site that has no advisor of its own."""
        functools.update_wrapper(self, code)
        self.__signature__: inspect.Signature = self.call_signature

    def advisor(self, field: str, order: int = -1) -> Callable[[F], F]:
        """Make a function the advisor of a parameter: ``(value, context) -> AdvisedValue``. It may be async.

        The advisor runs at the sites that offer the operation; :meth:`Site.advisor` registers one for a single site. An
        adapter class can have advisor methods instead, marked by :func:`~dfm_async.discovery.field_advisor`.

        Args:
            field: the parameter that it advises on.
            order: when it is asked, as with :func:`~dfm_async.discovery.field_advisor`.
        """

        def add(function: F) -> F:
            self.advisors[field] = advisor_of(self, field, order, function)
            self.changed()
            return function

        return add

    def expose(self, parameters: Mapping[str, ExposedParameter]) -> None:
        """Let calls pass extra parameters, which only some sites take."""
        if parameters:
            self.exposed.update(parameters)
            self.__signature__ = self.call_signature

    @property
    def call_signature(self) -> inspect.Signature:
        """What a call inside a pipeline may pass: the operation's own parameters, and those that sites add."""
        return self.signature.with_added(self.exposed)

    if TYPE_CHECKING:
        # For each number of parameters, mypy infers their types by the first overload and pyright by the second.

        @overload
        def _takes(self: TakesThree[A, B, C]) -> Arguments[A, B, C, V_co]: ...
        @overload
        def _takes(self: Operation[Concatenate[A, B, C, ...], Any, Any]) -> Arguments[A, B, C, V_co]: ...  # type: ignore[overload-overlap]
        @overload
        def _takes(self: TakesTwo[A, B]) -> Arguments[A, B, Never, V_co]: ...
        @overload
        def _takes(self: Operation[Concatenate[A, B, ...], Any, Any]) -> Arguments[A, B, Never, V_co]: ...  # type: ignore[overload-overlap]
        @overload
        def _takes(self: TakesOne[A]) -> Arguments[A, Never, Never, V_co]: ...
        @overload
        def _takes(self: Operation[Concatenate[A, ...], Any, Any]) -> Arguments[A, Never, Never, V_co]: ...  # type: ignore[overload-overlap]
        @overload
        def _takes(self) -> Arguments[Never, Never, Never, V_co]: ...
        def _takes(self) -> Any: ...

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self: Takes[A, B, C, Any],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        site: SiteChoice | None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self: Takes[A, B, C, Any],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        provider: str | None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self: Takes[A, B, C, Any],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        after: Any,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self: Takes[A, B, C, Any],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        retry: RetryPolicy | None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self: Takes[A, B, C, Any],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        deadline: float | None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self: Takes[A, B, C, Any],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        fallback: Any,
        **kwargs: Any,
    ) -> R_co: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the code, or record a node if a pipeline is being built."""
        builder = current_builder()
        if builder is None:
            return self.code(*args, **kwargs)
        own = self.signature.parameters.parameters  # one that a file declares may have a parameter named so
        options = {name: kwargs.pop(name) for name in RESERVED & kwargs.keys() if name not in own}
        partial = builder.mode == "discovery"  # what is left out is asked for
        return builder.call(self.name, self.bind(args, kwargs, partial), **options)

    def bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        partial: bool = False,
        options: frozenset[str] = RESERVED,
    ) -> dict[str, Any]:
        """Return the arguments of a call by the names of the parameters; with ``partial``, some may be missing.

        ``options`` are other names that the call takes, which an unknown one may mean.

        Raises:
            TypeError: they do not fit the parameters.
        """
        signature = self.__signature__
        try:
            bound = (signature.bind_partial if partial else signature.bind)(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}() {unknown_keyword(signature, kwargs, options) or error}") from None
        for name, parameter in self.signature.parameters.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in bound:
                bound[name] = tuple(bound[name])
        if self.declaration is not None:
            return {name: plain_data(value) for name, value in bound.items()}
        return bound

    def __get__(self, instance: object, owner: type | None = None) -> Operation[P, R_co, V_co]:
        return self

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> Never:
        """Explain, to a class that names the operation as its base, that an operation is not a class."""
        source = getattr(self.source, "__qualname__", None)
        if isinstance(self.source, type):
            todo = f"define class {source!r} without the decorator, inherit from it, and offer it with site.operation()"
        elif inspect.isfunction(self.source):
            todo = f"it is made of the function {source!r}, which a method 'body' of the class can call"
        else:
            todo = "inherit from a class that is not an operation"
        raise TypeError(f"a class cannot inherit from operation {self.name!r}, because it is not a class: {todo}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Travels as its code and name: in a worker, an operation that another one calls just runs.
        return (_rebuild, (self.name, self.code))

    def __repr__(self) -> str:
        return f"<Operation {self.name}{self.signature.parameters}>"


def advisor_of(operation: Operation[..., Any], field: str, order: int, function: Callable[..., Any]) -> Advisor:
    """Make the advisor of an operation's parameter; ValueError if the operation has no such parameter."""
    known = operation.call_signature.parameters
    if field not in known and not any(found.kind is found.VAR_KEYWORD for found in known.values()):
        raise ValueError(f"operation {operation.name!r} has no parameter {field!r} (it has: {', '.join(known)})")
    return advisor(field, order, function)


def _rebuild(name: str, code: Callable[..., Any]) -> Operation[..., Any]:
    return Operation(name, code, Signature.of(code, bound=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declaration of an operation in a federation file: JSON schemas, kept as they were written."""

    description: str = ""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    returns: str = "object"

    @property
    def documentation(self) -> str:
        """The docstring of the operation: what it does, what it takes and returns."""
        parts = [self.description.strip()] if self.description.strip() else []
        args = [
            f"    {name}: {text.strip()}"
            for name, schema in self.parameters.items()
            if isinstance(text := schema.get("description"), str) and text.strip()
        ]
        if args:
            parts.append("\n".join(["Args:", *args]))
        if self.returns != "object":
            parts.append(f"Returns:\n    {self.returns}")
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The code that implements an operation at one site.

    ``code`` is a function, an object with a ``body`` method, or a class with one, which is then built once per job
    with ``args``; or the path of such a class, which is imported at the site. For an external program it is the
    program's class. A program and a path have a signature that is ``declared`` elsewhere.
    """

    operation: str
    code: Any
    args: Mapping[str, Any] = field(default_factory=dict)
    provider: str | None = None
    retry: RetryPolicy | None = None
    deadline: float | None = None
    cost: Cost | None = None
    in_process: bool = False
    limits: CallLimits | None = None
    spread: bool | None = None
    """Whether calls may run in any worker of the site; None: those of functions and generators may."""
    checkpoint: bool = False
    """Whether the values of its calls are recorded, so that a job that runs again does not repeat them."""
    declared: Signature | None = None
    external: bool = False
    """Whether it is a program: it gets all arguments by name, also defaults, and streams as lists."""
    is_async: bool | None = None
    """Whether ``body`` is awaited; None: the code shows it."""
    bindings: Mapping[str, Binding] | None = None
    """Where each argument of the code comes from; None: all are the operation's parameters, by their names."""
    description: str = ""
    returns: str | None = None
    """The type of the result at this site, if it is more special than the operation's."""
    advisors: ChainMap[str, Advisor] = field(default_factory=ChainMap)
    """The advisors of parameters: the site's own, and as fallback those of the operation."""
    callee: Callable[[Adapter], Any] | None = None
    """Replaces how the runtime calls the code; it is sent to workers. For tests."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function whose signature counts."""
        return function_of(self.code)

    @property
    def per_job(self) -> bool:
        """Whether the code is a class that is built once per job."""
        return isinstance(self.code, (type, ClassPath))

    @property
    def exposed(self) -> dict[str, ExposedParameter]:
        """The extra parameters of the operation here, by their names."""
        found = (getattr(binding, "expose_as", None) for binding in (self.bindings or {}).values())
        return {exposed.param: exposed for exposed in found if exposed is not None}

    @property
    def kind(self) -> CodeKind:
        """How the code is called."""
        if self.is_async is not None:
            return CodeKind.ASYNC if self.is_async else CodeKind.SYNC
        function = self.function
        return kind_of(function if inspect.isroutine(function) or not callable(function) else _called(function))

    @property
    def signature(self) -> Signature:
        """The signature that the code has; the same as its operation's, or compatible."""
        if isinstance(self.code, ClassPath):
            return self.declared or Signature(inspect.Signature(), {}, Any, wants_context=False)
        own = Signature.of(self.function, bound=self.per_job)
        return own if self.declared is None else replace(self.declared, wants_context=own.wants_context)


def _called(code: Any) -> Callable[..., Any]:
    return code if isinstance(code, functools.partial) else type(code).__call__
