"""Pipelines and plans as drawings: a graph as plain data, a layout, and SVG that needs nothing else. Pure.

The layout is our own. A drawing must be there wherever the library is: in a notebook, on the live page, in a terminal.
Graphviz is a program that has to be installed, ELK and dagre are JavaScript, igraph and fast-sugiyama are compiled.
The one layered layout in plain Python, grandalf, has rested since 2023, knows no boxes within boxes, and has a licence
that does not go with ours.
"""

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names

if TYPE_CHECKING:
    from dfm_async.drawing.graph import Edge, Graph, Node, graph_of
    from dfm_async.drawing.picture import svg

__all__ = ["Edge", "Graph", "Node", "graph_of", "svg"]

_HOMES = {
    "dfm_async.drawing.graph": ("Edge", "Graph", "Node", "graph_of"),
    "dfm_async.drawing.picture": ("svg",),
}
__getattr__, __dir__ = lazy_names(__name__, globals(), _HOMES)
