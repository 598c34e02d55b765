"""The limits of an operation at a site, and what a site has for its calls. Plain data, parsed in one place."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec

from dfm_async.model.checks import whole

Shared: TypeAlias = Literal["cpus", "memory", "gpus"]
"""The resources of a site that the calls of all its operations share."""
SHARED: Final[tuple[Shared, ...]] = ("cpus", "memory", "gpus")

_RATE: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*/\s*(s|min|h)\s*")
_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]i?B|B)\s*")
_UNITS: Final = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_MOST: Final = 10**15
_BURST: Final = 1.0
"""The number of seconds whose calls may start at once."""


class LimitOptions(TypedDict, total=False):
    """The limits of an operation, as its declaration takes them; described at ``site.operation``."""

    limit: int | None
    rate: str | None
    key: str | None
    cpus: int | None
    gpus: int | None
    memory: int | str | None


def parse_rate(rate: object) -> float:
    """Return the number of calls per second.

    Raises:
        ValueError: this is not a rate.
    """
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    per_second = 0.0 if found is None else float(found[1]) / _SECONDS[found[2]]
    if not 0 < per_second < _MOST:
        wanted = "a number of calls per second, minute or hour, such as '10/s', '30/min' or '0.5/h'"
        raise ValueError(f"rate must be {wanted}, not {rate!r}")
    return per_second


def parse_bytes(size: object) -> int:
    """Return a number of bytes, which may be written with a unit, such as ``"8GiB"``.

    Raises:
        ValueError: this is not a size.
    """
    number: float = 0
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif isinstance(size, str) and (found := _BYTES.fullmatch(size)) is not None:
        number = float(found[1]) * _UNITS[found[2]]
    if not 1 <= number < _MOST:
        raise ValueError(f"memory must be a number of bytes, or a string such as '8GiB' or '500MB', not {size!r}")
    return int(number)


def bytes_text(size: int) -> str:
    """Return a number of bytes with the largest unit that keeps it exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and not size % _UNITS[unit]:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"


def _short_text(size: int) -> str:
    """Return a number of bytes with four digits."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size >= _UNITS[unit]), "B")
    return f"{size / _UNITS[unit]:.4g}{unit}"


class CallLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many calls of an operation may run at a site, how often they start, and what each of them needs.

    Attributes:
        limit: the number of calls that run at the same time; None means any number.
        rate: how often calls start, such as ``"10/s"``; None means at once.
        key: the parameter whose values ``limit`` and ``rate`` are counted for, each on its own.
        cpus: the number of processors that a call needs.
        memory: the number of bytes that it needs.
        gpus: the number of GPUs that it needs.
    """

    limit: int | None = None
    rate: str | None = None
    key: str | None = None
    cpus: int = 0
    memory: int = 0
    gpus: int = 0

    @classmethod
    def parse(cls, given: Mapping[str, Any], before: CallLimits | None = None) -> CallLimits | None:
        """Read limits as users write them; those that are not given stay as they were before.

        Returns:
            None if there is no limit.

        Raises:
            ValueError: a limit is not what it should be.
        """
        found: dict[str, Any] = {} if before is None else msgspec.structs.asdict(before)
        for name, value in given.items():
            if value is None:
                found.pop(name, None)
            elif name == "rate":
                parse_rate(value)
                found[name] = "".join(value.split())
            elif name == "memory":
                found[name] = parse_bytes(value)
            elif name == "key":
                if not isinstance(value, str) or not value:
                    raise ValueError(f"key must be the name of a parameter, not {value!r}")
                found[name] = value
            else:
                found[name] = whole(name, value)
        limits = cls(**found)
        if limits.key is not None and limits.limit is None and limits.rate is None:
            raise ValueError(f"key={limits.key!r} has no effect without limit= or rate=, which it counts per value")
        return None if limits == cls() else limits

    @property
    def per_second(self) -> float:
        """The number of calls that start in a second; infinite without a rate."""
        return math.inf if self.rate is None else parse_rate(self.rate)

    @property
    def burst(self) -> float:
        """The number of calls that may start at once after a pause."""
        return max(1.0, self.per_second * _BURST)

    @property
    def declared(self) -> dict[str, Any]:
        """The limits as users write them, without those that were not given."""
        found = {name: value for name, value in msgspec.structs.asdict(self).items() if value}
        return found | ({"memory": bytes_text(self.memory)} if self.memory else {})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.declared.items())


class SiteCapacity(msgspec.Struct, frozen=True, array_like=True):
    """What a site has for calls that state what they need.

    Attributes:
        cpus: the number of processors; None means its number of workers, or the cores that it may use.
        memory: the number of bytes; None means what the machine or its control group has.
        gpus: the number of GPUs.
    """

    cpus: int | None = None
    memory: int | None = None
    gpus: int = 0

    def lacks(self, limits: CallLimits) -> str | None:
        """Return what a call needs more of than there is; None if it can run, as far as is known."""
        for name in SHARED:
            needed, there = getattr(limits, name), getattr(self, name)
            if there is not None and needed > there:
                shown = (_short_text(needed), _short_text(there)) if name == "memory" else (needed, there)
                return f"needs {name}={shown[0]}, and the site has {shown[1]}. {_ADVICE[name]}"
        return None


_ADVICE: Final[dict[Shared, str]] = {
    "cpus": "Ask for fewer, or give the site more workers: federation.site(..., workers=...)",
    "memory": "Ask for less, or state how much the site has: federation.site(..., memory=...)",
    "gpus": "Ask for fewer, or state how many the site has: federation.site(..., gpus=...)",
}

LIMITS: Final = frozenset(LimitOptions.__annotations__)
"""The names of the limits."""
