"""Trees of advice: which values a field may have, and which the next one has then. Plain data.

A tree tells of one field after the other. Each value has an edge: to the advice for the next field, to an error, to
the word that somebody has to choose first, or to nothing, which means that all is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from dfm_async.discovery.plain import same, short
from dfm_async.errors import PartialError

__all__ = [
    "Advice",
    "BranchFieldAdvice",
    "Edge",
    "ErrorFieldAdvice",
    "FieldAdvice",
    "Form",
    "PartialFieldAdvice",
    "SingleFieldAdvice",
    "advice_from",
]

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
    """More can be said when somebody has chosen: discover again with that value."""


class FieldAdvice(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True, kw_only=True):
    """Advice for a field. Iterating gives its good values: those that do not end in errors only."""

    field: str

    def options(self) -> tuple[tuple[Any, Edge], ...]:
        """The values and where they lead, good or not."""
        raise NotImplementedError

    def has_good_options(self) -> bool:
        """Whether a value leads to more than errors."""
        return any(_is_good(edge) for _, edge in self.options())

    def collect_error_messages(self) -> dict[str, set[str]]:
        """All errors of the tree, by the field that they belong to."""
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
        """The advice for the next field, if this one has such a value; None if all is said.

        Raises:
            ValueError: the value is not advised, or leads to an error.
            PartialError: more can be said only by discovering again with this value.
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
        """The value and where it leads."""
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
        """The values and where they lead, good or not."""
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


def advice_from(data: Any) -> Edge:
    """Rebuilds a tree from plain data.

    Raises:
        ValueError: this is not a tree of advice.
    """
    try:
        return msgspec.convert(data, Edge)  # type: ignore[no-any-return]
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"this is not advice: {error}") from error
