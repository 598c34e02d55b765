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
    from dfm_async.federation.operation import Operation

__all__ = ["Parameters"]

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters that a call may give.

    Attributes:
        own: those of the operation.
        nullable: those for which null is a value like others.
        added: those that the site adds.
        open_ended: whether the operation takes any others, too.
    """

    own: Mapping[str, inspect.Parameter]
    nullable: frozenset[str]
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
            nullable=frozenset(name for name in listed if _nullable(name, called.operation)),
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
        return parameter is not None and parameter.default is not inspect.Parameter.empty and name not in self.nullable

    def null_changes(self, name: str) -> bool:
        """Tells whether null means another value than None, because it means that the call does not give it."""
        parameter = self.own.get(name)
        return self.null_is_absent(name) and (parameter is None or parameter.default is not None)


def _nullable(name: str, operation: Operation[..., Any]) -> bool:
    """Tells whether null can be meant. For an operation of a file, its schema says so: the type always allows None."""
    if operation.declaration is not None:
        schema = operation.declaration.parameters.get(name, {})
        kinds = schema.get("type", "null")
        return "null" in kinds if isinstance(kinds, list) else kinds == "null" or schema.get("nullable") is True
    return _accepts_null(operation.signature.types.get(name, Any))


def _accepts_null(declared: Any) -> bool:
    if typing.get_origin(declared) is typing.Annotated:
        return _accepts_null(typing.get_args(declared)[0])
    return declared in (Any, None, type(None), object) or type(None) in typing.get_args(declared)
