"""The decorator of operations, for type checkers: which operation it makes of which code."""

# mypy: disable-error-code="overload-overlap"
# The special forms come before the general ones that they overlap with.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, overload

from dfm_async.federation.call_types import (
    Body,
    ContextFirst,
    ContextFourth,
    ContextSecond,
    ContextThird,
    Elements,
    Later,
)
from dfm_async.federation.operation import ExternalCode, Operation
from dfm_async.model.call_limits import LimitOptions
from dfm_async.model.policies import Cost, RetryPolicy

if TYPE_CHECKING:
    from dfm_async.federation.call_types import Stream

P = ParamSpec("P")
E = TypeVar("E")
R = TypeVar("R")
V = TypeVar("V")
OperationType = TypeVar("OperationType", bound=Operation[..., Any, Any])


class Options(LimitOptions, total=False):
    """The options of an operation, described at ``site.operation``."""

    name: str | None
    provider: str | None
    retry: RetryPolicy | None
    deadline: float | None
    cost: Cost | None
    in_process: bool
    spread: bool | None
    checkpoint: bool
    args: Mapping[str, Any] | None
    program: ExternalCode | None


class OperationDecorator(Protocol):
    """Makes an operation of a function, of a class or object with a ``body``, or of another site's operation.

    The value of a coroutine function is what it returns, and that of a generator is a stream. A context is not a
    parameter of the operation: if it is the first one, checkers know the others; if it comes later, they do not check
    the arguments of calls.
    """

    @overload
    def __call__(self, code: OperationType, /, **options: Unpack[Options]) -> OperationType: ...
    @overload
    def __call__(
        self, code: type[Body[ContextFirst[P, Later[V]]]], /, **options: Unpack[Options]
    ) -> Operation[P, V]: ...
    @overload
    def __call__(
        self, code: type[Body[ContextFirst[P, Elements[E]]]], /, **options: Unpack[Options]
    ) -> Operation[P, Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: type[Body[ContextFirst[P, R]]], /, **options: Unpack[Options]) -> Operation[P, R]: ...
    @overload
    def __call__(self, code: type[Body[Callable[P, Later[V]]]], /, **options: Unpack[Options]) -> Operation[P, V]: ...
    @overload
    def __call__(
        self, code: type[Body[Callable[P, Elements[E]]]], /, **options: Unpack[Options]
    ) -> Operation[P, Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: type[Body[Callable[P, R]]], /, **options: Unpack[Options]) -> Operation[P, R]: ...
    @overload
    def __call__(self, code: ContextFirst[P, Later[V]], /, **options: Unpack[Options]) -> Operation[P, V]: ...
    @overload
    def __call__(
        self, code: ContextFirst[P, Elements[E]], /, **options: Unpack[Options]
    ) -> Operation[P, Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: ContextFirst[P, R], /, **options: Unpack[Options]) -> Operation[P, R]: ...
    @overload
    def __call__(self, code: ContextSecond[Later[V]], /, **options: Unpack[Options]) -> Operation[..., V]: ...
    @overload
    def __call__(
        self, code: ContextSecond[Elements[E]], /, **options: Unpack[Options]
    ) -> Operation[..., Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: ContextSecond[R], /, **options: Unpack[Options]) -> Operation[..., R]: ...
    @overload
    def __call__(self, code: ContextThird[Later[V]], /, **options: Unpack[Options]) -> Operation[..., V]: ...
    @overload
    def __call__(
        self, code: ContextThird[Elements[E]], /, **options: Unpack[Options]
    ) -> Operation[..., Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: ContextThird[R], /, **options: Unpack[Options]) -> Operation[..., R]: ...
    @overload
    def __call__(self, code: ContextFourth[Later[V]], /, **options: Unpack[Options]) -> Operation[..., V]: ...
    @overload
    def __call__(
        self, code: ContextFourth[Elements[E]], /, **options: Unpack[Options]
    ) -> Operation[..., Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: ContextFourth[R], /, **options: Unpack[Options]) -> Operation[..., R]: ...
    @overload
    def __call__(self, code: Callable[P, Later[V]], /, **options: Unpack[Options]) -> Operation[P, V]: ...
    @overload
    def __call__(
        self, code: Callable[P, Elements[E]], /, **options: Unpack[Options]
    ) -> Operation[P, Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: Callable[P, R], /, **options: Unpack[Options]) -> Operation[P, R]: ...
    @overload
    def __call__(self, code: Body[ContextFirst[P, Later[V]]], /, **options: Unpack[Options]) -> Operation[P, V]: ...
    @overload
    def __call__(
        self, code: Body[ContextFirst[P, Elements[E]]], /, **options: Unpack[Options]
    ) -> Operation[P, Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: Body[ContextFirst[P, R]], /, **options: Unpack[Options]) -> Operation[P, R]: ...
    @overload
    def __call__(self, code: Body[Callable[P, Later[V]]], /, **options: Unpack[Options]) -> Operation[P, V]: ...
    @overload
    def __call__(
        self, code: Body[Callable[P, Elements[E]]], /, **options: Unpack[Options]
    ) -> Operation[P, Stream[E], list[E]]: ...
    @overload
    def __call__(self, code: Body[Callable[P, R]], /, **options: Unpack[Options]) -> Operation[P, R]: ...
    @overload
    def __call__(self, /, **options: Unpack[Options]) -> OperationDecorator: ...
