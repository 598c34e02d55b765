"""An operation as one site offers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dfm_async.federation.operation import Adapter, Operation

if TYPE_CHECKING:
    from dfm_async.federation.bindings import ExposedParameter
    from dfm_async.federation.site import Site

__all__ = ["PlacedOperation"]


class PlacedOperation:
    """An operation whose calls are fixed to one site. It takes the parameters that the site adds, too."""

    def __init__(self, operation: Operation[..., Any], site: Site) -> None:
        self.operation = operation
        self.site = site
        self.__name__ = operation.__name__
        self.__qualname__ = operation.name
        self.__module__ = operation.__module__
        adapters = [adapter for (name, _), adapter in site.adapters.items() if name == operation.name]
        added = {name: found for adapter in adapters for name, found in adapter.exposed.items()}
        self.__doc__ = _documentation(operation, site, adapters, added)
        self.__signature__ = operation.signature.with_added(added)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Records a call at the site, in the pipeline that is being built."""
        if "site" in kwargs:
            raise TypeError(f"{self!r} is fixed to its site: leave site= out")
        return self.operation(*args, site=self.site.name, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> PlacedOperation:
        return self  # as a function in a class would be shown, so that help() shows this as one

    def __repr__(self) -> str:
        return f"<Operation {self.operation.name}{self.__signature__} at {self.site.name!r}>"


def _documentation(
    operation: Operation[..., Any], site: Site, adapters: list[Adapter], added: dict[str, ExposedParameter]
) -> str:
    """What the operation says of itself, and what the site adds."""
    parts = [operation.__doc__ or "", *(adapter.description for adapter in adapters)]
    if added:
        lines = [f"    {name}: {found.description}".rstrip(" :") for name, found in added.items()]
        parts.append("\n".join([f"Only at {site.name}:", *lines]))
    return "\n\n".join(dict.fromkeys(part.strip() for part in parts if part.strip()))
