"""Trees of advice: which values a field may have, and which the next one has then; and discoveries, which hold them.

A tree has one level per field. Each value has an edge: to the advice for the next field, to an error, to
the note that a value has to be chosen first, or to nothing, which means that there is no further field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import msgspec

from dfm_async.base.rendering import Shown
from dfm_async.discovery.advised_values import same, short
from dfm_async.errors import PartialError

Form: TypeAlias = Literal["", "literal", "one of", "subset of", "dict", "date range", "okay"]
"""How a value is meant: as it is, or as a list of options."""


class ErrorFieldAdvice(msgspec.Struct, frozen=True, tag_field="kind", tag="error", forbid_unknown_fields=True):
    """No value is possible here, or an advisor raised.

    Attributes:
        msg: why.
        traceback: where it was raised at the site; empty if nothing was.
    """

    msg: str
    traceback: str = ""


class PartialFieldAdvice(msgspec.Struct, frozen=True, tag_field="kind", tag="partial", forbid_unknown_fields=True):
    """Further advice depends on this choice: discover again with the chosen value."""


class FieldAdvice(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True, kw_only=True):
    """Advice for a field. Iterating gives its good values: those that do not end in errors only."""

    field: str

    def options(self) -> tuple[tuple[Any, Edge], ...]:
        """Return the values and where they lead, good or not."""
        raise NotImplementedError

    def has_good_options(self) -> bool:
        """Return whether a value leads to more than errors."""
        return any(_is_good(edge) for _, edge in self.options())

    def collect_error_messages(self) -> dict[str, set[str]]:
        """Return all errors of the tree, by the field that they belong to."""
        found: dict[str, set[str]] = {}
        stack: list[FieldAdvice] = [self]
        while stack:
            advice = stack.pop()
            for _, edge in advice.options():
                if isinstance(edge, ErrorFieldAdvice):
                    found.setdefault(advice.field, set()).add(edge.msg)
                elif isinstance(edge, FieldAdvice):
                    stack.append(edge)
        return found

    def select(self, value: Any) -> Advice | None:
        """Return the advice for the next field, if this one has such a value; None if there is no further field.

        Raises:
            ValueError: the value is not advised, or leads to an error.
            PartialError: further advice needs another discovery with this value.
        """
        edge = self._edge(value)
        if isinstance(edge, ErrorFieldAdvice):
            raise ValueError(f"{self.field}={short(value)} is not possible: {edge.msg}")  # noqa: TRY004 - not its type
        if isinstance(edge, PartialFieldAdvice):
            raise PartialError(self.field, value)
        return edge

    def _edge(self, value: Any) -> Edge:
        raise NotImplementedError

    def _not_advised(self, value: Any) -> ValueError:
        advised = ", ".join(short(option) for option in self) or "none is possible"
        return ValueError(f"{self.field}={short(value)} is not advised; it may be: {advised}")

    def __iter__(self) -> Iterator[Any]:
        return (value for value, edge in self.options() if _is_good(edge))


class SingleFieldAdvice(FieldAdvice, frozen=True, tag="single", kw_only=True):
    """Advice for a field that does not branch: all its values lead to the same.

    Attributes:
        field: the field.
        value: the value, or the list of them.
        edge: where it leads.
        form: how the value is meant.
    """

    value: Any
    edge: Edge = None
    form: Form = ""

    def options(self) -> tuple[tuple[Any, Edge], ...]:
        """Return the value and where it leads."""
        return ((self.value, self.edge),)

    @property
    def _listed(self) -> bool:
        return isinstance(self.value, list) and self.form in ("", "one of", "subset of")

    def __iter__(self) -> Iterator[Any]:
        if not _is_good(self.edge):
            return iter(())
        return iter(self.value if self._listed else [self.value])

    def _has(self, item: Any) -> bool:
        return any(same(option, item) for option in self.value)

    def _edge(self, value: Any) -> Edge:
        fits = same(self.value, value) or self.form in ("dict", "date range", "okay")
        if not fits and self._listed:
            several = isinstance(value, (list, tuple, set, frozenset)) and self.form == "subset of"
            fits = self._has(value) or (several and all(map(self._has, value)))
        if not fits:
            raise self._not_advised(value)
        return self.edge


class BranchFieldAdvice(FieldAdvice, frozen=True, tag="branch", kw_only=True):
    """Advice for a field with values that lead to different things.

    Attributes:
        field: the field.
        branches: the values, and where each leads.
    """

    branches: tuple[tuple[Any, Edge], ...]

    def options(self) -> tuple[tuple[Any, Edge], ...]:
        """Return the values and where they lead, good or not."""
        return self.branches

    def _edge(self, value: Any) -> Edge:
        edges = [edge for option, edge in self.branches if same(option, value)]
        if not edges:
            raise self._not_advised(value)
        return next(filter(_is_good, edges), edges[0])  # an advisor may name a value twice, and answer otherwise then


Advice: TypeAlias = SingleFieldAdvice | BranchFieldAdvice
Edge: TypeAlias = SingleFieldAdvice | BranchFieldAdvice | ErrorFieldAdvice | PartialFieldAdvice | None


def _is_good(edge: Edge) -> bool:
    if isinstance(edge, FieldAdvice):
        return edge.has_good_options()
    return not isinstance(edge, ErrorFieldAdvice)


_MOST: Final = 50
_WIDTH: Final = 80
_MANY: Final = 8
_RANGE: Final = {"startdate", "enddate"}
"""The keys of a range of dates."""


def _visible(text: str) -> str:
    """Return a text without control characters of terminals: it comes from sites."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        if value.keys() == _RANGE:
            return f"from {value['startdate']} to {value['enddate']}"
        return "{" + ", ".join(f"{_written(key)}: {_written(option)}" for key, option in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def option_text(value: Any) -> str:
    """Return an option as JSON writes it, except for ranges of dates, shortened if it is long."""
    text = _visible(_written(value))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def single_text(advice: SingleFieldAdvice) -> str:
    """Return the value of advice that does not branch."""
    value, form = advice.value, advice.form
    if form in ("one of", "subset of") and isinstance(value, list):
        shown = ", ".join(option_text(option) for option in value[:_MANY])
        more = f", and {len(value) - _MANY:,} more" if len(value) > _MANY else ""
        return f"{'one' if form == 'one of' else 'some'} of {shown or 'nothing'}{more}"
    return "any value" if form == "okay" else option_text(value)


def _ending(edge: Edge) -> str:
    if isinstance(edge, ErrorFieldAdvice):
        return f"  ✗ {_visible(' '.join(edge.msg.split()))}"
    return "  … choose, and discover again" if isinstance(edge, PartialFieldAdvice) else ""


def _lines(edge: Edge) -> Iterator[str]:
    """Yield the lines of a tree."""
    match edge:
        case SingleFieldAdvice(value=None, edge=ErrorFieldAdvice()):
            yield f"{edge.field}{_ending(edge.edge)}"
        case SingleFieldAdvice():
            yield f"{edge.field}: {single_text(edge)}{_ending(edge.edge)}"
            yield from _hung([list(_lines(edge.edge))] if isinstance(edge.edge, FieldAdvice) else [])
        case BranchFieldAdvice():
            yield f"{edge.field}:"
            branches = []
            for value, behind in edge.branches[:_MOST]:
                head = "" if value is None and isinstance(behind, ErrorFieldAdvice) else option_text(value)
                deeper = _hung([list(_lines(behind))]) if isinstance(behind, FieldAdvice) else ()
                branches.append([f"{head}{_ending(behind)}".strip(), *deeper])
            if len(edge.branches) > _MOST:
                branches.append([f"and {len(edge.branches) - _MOST:,} more"])
            yield from _hung(branches)
        case ErrorFieldAdvice():
            yield _ending(edge).strip()
        case None:
            yield "no advice"


def _hung(parts: list[list[str]]) -> Iterator[str]:
    """Indent parts below a line, each with a branch of the tree."""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        for number, line in enumerate(part):
            yield f"{('└─ ' if last else '├─ ') if number == 0 else ('   ' if last else '│  ')}{line}"


Found = Advice | ErrorFieldAdvice | None
"""The advice of a site for a node: a tree; an error, if its advisors could not be asked; None, if it has no advice."""


@dataclass(frozen=True, slots=True)
class AdviceError:
    """An error in a discovery.

    Attributes:
        site: the site.
        node: the label of the node.
        field: the field; empty if no advisor could be asked.
        values: the values of the fields in this branch, up to this one.
        message: what is wrong.
        traceback: where it was raised at the site; empty if nothing was.
    """

    site: str
    node: str
    field: str
    values: Mapping[str, Any]
    message: str
    traceback: str = ""


class Discovery(Shown):
    """The advice of the sites for a pipeline. Prints as a tree; notebooks show it as one that folds.

    Attributes:
        pipeline: the name of the pipeline.
        sites: for each site that was asked, the advice for each node, by the node's label. The advice is a
            :class:`SingleFieldAdvice`, a :class:`BranchFieldAdvice`, an :class:`ErrorFieldAdvice` if the advisors could
            not be asked at all, or None if there is no advice.
    """

    __slots__ = ("pipeline", "sites")

    def __init__(self, pipeline: str | None, sites: Mapping[str, Mapping[str, Found]]) -> None:
        self.pipeline: str | None = pipeline
        self.sites: Mapping[str, Mapping[str, Found]] = MappingProxyType(
            {site: MappingProxyType(dict(nodes)) for site, nodes in sites.items()}
        )

    def errors(self) -> list[AdviceError]:
        """Return everything that went wrong or is not possible, with the site, the node and the field."""
        return [
            error
            for site, nodes in self.sites.items()
            for node, advice in nodes.items()
            for error in _errors(site, node, "", {}, advice)
        ]

    def to_json(self) -> str:
        """Write it as JSON."""
        data = {"pipeline": self.pipeline, "sites": {site: dict(nodes) for site, nodes in self.sites.items()}}
        return msgspec.json.encode(data).decode()

    @classmethod
    def from_json(cls, data: str | bytes) -> Discovery:
        """Read one from JSON.

        Raises:
            ValueError: this is not a discovery.
        """
        try:
            found = msgspec.json.decode(data, type=_AdviceFile)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not a discovery: {error}") from error
        return cls(found.pipeline, found.sites)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Discovery):
            return NotImplemented
        return self.pipeline == other.pipeline and self.sites == other.sites

    def __hash__(self) -> int:
        return hash((self.pipeline, tuple(self.sites)))

    def __str__(self) -> str:
        text = ["Discovery" if self.pipeline is None else f"Discovery of {self.pipeline!r}"]
        for site, nodes in self.sites.items():
            parts = []
            for node, advice in nodes.items():
                below = list(_lines(advice))
                parts.append([node, *_hung([below])] if isinstance(advice, FieldAdvice) else [f"{node}  {below[0]}"])
            text += [site, *_hung(parts)]
        return "\n".join(text)

    def __repr__(self) -> str:
        asked = ", ".join(f"{site}({len(nodes)})" for site, nodes in self.sites.items())
        errors = len(self.errors())
        return f"<Discovery of {self.pipeline!r}: {asked}; {errors} error{'s' * (errors != 1)}>"


class _AdviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pipeline: str | None
    sites: dict[str, dict[str, Found]]


def found_of(data: Any) -> Found:
    """Rebuild the advice of a site for a node from plain data; ValueError for anything else."""
    try:
        return msgspec.convert(data, Found)  # type: ignore[no-any-return] # a union
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"this is not advice for a node: {error}") from error


def _errors(site: str, node: str, field: str, values: dict[str, Any], edge: Edge) -> Iterator[AdviceError]:
    if isinstance(edge, ErrorFieldAdvice):
        yield AdviceError(site, node, field, MappingProxyType(dict(values)), edge.msg, edge.traceback)
    elif isinstance(edge, FieldAdvice):
        for value, behind in edge.options():
            known = values if value is None else {**values, edge.field: value}
            yield from _errors(site, node, edge.field, known, behind)
