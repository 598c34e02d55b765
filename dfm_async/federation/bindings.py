"""Bindings: where an adapter gets an argument from. Plain data; the site evaluates it at each call."""

from __future__ import annotations

import inspect
from typing import Any, Final, TypeAlias

import msgspec

_TYPES: Final[dict[str, Any]] = {"string": str, "number": float, "integer": int, "boolean": bool, "array": list}


class _BindingData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ExposedParameter(_BindingData, frozen=True, kw_only=True):
    """An extra optional parameter of an operation at one site: a value for it takes the place of what is bound.

    Attributes:
        param: its name.
        type: its type, as JSON schemas name them, or the path of a pydantic model.
        description: a text for users.
        accepts_literal_input: whether it may be a constant.
        accepts_node_input: whether it may be the value of a node.
        accepts_place_input: whether it may be a parameter of the pipeline.
        discoverable: whether advice may be asked for.
    """

    param: str
    type: Any = "object"
    description: str = ""
    accepts_literal_input: bool = True
    accepts_node_input: bool = True
    accepts_place_input: bool = True
    discoverable: bool = True

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter as a signature shows it."""
        known = _TYPES.get(self.type, Any) if isinstance(self.type, str) else Any
        annotation = inspect.Parameter.empty if known is Any else known | None
        return inspect.Parameter(self.param, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class FromParam(_BindingData, frozen=True):
    """The operation's parameter of this name; None if the call does not give it and it has no default."""

    param: str
    doc: str = ""


class Const(_BindingData, frozen=True):
    """A constant."""

    value: Any
    expose_as: ExposedParameter | None = None
    doc: str = ""


class FromSecrets(_BindingData, frozen=True):
    """A secret of the site's vault, asked for at each call."""

    key: str
    expose_as: ExposedParameter | None = None
    doc: str = ""


class FromSite(_BindingData, frozen=True):
    """An attribute of the site object."""

    attribute: str
    expose_as: ExposedParameter | None = None
    doc: str = ""


class FromProvider(_BindingData, frozen=True):
    """An attribute of a provider object."""

    provider: str
    attribute: str
    expose_as: ExposedParameter | None = None
    doc: str = ""


Binding: TypeAlias = FromParam | Const | FromSecrets | FromSite | FromProvider
