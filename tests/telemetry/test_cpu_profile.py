"""Profiles of processor time: what calls do while they run, by operation and worker, on one machine and elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, ForEach, Pipeline, Session, Yield
from dfm_async.telemetry import CpuProfile, CpuRow, Span
from tests.support.sessions import SHORT

BUSY = 0.25
"""The number of seconds of processor time that operations use."""
fed = Federation("profiled")
lab = fed.site("lab", workers=2)


def spin(seconds: float = BUSY) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@lab.operation
def compute(part: int) -> int:
    spin()
    return os.getpid()


@lab.operation
def compute_a_little(part: int) -> int:
    spin(BUSY / 10)
    return os.getpid()


@lab.operation
def block() -> None:
    threading.Event().wait(BUSY)


@lab.operation
async def compute_on_the_loop() -> None:
    spin()
    await asyncio.sleep(BUSY)


@lab.operation
def elements() -> Iterator[int]:
    for number in range(3):
        spin(BUSY / 3)
        yield number


@lab.operation
async def elements_on_the_loop() -> AsyncIterator[int]:
    for number in range(3):
        spin(BUSY / 3)
        yield number


@lab.operation
def fail() -> None:
    spin()
    raise ValueError("nothing to compute")


with Pipeline("all kinds") as kinds:
    Yield(compute(1))
    Yield(block())
    Yield(compute_on_the_loop())
    with ForEach(elements()) as element:
        Yield(element)
    with ForEach(elements_on_the_loop()) as late:
        Yield(late)
    Yield(fail())

with Pipeline("parts") as parts:
    with ForEach([1, 2]) as part:
        Yield(compute(part))


async def ended(session: Session, pipeline: Pipeline) -> list[Any]:
    job = await session.execute(pipeline)
    return [result.value for result in await job.collect(errors="skip")]


async def test_all_kinds_of_code_are_sampled_and_waiting_is_not_running() -> None:
    async with Session(fed, target="inline", options=SHORT) as session:
        with session.profile(cpu=True) as profile:
            await ended(session, kinds)
    rows = {row.operation: row for row in profile.rows}
    names = ["block", "compute", "compute_on_the_loop", "elements", "elements_on_the_loop", "fail"]
    assert sorted(rows) == names
    assert {(row.site, row.worker, row.calls) for row in profile.rows} == {("lab", os.getpid(), 1)}
    for name in set(names) - {"block"}:
        assert rows[name].running > BUSY / 4, name
        assert [stack for stack, _ in profile.stacks if stack[2] == name and stack[-1].endswith(".spin")], name
    assert rows["block"].running < BUSY / 4
    assert rows["block"].waiting > BUSY / 2
    assert rows["compute_on_the_loop"].waiting > BUSY / 2
    waited = [stack for stack, _ in profile.stacks if stack[2] == "block" and stack[-1] == "(waiting)"]
    assert [name for name in waited[0] if name.endswith("test_cpu_profile.block")]
    assert rows["fail"].errors == 1
    assert not [stack for stack, _ in profile.stacks if any("dfm_async.telemetry" in name for name in stack)]


async def test_calls_in_other_workers_are_sampled() -> None:
    calls: Counter[int] = Counter()
    async with Session(fed, options=SHORT) as session:
        with session.profile(cpu=True) as profile:
            async with session.map(compute_a_little, itertools.count(), concurrency=8) as pids:
                async for pid in pids:
                    calls[pid] += 1
                    if len(calls) == 2 and min(calls.values()) > 8:
                        break
    assert {row.worker for row in profile.rows} == set(calls)
    assert all(row.running > BUSY / 4 for row in profile.rows)
    sampled = {stack[:3] for stack, _ in profile.stacks if stack[-1].endswith(".spin")}
    assert sampled == {("lab", f"worker {pid}", "compute_a_little") for pid in calls}


class Spans:
    def __init__(self) -> None:
        self.found: list[Span] = []

    def open(self) -> None: ...

    def write(self, spans: list[Span]) -> None:
        self.found += spans

    def close(self) -> None: ...


async def test_other_jobs_are_not_sampled() -> None:
    spans = Spans()
    async with Session(fed, target="inline", options=SHORT, trace=spans) as session:
        with session.profile(cpu=True) as empty:
            pass
        with session.profile() as costs:
            await ended(session, parts)
        assert costs.calls
    assert not empty
    assert str(empty) == "no calls were profiled"
    operations = [span for span in spans.found if span.name == "dfm.operation"]
    assert len(operations) == 2
    assert not [span for span in operations if "dfm.stacks" in span.attributes]
    assert "dfm-sampler" not in [thread.name for thread in threading.enumerate()]


# without jobs


def call(operation: str, stacks: str, **attributes: Any) -> Span:
    return Span(
        name="dfm.operation",
        trace_id="0" * 32,
        span_id="0" * 16,
        parent_id=None,
        start=0,
        end=2_000_000_000,
        process="lab",
        attributes={"dfm.operation": operation, "dfm.worker": 7, "dfm.stacks": stacks, **attributes},
    )


def profile_of(*spans: Span) -> CpuProfile:
    profile = CpuProfile()
    for span in spans:
        profile.add(span)
    return profile


def test_a_profile_adds_up_calls_and_prints_tables() -> None:
    first = call("mean", "1000000 500000 m.mean;m.add\n250000 0 m.mean", **{"dfm.waited": 0.5})
    profile = profile_of(first, call("mean", "1000000 0 m.mean;m.add"))
    row = CpuRow(site="lab", worker=7, operation="mean", calls=2, total=4.0, running=2.25, queued=0.5)
    assert profile.rows == [row]
    assert row.waiting == 1.75
    assert str(profile).splitlines() == [
        "operation  site  worker  calls  total  running  waiting  queued",
        "---------------------------------------------------------------",
        "mean       lab   7       2      4 s    2.25 s   1.75 s   500 ms",
        "",
        "function  running  waiting  total",
        "---------------------------------",
        "m.add     2 s      500 ms   2.5 s",
        "m.mean    250 ms   0 s      2.75 s",
    ]


def test_invalid_stacks_of_a_site_are_skipped() -> None:
    profile = profile_of(call("mean", "x 1 m.mean\n-5 1 m.mean\n\n1\n5\n1000000 0 m.mean;<b>"))
    assert profile.stacks == [(("lab", "worker 7", "mean", "m.mean", "<b>"), 1.0)]


def test_a_profile_is_written_as_page_speedscope_or_collapsed_stacks(tmp_path: Path) -> None:
    profile = profile_of(call("mean", "1000000 500000 m.<lambda>"))
    profile.save(tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_text().splitlines() == [
        "lab;worker 7;mean;m.<lambda> 1000000",
        "lab;worker 7;mean;m.<lambda>;(waiting) 500000",
    ]
    profile.save(tmp_path / "p.json")
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["shared"]["frames"] == [{"name": "mean"}, {"name": "m.<lambda>"}, {"name": "(waiting)"}]
    assert [found["name"] for found in written["profiles"]] == ["lab worker 7"]
    assert written["profiles"][0]["samples"] == [[0, 1], [0, 1, 2]]
    assert written["profiles"][0]["weights"] == [1_000_000, 500_000]
    profile.save(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert "m.&lt;lambda&gt;: 1.5 s, 100.0%" in page
    assert "m.<lambda>" not in page
    assert "{{" not in page
    with pytest.raises(ValueError, match=r"p\.svg: the name must end with \.html"):
        profile.save(tmp_path / "p.svg")


def test_spans_that_sites_could_not_report_are_mentioned() -> None:
    span = call("mean", "")
    site = Span(
        name="dfm.site",
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=None,
        start=0,
        end=1,
        process="lab",
        attributes={"dfm.spans_left_out": 1200},
    )
    assert str(profile_of(span, site)).endswith("1,200 spans could not be recorded, and are missing here")
