"""Operations and nodes as pipelines for DFM use them."""

from __future__ import annotations

from typing import Any

from dfm_async.federation.namespace import PlacedOperation
from dfm_async.federation.operation import Operation
from dfm_async.language.builder import Value


class Node(Value):
    """A node of a pipeline, with the names that DFM has for its fields and its id."""

    __slots__ = ()

    def fieldref(self, key: str | int) -> Value:
        """Return a field of the value."""
        return self[key]

    @property
    def dfm_node_id(self) -> Value:
        """The node, for ``dfm_after``."""
        return self


class DfmOperation:
    """An operation whose calls take the keywords of DFM."""

    def __init__(self, operation: Operation[..., Any] | PlacedOperation, provider: str | None = None) -> None:
        self._operation = operation
        self._options = {} if provider is None else {"provider": provider}
        self.__name__ = operation.__name__
        self.__doc__ = operation.__doc__
        self.__signature__ = operation.__signature__

    def __call__(self, *, dfm_after: Any = None, dfm_node_id: Any = None, **kwargs: Any) -> Node:
        """Record a call in the pipeline that is being built. Names of nodes have no effect."""
        found = self._operation(**{**self._options, **kwargs}, after=dfm_after)
        return Node(found._expression, found._builder)  # noqa: SLF001 - it is the same value

    def __repr__(self) -> str:
        return repr(self._operation)
