"""Plans: prepared pipelines, as plain data."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic

import msgspec

from dfm_async.base.rendering import Shown, renderer
from dfm_async.base.text import columns, size_text, time_text
from dfm_async.discovery.advisors import DISCOVER
from dfm_async.errors import EncodingError, PipelineError, Problem
from dfm_async.model.ids import Location
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.planning.estimate import Alternative, NodeCost, PlanCost
from dfm_async.planning.types import type_of_event
from dfm_async.wire.codec import Codec

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

_codec = Codec.for_untrusted()
CANONICAL: Final = Codec.for_processes().for_keys()
"""Writes equal values as equal bytes, on every run and machine."""
_COSTS: Final = ("start", "time", "in", "out", "sent to it")
REJECTED: Final = ("rejected", "site", "in total", "adds")
"""The column heads of the table of rejected sites."""


class ParameterUse(msgspec.Struct, frozen=True):
    """Which parameter of which operation gets a pipeline's parameter as it is."""

    name: str
    operation: str
    argument: str


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One statement in the plan: what it is, where it runs and why, and which statements it needs.

    Attributes:
        id: its id in the pipeline.
        label: what it is called in events, errors and drawings.
        location: where it runs; its site is empty if that is not decided.
        why: why it runs there.
        depth: how many blocks it is nested in.
        inputs: the statements whose values it needs.
        kind: what kind of statement it is, as in the JSON of a pipeline.
        block: the statement whose block it is in; None outside all blocks.
        branch: which block of that statement: 1 is ``otherwise``.
        params: the parameters that it needs.
        after: the statements that it waits for without needing their values.
        returns: those of the inputs that come back to it from its own block.
        detail: the place of a yield, or the condition of a branch.
        cost: the estimated cost of a call, if anything is known about costs.
        alternatives: where else a call could run, the best of them first.
        provider: whose code a call runs, if it is a provider's.
    """

    id: int
    label: str
    location: Location
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
        return self.location.site


class Plan(Shown, msgspec.Struct, Generic[R_co], frozen=True, kw_only=True, dict=True):
    """A prepared pipeline: one net per participating location. Reusable for many jobs."""

    pipeline: str | None
    federation: str
    api_version: str
    homesite: str
    locations: tuple[Location, ...]
    nets: tuple[spec.Net, ...]
    params: tuple[str, ...]
    uses: tuple[ParameterUse, ...]
    nodes: tuple[NodePlan, ...]
    ordered_places: tuple[str, ...] = ()
    """Places with one yield outside all loops, whose results of one frame come in order by themselves."""
    cost: PlanCost | None = None
    """The estimated time, if anything is known about costs."""
    defaults: dict[str, Any] = {}
    """The values of those parameters that a parameter set need not have."""
    events: dict[str, dict[str, Any]] = {}
    """The events that it waits for, each with the JSON schema of its value."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that take part."""
        return tuple(dict.fromkeys(location.site for location in self.locations))

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The places that the pipeline yields to."""
        return tuple(dict.fromkeys(point.place for point in self.nets[0].points)) if self.nets else ()

    @cached_property
    def points(self) -> list[tuple[str, str]]:
        """The yields of the pipeline: their place, and the node whose value they send."""
        return [(point.place, point.node) for point in self.nets[0].points] if self.nets else []

    @cached_property
    def declared(self) -> dict[str, Any]:
        """The types that the function of the pipeline declares for parameters. They are not part of the JSON."""
        return {}

    @cached_property
    def event_types(self) -> dict[str, Any]:
        """The types of the values of events."""
        return {name: type_of_event(schema) for name, schema in self.events.items()}

    @cached_property
    def waits(self) -> dict[str, tuple[str, Location]]:
        """The statements that wait: their labels, the event (empty: only a time), and where they are."""
        return {
            node.label: (node.detail if node.kind == "wait" else "", node.location)
            for node in self.nodes
            if node.kind in ("wait", "sleep")
        }

    @cached_property
    def params_at(self) -> list[list[str]]:
        """The parameters that each location uses."""
        return [[name for name, _ in net.params] for net in self.nets]

    @cached_property
    def sites_at(self) -> list[str]:
        """The site of each location."""
        return [location.site for location in self.locations]

    def operations_at(self, at: int) -> tuple[str, ...]:
        """Return the operations that a location calls."""
        actions = (transition.action for transition in self.nets[at].transitions)
        names = (action.operation for action in actions if isinstance(action, spec.Call))
        return tuple(dict.fromkeys(name for name in names if name != DISCOVER))

    @cached_property
    def contained(self) -> dict[int, int]:
        """The locations whose loss is a failure of their calls, and the location that calls them."""
        return {found.location: net.location for net in self.nets for found in net.contains}

    @cached_property
    def hash(self) -> str:
        """The same for equal plans, on every run and machine.

        Only a literal that JSON cannot hold (an object that must be pickled) can make it differ between runs.
        """
        return hashlib.sha256(self._to_json(CANONICAL)).hexdigest()[:32]

    def to_json(self) -> bytes:
        """Write the plan as JSON.

        Raises:
            EncodingError: the pipeline has a literal that only pickle could hold.
        """
        return self._to_json(_codec)

    def _to_json(self, codec: Codec) -> bytes:
        nets = tuple(
            msgspec.structs.replace(net, literals=tuple(codec.encode(value) for value in net.literals))
            for net in self.nets
        )
        defaults = {name: codec.encode(value) for name, value in self.defaults.items()}
        return msgspec.json.encode(msgspec.structs.replace(self, nets=nets, defaults=defaults), order="deterministic")

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """Read a plan from JSON: one that :meth:`to_json` has written.

        The parts of the plan are checked against each other, not against a pipeline. From untrusted sources, accept
        pipelines instead.

        Raises:
            PipelineError: this is not a plan.
        """
        return plan_from_json(data, _codec.loads)

    def explain(self) -> Explanation:
        """Explain where each node runs and why. Prints as text, draws as Mermaid, renders in notebooks."""
        return Explanation(self)

    def to_svg(self) -> str:
        """Draw the plan as self-contained SVG: blocks are boxes, and sites have colours."""
        return renderer().svg(self)

    def __repr__(self) -> str:
        return f"<Plan {self.pipeline!r}: {len(self.nodes)} nodes at {', '.join(map(str, self.locations))}>"


class Explanation(Shown):
    """Where each node of a plan runs, and why; if costs are known, also what it costs, and what else was possible."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the columns of the table of nodes."""
        return ("node", "site", "why") if self.plan.cost is None else ("node", "site", *_COSTS, "why")

    def row(self, node: NodePlan) -> tuple[str, ...]:
        """Return the row of a node in the table."""
        costs = () if self.plan.cost is None else _costs(node)
        return (node.label, _where(str(node.location), node.provider), *costs, node.why)

    @property
    def rejected(self) -> list[tuple[str, str, str, str]]:
        """The rejected sites: the node, the site, how long everything would take there, and how much that adds."""
        return [
            (node.label, _where(other.site, other.provider), time_text(other.total), f"+{time_text(other.difference)}")
            for node in self.plan.nodes
            for other in node.alternatives
        ]

    @property
    def total(self) -> str:
        """How long everything takes, in words; empty if nothing is known."""
        cost = self.plan.cost
        if cost is None:
            return ""
        return f"{time_text(cost.seconds)} in total, {'the least' if cost.optimal else 'the least that was found'}"

    def __str__(self) -> str:
        plan = self.plan
        rows = [self.heads]
        for node in plan.nodes:
            label, *rest = self.row(node)
            rows.append(("  " * node.depth + label, *rest))
        head = f"pipeline {plan.pipeline!r} over {', '.join(map(str, plan.locations))}"
        text = "\n".join([f"{head}: {self.total}" if self.total else head, columns(rows)])
        if any(node.cost is not None and node.cost.critical for node in plan.nodes):
            text += "\n* everything waits for these"
        if self.rejected:
            text += "\n\n" + columns([REJECTED, *self.rejected])
        return text

    __repr__ = __str__

    def to_mermaid(self) -> str:
        """Draw the plan as a Mermaid flow chart, one box per site."""
        lines = ["flowchart LR"]
        for location in self.plan.locations:
            lines.append(f'  subgraph s{self.plan.locations.index(location)}["{location}"]')
            lines += [f'    n{node.id}["{_box(node)}"]' for node in self.plan.nodes if node.location == location]
            lines.append("  end")
        lines += [f"  n{source} --> n{node.id}" for node in self.plan.nodes for source in node.inputs]
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Draw the plan as SVG."""
        return self.plan.to_svg()


def _costs(node: NodePlan) -> tuple[str, ...]:
    cost = node.cost
    if cost is None:
        return ("",) * len(_COSTS)
    transfers = [f"{size_text(sent.bytes)} from {sent.source}: {time_text(sent.seconds)}" for sent in cost.transfers]
    star = " *" if cost.critical else ""
    return (
        time_text(cost.start),
        time_text(cost.seconds) + star,
        size_text(cost.bytes_in),
        size_text(cost.bytes_out),
        ", ".join(transfers) or "-",
    )


def _where(place: str, provider: str | None) -> str:
    return place if provider is None else f"{place}/{provider}"


def _box(node: NodePlan) -> str:
    return node.label if node.cost is None else f"{node.label}<br/>{time_text(node.cost.seconds)}"


def plan_from_json(data: bytes | str, load: Callable[[bytes], Any]) -> Plan:
    """Read a plan from JSON; ``load`` rebuilds its constants. Anything else is a PipelineError."""
    try:
        try:
            plan = msgspec.json.decode(data, type=Plan)
        except msgspec.ValidationError:
            plan = msgspec.convert(_with_locations(msgspec.json.decode(data)), Plan)
        nets = tuple(
            msgspec.structs.replace(net, literals=tuple(load(base64.b64decode(value)) for value in net.literals))
            for net in plan.nets
        )
        defaults = {name: load(base64.b64decode(value)) for name, value in plan.defaults.items()}
        plan = msgspec.structs.replace(plan, nets=nets, defaults=defaults)
        _check_parts(plan)
    except (ValueError, EncodingError, TypeError, LookupError, RecursionError) as error:
        raise PipelineError(None, [Problem("plan", f"cannot be read: {error}")]) from error
    return plan


def _with_locations(found: Any) -> Any:
    """Return the JSON of a plan with locations, in place of the strings that earlier versions wrote."""
    match found:
        case {"locations": list(), "nets": list(nets), "nodes": list(nodes)}:
            for holder in (found, *nets):
                holder["locations"] = [_location(each) for each in holder["locations"]]
            for node in nodes:
                node["location"] = _location(node["location"])
    return found


def _location(written: Any) -> Any:
    """Return the location of ``site``, ``site#operation`` or ``site##cache``."""
    if not isinstance(written, str):
        return written
    site, _, part = written.partition("#")
    return {"site": site, "cache": True} if part == "#cache" else {"site": site, "operation": part}


