"""Pipelines and plans as drawings: a graph as plain data, a layout, and SVG that needs nothing else. Pure.

The layout is our own. A drawing must be there wherever the library is: in a notebook, on the live page, in a terminal.
Graphviz is a program that has to be installed, ELK and dagre are JavaScript, igraph and fast-sugiyama are compiled.
The one layered layout in plain Python, grandalf, has not changed since 2023, has no boxes within boxes, and has an
incompatible licence.
"""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.drawing.graph import Edge as Edge
    from dfm_async.drawing.graph import Graph as Graph
    from dfm_async.drawing.graph import Node as Node
    from dfm_async.drawing.graph import graph_of as graph_of
    from dfm_async.drawing.picture import svg as svg
