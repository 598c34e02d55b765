"""Operations of files: what they take and return."""

from __future__ import annotations

import inspect
import keyword
import typing
from collections.abc import Callable
from typing import Any, Final

from dfm_async.federation.files.documents import Documents
from dfm_async.federation.files.schemas import SchemaReader, type_name
from dfm_async.federation.files.values import FileValue, if_given, one_of
from dfm_async.federation.operation import Declaration, Operation, Signature
from dfm_async.federation.schemas import Models, optional, result_type, shown, type_of

_KEYS: Final = ("description", "parameters", "required", "returns", "type", "title")
_TAKEN: Final = frozenset({"site", "provider"})


def read_operation(value: FileValue, documents: Documents, schemas: SchemaReader) -> Declaration:
    """Read an operation."""
    fields = value.fields("an operation", _KEYS)
    description = _text(fields.get("description"), "description")
    parameters: dict[str, dict[str, Any]] = {}
    if "parameters" in fields:
        for name, part in documents.entries(fields["parameters"], "parameters"):
            if not name.isidentifier() or keyword.iskeyword(name):
                part.problem(f"a parameter's name must be an identifier, not {name!r}")
            elif name in _TAKEN:
                part.problem(f"a parameter cannot be named {name!r}: that argument of a call chooses where it runs")
            else:
                parameters[name] = schemas.parameter(part)
    required: list[str] = []
    for part in fields["required"].items("required") if "required" in fields else ():
        needed = part.text("the name of a parameter")
        if needed is not None and needed not in parameters:
            part.doubt(
                f"the operation has no parameter {needed!r}, so it is ignored; {one_of(needed, list(parameters))}"
            )
        elif needed is not None and needed not in required:
            required.append(needed)
    returns = if_given(type_name)(fields["returns"], "returns") if "returns" in fields else None
    if "type" in fields and fields["type"].node.value != "object":
        fields["type"].problem(f"the type of an operation can only be object, not {fields['type'].kind}")
    return Declaration(
        description=description, parameters=parameters, required=tuple(required), returns=returns or "object"
    )


def signature_of(declaration: Declaration, models: Models) -> Signature:
    """Return what can be passed to a declared operation: what is required first, then what is not, by name."""
    listed: list[inspect.Parameter] = []
    types: dict[str, Any] = {}
    required = set(declaration.required)
    for name, schema in sorted(declaration.parameters.items(), key=lambda item: item[0] not in required):
        found = type_of(schema, models)
        if name in required:
            parameter = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        else:
            default = schema.get("default")
            parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            found = optional(found)
        if found is not Any:
            types[name] = found
            parameter = parameter.replace(annotation=shown(found))
        listed.append(parameter)
    returns = result_type(declaration.returns)
    declared = inspect.Signature.empty if returns is Any else returns
    return Signature(inspect.Signature(listed, return_annotation=declared), types, returns, wants_context=False)


def _text(value: FileValue | None, what: str) -> str:
    return "" if value is None or value.missing else value.text(what) or ""


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
    """Make the declaration of an operation from its signature.

    Adds the schemas that its types need to ``schemas``; ``problem`` receives what cannot be written.
    """
    signature = operation.signature
    parameters: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    for name, parameter in signature.parameters.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problem(f"the parameter {parameter} takes any number of values; in a file, each has a name")
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
