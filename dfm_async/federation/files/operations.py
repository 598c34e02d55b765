"""Operations of files: what they take and return."""

from __future__ import annotations

import inspect
import keyword
from typing import Any, Final

from dfm_async.federation.files.documents import Documents
from dfm_async.federation.files.schemas import SchemaReader, is_path
from dfm_async.federation.files.values import Value, one_of
from dfm_async.federation.operation import Declaration, Signature
from dfm_async.federation.schemas import Models, optional, result_type, shown, type_of

__all__ = ["read_operation", "signature_of"]

_KEYS: Final = ("description", "parameters", "required", "returns", "type", "title")
_TAKEN: Final = frozenset({"site", "provider"})


def read_operation(value: Value, documents: Documents, schemas: SchemaReader) -> Declaration:
    """Reads an operation."""
    fields = value.fields("an operation", _KEYS)
    description = _text(fields.get("description"), "description")
    parameters: dict[str, dict[str, Any]] = {}
    if "parameters" in fields:
        for name, part in documents.entries(fields["parameters"], "parameters"):
            if not name.isidentifier() or keyword.iskeyword(name):
                part.problem(f"a parameter's name must be an identifier, not {name!r}")
            elif name in _TAKEN:
                part.problem(f"a parameter cannot be named {name!r}: it says where a call runs")
            else:
                parameters[name] = schemas.parameter(part)
    required: list[str] = []
    for part in fields["required"].items("required") if "required" in fields else ():
        needed = part.text("the name of a parameter")
        if needed is not None and needed not in parameters:
            part.doubt(
                f"the operation has no parameter {needed!r}, so it is not needed; {one_of(needed, list(parameters))}"
            )
        elif needed is not None and needed not in required:
            required.append(needed)
    returns = _text(fields.get("returns"), "returns") or "object"
    if not is_path(returns):
        fields["returns"].problem(f"returns must name a type, such as string or pkg.mod.Model, not {returns!r}")
    if "type" in fields and fields["type"].node.value != "object":
        fields["type"].problem(f"the type of an operation can only be object, not {fields['type'].kind}")
    return Declaration(description=description, parameters=parameters, required=tuple(required), returns=returns)


def signature_of(declaration: Declaration, models: Models) -> Signature:
    """What can be passed to a declared operation: what is required first, then what is not, by name."""
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


def _text(value: Value | None, what: str) -> str:
    return "" if value is None or value.missing else value.text(what) or ""
