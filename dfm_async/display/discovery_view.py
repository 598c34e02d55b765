"""Discoveries as HTML: trees that fold."""

from __future__ import annotations

from html import escape
from typing import Final

from dfm_async.discovery.advice import (
    BranchFieldAdvice,
    Edge,
    ErrorFieldAdvice,
    FieldAdvice,
    PartialFieldAdvice,
    SingleFieldAdvice,
)
from dfm_async.discovery.discovery import Discovery
from dfm_async.discovery.text import single_text, value_text
from dfm_async.display.markup import badge, folded, framed

__all__ = ["discovery_html"]

_MOST: Final = 50


def discovery_html(discovery: Discovery) -> str:
    """A discovery: a tree per site and node; branches fold, errors stand out."""
    name = "Discovery" if discovery.pipeline is None else f"Discovery of <b>{escape(discovery.pipeline)}</b>"
    parts = [f"<div>{name}</div>"]
    for site, nodes in discovery.sites.items():
        trees = "".join(f"<li>{_node(node, advice)}</li>" for node, advice in nodes.items())
        parts.append(f"<div><b>{escape(site)}</b></div><ul>{trees}</ul>")
    return framed(*parts)


def _node(label: str, advice: Edge) -> str:
    if isinstance(advice, FieldAdvice):
        return f"{escape(label)}<ul><li>{_tree(advice)}</li></ul>"
    said = _end(advice) if advice is not None else '<span class="dfm-dim">no advice</span>'
    return f"{escape(label)} {said}"


def _tree(advice: FieldAdvice) -> str:
    field = f"<b>{escape(advice.field)}</b>"
    if isinstance(advice, SingleFieldAdvice):
        failed = advice.value is None and isinstance(advice.edge, ErrorFieldAdvice)
        value = "" if failed else f" <code>{escape(single_text(advice))}</code>"
        return f"{field}{value} {_behind(advice.edge)}"
    assert isinstance(advice, BranchFieldAdvice)  # noqa: S101 - there are two kinds
    listed = advice.branches[:_MOST]
    items = "".join(
        f"<li>{'' if value is None else f'<code>{escape(value_text(value))}</code>'} {_behind(edge)}</li>"
        for value, edge in listed
    )
    more = len(advice.branches) - len(listed)
    below = f'<li class="dfm-dim">and {more:,} more</li>' if more > 0 else ""
    good = sum(1 for _ in advice)
    count = f'<span class="dfm-dim">{good:,} of {len(advice.branches):,} possible</span>'
    return f"<details open><summary>{field} {count}</summary><ul>{items}{below}</ul></details>"


def _behind(edge: Edge) -> str:
    if isinstance(edge, FieldAdvice):
        return f"<ul><li>{_tree(edge)}</li></ul>"
    return _end(edge)


def _end(edge: Edge) -> str:
    """What stands where a tree ends."""
    if isinstance(edge, PartialFieldAdvice):
        return '<span class="dfm-dim">choose, and discover again</span>'
    if not isinstance(edge, ErrorFieldAdvice):
        return ""
    line = f"{badge('error', 'bad')} {escape(edge.msg)}"
    return folded(line, f"<pre>{escape(edge.traceback.rstrip())}</pre>") if edge.traceback else line
