"""An operation as one site offers it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dfm_async.federation.operation import Operation

if TYPE_CHECKING:
    from dfm_async.federation.federation import Site

__all__ = ["PlacedOperation"]


class PlacedOperation:
    """An operation whose calls are fixed to one site. It takes the parameters that the site adds, too."""

    def __init__(self, operation: Operation[..., Any], site: Site) -> None:
        self.operation = operation
        self.site = site
        self.__name__ = operation.__name__
        self.__doc__ = operation.__doc__
        self.__signature__ = self._signature()

    def _signature(self) -> inspect.Signature:
        own = self.operation.signature.parameters
        name = self.operation.name
        added = [
            inspect.Parameter(param, inspect.Parameter.KEYWORD_ONLY, default=None)
            for (operation, _), adapter in self.site.adapters.items()
            if operation == name
            for param in adapter.exposed
            if param not in own.parameters
        ]
        return own.replace(parameters=[*own.parameters.values(), *dict.fromkeys(added)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call at the site, in the pipeline that is being built."""
        if "site" in kwargs:
            raise TypeError(f"{self!r} is fixed to its site: leave site= out")
        return self.operation(*args, site=self.site.name, **kwargs)

    def __repr__(self) -> str:
        return f"<Operation {self.operation.name}{self.__signature__} at {self.site.name!r}>"
