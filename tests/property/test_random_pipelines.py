from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfm_async import Event, Failure, JobFailed, JobStatus, Pipeline, PipelineError, Result, Session, Yield
from dfm_async.events import FailureHandled, FrameCompleted, WaitBegan
from tests.property.random_pipelines import SITES, fed, functions, pipelines, total
from tests.reference import interpret, value_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]

sets = st.lists(
    st.fixed_dictionaries({"x": st.integers(0, 9)}, optional={"y": st.integers(0, 9)}), min_size=0, max_size=3
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def inline() -> AsyncIterator[Session]:
    async with Session(fed, target="inline") as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local() -> AsyncIterator[Session]:
    async with Session(fed, target="local") as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def spreading() -> AsyncIterator[Session]:
    """A session whose workers take every call for one that computes, and run it in another worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFM_SPREAD", "always")
        async with Session(fed, target="local") as session:
            with Pipeline("start the workers") as pipeline:
                Yield([total([1], site=site) for site in SITES])
            await (await session.execute(pipeline)).first()
            patch.undo()
            yield session


def _shared(taken: list[tuple[int, str]], text: str) -> tuple[list[tuple[int, str]], Counter[tuple[int, str]]]:
    """Return the events that are sent before they are waited for, in some order, and those that are sent after that."""
    draw = random.Random(text)
    early = [event for event in taken if draw.random() < 0.5]
    draw.shuffle(early)
    return early, Counter(taken) - Counter(early)


async def check(session: Session, pipeline: Pipeline, params: list[dict[str, Any]]) -> None:
    expected = interpret(pipeline, functions, params)
    text = f"{pipeline}\n{params}"
    async with asyncio.timeout(20):
        job = await session.execute(pipeline, params)
        early, late = _shared(expected.events, text)
        for index, name in early:
            await job.send(name, value_of(name), frame=index)
        events: list[Event] = []
        async for event in job.events():
            events.append(event)
            if isinstance(event, WaitBegan) and late[event.frame[0], event.name]:
                late[event.frame[0], event.name] -= 1
                await job.send(event.name, value_of(event.name), frame=event.frame[0])
    results = [(e.place, e.frame, e.value) for e in events if isinstance(e, Result)]
    lost = [(e.place, e.frame) for e in events if isinstance(e, Failure) and e.place is not None]
    errors = [(e.node, e.frame) for e in events if isinstance(e, Failure) and e.place is None]
    handled = [(e.node, e.frame) for e in events if isinstance(e, FailureHandled)]
    done = [e.frame for e in events if isinstance(e, FrameCompleted)]
    assert sorted(results) == sorted(expected.results), text
    assert sorted(lost) == sorted(expected.lost), text
    assert sorted(errors) == sorted(expected.errors), text
    assert sorted(handled) == sorted(expected.handled), text
    assert sorted(done) == [(i,) for i in range(len(params))]
    assert [e.offset for e in events] == list(range(len(events)))
    if expected.errors:
        assert job.status is JobStatus.FAILED
        with pytest.raises(JobFailed):
            await job
    else:
        assert await job is JobStatus.FINISHED


async def valid(pipeline: Pipeline, session: Session) -> bool:
    try:
        await session.prepare(pipeline)
    except PipelineError as error:
        # The maker collects whatever it finds; only that may be refused.
        if not all("collect" in problem.statement for problem in error.problems):
            raise
        return False
    return True


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(pipeline=pipelines(), params=sets)
async def test_inline_does_what_plain_python_does(inline: Session, pipeline: Pipeline, params: Any) -> None:
    if await valid(pipeline, inline):
        await check(inline, pipeline, params)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(pipeline=pipelines(), params=sets, spread=st.sampled_from([False, False, True]))
async def test_worker_processes_do_what_plain_python_does(
    local: Session, spreading: Session, pipeline: Pipeline, params: Any, spread: bool
) -> None:
    session = spreading if spread else local
    if await valid(pipeline, session):
        await check(session, pipeline, params)
