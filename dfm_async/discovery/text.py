"""Trees of advice as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dfm_async.discovery.advice import (
    BranchFieldAdvice,
    Edge,
    ErrorFieldAdvice,
    FieldAdvice,
    PartialFieldAdvice,
    SingleFieldAdvice,
)

__all__ = ["discovery_text", "lines", "single_text", "value_text"]

_MOST: Final = 50
_WIDTH: Final = 80
_MANY: Final = 8


def _visible(text: str) -> str:
    """A text without anything that a terminal would take for an instruction: sites may say what they want."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _one_line(message: str) -> str:
    return _visible(" ".join(message.split()))


def value_text(value: Any) -> str:
    """A value as JSON writes it, shortened if it is long."""
    text = _visible(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def single_text(advice: SingleFieldAdvice) -> str:
    """The value of advice that does not branch."""
    value, form = advice.value, advice.form
    if form in ("one of", "subset of") and isinstance(value, list):
        shown = ", ".join(value_text(option) for option in value[:_MANY])
        more = f", and {len(value) - _MANY:,} more" if len(value) > _MANY else ""
        return f"{'one' if form == 'one of' else 'some'} of {shown or 'nothing'}{more}"
    if form == "date range" and isinstance(value, dict):
        return f"from {value.get('startdate')} to {value.get('enddate')}"
    return "any value" if form == "okay" else value_text(value)


def _ending(edge: Edge) -> str:
    if isinstance(edge, ErrorFieldAdvice):
        return f"  ✗ {_one_line(edge.msg)}"
    return "  … choose, and discover again" if isinstance(edge, PartialFieldAdvice) else ""


def lines(edge: Edge) -> Iterator[str]:
    """The lines of a tree."""
    match edge:
        case SingleFieldAdvice(value=None, edge=ErrorFieldAdvice()):
            yield f"{edge.field}{_ending(edge.edge)}"
        case SingleFieldAdvice():
            yield f"{edge.field}: {single_text(edge)}{_ending(edge.edge)}"
            yield from _hung([list(lines(edge.edge))] if isinstance(edge.edge, FieldAdvice) else [])
        case BranchFieldAdvice():
            yield f"{edge.field}:"
            branches = []
            for value, behind in edge.branches[:_MOST]:
                head = "" if value is None and isinstance(behind, ErrorFieldAdvice) else value_text(value)
                deeper = _hung([list(lines(behind))]) if isinstance(behind, FieldAdvice) else ()
                branches.append([f"{head}{_ending(behind)}".strip(), *deeper])
            if len(edge.branches) > _MOST:
                branches.append([f"and {len(edge.branches) - _MOST:,} more"])
            yield from _hung(branches)
        case ErrorFieldAdvice():
            yield f"✗ {_one_line(edge.msg)}"
        case None:
            yield "no advice"


def _hung(parts: list[list[str]]) -> Iterator[str]:
    """Hangs parts below a line, each with a twig."""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        for number, line in enumerate(part):
            yield f"{('└─ ' if last else '├─ ') if number == 0 else ('   ' if last else '│  ')}{line}"


def discovery_text(pipeline: str | None, sites: Mapping[str, Mapping[str, Edge]]) -> str:
    """Writes a discovery as trees, one per site."""
    head = "Discovery" if pipeline is None else f"Discovery of {pipeline!r}"
    found = [head]
    for site, nodes in sites.items():
        found.append(site)
        parts = []
        for node, advice in nodes.items():
            below = list(lines(advice))
            parts.append([node, *_hung([below])] if isinstance(advice, FieldAdvice) else [f"{node}  {below[0]}"])
        found += _hung(parts)
    return "\n".join(found)
