"""A plan: a prepared pipeline, as plain data."""

from __future__ import annotations

import base64
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.errors import EncodingError, PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Operation
from dfm_async.model.policies import RetryPolicy
from dfm_async.net import spec
from dfm_async.pipeline.expressions import Constant, Parameter, Ref, walk
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.pipeline.statements import CallStatement, CollectStatement, IfStatement, Statement, YieldStatement
from dfm_async.pipeline.text import expression_text
from dfm_async.planner.account import Alternative, NodeCost, PlanCost
from dfm_async.planner.candidates import may_stream
from dfm_async.planner.costs import Costs
from dfm_async.planner.integrity import check_parts
from dfm_async.planner.nets import build_nets
from dfm_async.planner.placement import Placement, place
from dfm_async.planner.profile import Profile
from dfm_async.planner.structure import Spot, Structure, analyse
from dfm_async.planner.types import fits, type_text, validate
from dfm_async.rendering import Shown, renderer
from dfm_async.wire.codec import Codec

if TYPE_CHECKING:
    from dfm_async.planner.explain import Explanation

__all__ = [
    "NodePlan",
    "ParameterUse",
    "Plan",
    "allowed_sites",
    "check_literals",
    "check_version",
    "misfits",
    "node_plans",
    "parameter_types",
    "plan_from_json",
    "prepare",
    "retry_policies",
    "sketch",
]

_codec = Codec(trusted=False)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_KINDS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Statement)}
_hashing = Codec(trusted=True, canonical=True)


class ParameterUse(msgspec.Struct, frozen=True):
    """Which parameter of which operation gets a pipeline's parameter as it is."""

    name: str
    operation: str
    argument: str


def misfits(plan: Plan, federation: Federation) -> list[Problem]:
    """Return why an earlier plan no longer fits: operations that are gone, or have other parameters."""
    problems = []
    for name, net in zip(plan.sites_at, plan.nets, strict=True):
        site = federation.sites.get(name)
        for transition in net.transitions:
            action = transition.action
            if not isinstance(action, spec.Call) or action.operation == DISCOVER:
                continue
            adapter = None if site is None else site.adapter(action.operation, action.provider)
            known = federation.operations.get(action.operation)
            if adapter is None:
                text = f"the federation {federation.name!r} has no {action.operation!r} at site {name!r}"
                problems.append(Problem("", text))
            elif known is not None:
                changed = f"operation {action.operation!r} has changed since the plan was made"
                wrong = _misfits(known, action.args)
                problems += [Problem(transition.label, f"{changed}: {problem}") for problem in wrong]
    return problems


def retry_policies(plan: Plan, federation: Federation) -> list[RetryPolicy | None]:
    """The policy of each call in a plan: that of the pipeline, else that of the adapter at its site."""
    policies: list[RetryPolicy | None] = []
    for location, net in zip(plan.sites_at, plan.nets, strict=True):
        site = federation.sites.get(location)
        for transition in net.transitions:
            action = transition.action
            if isinstance(action, spec.Call):
                adapter = None if site is None else site.adapter(action.operation, action.provider)
                policies.append(action.retry or (None if adapter is None else adapter.retry))
    return policies


def parameter_types(plan: Plan, federation: Federation) -> dict[str, list[Any]]:
    """The types that operations declare for the parameters of a plan; a parameter without one is not there."""
    hints: dict[str, list[Any]] = {}
    for use in plan.uses:
        operation = federation.operations.get(use.operation)
        hint = Any if operation is None else operation.signature.types.get(use.argument, Any)
        if hint is not Any and hint not in hints.setdefault(use.name, []):
            hints[use.name].append(hint)
    return hints


