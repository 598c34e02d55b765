"""Costs of operations and of sending: configured, measured in real runs, and assumed where nothing is known."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from dfm_async.base.text import columns, size_text, time_text
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Adapter
from dfm_async.model.policies import Cost
from dfm_async.model.resources import SendCost

ENOUGH: Final = 3
"""How many samples a measured cost needs."""
_KEPT: Final = 128
"""How many samples of one kind are kept; of more, every second, every fourth and so on."""
_FITTED: Final = 48
"""How many of them a fit compares, pair by pair."""
_FORMAT: Final = 1
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class CallSamples(msgspec.Struct, kw_only=True):
    """Calls of one operation at one site.

    Attributes:
        site: the site.
        operation: the operation.
        provider: the provider, if it is one's.
        count: how many calls were measured.
        points: some of them: bytes of input, seconds, bytes of output.
    """

    site: str
    operation: str
    provider: str | None = None
    count: int = 0
    points: list[tuple[_Amount, _Amount, _Amount]] = msgspec.field(default_factory=list)

    @property
    def cost(self) -> Cost:
        """The cost that fits them."""
        time, per_byte = _fit([(given, seconds) for given, seconds, _ in self.points])
        size, factor = _fit([(given, made) for given, _, made in self.points])
        throughput = 1 / per_byte if per_byte else None
        return Cost(fixed_time=time, throughput=throughput, fixed_size=size, output_factor=factor)


class LinkSamples(msgspec.Struct, kw_only=True):
    """Messages with values from one site to another.

    Attributes:
        source: who sent them.
        target: who got them.
        count: how many were measured.
        points: some of them: bytes, seconds.
    """

    source: str
    target: str
    count: int = 0
    points: list[tuple[_Amount, _Amount]] = msgspec.field(default_factory=list)

    @property
    def cost(self) -> SendCost:
        """The cost that fits them."""
        time, per_byte = _fit(self.points)
        return SendCost(fixed_time=time, bandwidth=1 / per_byte if per_byte else None)


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    calls: list[CallSamples]
    links: list[LinkSamples]


class Profile:
    """What real runs cost: made by ``session.profile()``, and given to ``session.prepare(costs=...)``.

    It prints as a table. A cost counts as measured from three samples on. Of many samples only some are kept, so a
    profile may stay open for a long time.
    """

    def __init__(self, calls: Iterable[CallSamples] = (), links: Iterable[LinkSamples] = ()) -> None:
        self._calls = {(found.site, found.operation, found.provider): found for found in calls}
        self._links = {(found.source, found.target): found for found in links}

    @property
    def calls(self) -> list[CallSamples]:
        """What was measured of operations, by site, operation and provider."""
        return [self._calls[key] for key in sorted(self._calls, key=lambda key: (key[1], key[0], key[2] or ""))]

    @property
    def links(self) -> list[LinkSamples]:
        """What was measured of sending, by sites."""
        return [self._links[key] for key in sorted(self._links)]

    def __bool__(self) -> bool:
        """Return whether anything was measured."""
        return bool(self._calls or self._links)

    # what it is for

    def cost(self, site: str, operation: str, provider: str | None = None) -> Cost | None:
        """Return what an operation costs at a site; None if it was not measured often enough."""
        found = self._calls.get((site, operation, provider))
        return None if found is None or found.count < ENOUGH else found.cost

    def link(self, source: str, target: str) -> SendCost | None:
        """Return what sending from one site to another costs; None if it was not measured often enough."""
        found = self._links.get((source, target))
        return None if found is None or found.count < ENOUGH else found.cost

    # measuring

    def add_call(
        self, site: str, operation: str, provider: str | None, given: float, seconds: float, made: float
    ) -> None:
        """Add a call: the bytes of its input, how long it took, the bytes of its output."""
        key = (site, operation, provider)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = CallSamples(site=site, operation=operation, provider=provider)
        _keep(found, (given, seconds, made))

    def add_send(self, source: str, target: str, size: float, seconds: float) -> None:
        """Add a message: how many bytes it had, and how long it took."""
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = LinkSamples(source=source, target=target)
        _keep(found, (size, seconds))

    # files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as JSON; what was there stays whole until that is done.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        data = msgspec.json.format(msgspec.json.encode(_ProfileFile(_FORMAT, self.calls, self.links)), indent=1)
        try:
            part.write_bytes(data + b"\n")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read it from a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: this is not a profile.
        """
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=_ProfileFile)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: not a profile: {error}") from error
        if found.format != _FORMAT:
            raise ValueError(f"{os.fspath(path)}: a profile of format {found.format}; this version reads {_FORMAT}")
        return cls(found.calls, found.links)

    # text

    def __str__(self) -> str:
        if not self:
            return "nothing was measured"
        rows = [("operation", "site", "calls", "fixed time", "throughput", "output")]
        for calls in self.calls:
            cost = calls.cost
            site = calls.site if calls.provider is None else f"{calls.site}/{calls.provider}"
            output = f"{size_text(cost.fixed_size)} + {cost.output_factor:.3g} x input"
            rows.append(
                (calls.operation, site, str(calls.count), time_text(cost.fixed_time), _rate(cost.throughput), output)
            )
        text = columns(rows)
        if self._links:
            sent = [("from", "to", "messages", "fixed time", "bandwidth")]
            for link in self.links:
                known = link.cost
                sent.append(
                    (link.source, link.target, str(link.count), time_text(known.fixed_time), _rate(known.bandwidth))
                )
            text += "\n\n" + columns(sent)
        return text

    __repr__ = __str__


