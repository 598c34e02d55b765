"""What a discovery has found: a tree of advice per site and node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from dfm_async.discovery.advice import Advice, Edge, ErrorFieldAdvice, FieldAdvice, advice_from
from dfm_async.discovery.text import discovery_text
from dfm_async.rendering import Shown

__all__ = ["AdviceError", "Discovery", "Found"]

Found = Advice | ErrorFieldAdvice | None
"""What a site has said of a node: a tree; an error, if it could not be asked; None, if it has nothing to say."""


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
    """What the sites have said about a pipeline. Prints as a tree; notebooks show it as one that folds.

    Attributes:
        pipeline: the name of the pipeline.
        sites: for each site that was asked, the advice for each node, by the node's label. The advice is a
            :class:`SingleFieldAdvice`, a :class:`BranchFieldAdvice`, an :class:`ErrorFieldAdvice` if the advisors could
            not be asked at all, or None if there is nothing to say.
    """

    __slots__ = ("pipeline", "sites")

    def __init__(self, pipeline: str | None, sites: Mapping[str, Mapping[str, Found]]) -> None:
        self.pipeline = pipeline
        self.sites: Mapping[str, Mapping[str, Found]] = MappingProxyType(
            {site: MappingProxyType(dict(nodes)) for site, nodes in sites.items()}
        )

    def errors(self) -> list[AdviceError]:
        """Everything that went wrong or is not possible, with the site, the node and the field."""
        return [
            error
            for site, nodes in self.sites.items()
            for node, advice in nodes.items()
            for error in _errors(site, node, "", {}, advice)
        ]

    def to_json(self) -> str:
        """Writes it as JSON."""
        data = {"pipeline": self.pipeline, "sites": {site: dict(nodes) for site, nodes in self.sites.items()}}
        return msgspec.json.encode(data).decode()

    @classmethod
    def from_json(cls, data: str | bytes) -> Discovery:
        """Reads one from JSON.

        Raises:
            ValueError: this is not a discovery.
        """
        try:
            found = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ValueError(f"this is not a discovery: {error}") from error
        return cls(found.pipeline, {site: {n: found_of(a) for n, a in ns.items()} for site, ns in found.sites.items()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Discovery):
            return NotImplemented
        return self.pipeline == other.pipeline and self.sites == other.sites

    def __hash__(self) -> int:
        return hash((self.pipeline, tuple(self.sites)))

    def __str__(self) -> str:
        return discovery_text(self.pipeline, self.sites)

    def __repr__(self) -> str:
        asked = ", ".join(f"{site}({len(nodes)})" for site, nodes in self.sites.items())
        errors = len(self.errors())
        return f"<Discovery of {self.pipeline!r}: {asked}; {errors} error{'s' * (errors != 1)}>"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pipeline: str | None
    sites: dict[str, dict[str, Any]]


def found_of(data: Any) -> Found:
    """Rebuilds what a site has said of a node from plain data.

    Raises:
        ValueError: this is not advice for a node.
    """
    edge = advice_from(data)
    if edge is None or isinstance(edge, (FieldAdvice, ErrorFieldAdvice)):
        return edge
    raise ValueError("advice for a node begins with a field")


def _errors(site: str, node: str, field: str, values: dict[str, Any], edge: Edge) -> Iterator[AdviceError]:
    if isinstance(edge, ErrorFieldAdvice):
        yield AdviceError(site, node, field, MappingProxyType(dict(values)), edge.msg, edge.traceback)
    elif isinstance(edge, FieldAdvice):
        for value, behind in edge.options():
            known = values if value is None else {**values, edge.field: value}
            yield from _errors(site, node, edge.field, known, behind)