class NodePlan(msgspec.Struct, frozen=True):
    """One statement in the plan: what it is, where it runs and why, and which statements it needs.

    Attributes:
        id: its id in the pipeline.
        label: what it is called in events, errors and drawings.
        location: where it runs; empty if that is not decided.
        why: why it runs there.
        depth: how many blocks it stands in.
        inputs: the statements whose values it needs.
        kind: what kind of statement it is, as in the JSON of a pipeline.
        block: the statement whose block it stands in; None outside all blocks.
        branch: which block of that statement: 1 is ``otherwise``.
        params: the parameters that it needs.
        after: the statements that it waits for without needing their values.
        returns: those of the inputs that come back to it from its own block.
        detail: the place of a yield, or the condition of a branch.
        cost: what a call is reckoned to cost, if anything is known about costs.
        alternatives: where else a call could run, the best of them first.
        provider: whose code a call runs, if it is a provider's.
    """

    id: int
    label: str
    location: str
    why: str
    depth: int
    inputs: tuple[int, ...]
    kind: str = "call"
    block: int | None = None
    branch: int = 0
    params: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()
    detail: str = ""
    cost: NodeCost | None = None
    alternatives: tuple[Alternative, ...] = ()
    provider: str | None = None

    @property
    def site(self) -> str:
        """The site that it runs at."""
        return self.location.partition("#")[0]