def _keep(samples: CallSamples | LinkSamples, point: Any) -> None:
    """Count a sample, and keep it or not: all at first, then ever fewer."""
    stride = 1
    while samples.count >= _KEPT * stride:
        stride *= 2
    if samples.count % stride == 0:
        samples.points.append(point)
    samples.count += 1
    if len(samples.points) > _KEPT:
        del samples.points[1::2]


def _fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return a line through points: its value at zero and its slope, neither of them negative.

    The slope is the median of those between any two points, where points that are far apart count more: single calls
    that took much longer, such as the first one, hardly change it, and neither do many small ones that differ.
    """
    if not points:
        return 0.0, 0.0
    ys = median(y for _, y in points)
    step = max(1, -(-len(points) // _FITTED))
    some = points[::step]
    slopes = [((b - d) / (a - c), abs(a - c)) for i, (a, b) in enumerate(some) for c, d in some[:i] if a != c]
    widest = max(x for x, _ in points)
    if not slopes or min(x for x, _ in points) > 0.8 * widest:
        return ys, 0.0
    slope = _weighted_median(slopes)
    if slope <= 0:
        return ys, 0.0
    start = median(y - slope * x for x, y in points)
    if start < 0:
        return 0.0, _weighted_median([(y / x, x) for x, y in points if x])
    return start, slope


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Return the median of values with weights."""
    values = sorted(values)
    left = sum(weight for _, weight in values) / 2
    for value, weight in values:
        left -= weight
        if left <= 0:
            return value
    return values[-1][0]


def _rate(value: float | None) -> str:
    return "any" if value is None else f"{size_text(value)}/s"


UNKNOWN_LINK: Final = SendCost(fixed_time=1.0, bandwidth=1e7)
"""What sending costs between two sites of which nothing is known: so much that values rather stay where they are."""
PARAMETER_BYTES: Final = 1000.0
"""How large a parameter of a pipeline is assumed to be."""
ELEMENTS: Final = 10
"""How often the body of a loop is assumed to run, if the pipeline does not state it."""

_FREE: Final = Cost()
_HERE: Final = SendCost()
_MANY: Final = 10_000


class Costs:
    """The costs of a federation, as the planner uses them: measured ones replace the configured ones."""

    def __init__(self, federation: Federation, measured: Profile | None = None) -> None:
        self._federation = federation
        self._measured = measured
        self._links: dict[tuple[str, str], SendCost] = {}
        self._unknown: dict[str, Cost] = {}
        self.links_known = measured is not None or any(site.send_cost for site in federation.sites.values())
        """Whether anything is known about sending."""

    def known(self, site: str, adapter: Adapter) -> Cost | None:
        """Return what an adapter costs at a site: as measured, or else as configured; None if unknown."""
        if self._measured is not None:
            found = self._measured.cost(site, adapter.operation, adapter.provider)
            if found is not None:
                return found
        return adapter.cost

    def work(self, site: str, adapter: Adapter) -> Cost:
        """Return what an adapter costs at a site; if unknown, the highest known cost of the same operation."""
        return self.known(site, adapter) or self._worst(adapter.operation)

    def _worst(self, operation: str) -> Cost:
        found = self._unknown.get(operation)
        if found is None:
            costs = [
                cost
                for site in self._federation.sites.values()
                for (name, _), adapter in site.adapters.items()
                if name == operation and (cost := self.known(site.name, adapter)) is not None
            ]
            found = self._unknown[operation] = _worst_of(costs)
        return found

    def link(self, source: str, target: str) -> SendCost:
        """Return what sending from one site to another costs; a known cost counts for both directions."""
        if source == target:
            return _HERE
        pair = (source, target)
        found = self._links.get(pair)
        if found is None:
            found = self._links[pair] = self._find(source, target) or self._find(target, source) or UNKNOWN_LINK
        return found

    def _find(self, source: str, target: str) -> SendCost | None:
        if self._measured is not None:
            found = self._measured.link(source, target)
            if found is not None:
                return found
        site = self._federation.sites.get(source)
        return None if site is None else site.send_cost.get(target)


def _worst_of(costs: list[Cost]) -> Cost:
    if not costs:
        return _FREE
    rates = [cost.throughput for cost in costs if cost.throughput is not None]
    return Cost(
        fixed_time=max(cost.fixed_time for cost in costs),
        throughput=min(rates, default=None),
        fixed_size=max(cost.fixed_size for cost in costs),
        output_factor=max(cost.output_factor for cost in costs),
    )


def bytes_of(value: Any) -> float:
    """Return roughly how many bytes a constant has, from at most some thousands of its parts."""
    total, seen = 0.0, 0
    stack = [value]
    while stack and seen < _MANY:
        seen += 1
        part = stack.pop()
        if isinstance(part, (str, bytes, bytearray, memoryview)):
            total += len(part)
        elif isinstance(part, dict):
            stack.extend(part.keys())
            stack.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            stack.extend(part)
        else:
            size = getattr(part, "nbytes", None)
            total += size if isinstance(size, int) else 8
    return total
