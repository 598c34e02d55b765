"""What type checkers know about the code of operations and their calls. At run time, nothing of it is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from dfm_async.language.expressions import Advise
from dfm_async.language.statements import BestOf

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
E = TypeVar("E")
R_co = TypeVar("R_co", covariant=True)
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
F_co = TypeVar("F_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)


# code: callers do not pass a parameter that is named "context"


class ContextFirst(Protocol[P, R_co]):
    """Code whose first parameter is the context of the call."""

    def __call__(self, context: Any, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the code."""


class ContextSecond(Protocol[R_co]):
    """Code with one parameter that must be passed, and a context after it, which checkers cannot remove."""

    def __call__(self, a: Any, /, *, context: Any) -> R_co:
        """Run the code."""


class ContextThird(Protocol[R_co]):
    """Code with two parameters that must be passed, and a context after them."""

    def __call__(self, a: Any, b: Any, /, *, context: Any) -> R_co:
        """Run the code."""


class ContextFourth(Protocol[R_co]):
    """Code with three parameters that must be passed, and a context after them."""

    def __call__(self, a: Any, b: Any, c: Any, /, *, context: Any) -> R_co:
        """Run the code."""


class Body(Protocol[F_co]):
    """An object whose ``body`` is the code."""

    @property
    def body(self) -> F_co:
        """Run the code."""


Later: TypeAlias = Coroutine[Any, Any, V]
"""What a coroutine function returns. In a pipeline, its call is a placeholder for the value."""
Elements: TypeAlias = Iterator[E] | AsyncIterator[E]
"""What a generator returns. In a pipeline, its call is a placeholder for the stream."""

if TYPE_CHECKING:

    class Stream(list[E], Iterator[E], AsyncIterator[E]):  # pyright: ignore[reportIncompatibleMethodOverride]
        """The elements of a generator: an operation can take them as a list, an iterator or an async iterator."""


# calls with options: a ParamSpec cannot be combined with keywords, so only the first positional arguments are checked


class Named(Protocol):
    """A site."""

    @property
    def name(self) -> str:
        """Its name."""


SiteChoice: TypeAlias = str | Named | BestOf | Advise
"""Where a call runs."""


class Arguments(Generic[A, B, C, V_co]):
    """The types of the first three positional parameters of an operation, ``Never`` for missing ones; of its value."""


class Takes(Protocol[A, B, C, V_co]):
    """An operation, by the types of its first parameters and of its value."""

    def _takes(self) -> Arguments[A, B, C, V_co]: ...


class TakesOne(Protocol[A_contra]):
    """An operation with at least one positional parameter."""

    @property
    def code(self) -> Callable[Concatenate[A_contra, ...], Any]:
        """The plain function."""


class TakesTwo(Protocol[A_contra, B_contra]):
    """An operation with at least two positional parameters."""

    @property
    def code(self) -> Callable[Concatenate[A_contra, B_contra, ...], Any]:
        """The plain function."""


class TakesThree(Protocol[A_contra, B_contra, C_contra]):
    """An operation with at least three positional parameters."""

    @property
    def code(self) -> Callable[Concatenate[A_contra, B_contra, C_contra, ...], Any]:
        """The plain function."""
