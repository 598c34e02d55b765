"""Which parameters a class of an operation has, and what null means for them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_async.federation.dfm_json.names import Called
    from dfm_async.federation.federation import Federation

__all__ = ["Parameters"]

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters that a call may give.

    Attributes:
        own: those of the operation.
        types: their declared types.
        added: those that the site adds.
        open_ended: whether the operation takes any others, too.
    """

    own: Mapping[str, inspect.Parameter]
    types: Mapping[str, Any]
    added: frozenset[str]
    open_ended: bool

    @classmethod
    def of(cls, called: Called, federation: Federation) -> Parameters:
        """The parameters of a class: one that is fixed to a site has those that the site adds."""
        signature = called.operation.signature
        listed = signature.parameters.parameters
        adapter = None
        if called.site is not None:
            adapter = federation.sites[called.site].adapters.get((called.operation.name, called.provider))
        return cls(
            own={name: parameter for name, parameter in listed.items() if parameter.kind not in _VARIABLE},
            types=signature.types,
            added=frozenset(() if adapter is None else adapter.exposed.keys() - listed.keys()),
            open_ended=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in listed.values()),
        )

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self.added or self.open_ended

    @property
    def required(self) -> list[str]:
        """The names of those that a call must give."""
        return [name for name, parameter in self.own.items() if parameter.default is inspect.Parameter.empty]

    def null_is_absent(self, name: str) -> bool:
        """Tells whether null means that the call does not give it.

        DFM writes null for each parameter that was left out. Where null could be meant, it is.
        """
        if name in self.added:
            return True
        parameter = self.own.get(name)
        if parameter is None or parameter.default is inspect.Parameter.empty:
            return False
        return not _accepts_null(self.types.get(name, Any))


def _accepts_null(declared: Any) -> bool:
    if declared in (Any, None, type(None), object):
        return True
    if typing.get_origin(declared) is typing.Annotated:
        return _accepts_null(typing.get_args(declared)[0])
    return any(part is type(None) or part is Any for part in typing.get_args(declared) if part is not declared)
