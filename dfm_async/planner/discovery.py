"""From a pipeline for discovery to a plan that asks: one question per node and per site that can run it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.errors import PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Adapter, Operation
from dfm_async.pipeline.expressions import Advise, Constant, Expression, Ref
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.pipeline.statements import CallStatement, Statement, YieldStatement
from dfm_async.planner.candidates import adapters_of
from dfm_async.planner.graph import Option
from dfm_async.planner.nets import build_nets
from dfm_async.planner.placement import Placement
from dfm_async.planner.plan import Plan, allowed_sites, check_literals, check_version, node_plans
from dfm_async.planner.structure import Spot, Structure, analyse
from dfm_async.planner.types import validate

__all__ = ["prepare_discovery"]


def prepare_discovery(
    pipeline: Pipeline, federation: Federation, homesite: str, restrict_to_sites: Iterable[str] | str | None = None
) -> Plan:
    """Checks a pipeline for discovery and makes a plan that asks. Its yields have the labels of the pipeline's nodes.

    Raises:
        PipelineError: with everything that is wrong, each problem with its statement.
    """
    if pipeline.mode != "discovery":
        message = "asks for nothing: use Pipeline(..., mode='discovery') to discover, or execute it"
        raise PipelineError(pipeline.name, [Problem("mode", message)])
    found = analyse(pipeline)
    check_version(pipeline, federation, found)
    allowed = allowed_sites(restrict_to_sites, federation, homesite, found)
    asked = [
        question
        for spot in found.spots.values()
        if isinstance(spot.statement, CallStatement)
        for question in _questions(spot, spot.statement, federation, allowed, found)
    ]
    if not asked and not found.problems:
        found.problems.append(Problem("", "calls no operation that could give advice"))
    if found.problems:
        raise PipelineError(pipeline.name, found.problems)
    return _plan(asked, pipeline.name, federation, homesite)


_Asked: TypeAlias = tuple[str, str, dict[str, Any]]
"""The site, the label of the node, and what the site is told."""


def _plan(asked: list[_Asked], name: str | None, federation: Federation, homesite: str) -> Plan:
    body: list[Statement] = []
    for site, _, arguments in asked:
        args: dict[str, Expression] = {key: Constant(value=value) for key, value in arguments.items()}
        call = CallStatement(id=len(body), operation=DISCOVER, args=args, site=site)
        body += (call, YieldStatement(id=call.id + 1, value=Ref(node=call.id), place="advice", multiuse=True))
    found = analyse(Pipeline(name, body=tuple(body)))
    placed = {}
    for index, (site, label, _) in enumerate(asked):
        found.spots[2 * index].label = label
        placed[2 * index] = placed[2 * index + 1] = Placement(site, "it can run there")
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
        nodes=node_plans(found, placed),
    )


def _questions(
    spot: Spot, statement: CallStatement, federation: Federation, allowed: list[str] | None, found: Structure
) -> Iterator[_Asked]:
    """The sites to ask about a call, and what each is told. Of several providers at one site, each is asked."""
    operation = federation.operations.get(statement.operation)
    if operation is None:
        known = ", ".join(sorted(federation.operations)) or "none"
        found.report(spot, f"no operation {statement.operation!r} in federation {federation.name!r} (it has: {known})")
        return
    given, asked = _arguments(spot, statement, operation, found)
    check_literals(spot, found)
    options = _candidates(spot, statement, federation, allowed, found)
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
    """What a call gives, and what it asks for: also what nodes and parameters will give, which is not known yet."""
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


def _candidates(
    spot: Spot, statement: CallStatement, federation: Federation, allowed: list[str] | None, found: Structure
) -> list[Option]:
    """Where a call can run, in the order of the federation."""
    asked = statement.site
    wanted = [asked] if isinstance(asked, str) else None if asked is None or asked.sites is None else list(asked.sites)
    known = ", ".join(federation.sites) or "none"
    for name in wanted or ():
        if name not in federation.sites:
            found.report(spot, f"no site {name!r} in federation {federation.name!r} (it has: {known})")
    options = [
        Option(site.name, adapter)
        for site in federation.sites.values()
        if (wanted is None or site.name in wanted) and (allowed is None or site.name in allowed)
        for adapter in adapters_of(site, statement.operation, statement.provider)
        if _takes(adapter, statement, federation)
    ]
    if not options:
        among = "" if wanted is None else f" among {wanted}"
        provider = "" if statement.provider is None else f" from provider {statement.provider!r}"
        limit = "" if allowed is None else f" (restricted to {sorted(allowed)})"
        found.report(spot, f"no site{among} offers operation {statement.operation!r}{provider}{limit}")
    return options


def _takes(adapter: Adapter, statement: CallStatement, federation: Federation) -> bool:
    """Whether an adapter takes all arguments of a call: some parameters are only there at some sites."""
    operation = federation.operations[statement.operation]
    elsewhere = operation.exposed.keys() - operation.signature.parameters.parameters.keys() - adapter.exposed.keys()
    return not elsewhere & statement.args.keys()
