"""Operations by name: as a mapping, and by attributes as far as names have dots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dfm_async.federation.operation import Operation

__all__ = ["Namespace", "Operations"]

T = TypeVar("T")


class Namespace(Mapping[str, T]):
    """Names with dots: ``found["array.Create"]`` is ``found.array.Create``.

    Args:
        what: what the names are for, in messages.
        items: all of them, by their whole names; looked at each time, so that later ones are found.
        prefix: the names that this one shows begin so.
        show: makes what is given out of what is kept.
    """

    def __init__(
        self, what: str, items: Mapping[str, T], prefix: str = "", show: Callable[[T], T] | None = None
    ) -> None:
        self._what = what
        self._items = items
        self._prefix = prefix
        self._show = show

    def __getitem__(self, name: str) -> T:
        found = self._items[self._prefix + name]
        return found if self._show is None else self._show(found)

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (name[start:] for name in self._items if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these on its own (copy, pickle, inspection)
            raise AttributeError(name)
        if name in self:
            return self[name]
        inner = Namespace(self._what, self._items, f"{self._prefix}{name}.", self._show)
        if not len(inner):
            known = ", ".join(sorted({part.partition(".")[0] for part in self})) or "nothing"
            raise AttributeError(f"no {self._what} {self._prefix + name!r} (there is: {known})")
        return inner

    def __dir__(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in self} | {"get", "items", "keys", "values"})

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"<{self._what}s: {', '.join(self) or 'none'}>"


class Operations(Namespace["Operation[..., Any]"], MutableMapping[str, "Operation[..., Any]"]):
    """The operations of a federation: ``federation.operations.array.Create(...)``, or ``["array.Create"]``."""

    def __init__(self) -> None:
        super().__init__("operation", {})

    def __setitem__(self, name: str, operation: Operation[..., Any]) -> None:
        self._items[name] = operation  # type: ignore[index] # the dict that was made above

    def __delitem__(self, name: str) -> None:
        del self._items[name]  # type: ignore[attr-defined] # the dict that was made above
