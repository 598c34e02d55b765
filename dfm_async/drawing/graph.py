"""What a drawing shows, as plain data: nodes, their blocks, and the edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

import msgspec

from dfm_async.base.text import shortened
from dfm_async.language.pipeline import Pipeline
from dfm_async.language.statements import Statement
from dfm_async.planning.plan import NodePlan, Plan
from dfm_async.planning.prepare import sketch
from dfm_async.planning.structure import analyse

_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(Statement)}
COMPOUND: Final = frozenset(kind for kind, found in _KINDS.items() if "body" in found.__struct_fields__)
"""The kinds of nodes that have a block, which is drawn as a box."""
FEET: Final = {kind: str(found.result) for kind, found in _KINDS.items() if found.result}
"""The kinds of nodes whose block makes their value, and the name of the expression that does so: the foot of a box."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One statement of a pipeline, or one of its parameters.

    Attributes:
        id: the label that events use as ``node``.
        kind: as in the JSON of a pipeline ("call", "yield", "for_each", "repeat", "if", "try_from_cache", "collect",
            "choice", "gather", "wait", "sleep"), or "parameter".
        text: what it is called: an operation, a place, a condition, a parameter, an event, a time.
        site: where it runs; empty if that is not decided, and for parameters.
        why: why it runs there.
        block: the id of the node whose block it is in; None outside all blocks.
        branch: which block of that node: 1 is ``otherwise``.
    """

    id: str
    kind: str
    text: str
    site: str = ""
    why: str = ""
    block: str | None = None
    branch: int = 0


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """What goes from one node to another.

    Attributes:
        source: the id of the node that it comes from.
        target: the id of the node that it goes to.
        role: "data" for a value, "after" for mere order, "return" for a value that goes back to the statement whose
            block made it (``next``, ``until``, ``store``).
    """

    source: str
    target: str
    role: Literal["data", "after", "return"] = "data"


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline or a plan as it is drawn.

    Attributes:
        name: the name of the pipeline.
        sites: the sites that take part, in the order of their first node.
        nodes: an outer one before those of its block, in the order of the text.
        edges: at most one between two nodes.
    """

    name: str | None
    sites: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def graph_of(found: Pipeline | Plan) -> Graph:
    """Return the graph of a pipeline or a plan. A pipeline may have problems; only a plan knows all sites."""
    if isinstance(found, Plan):
        return _graph(found.pipeline, found.nodes, found.defaults)
    return _graph(found.name, sketch(found), analyse(found).defaults)


def _graph(name: str | None, planned: Iterable[NodePlan], defaults: Mapping[str, Any]) -> Graph:
    nodes: dict[int, Node] = {}
    parameters: dict[str, Node] = {}
    edges: dict[tuple[str, str], Edge] = {}
    planned = tuple(planned)
    for plan in planned:
        outer = None if plan.block is None else nodes.get(plan.block)
        if outer is not None and outer.kind not in COMPOUND:
            outer = None  # no plan of ours; it is drawn as well as it can be
        nodes[plan.id] = Node(
            id=plan.label,
            kind=plan.kind,
            text=plan.detail or plan.label.rpartition("#")[0],
            site=plan.site,
            why=plan.why,
            block=None if outer is None else outer.id,
            branch=1 if plan.branch and outer is not None and outer.kind == "if" else 0,
        )

    def draw(source: Node | None, target: Node, role: Literal["data", "after", "return"]) -> None:
        if source is not None and source is not target:
            edges.setdefault((source.id, target.id), Edge(source=source.id, target=target.id, role=role))

    for plan in planned:
        target = nodes[plan.id]
        for key in plan.inputs:
            draw(nodes.get(key), target, "return" if key in plan.returns else "data")
        for parameter in plan.params:
            if parameter not in parameters:
                default = f" = {shortened(defaults[parameter])}" if parameter in defaults else ""
                parameters[parameter] = Node(
                    id=f"PlaceParam({parameter!r})", kind="parameter", text=parameter + default
                )
            draw(parameters[parameter], target, "data")
        for key in plan.after:
            draw(nodes.get(key), target, "after")
    return Graph(
        name=name,
        sites=tuple(dict.fromkeys(node.site for node in nodes.values() if node.site)),
        nodes=(*parameters.values(), *nodes.values()),
        edges=tuple(edges.values()),
    )