def _check_parts(plan: Plan) -> None:
    """Raise ValueError unless its nets can be run, and mean the same locations, parameters and yields."""
    locations, params, nets = plan.locations, plan.params, plan.nets
    known = set(range(len(locations)))
    if not plan.defaults.keys() <= set(params):
        raise ValueError("it has defaults of parameters that it does not have")
    if [net.location for net in nets] != sorted(known):
        raise ValueError("its nets are not those of its locations")
    for name, net in zip(locations, nets, strict=True):
        try:
            CompiledNet(net)
        except (LookupError, AssertionError, AttributeError) as error:
            raise ValueError(f"the net of '{name}' does not fit together: {error!r}") from error
        emitted = {found.action.point for found in net.transitions if isinstance(found.action, spec.Emit)}
        routes = {at for place in net.places for at in place.routes}
        members = {at for loop in net.loops for at in (*loop.members, loop.control)}
        if tuple(net.locations) != tuple(locations) or not routes | members <= known:
            raise ValueError(f"the net of '{name}' leads to other locations")
        if not {param for param, _ in net.params} <= set(params):
            raise ValueError(f"the net of '{name}' has other parameters")
        if net.points != nets[0].points or not emitted <= set(range(len(net.points))):
            raise ValueError(f"the net of '{name}' has other yields")
