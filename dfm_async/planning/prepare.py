"""From a pipeline to a plan: checks it, places its nodes, and makes its nets.

A plan for discovery asks: it has one question per node and per site that can run it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

from dfm_async.base.text import shortened
from dfm_async.discovery.advisors import DISCOVER
from dfm_async.errors import DfmError, EncodingError, PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.federation.fingerprints import fingerprint
from dfm_async.federation.operation import Adapter, Operation
from dfm_async.language.expressions import Advise, Constant, Expression, Parameter, Ref, walk
from dfm_async.language.pipeline import Pipeline
from dfm_async.language.pipeline_text import expression_text
from dfm_async.language.statements import (
    CallStatement,
    ChoiceStatement,
    CollectStatement,
    IfStatement,
    SleepStatement,
    Statement,
    WaitStatement,
    YieldStatement,
)
from dfm_async.model.ids import Location, OperationKey
from dfm_async.model.policies import RetryPolicy
from dfm_async.net import spec
from dfm_async.planning.candidates import Candidates, may_stream, type_conflict
from dfm_async.planning.containment import contain
from dfm_async.planning.nets import build_nets
from dfm_async.planning.placement import Placement, place
from dfm_async.planning.plan import CANONICAL, NodePlan, ParameterUse, Plan
from dfm_async.planning.profile import Costs, Profile
from dfm_async.planning.structure import Spot, Structure, analyse
from dfm_async.planning.types import type_of_event, validate

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def prepare(
    pipeline: Pipeline,
    federation: Federation,
    homesite: str,
    restrict_to_sites: Iterable[str] | str | None = None,
    lanes: int = 1,
    measured: Profile | None = None,
) -> Plan:
    """Check a pipeline, place its nodes and make its nets.

    A PipelineError lists everything that is wrong, each problem with its statement.

    Args:
        pipeline: the pipeline.
        federation: the sites.
        homesite: where parameters come from and results go to.
        restrict_to_sites: the sites that may be used; None means all.
        lanes: the number of processes of a site that does not set it.
        measured: costs that replace the configured ones.
    """
    if pipeline.mode == "discovery":
        message = "is a pipeline for discovery, which is not executed: use 'await session.discover(pipeline)'"
        raise PipelineError(pipeline.name, [Problem("mode", message)])
    found, allowed = _analysed(pipeline, federation, homesite, restrict_to_sites)
    placed, cost = place(found, federation, homesite, allowed, lanes, Costs(federation, measured))
    uses = _check_types(found, federation)
    _check_result(pipeline, found, federation)
    _check_defaults(found)
    if found.problems:
        raise PipelineError(pipeline.name, found.problems)
    streams = cache(partial(may_stream, federation))
    locations, nets, params = build_nets(pipeline.body, found, placed, streams)
    nets = contain(nets, partial(_policy, federation))
    plan = Plan(
        pipeline=pipeline.name,
        federation=federation.name,
        api_version=federation.api_version,
        homesite=homesite,
        locations=locations,
        nets=nets,
        params=params,
        uses=uses,
        nodes=_node_plans(found, placed),
        ordered_places=_ordered(found),
        cost=cost,
        defaults={name: found.defaults[name] for name in params if name in found.defaults},
        events=found.events,
    )
    plan.declared.update({name: hint for name, hint in pipeline.types.items() if hint is not Any})
    return plan


def _analysed(
    pipeline: Pipeline, federation: Federation, homesite: str, restrict: Iterable[str] | str | None
) -> tuple[Structure, list[str] | None]:
    """Return the structure of a pipeline, and the sites that may be used; None means all."""
    found = analyse(pipeline)
    wanted, given = pipeline.api_version, federation.api_version
    if wanted and wanted.partition(".")[0] != given.partition(".")[0]:
        message = f"is for API version {wanted}, but federation {federation.name!r} has {given}"
        found.problems.append(Problem("api_version", message))
    if restrict is None:
        return found, None
    names = [homesite] if restrict == "homesite" else [restrict] if isinstance(restrict, str) else list(restrict)
    for name in names:
        if name not in federation.sites and name != homesite:
            message = f"names site {name!r}, which does not exist (there are: {', '.join(federation.sites)})"
            found.problems.append(Problem("restrict_to_sites", message))
    return found, names


def _check_types(found: Structure, federation: Federation) -> tuple[ParameterUse, ...]:
    """Check constants and edges against declared types. Gives the uses of parameters, to check those at execution."""
    uses: list[ParameterUse] = []
    fitting: set[tuple[str, ...]] = set()
    for spot in found.spots.values():
        statement = spot.statement
        _check_literals(spot, found)
        if isinstance(statement, WaitStatement) and statement.fallback is not None:
            _check_fallback(spot, statement.fallback, type_of_event(statement.schema), found)
        if not isinstance(statement, CallStatement):
            continue
        operation = federation.operations.get(statement.operation)
        if operation is None:
            continue
        parameters = operation.signature.parameters.parameters
        types = operation.signature.types
        names = (operation.name, *statement.args)
        if names not in fitting:
            problems = list(_misfits(operation, statement.args))
            for problem in problems:
                found.report(spot, problem)
            if not problems:
                fitting.add(names)
        if statement.fallback is not None:
            _check_fallback(spot, statement.fallback, operation.signature.returns, found)
        for name, expression in statement.args.items():
            hint = types.get(name, Any)
            if hint is Any or name not in parameters or parameters[name].kind in _VARIABLE:
                continue
            if isinstance(expression, Constant):
                value, wrong = validate(hint, expression.value, convert=False)
                if wrong is not None:
                    found.report(spot, f"{name}: {wrong}")
                elif value is not expression.value:
                    found.converted[statement.id, name] = value
            elif isinstance(expression, (Ref, Parameter)):
                conflict = type_conflict(expression, name, hint, found, federation)
                if conflict is not None:
                    found.report(spot, conflict)
            if isinstance(expression, Parameter) and not expression.path:
                uses.append(ParameterUse(expression.name, operation.name, name))
                if expression.name in found.defaults:
                    _, wrong = validate(hint, found.defaults[expression.name], convert=False)
                    if wrong is not None:
                        found.report(spot, f"{name}: the default of PlaceParam({expression.name!r}): {wrong}")
    return tuple(uses)


def _check_result(pipeline: Pipeline, found: Structure, federation: Federation) -> None:
    """Check what the function of a pipeline returns against the type that it declares."""
    for spot in found.spots.values() if pipeline.result is not None else ():
        statement = spot.statement
        if not isinstance(statement, YieldStatement) or statement.place != pipeline.result:
            continue
        if isinstance(statement.value, Constant):
            _, wrong = validate(pipeline.returns, statement.value.value, convert=False)
            conflict = wrong and f"the result: {wrong}"
        elif isinstance(statement.value, (Ref, Parameter)):
            conflict = type_conflict(statement.value, "the result", pipeline.returns, found, federation)
        else:
            conflict = None
        if conflict is not None:
            found.report(spot, conflict)


def _check_fallback(spot: Spot, fallback: Constant, hint: Any, found: Structure) -> None:
    """Check the value that takes the place of a failed one, as a literal is checked."""
    value, wrong = validate(hint, fallback.value, convert=False)
    try:
        CANONICAL.pack(fallback.value)
    except EncodingError as error:
        wrong = wrong or str(error)
    if wrong is not None:
        found.report(spot, f"fallback: {wrong}")
    elif value is not fallback.value:
        found.converted[spot.statement.id, "fallback"] = value


def _misfits(operation: Operation[..., Any], given: Collection[str]) -> Iterator[str]:
    """Yield which arguments of a call its operation does not take, and which are missing."""
    parameters = operation.signature.parameters.parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in given:
        if name not in parameters and not open_ended and name not in operation.exposed:
            yield f"operation {operation.name!r} has no parameter {name!r}"
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE and name not in given:
            yield f"parameter {name!r} of operation {operation.name!r} is missing"


def _check_defaults(found: Structure) -> None:
    """Report defaults of parameters that cannot be sent, and parameters with different defaults."""
    known: dict[str, bytes] = {}
    for spot in found.spots.values():
        for _, ref, _ in spot.references:
            if not isinstance(ref, Parameter) or ref.default is None:
                continue
            label = f"PlaceParam({ref.name!r})"
            try:
                data = CANONICAL.encode(ref.default.value)
            except EncodingError as error:
                found.problems.append(Problem(label, f"default: {error}"))
                continue
            if known.setdefault(ref.name, data) != data:
                values = f"{shortened(found.defaults[ref.name])} and {shortened(ref.default.value)}"
                found.problems.append(Problem(label, f"has different defaults, {values}: give it one default"))


def _check_literals(spot: Spot, found: Structure) -> None:
    """Report constants that cannot be sent."""
    for name, expression, _ in spot.expressions:
        if type(expression) is Ref or type(expression) is Parameter:
            continue
        for part in (expression,) if isinstance(expression, Constant) else walk(expression):
            if isinstance(part, Constant) and type(part.value) not in _PLAIN:
                try:
                    CANONICAL.pack(part.value)
                except EncodingError as error:
                    found.report(spot, f"{name}: {error}")


def prepare_discovery(
    pipeline: Pipeline, federation: Federation, homesite: str, restrict_to_sites: Iterable[str] | str | None = None
) -> Plan:
    """Check a pipeline for discovery and make a plan that asks. Its yields have the labels of the pipeline's nodes.

    A PipelineError lists everything that is wrong, each problem with its statement.
    """
    if pipeline.mode != "discovery":
        message = "asks for nothing: use Pipeline(..., mode='discovery') to discover, or execute it"
        raise PipelineError(pipeline.name, [Problem("mode", message)])
    found, allowed = _analysed(pipeline, federation, homesite, restrict_to_sites)
    candidates = Candidates(found, federation, allowed)
    asked = [
        question
        for spot in found.spots.values()
        if isinstance(spot.statement, CallStatement)
        for question in _questions(spot, spot.statement, candidates)
    ]
    if not asked and not found.problems:
        found.problems.append(Problem("", "calls no operation that could give advice"))
    if found.problems:
        raise PipelineError(pipeline.name, found.problems)
    return _discovery_plan(asked, pipeline.name, federation, homesite)


_Asked: TypeAlias = tuple[str, str, dict[str, Any]]
"""The site, the label of the node, and the arguments of the question."""


def _discovery_plan(asked: list[_Asked], name: str | None, federation: Federation, homesite: str) -> Plan:
    body: list[Statement] = []
    for site, _, arguments in asked:
        args: dict[str, Expression] = {key: Constant(value=value) for key, value in arguments.items()}
        call = CallStatement(id=len(body), operation=DISCOVER, args=args, site=site)
        body += (call, YieldStatement(id=call.id + 1, value=Ref(node=call.id), place="advice"))
    found = analyse(Pipeline(name, body=tuple(body)))
    placed = {}
    for index, (site, label, _) in enumerate(asked):
        found.spots[2 * index].label = label
        placed[2 * index] = placed[2 * index + 1] = Placement(Location(site), "it can run there")
    locations, nets, _ = build_nets(tuple(body), found, placed, lambda _: False)
    return Plan(
        pipeline=name,
        federation=federation.name,
        api_version=federation.api_version,
        homesite=homesite,
        locations=locations,
        nets=nets,
        params=(),
        uses=(),
        nodes=_node_plans(found, placed),
    )


def _questions(spot: Spot, statement: CallStatement, candidates: Candidates) -> Iterator[_Asked]:
    """Yield the sites to ask about a call, and what each is sent. Of several providers at one site, each is asked."""
    found = candidates.found
    operation = candidates.operation(spot, statement)
    if operation is None:
        return
    given, asked = _arguments(spot, statement, operation, found)
    _check_literals(spot, found)
    extra = {
        name
        for name in operation.exposed.keys() & statement.args
        if name not in operation.signature.parameters.parameters
    }
    offered = candidates.offered(spot, statement)
    options = [option for option in offered if extra <= option.adapter.exposed.keys()]
    if offered and not options:
        found.report(spot, f"no site that may run it takes {', '.join(sorted(extra))}")
    offers = Counter(option.site for option in options)
    for option in options:
        adapter = option.adapter
        closed = {name for name, schema in _schemas(operation) if schema.get("discoverable") is False}
        closed |= {name for name, parameter in adapter.exposed.items() if not parameter.discoverable}
        for name in asked:
            if name in closed and isinstance(statement.args[name], Advise):
                found.report(spot, f"parameter {name!r} of operation {operation.name!r} is not discoverable")
        yield (
            option.site,
            spot.label if offers[option.site] == 1 else f"{spot.label}/{adapter.provider}",
            {
                "operation": operation.name,
                "provider": adapter.provider,
                "given": given,
                "asked": asked,
                "closed": sorted(closed),
            },
        )


def _schemas(operation: Operation[..., Any]) -> Iterable[tuple[str, Any]]:
    return () if operation.declaration is None else operation.declaration.parameters.items()


def _arguments(
    spot: Spot, statement: CallStatement, operation: Operation[..., Any], found: Structure
) -> tuple[dict[str, Any], list[str]]:
    """Return the constants of a call, and the names it asks for: also those whose values are not known yet."""
    parameters = operation.call_signature.parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    given: dict[str, Any] = {}
    asked: list[str] = []
    for name, expression in statement.args.items():
        if name not in parameters and not open_ended:
            found.report(spot, f"operation {operation.name!r} has no parameter {name!r}")
        elif isinstance(expression, Constant):
            _, wrong = validate(operation.signature.types.get(name, Any), expression.value, convert=False)
            if wrong is not None:
                found.report(spot, f"{name}: {wrong}")
            given[name] = expression.value
        else:
            asked.append(name)
    return given, asked


def sketch(pipeline: Pipeline) -> tuple[NodePlan, ...]:
    """Return the statements of a pipeline that no federation has placed yet; also of one that has problems."""
    found = analyse(pipeline)
    fixed = {}
    for key, spot in found.spots.items():
        site = getattr(spot.statement, "site", None)
        why = "fixed by the pipeline" if isinstance(site, str) else ""
        fixed[key] = Placement(Location(site if isinstance(site, str) else ""), why)
    return _node_plans(found, fixed)


def _node_plans(found: Structure, placed: dict[int, Placement]) -> tuple[NodePlan, ...]:
    """Return the statements of a pipeline, with what is known of each."""
    nodes = []
    for key, spot in found.spots.items():
        statement, where = spot.statement, placed[key]
        inputs: dict[int, None] = {}
        returns: dict[int, None] = {}
        params: dict[str, None] = {}
        for _, ref, inside in spot.references:
            if isinstance(ref, Parameter):
                params[ref.name] = None
            elif ref.node != key:
                inputs[ref.node] = None
                if inside:
                    returns[ref.node] = None
        detail = ""
        if isinstance(statement, YieldStatement):
            detail = statement.place
        elif isinstance(statement, WaitStatement):
            detail = statement.event
        elif isinstance(statement, SleepStatement):
            detail = f"{expression_text(statement.seconds, _labels(inputs, found))} s"
        elif isinstance(statement, IfStatement):
            detail = expression_text(statement.cond, _labels(inputs, found))
        elif isinstance(statement, CollectStatement):
            inputs[statement.node] = None
        elif isinstance(statement, ChoiceStatement):
            inputs[statement.branch] = None
        block, branch = spot.path[-1] if spot.path else (None, 0)
        nodes.append(
            NodePlan(
                id=key,
                label=spot.label,
                location=where.location,
                why=where.why,
                depth=len(spot.path),
                inputs=tuple(inputs),
                kind=statement.kind,
                block=block,
                branch=branch,
                params=tuple(params),
                after=statement.after,
                returns=tuple(returns),
                detail=detail,
                cost=where.cost,
                alternatives=where.alternatives,
                provider=where.provider,
            )
        )
    return tuple(nodes)


def _labels(nodes: Iterable[int], found: Structure) -> dict[int, str]:
    return {node: found.spots[node].label for node in nodes if node in found.spots}


def _ordered(found: Structure) -> tuple[str, ...]:
    yields = [(s.statement.place, s.scope) for s in found.spots.values() if isinstance(s.statement, YieldStatement)]
    counts = Counter(place for place, _ in yields)
    return tuple(place for place, scope in yields if counts[place] == 1 and scope == 0)


def calls_of(plan: Plan, federation: Federation) -> Iterator[tuple[str, str, spec.Call, Adapter | None]]:
    """Yield the calls of a plan: the site, the label, the call, and its adapter, if the site has one."""
    for name, net in zip(plan.sites_at, plan.nets, strict=True):
        site = federation.sites.get(name)
        for transition in net.transitions:
            action = transition.action
            if isinstance(action, spec.Call):
                adapter = None if site is None else site.adapter(action.operation, action.provider)
                yield name, transition.label, action, adapter


def misfits(plan: Plan, federation: Federation) -> list[Problem]:
    """Return why an earlier plan no longer fits: operations that are gone, or have other parameters."""
    problems = []
    for site, label, call, adapter in calls_of(plan, federation):
        if call.operation == DISCOVER:
            continue
        known = federation.operations.get(call.operation)
        if adapter is None:
            text = f"the federation {federation.name!r} has no {call.operation!r} at site {site!r}"
            problems.append(Problem("", text))
        elif known is not None:
            changed = f"operation {call.operation!r} has changed since the plan was made"
            problems += [Problem(label, f"{changed}: {problem}") for problem in _misfits(known, call.args)]
    return problems


def check_left_out(plan: Plan, federation: Federation, left_out: Mapping[OperationKey, DfmError]) -> None:
    """Check that a plan uses no operation that workers do not have, because its code could not be given to them.

    Raises:
        DfmError: it does; the reason why the operation was left out.
    """
    for site, _, _, adapter in calls_of(plan, federation) if left_out else ():
        error = None if adapter is None else left_out.get((site, adapter.operation, adapter.provider))
        if error is not None:
            raise type(error)(*error.args) from error.__cause__  # one of its own for each job


def code_of(plan: Plan, federation: Federation) -> tuple[tuple[str, str], ...]:
    """Return the operations of a plan, each with its site, and the fingerprints of their code, as far as known."""
    calls = [(site, call.operation, adapter) for site, _, call, adapter in calls_of(plan, federation) if adapter]
    found = {_offered(operation, site): fingerprint(adapter) for site, operation, adapter in calls}
    return tuple((name, text) for name, text in sorted(found.items()) if text)


def operations_of(plan: Plan, nodes: Collection[str]) -> set[str]:
    """Return the operations that some nodes of a plan call, named as in :func:`code_of`."""
    return {
        _offered(transition.action.operation, site)
        for site, net in zip(plan.sites_at, plan.nets, strict=True)
        for transition in net.transitions
        if isinstance(transition.action, spec.Call) and transition.label in nodes
    }


def _offered(operation: str, site: str) -> str:
    return f"{operation!r} at site {site!r}"


def _policy(federation: Federation, net: spec.Net, call: spec.Call) -> RetryPolicy | None:
    """Return the policy of a call: that of the pipeline, else that of the adapter at its site."""
    site = federation.sites.get(net.locations[net.location].site)
    adapter = None if site is None else site.adapter(call.operation, call.provider)
    return call.retry or (None if adapter is None else adapter.retry)


def retry_policies(plan: Plan, federation: Federation) -> list[RetryPolicy | None]:
    """Return the policy of each call in a plan: that of the pipeline, else that of the adapter at its site."""
    return [
        call.retry or (None if adapter is None else adapter.retry) for _, _, call, adapter in calls_of(plan, federation)
    ]


def parameter_names(plan: Plan, pipeline: Pipeline) -> tuple[str, ...]:
    """Return the parameters of a plan for users: in the order of the function of its pipeline, if there is one."""
    return plan.params if pipeline.signature is None else tuple(pipeline.signature.parameters)


def parameter_types(plan: Plan, federation: Federation) -> dict[str, list[Any]]:
    """Return the types that are declared for the parameters of a plan; a parameter without one is not there.

    The first one is that of the function of the pipeline, if it declares one; operations declare the others.
    """
    hints: dict[str, list[Any]] = {name: [hint] for name, hint in plan.declared.items()}
    for use in plan.uses:
        operation = federation.operations.get(use.operation)
        hint = Any if operation is None else operation.signature.types.get(use.argument, Any)
        if hint is not Any and hint not in hints.setdefault(use.name, []):
            hints[use.name].append(hint)
    return hints
