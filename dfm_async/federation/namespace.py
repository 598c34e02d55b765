"""Operations by name: as a mapping, and by attributes as far as names have dots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from dfm_async.federation.operation import Adapter, Operation

if TYPE_CHECKING:
    from dfm_async.federation.bindings import ExposedParameter

T = TypeVar("T")


class Namespace(Mapping[str, T]):
    """Names with dots: ``found["array.Create"]`` is ``found.array.Create``.

    It shows those of ``items`` that begin with ``prefix``, also later ones; ``what`` names their kind in messages.
    """

    def __init__(self, what: str, items: Mapping[str, T], prefix: str = "") -> None:
        self._what = what
        self._items = items
        self._prefix = prefix

    def __getitem__(self, name: str) -> T:
        return self._items[self._prefix + name]

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
        inner = Namespace(self._what, self._items, f"{self._prefix}{name}.")
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


class PlacedOperation:
    """An operation whose calls are fixed to one site. It takes the parameters that the site adds, too."""

    def __init__(self, operation: Operation[..., Any], site: str, adapters: Collection[Adapter]) -> None:
        self.operation = operation
        self.site = site
        self.__name__ = operation.__name__
        self.__qualname__ = operation.name
        self.__module__ = operation.__module__
        self.added = {name: found for adapter in adapters for name, found in adapter.exposed.items()}
        """The parameters that only the site has."""
        self.__doc__ = _documentation(operation, site, adapters, self.added)
        self.__signature__ = operation.signature.with_added(self.added)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Record a call at the site, in the pipeline that is being built."""
        if "site" in kwargs:
            raise TypeError(f"{self!r} is fixed to its site: leave site= out")
        return self.operation(*args, site=self.site, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> PlacedOperation:
        return self  # as a function in a class would be shown, so that help() shows this as one

    def __repr__(self) -> str:
        return f"<Operation {self.operation.name}{self.__signature__} at {self.site!r}>"


def _documentation(
    operation: Operation[..., Any], site: str, adapters: Collection[Adapter], added: dict[str, ExposedParameter]
) -> str:
    """Return the docstring of the operation, and what the site adds."""
    parts = [operation.__doc__ or "", *(adapter.description for adapter in adapters)]
    if added:
        lines = [f"    {name}: {found.description}".rstrip(" :") for name, found in added.items()]
        parts.append("\n".join([f"Only at {site}:", *lines]))
    return "\n\n".join(dict.fromkeys(part.strip() for part in parts if part.strip()))
