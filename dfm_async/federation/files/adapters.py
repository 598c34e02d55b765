"""Adapters of files: the class, and where each of its arguments comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dfm_async.federation.bindings import (
    Binding,
    Const,
    ExposedParameter,
    FromParam,
    FromProvider,
    FromSecrets,
    FromSite,
)
from dfm_async.federation.files.schemas import INPUTS, is_path
from dfm_async.federation.files.values import Value, close_to, one_of
from dfm_async.federation.operation import RESERVED
from dfm_async.federation.schemas import JSON_TYPES
from dfm_async.model.policies import Cost, RetryPolicy
from dfm_async.model.resources import ClassPath, refusal

__all__ = ["AdapterFields", "class_path", "read_adapter"]

_KEYS: Final = (
    "adapter",
    "description",
    "returns",
    "is_async",
    "compute_cost",
    "args",
    "retry",
    "deadline",
    "in_process",
)
_SOURCES: Final = ("from_param", "const", "from_secrets", "from_site", "from_provider")
_COSTS: Final = ("fixed_time", "compute_throughput", "fixed_size", "output_factor")
_RETRY: Final = ("attempts", "backoff", "max_backoff", "on", "on_worker_lost")
_FROM_OPERATION: Final = "from-operation"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFields:
    """What a file says of an adapter."""

    code: ClassPath
    bind: dict[str, Binding] | None
    is_async: bool
    description: str
    returns: str | None
    cost: Cost | None
    retry: RetryPolicy | None
    deadline: float | None
    in_process: bool


def read_adapter(
    value: Value, parameters: Collection[str], providers: Collection[str], packages: tuple[str, ...] | None
) -> AdapterFields | None:
    """Reads an adapter; None if something is wrong with what it cannot do without.

    Args:
        value: where it stands.
        parameters: those of its operation.
        providers: those of its site.
        packages: where classes may come from.
    """
    fields = value.fields("an adapter", _KEYS)
    adapter = fields.get("adapter")
    if adapter is None:
        value.problem("an adapter needs 'adapter': the path of its class, or {path: ..., args: {...}}")
    code = None if adapter is None else class_path(adapter, "adapter", packages)
    is_async = fields["is_async"].flag("is-async") if "is_async" in fields else True
    in_process = fields["in_process"].flag("in-process") if "in_process" in fields else False
    bind = _bindings(fields["args"], parameters, providers) if "args" in fields else {}
    cost = _cost(fields["compute_cost"]) if "compute_cost" in fields else None
    retry = _retry(fields["retry"]) if "retry" in fields else None
    deadline = fields["deadline"].number("deadline", positive=True) if "deadline" in fields else None
    found = _text(fields, "description")
    returns = _text(fields, "returns")
    if returns and not is_path(returns):
        fields["returns"].problem(f"returns must name a type, such as string or pkg.mod.Model, not {returns!r}")
    if code is None:
        return None
    return AdapterFields(
        code=code,
        bind=bind,
        is_async=is_async is not False,
        description=found,
        returns=returns or None,
        cost=cost,
        retry=retry,
        deadline=deadline,
        in_process=bool(in_process),
    )


def class_path(value: Value, what: str, packages: tuple[str, ...] | None) -> ClassPath | None:
    """Reads the path of a class, with or without the arguments of its constructor. Nothing is imported."""
    args: dict[str, Any] = {}
    if isinstance(value.node.value, dict):
        fields = value.fields(what, ("path", "args"))
        if "args" in fields:
            args = fields["args"].plain_mapping("args")
            for name in args:
                if not name.isidentifier():
                    fields["args"].problem_at_key(name, "an argument's name must be an identifier")
        if "path" not in fields:
            value.problem(f"{what} needs 'path': the class, such as pkg.mod.Class")
            return None
        value = fields["path"]
    text = value.text(what)
    if text is None:
        return None
    wrong = refusal(text, packages, in_file=True)
    if wrong is not None:
        value.problem(f"{text!r} {wrong}")
        return None
    return ClassPath(text, args)


def _text(fields: Mapping[str, Value], name: str) -> str:
    value = fields.get(name)
    return "" if value is None or value.missing else value.text(name) or ""


def _bindings(value: Value, parameters: Collection[str], providers: Collection[str]) -> dict[str, Binding] | None:
    if value.node.value == _FROM_OPERATION:
        return None
    if isinstance(value.node.value, str):
        hint = close_to(value.node.value, [_FROM_OPERATION])
        value.problem(f"args must be the word 'from-operation' or a mapping, not {value.kind}{hint}")
        return {}
    found: dict[str, Binding] = {}
    exposed: dict[str, str] = {}
    for name, part in value.mapping("args"):
        if not name.isidentifier():
            value.problem_at_key(name, "an argument's name must be an identifier")
            continue
        binding = _binding(part, parameters, providers)
        if binding is None:
            continue
        found[name] = binding
        extra = None if isinstance(binding, FromParam) else binding.expose_as
        if extra is not None:
            if extra.param in exposed:
                part.problem(f"the argument {exposed[extra.param]!r} is exposed as {extra.param!r} already")
            exposed[extra.param] = name
    return found


def _binding(value: Value, parameters: Collection[str], providers: Collection[str]) -> Binding | None:
    if isinstance(value.node.value, list):
        value.problem("a list must be written as {const: [...]}")
        return None
    if not isinstance(value.node.value, dict):
        return Const(value.node.value)
    fields = value.fields("a binding", (*_SOURCES, "expose_as", "doc"))
    chosen = [name for name in _SOURCES if name in fields]
    if not chosen and any(name.replace("-", "_") not in fields for name, _ in value.mapping("a binding")):
        return None  # an unknown key, which may be a misspelt one
    if len(chosen) != 1:
        shown = f"not {' and '.join(name.replace('_', '-') for name in chosen)}" if chosen else "and there is none"
        value.problem(f"a binding has one of from-param, const, from-secrets, from-site, from-provider, {shown}")
        return None
    source, at = chosen[0], fields[chosen[0]]
    doc = _text(fields, "doc")
    expose_as = _exposed(fields["expose_as"]) if "expose_as" in fields and not fields["expose_as"].missing else None
    if source == "from_param":
        if "expose_as" in fields:
            fields["expose_as"].problem("expose-as cannot stand beside from-param: the parameter is there already")
        name = at.identifier("from-param")
        if name is not None and name not in parameters:
            at.problem(f"the operation has no parameter {name!r}; {one_of(name, list(parameters))}")
            return None
        return None if name is None else FromParam(name, doc)
    if source == "const":
        return Const(at.plain(), expose_as, doc)
    if source == "from_secrets":
        key = at.text("from-secrets")
        return None if key is None else FromSecrets(key, expose_as, doc)
    if source == "from_site":
        attribute = _attribute(at, at.identifier("from-site"))
        return None if attribute is None else FromSite(attribute, expose_as, doc)
    return _from_provider(at, providers, expose_as, doc)


def _from_provider(
    at: Value, providers: Collection[str], expose_as: ExposedParameter | None, doc: str
) -> FromProvider | None:
    text = at.text("from-provider")
    if text is None:
        return None
    provider, dot, attribute = text.partition(".")
    if not dot or not provider.isidentifier() or not attribute.isidentifier():
        at.problem(f"from-provider names a provider and its attribute, such as acme.base_url, not {text!r}")
        return None
    if provider not in providers:
        at.problem(f"the site has no provider {provider!r}; {one_of(provider, list(providers))}")
        return None
    return None if _attribute(at, attribute) is None else FromProvider(provider, attribute, expose_as, doc)


def _attribute(at: Value, name: str | None) -> str | None:
    if name is not None and name.startswith("__"):
        at.problem(f"{name!r} is an attribute of Python's own; name one of the object's")
        return None
    return name


def _exposed(value: Value) -> ExposedParameter | None:
    fields = value.fields("expose-as", ("param", "type", "description", *INPUTS))
    param = fields["param"].identifier("param") if "param" in fields else None
    if "param" not in fields:
        value.problem("expose-as needs 'param': the name of the parameter that calls may pass")
    kinds: Any = "object"
    if "type" in fields:
        kinds = _exposed_type(fields["type"])
    inputs = {name: fields[name].flag(name) is not False for name in INPUTS if name in fields}
    if param in RESERVED:
        fields["param"].problem(f"{param!r} means something else in a pipeline; choose another name")
        return None
    if param is None or kinds is None:
        return None
    return ExposedParameter(param=param, type=kinds, description=_text(fields, "description"), **inputs)


def _exposed_type(value: Value) -> Any:
    if isinstance(value.node.value, list):
        found = [_exposed_type(part) for part in value.items("type")]
        return None if not found or None in found else found
    text = value.text("type")
    if text is None or text in JSON_TYPES or ("." in text and is_path(text)):
        return text
    value.problem(
        f"there is no type {text!r}{close_to(text, JSON_TYPES)}. Allowed are: {', '.join(JSON_TYPES)}, and "
        "the path of a pydantic model"
    )
    return None


def _cost(value: Value) -> Cost | None:
    if value.missing:
        return None
    numbers = {
        name: part.number(name, positive=name == "compute_throughput")
        for name, part in value.fields("compute_cost", _COSTS).items()
        if not part.missing
    }
    return Cost(
        fixed_time=numbers.get("fixed_time") or 0.0,
        throughput=numbers.get("compute_throughput"),
        fixed_size=numbers.get("fixed_size") or 0.0,
        output_factor=numbers.get("output_factor") or 0.0,  # as in DFM: the result does not grow with the input
    )


def _retry(value: Value) -> RetryPolicy | None:
    fields = value.fields("retry", _RETRY)
    given: dict[str, Any] = {}
    for name in ("attempts", "on_worker_lost"):
        if name in fields:
            given[name] = fields[name].number(name, whole=True, positive=name == "attempts")
    for name in ("backoff", "max_backoff"):
        if name in fields:
            given[name] = fields[name].number(name)
    if "on" in fields:
        names = [part.text("the name of an exception") for part in fields["on"].items("on")]
        given["on"] = tuple(name for name in names if name is not None)
    if any(found is None for found in given.values()):
        return None
    return RetryPolicy(**given)
