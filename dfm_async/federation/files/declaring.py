"""What a file says of an operation that a class defines in Python."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Final

from dfm_async.federation.operation import Declaration, Operation

__all__ = ["declared"]

_RESULTS: Final[dict[Any, str]] = {
    str: "string",
    float: "number",
    int: "integer",
    bool: "boolean",
    list: "array",
    type(None): "null",
}
_MODEL_START: Final = "types."


def declared(operation: Operation[..., Any], schemas: dict[str, Any], problem: Callable[[str], None]) -> Declaration:
    """Makes the declaration of an operation from its signature.

    Args:
        operation: the operation.
        schemas: the schemas of the file; those that its types need are added.
        problem: told what cannot be written.
    """
    signature = operation.signature
    parameters: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    for name, parameter in signature.parameters.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problem(f"the parameter {parameter} stands for any number of them; a file names each")
            continue
        schema = _schema(signature.types.get(name, Any), schemas)
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            schema = {**schema, "default": parameter.default}
        parameters[name] = schema
    return Declaration(
        description=inspect.getdoc(operation.code) or "",
        parameters=parameters,
        required=tuple(required),
        returns=_returns(signature.returns),
    )


def _schema(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if hint is Any:
        return {"type": "object"}
    from pydantic import BaseModel, TypeAdapter
    from pydantic.errors import PydanticUserError

    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return {"type": f"{hint.__module__}.{hint.__qualname__}"}
    try:
        found = TypeAdapter(hint).json_schema(ref_template=f"#/schemas/{_MODEL_START}{{model}}")
    except (PydanticUserError, TypeError, NameError):
        return {"type": "object"}  # any Python object
    for name, schema in found.pop("$defs", {}).items():
        schemas.setdefault(f"{_MODEL_START}{name}", schema)
    return found


def _returns(hint: Any) -> str:
    hint = type(None) if hint is None else typing.get_origin(hint) or hint
    if hint in _RESULTS:
        return _RESULTS[hint]
    if isinstance(hint, type) and hasattr(hint, "model_validate"):
        return f"{hint.__module__}.{hint.__qualname__}"
    return "object"
