"""Random pipelines with checkpoints: interrupted and resumed, and forked."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfm_async import Event, Failure, Job, JobStatus, Pipeline, Result, Session, current_context
from dfm_async.events import FailureHandled, FrameCompleted
from dfm_async.federation.operation import CodeKind
from dfm_async.planning.forking import ForkedCalls
from dfm_async.runtime.callees import Callee
from tests.property.random_pipelines import Maker, fed, functions, write
from tests.property.test_random_pipelines import sets, valid
from tests.property.waits import sending
from tests.reference import interpret
from tests.support.sessions import SHORT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])

Key = tuple[str, tuple[int, ...]]
"""A call: its node and its frame."""


class Calls:
    """The calls of the current job: all are noted, one can be waited for, and some return other values."""

    def begin(self, *, last: int = -1, changed: Callable[[str, tuple[int, ...]], bool] | None = None) -> None:
        """Note the calls of a new job; ``reached`` is set at a number of calls. ``changed`` selects calls."""
        self.made: list[Key] = []
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last = last
        self._changed = changed

    def note(self) -> bool:
        """Note a call; return whether it returns another value."""
        context = current_context()
        node, frame = context.node, tuple(context.frame)
        self.made.append((node, frame))
        if len(self.made) == self._last:
            self._loop.call_soon_threadsafe(self.reached.set)
        return self._changed is not None and self._changed(node, frame)

    @property
    def held(self) -> bool:
        """Whether an asynchronous call that begins now is in flight when the session is closed."""
        return len(self.made) == self._last


CALLS = Calls()


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, dict):
        return {key: other(item) for key, item in value.items()}
    return [other(item) for item in value] if isinstance(value, list) else value + 1


class NotedCallee(Callee):
    """Notes the calls of an operation."""

    def bound(self, instance: Any) -> Callable[..., Any]:
        code = super().bound(instance)

        def sync(*args: Any, **named: Any) -> Any:
            change = CALLS.note()
            value = code(*args, **named)
            if inspect.isgenerator(value) or hasattr(value, "__next__"):
                return map(other, value) if change else value
            return other(value) if change else value

        async def asynchronous(*args: Any, **named: Any) -> Any:
            change = CALLS.note()
            if CALLS.held:
                await asyncio.sleep(10)
            value = await code(*args, **named)
            return other(value) if change else value

        def generator(*args: Any, **named: Any) -> Iterator[Any]:
            change = CALLS.note()
            for value in code(*args, **named):
                yield other(value) if change else value

        async def async_generator(*args: Any, **named: Any) -> AsyncIterator[Any]:
            change = CALLS.note()
            async for value in code(*args, **named):
                yield other(value) if change else value

        wrappers: dict[CodeKind, Callable[..., Any]] = {
            CodeKind.SYNC: sync,
            CodeKind.ASYNC: asynchronous,
            CodeKind.GENERATOR: generator,
            CodeKind.ASYNC_GENERATOR: async_generator,
        }
        return wrappers[self.kind]


class WithoutCache(Maker):
    """Writes pipelines without ``TryFromCache``: what a cache has depends on which jobs ran before."""

    def statement(self, kind: str, ints: list[Any], streams: list[Any], depth: int) -> list[Any]:
        return super().statement("op" if kind == "cache" else kind, ints, streams, depth)


@st.composite
def pipelines(draw: Any) -> Pipeline:
    """Draw a pipeline with the parameters x and y."""
    return write(WithoutCache(draw))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def noted() -> AsyncIterator[None]:
    """Note all calls of the federation."""
    before = {site: dict(site.adapters) for site in fed.sites.values()}
    for site, adapters in before.items():
        for key, adapter in adapters.items():
            site.adapters[key] = replace(adapter, callee=NotedCallee)
    yield
    for site, adapters in before.items():
        site.adapters.update(adapters)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(noted: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Session]:
    store = f"sqlite:///{tmp_path_factory.mktemp('forks')}/jobs.db"
    async with Session(fed, target="inline", store=store, options=SHORT) as session:
        yield session


def recorded(folder: Path, job: str) -> set[Key]:
    """Return the calls that are recorded as a whole."""
    found: set[Key] = set()
    for path in folder.glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as file:
            rows = [
                *file.execute("SELECT node, frame FROM checkpoints WHERE job = ?", (job,)),
                *file.execute("SELECT node, frame FROM elements WHERE job = ? AND count = 0", (job,)),
            ]
        found |= {(node, tuple(map(int, frame.split(".")))) for node, frame in rows}
    return found


async def events_of(job: Job) -> list[Event]:
    """Read a job until it ends or is interrupted, and send each event that it waits for."""
    events = []
    async with sending(job) as sender:
        async for event in job.events():
            events.append(event)
            sender.saw(event)
    return events


async def outcome(job: Job) -> dict[str, list[Any]]:
    """Return what a job yields, in a form that can be compared."""
    async with asyncio.timeout(30):
        events = await events_of(job)
    return {
        "results": sorted((e.place, e.frame, e.value) for e in events if isinstance(e, Result)),
        "lost": sorted((e.place, e.frame) for e in events if isinstance(e, Failure) and e.place is not None),
        "errors": sorted((e.node, e.frame) for e in events if isinstance(e, Failure) and e.place is None),
        "handled": sorted({(e.node, e.frame) for e in events if isinstance(e, FailureHandled)}),
        "done": sorted(e.frame for e in events if isinstance(e, FrameCompleted)),
    }


@SLOW
@given(pipeline=pipelines(), params=sets, last=st.integers(1, 30))
async def test_a_resumed_job_does_what_plain_python_does(
    noted: None, pipeline: Pipeline, params: Any, last: int
) -> None:
    text = f"{pipeline}\n{params} interrupted at call {last}"
    with tempfile.TemporaryDirectory() as name:
        store = f"sqlite:///{name}/jobs.db"
        async with Session(fed, target="inline", store=store, options=SHORT) as first:
            if not await valid(pipeline, first):
                return
            CALLS.begin(last=last)
            job = await first.execute(pipeline, params, checkpoint="calls")
            waits = [asyncio.create_task(events_of(job)), asyncio.create_task(CALLS.reached.wait())]
            done, _ = await asyncio.wait(waits, return_when="FIRST_COMPLETED", timeout=30)
            assert done, text
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            for task in done:
                task.result()
        known = recorded(Path(f"{name}/jobs.db-checkpoints"), job._known().spec.checkpoints)
        CALLS.begin()
        async with Session(fed, target="inline", store=store, options=SHORT) as second:
            job = await second.reattach(job.job_id)
            if job.status is JobStatus.INTERRUPTED:
                job = await second.resume(job.job_id)
            found = await outcome(job)
    assert known.isdisjoint(CALLS.made), text
    expected = interpret(pipeline, functions, params)
    assert found == {
        "results": sorted(expected.results),
        "lost": sorted(expected.lost),
        "errors": sorted(expected.errors),
        "handled": sorted(set(expected.handled)),
        "done": [(number,) for number in range(len(params))],
    }, text


@SLOW
@given(pipeline=pipelines(), params=sets, data=st.data())
async def test_a_fork_does_what_a_new_job_does(session: Session, pipeline: Pipeline, params: Any, data: Any) -> None:
    """At the point that a fork begins at, the operation has new code."""
    if not params or not await valid(pipeline, session):
        return
    CALLS.begin()
    job = await session.execute(pipeline, params, checkpoint="calls")
    await outcome(job)
    known = recorded(Path(session.options.checkpoints or ""), job._known().spec.checkpoints)
    if not known:
        return
    node, frame = data.draw(st.sampled_from(sorted(known)))
    frame = frame[: data.draw(st.integers(1, len(frame)))]
    begin = (0, *frame[1:])

    def changed(name: str, at: tuple[int, ...]) -> bool:
        return name == node and at[: len(begin)] == begin

    text = f"{pipeline}\n{params} forked at {node} {frame}"
    CALLS.begin(changed=changed)
    fork = await job.fork(node, frame)
    found = await outcome(fork)
    again = CALLS.made
    CALLS.begin(changed=changed)
    new = await session.execute(pipeline, params[frame[0]])
    assert found == await outcome(new), text
    is_kept = ForkedCalls(job.plan.nodes, node, frame).is_kept
    kept = {(name, (0, *at[1:])) for name, at in known if at[0] == frame[0] and is_kept(name, at)}
    assert kept.isdisjoint(again), text
    assert any(changed(*call) for call in again), text
    for found_job in (job, fork, new):
        await session.forget(found_job.job_id)