class Plan(Shown, msgspec.Struct, frozen=True, dict=True):
    """A prepared pipeline: one net per participating location. Reusable for many jobs."""

    pipeline: str | None
    federation: str
    api_version: str
    homesite: str
    locations: tuple[str, ...]
    nets: tuple[spec.Net, ...]
    params: tuple[str, ...]
    uses: tuple[ParameterUse, ...]
    nodes: tuple[NodePlan, ...]
    ordered_places: tuple[str, ...] = ()
    """Places with one yield outside all loops, whose results of one frame come in order by themselves."""
    cost: PlanCost | None = None
    """How long it is reckoned to take, if anything is known about costs."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that take part."""
        return tuple(dict.fromkeys(location.partition("#")[0] for location in self.locations))

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The places that the pipeline yields to."""
        return tuple(dict.fromkeys(point.place for point in self.nets[0].points)) if self.nets else ()

    @cached_property
    def points(self) -> list[tuple[str, str]]:
        """The yields of the pipeline: their place, and the node whose value they send."""
        return [(point.place, point.node) for point in self.nets[0].points] if self.nets else []

    @cached_property
    def params_at(self) -> list[list[str]]:
        """The parameters that each location uses."""
        return [[name for name, _ in net.params] for net in self.nets]

    @cached_property
    def sites_at(self) -> list[str]:
        """The site of each location."""
        return [location.partition("#")[0] for location in self.locations]

    @cached_property
    def hash(self) -> str:
        """The same for equal plans, on every run and machine.

        Only a literal that JSON cannot hold (an object that must be pickled) can make it differ between runs.
        """
        return hashlib.sha256(self._to_json(_hashing)).hexdigest()[:32]

    def to_json(self) -> bytes:
        """Writes the plan as JSON.

        Raises:
            EncodingError: the pipeline has a literal that only pickle could hold.
        """
        return self._to_json(_codec)

    def _to_json(self, codec: Codec) -> bytes:
        nets = tuple(
            msgspec.structs.replace(net, literals=tuple(codec.encode(value) for value in net.literals))
            for net in self.nets
        )
        return msgspec.json.encode(msgspec.structs.replace(self, nets=nets), order="deterministic")

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """Reads a plan from JSON: one that :meth:`to_json` has written.

        Its parts must fit together, but nobody can tell whether they are what a pipeline meant. From those whom you do
        not trust, take pipelines.

        Raises:
            PipelineError: this is not a plan.
        """
        return plan_from_json(data, _codec.loads)

    def explain(self) -> Explanation:
        """Tells where each node runs and why. Prints as text, draws as Mermaid, renders in notebooks."""
        from dfm_async.planner.explain import Explanation

        return Explanation(self)

    def to_svg(self) -> str:
        """Draws the plan as SVG that needs nothing else: blocks are boxes, sites have colours."""
        return renderer().svg(self)

    def __repr__(self) -> str:
        return f"<Plan {self.pipeline!r}: {len(self.nodes)} nodes at {', '.join(self.locations)}>"


def plan_from_json(data: bytes | str, load: Callable[[bytes], Any]) -> Plan:
    """Reads a plan from JSON; ``load`` rebuilds its constants.

    Raises:
        PipelineError: this is not a plan.
    """
    try:
        plan = msgspec.json.decode(data, type=Plan)
        nets = tuple(
            msgspec.structs.replace(net, literals=tuple(load(_bytes(value)) for value in net.literals))
            for net in plan.nets
        )
        plan = msgspec.structs.replace(plan, nets=nets)
        check_parts(plan.locations, plan.params, plan.nets)
    except (msgspec.DecodeError, EncodingError, TypeError, ValueError, RecursionError) as error:
        raise PipelineError(None, [Problem("plan", f"cannot be read: {error}")]) from error
    return plan


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value)


def prepare(
    pipeline: Pipeline,
    federation: Federation,
    homesite: str,
    restrict_to_sites: Iterable[str] | str | None = None,
    lanes: int = 1,
    measured: Profile | None = None,
) -> Plan:
    """Checks a pipeline, places its nodes and makes its nets.

    Args:
        pipeline: the pipeline.
        federation: the sites.
        homesite: where parameters come from and results go to.
        restrict_to_sites: the sites that may be used; None means all.
        lanes: how many processes a site has that does not say it itself.
        measured: costs that replace the configured ones.

    Raises:
        PipelineError: with everything that is wrong, each problem with its statement.
    """
    if pipeline.mode == "discovery":
        message = "is a pipeline for discovery, which is not executed: use 'await session.discover(pipeline)'"
        raise PipelineError(pipeline.name, [Problem("mode", message)])
    found = analyse(pipeline)
    check_version(pipeline, federation, found)
    allowed = allowed_sites(restrict_to_sites, federation, homesite, found)
    placed, cost = place(found, federation, homesite, allowed, lanes, Costs(federation, measured))
    uses = _check_types(found, federation)
    if found.problems:
        raise PipelineError(pipeline.name, found.problems)
    streams = cache(partial(may_stream, federation))
    locations, nets, params = build_nets(pipeline.body, found, placed, streams)
    return Plan(
        pipeline=pipeline.name,
        federation=federation.name,
        api_version=federation.api_version,
        homesite=homesite,
        locations=locations,
        nets=nets,
        params=params,
        uses=uses,
        nodes=node_plans(found, placed),
        ordered_places=_ordered(found),
        cost=cost,
    )


def check_version(pipeline: Pipeline, federation: Federation, found: Structure) -> None:
    """Reports a pipeline that is for another major version."""
    wanted, given = pipeline.api_version, federation.api_version
    if wanted and wanted.partition(".")[0] != given.partition(".")[0]:
        message = f"is for API version {wanted}, but federation {federation.name!r} has {given}"
        found.problems.append(Problem("api_version", message))


def allowed_sites(
    restrict: Iterable[str] | str | None, federation: Federation, homesite: str, found: Structure
) -> list[str] | None:
    """The sites that may be used; None means all."""
    if restrict is None:
        return None
    names = [homesite] if restrict == "homesite" else [restrict] if isinstance(restrict, str) else list(restrict)
    for name in names:
        if name not in federation.sites and name != homesite:
            message = f"names site {name!r}, which does not exist (there are: {', '.join(federation.sites)})"
            found.problems.append(Problem("restrict_to_sites", message))
    return names


def _check_types(found: Structure, federation: Federation) -> tuple[ParameterUse, ...]:
    """Checks constants and edges against declared types. Gives the uses of parameters, to check those at execution."""
    uses: list[ParameterUse] = []
    for spot in found.spots.values():
        statement = spot.statement
        check_literals(spot, found)
        if not isinstance(statement, CallStatement):
            continue
        operation = federation.operations.get(statement.operation)
        if operation is None:
            continue
        parameters = operation.signature.parameters.parameters
        types = operation.signature.types
        for problem in _misfits(operation, statement.args):
            found.report(spot, problem)
        for name, expression in statement.args.items():
            parameter = parameters.get(name)
            if parameter is None:
                continue
            hint = types.get(name, Any)
            if hint is Any or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if isinstance(expression, Constant):
                value, wrong = validate(hint, expression.value, convert=False)
                if wrong is not None:
                    found.report(spot, f"{name}: {wrong}")
                elif value is not expression.value:
                    found.converted[statement.id, name] = value
            elif isinstance(expression, Parameter) and not expression.path:
                uses.append(ParameterUse(expression.name, operation.name, name))
            elif isinstance(expression, Ref) and not expression.path:
                _check_edge(expression, name, hint, spot.label, found, federation)
    return tuple(uses)


def _misfits(operation: Operation[..., Any], given: Collection[str]) -> Iterator[str]:
    """Say which of the arguments of a call its operation does not take, and which it lacks."""
    parameters = operation.signature.parameters.parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in given:
        if name not in parameters and not open_ended and name not in operation.exposed:
            yield f"operation {operation.name!r} has no parameter {name!r}"
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE and name not in given:
            yield f"parameter {name!r} of operation {operation.name!r} is missing"


def check_literals(spot: Spot, found: Structure) -> None:
    """Reports constants that cannot be sent."""
    for name, expression, _ in spot.expressions:
        if type(expression) is Ref or type(expression) is Parameter:
            continue
        for part in (expression,) if isinstance(expression, Constant) else walk(expression):
            if isinstance(part, Constant) and type(part.value) not in _PLAIN:
                try:
                    _hashing.pack(part.value)
                except EncodingError as error:
                    found.report(spot, f"{name}: {error}")


def _check_edge(ref: Ref, name: str, hint: Any, label: str, found: Structure, federation: Federation) -> None:
    target = found.spots.get(ref.node)
    if target is None or not isinstance(target.statement, CallStatement):
        return
    source = federation.operations.get(target.statement.operation)
    if source is not None and not fits(source.signature.returns, hint):
        message = (
            f"{name} is declared {type_text(hint)}, but {target.label} returns {type_text(source.signature.returns)}"
        )
        found.problems.append(Problem(label, message))


def sketch(pipeline: Pipeline) -> tuple[NodePlan, ...]:
    """The statements of a pipeline that no federation has placed yet; also of one that has problems."""
    found = analyse(pipeline)
    fixed = {}
    for key, spot in found.spots.items():
        site = getattr(spot.statement, "site", None)
        fixed[key] = Placement(site, "fixed by the pipeline") if isinstance(site, str) else Placement("", "")
    return node_plans(found, fixed)


def node_plans(found: Structure, placed: dict[int, Placement]) -> tuple[NodePlan, ...]:
    """The statements of a pipeline, with what is known of each."""
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
        after: tuple[int, ...] = ()
        detail = ""
        match statement:
            case CallStatement():
                after = statement.after
            case YieldStatement():
                after, detail = statement.after, statement.place
            case IfStatement():
                labels = {node: found.spots[node].label for node in inputs if node in found.spots}
                detail = expression_text(statement.cond, labels)
            case CollectStatement():
                inputs[statement.node] = None
        block, branch = spot.path[-1] if spot.path else (None, 0)
        nodes.append(
            NodePlan(
                key,
                spot.label,
                where.location,
                where.why,
                len(spot.path),
                tuple(inputs),
                _KINDS[type(statement)],
                block,
                branch,
                tuple(params),
                after,
                tuple(returns),
                detail,
                where.cost,
                where.alternatives,
                where.provider,
            )
        )
    return tuple(nodes)


def _ordered(found: Structure) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    loose: set[str] = set()
    for spot in found.spots.values():
        if isinstance(spot.statement, YieldStatement):
            counts[spot.statement.place] = counts.get(spot.statement.place, 0) + 1
            if spot.scope:
                loose.add(spot.statement.place)
    return tuple(place for place, count in counts.items() if count == 1 and place not in loose)
