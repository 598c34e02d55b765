"""Adapters of files: the class, and where each of its arguments comes from."""

from __future__ import annotations

from collections.abc import Collection
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
from dfm_async.federation.files.schemas import INPUTS, read_types, type_name
from dfm_async.federation.files.values import FileValue, Reader, close_to, if_given, number, one_of, positive
from dfm_async.federation.operation import RESERVED
from dfm_async.model.call_limits import LIMITS, CallLimits
from dfm_async.model.policies import Cost, RetryPolicy
from dfm_async.model.resources import ClassPath, refusal

_SOURCES: Final = ("from_param", "const", "from_secrets", "from_site", "from_provider")
_FROM_OPERATION: Final = "from-operation"


def read_adapter(
    value: FileValue, parameters: Collection[str], providers: Collection[str], packages: tuple[str, ...] | None
) -> dict[str, Any]:
    """Read an adapter: the ``code``, and the options of :meth:`~dfm_async.federation.Site.adapt`.

    Only classes of ``packages`` are allowed; ``parameters`` and ``providers`` are those of its operation and its site.
    """
    readers: dict[str, Reader] = {
        "adapter": lambda at, what: class_path(at, what, packages),
        "description": if_given(FileValue.text),
        "returns": if_given(type_name),
        "is_async": FileValue.flag,
        "compute_cost": if_given(_cost),
        "args": lambda at, _: _bindings(at, parameters, providers),
        "retry": _retry,
        "deadline": positive,
        "in_process": FileValue.flag,
        **dict.fromkeys(sorted(LIMITS), _limit),
    }
    given = value.read("an adapter", readers)
    _check_limits(value, {name: found for name, found in given.items() if name in LIMITS}, parameters)
    if not value.has("adapter"):
        value.problem("an adapter needs 'adapter': the path of its class, or {path: ..., args: {...}}")
    bind = given.pop("args", None) if value.has("args") else {}
    names = {"adapter": "code", "compute_cost": "cost"}
    return {"bind": bind, "is_async": True, **{names.get(key, key): found for key, found in given.items()}}


def class_path(value: FileValue, what: str, packages: tuple[str, ...] | None) -> ClassPath | None:
    """Read the path of a class, with or without the arguments of its constructor. Nothing is imported."""
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


def _bindings(value: FileValue, parameters: Collection[str], providers: Collection[str]) -> dict[str, Binding] | None:
    if value.node.value == _FROM_OPERATION:
        return None
    if isinstance(value.node.value, str):
        hint = close_to(value.node.value, [_FROM_OPERATION])
        value.problem(f"args must be 'from-operation' or a mapping, not {value.kind}{hint}")
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


def _binding(value: FileValue, parameters: Collection[str], providers: Collection[str]) -> Binding | None:
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
        shown = " and ".join(name.replace("_", "-") for name in chosen) or "none of them"
        value.problem(f"a binding has one of from-param, const, from-secrets, from-site, from-provider, not {shown}")
        return None
    source, at = chosen[0], fields[chosen[0]]
    about: dict[str, Any] = {}
    if "doc" in fields and not fields["doc"].missing:
        about["doc"] = fields["doc"].text("doc")
    if source == "from_param":
        if "expose_as" in fields:
            fields["expose_as"].problem("expose-as cannot be combined with from-param: the parameter exists already")
        name = at.identifier("from-param")
        if name is not None and name not in parameters:
            at.problem(f"the operation has no parameter {name!r}; {one_of(name, list(parameters))}")
        return None if name is None else FromParam(name, **about)
    if "expose_as" in fields and not fields["expose_as"].missing:
        about["expose_as"] = _exposed(fields["expose_as"])
    if source == "const":
        return Const(at.plain(), **about)
    text = at.text(source.replace("_", "-")) or ""
    if source == "from_secrets":
        return FromSecrets(text, **about)
    if source == "from_site":
        return FromSite(_attribute(at, at.identifier("from-site") or ""), **about)
    provider, _, attribute = text.partition(".")
    if not provider.isidentifier() or not attribute.isidentifier():
        at.problem(f"from-provider names a provider and its attribute, such as acme.base_url, not {text!r}")
        return None
    if provider not in providers:
        at.problem(f"the site has no provider {provider!r}; {one_of(provider, list(providers))}")
        return None
    return FromProvider(provider, _attribute(at, attribute), **about)


def _attribute(at: FileValue, name: str) -> str:
    if name.startswith("__"):
        at.problem(f"{name!r} is an attribute of Python's own; name one of the object's")
    return name


def _exposed(value: FileValue) -> ExposedParameter | None:
    readers: dict[str, Reader] = {
        "param": FileValue.identifier,
        "type": lambda at, _: read_types(at),
        "description": if_given(FileValue.text),
        **dict.fromkeys(INPUTS, FileValue.flag),
    }
    given = value.read("expose-as", readers)
    if not value.has("param"):
        value.problem("expose-as needs 'param': the name of the parameter that calls may pass")
    elif given.get("param") in RESERVED:
        value.problem(f"{given['param']!r} means something else in a pipeline; choose another name for param")
    return ExposedParameter(**given) if "param" in given else None


def _cost(value: FileValue, what: str) -> Cost:
    readers = {"fixed_time": number, "compute_throughput": positive, "fixed_size": number, "output_factor": number}
    given = value.read(what, {name: if_given(reader) for name, reader in readers.items()})
    # As in DFM, the result does not grow with the input by default.
    return Cost(throughput=given.pop("compute_throughput", None), **{"output_factor": 0.0, **given})


def _limit(value: FileValue, what: str) -> Any:
    """Read one limit of calls; its name is its key."""
    try:
        if what != "key":  # has no effect by itself
            CallLimits.parse({what: value.node.value})
    except ValueError as error:
        value.problem(str(error))
        return None
    return value.identifier(what) if what == "key" else value.node.value


def _check_limits(value: FileValue, given: dict[str, Any], parameters: Collection[str]) -> None:
    try:
        limits = CallLimits.parse(given)
    except ValueError as error:
        value.problem(str(error))
        return
    if limits is not None and limits.key is not None and limits.key not in parameters:
        name = limits.key
        value.part("key").problem(f"the operation has no parameter {name!r}; {one_of(name, list(parameters))}")


def _retry(value: FileValue, what: str) -> RetryPolicy | None:
    readers: dict[str, Reader] = {
        "attempts": lambda at, name: at.number(name, whole=True, positive=True),
        "backoff": number,
        "max_backoff": number,
        "on": lambda at, name: tuple(part.text("the name of an exception") or "" for part in at.items(name)),
        "on_worker_lost": lambda at, name: at.number(name, whole=True),
        "jitter": number,
    }
    try:
        return RetryPolicy(**value.read(what, readers))
    except ValueError as error:
        value.problem(str(error))
        return None
