"""Ticks of timetables, and which of them run: without a clock, compared with plain lists."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async.session.timetables import MOST_MISSED, ON_TIME, Cron, Interval, Missed, Ticks, Timetable, timetable

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Havana", "Asia/Beirut", "Asia/Kolkata"]
YEAR = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def ticks_between(table: Timetable, start: float, end: float) -> list[float]:
    found = []
    tick = table.following(start)
    while tick is not None and tick <= end:
        found.append(tick)
        tick = table.following(tick)
    return found


def days_of(table: Timetable) -> list[date]:
    """Return the local dates of the ticks of 2026."""
    start = datetime(2026, 1, 1, tzinfo=table.zone).timestamp() - 1
    end = datetime(2027, 1, 1, tzinfo=table.zone).timestamp() - 1
    return [datetime.fromtimestamp(tick, table.zone).date() for tick in ticks_between(table, start, end)]


@given(st.sampled_from(ZONES), st.integers(0, 23), st.integers(0, 59))
@settings(max_examples=12)
def test_daily_time_comes_once_a_day_all_year(zone: str, hour: int, minute: int) -> None:
    days = [date(2026, 1, 1) + timedelta(days=number) for number in range(365)]
    assert days_of(Cron(f"{minute} {hour} * * *", ZoneInfo(zone))) == days


@pytest.mark.parametrize(
    ("cron", "day", "expected"),
    [
        ("0 3 * * *", datetime(2026, 3, 28, 12), "2026-03-29T01:00:00"),  # clocks are set from 2:00 to 3:00
        ("30 2 * * *", datetime(2026, 3, 28, 12), "2026-03-29T01:00:00"),  # 2:30 does not exist
        ("0 3 * * *", datetime(2026, 10, 24, 12), "2026-10-25T02:00:00"),  # from 3:00 to 2:00
        ("30 2 * * *", datetime(2026, 10, 24, 12), "2026-10-25T00:30:00"),  # 2:30 exists twice
        ("30 2 * * *", datetime(2026, 10, 25, 2, 10, fold=1), "2026-10-26T01:30:00"),  # it was before that
    ],
)
def test_days_on_which_clocks_change_have_one_tick(cron: str, day: datetime, expected: str) -> None:
    found = Cron(cron, BERLIN).following(day.replace(tzinfo=BERLIN).timestamp())
    assert found is not None
    assert datetime.fromtimestamp(found, UTC).replace(tzinfo=None).isoformat() == expected


def test_hours_that_exist_twice_have_their_hourly_ticks_twice() -> None:
    start = datetime(2026, 10, 25, 1, 30, tzinfo=BERLIN).timestamp()
    found = ticks_between(Cron("0 * * * *", BERLIN), start, start + 3 * 3600)
    assert [tick - found[0] for tick in found] == [0, 3600, 7200]


_FIELD = st.one_of(
    st.just("*"),
    st.integers(2, 20).map(lambda n: f"*/{n}"),
    st.lists(st.integers(0, 23), min_size=1, max_size=3).map(lambda found: ",".join(map(str, found))),
)


@given(
    st.tuples(_FIELD, _FIELD, st.sampled_from(["*", "*", "1", "L", "29,30"]), st.sampled_from(["*", "MON", "0,6"])),
    st.sampled_from(ZONES),
    st.integers(0, 366 * 24 * 60),
    st.floats(0, 1),
)
def test_ticks_do_not_depend_on_where_the_search_begins(
    fields: tuple[str, ...], zone: str, minutes: int, part: float
) -> None:
    minute, hour, day, weekday = fields
    table = Cron(f"{minute} {hour} {day} * {weekday}", ZoneInfo(zone))
    moment = YEAR + minutes * 60
    tick = table.following(moment)
    assert tick is not None
    assert tick > moment
    between = moment + (tick - moment) * part
    if between < tick:
        assert table.following(between) == tick


def test_intervals_are_counted_from_the_beginning_of_1970() -> None:
    hourly = Interval(3600)
    assert [hourly.following(moment) for moment in (0, 3599.9, 3600, 7300)] == [3600, 3600, 7200, 10800]
    assert repr(hourly) == "every 3,600 s"


def plainly(table: Timetable, missed: Missed, last: float, now: float) -> list[float]:
    """Return the ticks that run, by the description of the options."""
    since = ticks_between(table, last, now)
    if missed == "all":
        return since[-MOST_MISSED:]
    if missed == "once" or (since and now - since[-1] <= ON_TIME):
        return since[-1:]
    return []


@given(
    st.one_of(
        st.integers(1, 5000).map(Interval),
        st.sampled_from(["*/5 * * * *", "0 3 * * *", "*/7 1,2 * * *"]).map(lambda cron: Cron(cron, BERLIN)),
    ),
    st.sampled_from(["skip", "once", "all"]),
    st.lists(st.one_of(st.floats(-100, 100), st.floats(0, 40_000)), min_size=1, max_size=6),
)
def test_ticks_run_as_the_policy_says_and_at_most_once(table: Timetable, missed: Missed, steps: list[float]) -> None:
    now = last = YEAR + 86 * 86400  # some days before clocks change
    ticks = Ticks(table, missed, last)
    run: list[float] = []
    for step in steps:
        now += step  # the clock may be set back
        found = ticks.advance(now)
        assert found == plainly(table, missed, last, now)
        run += found
        last = max([last, *ticks_between(table, last, now)])
        following = ticks.following
        assert following == table.following(last)
        assert following is not None
        assert following > now
    assert run == sorted(set(run))


def test_years_that_were_missed_are_not_searched() -> None:
    class Counted(Interval):
        calls = 0

        def following(self, moment: float) -> float:
            self.calls += 1
            return super().following(moment)

    for missed in ("skip", "once", "all"):
        table = Counted(1)
        found = Ticks(table, missed, YEAR).advance(YEAR + 3 * 365 * 86400)
        assert len(found) == (MOST_MISSED if missed == "all" else 1)
        assert table.calls < 1000


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cron": "0 25 * * *"}, r"cannot parse the cron expression '0 25 \* \* \*': bad hour. It has minute, hour"),
        ({"cron": "daily"}, "wrong number of fields"),
        ({"cron": ""}, "wrong number of fields"),
        ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
        ({"every": 0}, "every must be a whole number, 1 or more"),
        ({"every": 0.5}, "every must be a whole number"),
        ({"every": 60, "tz": "Europe/Berln"}, "time zone 'Europe/Berln' is not known"),
        ({"every": 60, "tz": "../etc/passwd"}, "is not known"),
        ({"every": 60, "tz": None}, "is not known"),
    ],
)
def test_invalid_timetables_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        timetable(**{"cron": None, "every": None, "tz": "UTC", **options})


@pytest.mark.parametrize("options", [{}, {"cron": "0 3 * * *", "every": 60}, {"cron": 3}])
def test_schedule_needs_one_timetable(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"cron"):
        timetable(**{"cron": None, "every": None, "tz": "UTC", **options})


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(ImportError, match=r"\[schedule\]"):
        Cron("0 3 * * *")
