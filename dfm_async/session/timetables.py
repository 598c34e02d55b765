"""When the jobs of a schedule run: timetables, and which of their ticks are due. Pure: no asyncio, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import Any, Final, Literal, Protocol, TypeAlias

from dfm_async.base.text import install_hint
from dfm_async.model.checks import whole

Missed: TypeAlias = Literal["skip", "once", "all"]
"""What happens to ticks that were missed."""

ON_TIME: Final = 60.0
"""By how many seconds a tick may be late, unless the next one has come, before it counts as missed."""
MOST_MISSED: Final = 100
"""The number of missed ticks that run with "all": the newest."""
_WINDOW: Final = 60.0
"""The number of seconds that are searched first for the newest ticks."""


class Timetable(Protocol):
    """An endless series of moments, its ticks, in seconds since 1970."""

    @property
    def zone(self) -> tzinfo:
        """The time zone that it is written in."""

    def following(self, moment: float) -> float | None:
        """Return the first tick after a moment; None if there is none within 50 years."""


class Interval:
    """A tick every so many seconds, counted from the beginning of 1970, so that all replicas have the same ones.

    Raises:
        ValueError: the number of seconds cannot be used.
    """

    def __init__(self, seconds: int, zone: tzinfo = UTC) -> None:
        self._seconds = whole("every", seconds)
        self.zone = zone

    def following(self, moment: float) -> float:
        """Return the first tick after a moment."""
        return float((moment // self._seconds + 1) * self._seconds)

    def __repr__(self) -> str:
        return f"every {self._seconds:,} s"


class Cron:
    """The ticks of a cron expression in a time zone, by the rules of Debian's cron.

    A time that does not exist, because clocks are set forward over it, is moved to the end of the gap; of one that
    exists twice, the first counts. That holds for fixed times. Expressions whose minute or hour begins with ``*``
    follow the clock: in an hour that exists twice they have ticks both times.

    Raises:
        ValueError: the expression is invalid, or has no ticks.
        ImportError: the extra ``schedule`` is not installed.
    """

    def __init__(self, expression: str, zone: tzinfo = UTC) -> None:
        try:
            from cronsim import CronSim, CronSimError
        except ImportError as error:
            raise ImportError(f"cron expressions need an extra: {install_hint('schedule')}") from error
        self._simulate: Any = CronSim
        self._expression = expression
        self.zone = zone
        fields = "minute, hour, day of month, month, day of week"
        if not isinstance(expression, str):
            raise TypeError(f"cron must be an expression such as '0 3 * * *' ({fields}), not {expression!r}")
        try:
            first = self.following(0)
        except CronSimError as error:
            problem = str(error)[:1].lower() + str(error)[1:]
            raise ValueError(f"cannot parse the cron expression {expression!r}: {problem}. It has {fields}") from error
        if first is None:
            raise ValueError(f"the cron expression {expression!r} has no ticks")

    def following(self, moment: float) -> float | None:
        """Return the first tick after a moment; None if there is none within 50 years."""
        for tick in self._simulate(self._expression, datetime.fromtimestamp(moment, self.zone)):
            found: float = tick.timestamp()
            if found > moment:  # else it is the first of a time that exists twice, and the moment is in the second
                return found
        return None

    def __repr__(self) -> str:
        return f"cron {self._expression!r} {self.zone}"


def timetable(cron: str | None, every: int | None, tz: str) -> Timetable:
    """Return the timetable that a user describes.

    Raises:
        TypeError: there is neither a cron expression nor an interval, or both.
        ValueError: one of them, or the time zone, is invalid.
        ImportError: the extra ``schedule`` is not installed, and a cron expression needs it.
    """
    if (cron is None) == (every is None):
        raise TypeError("a schedule needs either cron='0 3 * * *' or every=3600")
    zone = _zone(tz)
    return Interval(every, zone) if every is not None else Cron(cron or "", zone)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # also where no database of time zones is installed
    from zoneinfo import ZoneInfo  # only here: few programs have schedules

    try:
        return ZoneInfo(name)
    except (ValueError, TypeError, OSError, KeyError) as error:
        problem = f"the time zone {name!r} is not known: pass one such as 'Europe/Berlin'"
        raise ValueError(f"{problem}, or install the database: {install_hint('schedule')}") from error


class Ticks:
    """Decide which ticks of a timetable run.

    Of the ticks since the last one, the newest is on time if it is late by a minute at most; the others were missed,
    because the program did not run, the machine slept, or the jobs before them took long to submit.

    Args:
        timetable: has the ticks.
        missed: "skip" runs none that was missed; "once" the newest if it was; "all" the newest 100.
        last: the last tick that ran, or the moment after which there are any.
    """

    def __init__(self, timetable: Timetable, missed: Missed, last: float) -> None:
        if missed not in ("skip", "once", "all"):
            raise ValueError(f"missed must be 'skip', 'once' or 'all', not {missed!r}")
        self._timetable = timetable
        self._missed = missed
        self._last = last

    @property
    def following(self) -> float | None:
        """The next tick, if there is one."""
        return self._timetable.following(self._last)

    def advance(self, now: float) -> list[float]:
        """Note the time; return the ticks that are to run now, the oldest first. Each is returned at most once."""
        found = self._newest(now, MOST_MISSED if self._missed == "all" else 1)
        if not found:
            return []
        self._last = found[-1]
        if self._missed == "skip" and now - self._last > ON_TIME:
            return []
        return found

    def _newest(self, now: float, count: int) -> list[float]:
        """Return the newest ticks since the last one.

        They are searched in ever longer times before now: a program that did not run for a year must not go through
        all ticks of that year.
        """
        window = _WINDOW
        while True:
            start = max(self._last, now - window)
            found = deque(self._between(start, now), maxlen=count)
            if len(found) == count or start == self._last:
                return list(found)
            window *= 2

    def _between(self, start: float, end: float) -> Iterator[float]:
        tick = self._timetable.following(start)
        while tick is not None and tick <= end:
            yield tick
            tick = self._timetable.following(tick)
