"""A fork of a job uses what was recorded before a node, and runs the rest again."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    DfmError,
    Federation,
    ForEach,
    If,
    JobFailed,
    ParameterError,
    Pipeline,
    PipelineError,
    PlaceParam,
    Repeat,
    Session,
    Yield,
    collect,
    current_context,
)

CALLS: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""The calls of operations, by operation and frame."""


def offered(change: int = 0) -> tuple[Federation, Any]:
    """Return a federation, and its operations; ``change`` is code of ``step``."""
    fed = Federation("forks")
    lab, desk = fed.site("lab"), fed.site("desk")

    @lab.operation(checkpoint=True)
    async def prepare(x: int) -> int:
        _note()
        return x + 1

    if change:

        @lab.operation(checkpoint=True)
        async def step(weights: int, by: int) -> int:
            _note()
            return weights + by + change

    else:

        @lab.operation(checkpoint=True)
        async def step(weights: int, by: int) -> int:
            _note()
            return weights + by

    @desk.operation(checkpoint=True)
    async def measure(weights: int) -> int:
        _note()
        return 10 * weights

    @desk.operation
    async def publish(value: Any) -> Any:
        _note()
        return value

    @desk.operation(checkpoint=True)
    async def total(values: list[int]) -> int:
        _note()
        return sum(values)

    operations = prepare, step, measure, publish, total
    return fed, type("Operations", (), {found.name: found for found in operations})


def _note() -> None:
    context = current_context()
    CALLS[context.node.partition("#")[0], tuple(context.frame)] += 1


FED, OPS = offered()


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def training(ops: Any = OPS) -> Pipeline:
    with Pipeline("training") as pipeline:
        start = ops.prepare(PlaceParam("x"))
        with Repeat(start, times=5) as weights:
            trained = ops.step(weights, 1)
            error = ops.measure(trained)
            with If(error > 60):
                Yield(ops.publish(trained), place="good")
            weights.next(trained)
        Yield(weights)
    return pipeline


def elements() -> Pipeline:
    with Pipeline("elements") as pipeline:
        with ForEach([1, 2, 3]) as number:
            stepped = OPS.step(number, PlaceParam("x"))
            OPS.publish(stepped)
        Yield(OPS.total(collect(stepped)))
    return pipeline


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    async with Session(FED, target="inline", store=f"sqlite:///{tmp_path}/jobs.db") as session:
        yield session


def called(node: str) -> list[tuple[int, ...]]:
    return sorted(frame for name, frame in CALLS.elements() if name == node)


async def test_a_fork_runs_a_node_and_what_depends_on_it_again(session: Session) -> None:
    job = await session.execute(training(), [{"x": 0}, {"x": 1}], label="ann")
    before = await job.collect()
    CALLS.clear()
    fork = await job.fork("measure#3")
    info = fork.info()
    assert (info.fork_of, info.retry_of, info.label, info.sets) == (job.job_id, None, "ann", 2)
    after = await fork.collect()
    assert sorted((r.place, r.frame, r.value) for r in after) == sorted((r.place, r.frame, r.value) for r in before)
    assert called("measure") == [(number, n) for number in range(2) for n in range(5)]
    assert (called("prepare"), called("step")) == ([], [])


async def test_a_fork_in_a_round_runs_the_later_rounds_again(session: Session) -> None:
    job = await session.execute(training(), [{"x": 0}, {"x": 1}, {"x": 2}])
    await job
    CALLS.clear()
    fork = await job.fork("step", frame=(2, 3))
    assert [found.value for found in await fork.collect() if found.place == "yield"] == [8]
    assert fork.info().sets == 1
    assert called("step") == called("measure") == [(0, 3), (0, 4)]
    assert called("prepare") == []
    CALLS.clear()
    again = await fork.fork("prepare", frame=0)
    assert (again.info().fork_of, (await again.first("yield")).value) == (fork.job_id, 8)
    await again
    assert called("step") == [(0, n) for n in range(5)]


async def test_a_fork_of_an_element_leaves_other_elements_as_they_are(session: Session) -> None:
    job = await session.execute(elements(), {"x": 10})
    assert (await job.first()).value == 36
    CALLS.clear()
    fork = await job.fork("step", frame=[0, 1])
    assert (await fork.first()).value == 36
    assert (called("step"), called("total")) == ([(0, 1)], [(0,)])
    assert called("publish") == [(0, 0), (0, 1), (0, 2)], "what is not recorded runs again"


async def test_a_fork_uses_the_new_code_of_the_node(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    async with Session(FED, target="inline", store=store) as session:
        job = await session.execute(training(), {"x": 0}, job_id="first")
        assert (await job.first("yield")).value == 6
        await job
    changed, _ = offered(change=100)
    async with Session(changed, target="inline", store=store) as session:
        job = await session.reattach("first")
        fork = await job.fork("step", frame=(0, 4))
        assert (await fork.first("yield")).value == 5 + 101
        with pytest.raises(
            PipelineError,
            match=r"(?s)'step' at site 'lab' has changed.* with job\.fork\('publish', accept_changes=True\)",
        ):
            await job.fork("publish")
        accepted = await job.fork("publish", accept_changes=True)
        assert (await accepted.first("yield")).value == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), r"the pipeline has no call 'train'; its calls are: prepare#0, step#2, measure#3, publish#5"),
        (
            ("step", (0, 7)),
            r"no call of step#2 in frame \[0, 7\] is recorded of job .*: 10 are, from \[0, 0\] to \[1, 4\]",
        ),
        (("publish", (0, 4)), r"no call of publish#5 in frame \[0, 4\] is recorded .*checkpoint='calls'"),
        (("step", (2,)), r"job \w+ has no parameter set 2: the last one is 1"),
        (("step", (0, 1, 2)), r"a frame of step#2 is the number of a parameter set, and its iteration of Repeat#1"),
    ],
)
async def test_a_fork_from_nowhere_is_explained(session: Session, arguments: Any, message: str) -> None:
    job = await session.execute(training(), [{"x": 0}, {"x": 1}])
    await job
    with pytest.raises(ParameterError, match=message):
        await job.fork(*arguments)


async def test_a_frame_is_numbers(session: Session) -> None:
    job = await session.execute(training(), {"x": 0})
    with pytest.raises(ValueError, match=r"frame must be a number, or several, counted from 0, not \[0, -1\]"):
        await job.fork("step", frame=[0, -1])


async def test_a_fork_needs_a_store() -> None:
    async with Session(FED, target="inline") as session:
        job = await session.execute(training(), {"x": 0})
        with pytest.raises(DfmError, match="only sessions with a store record calls"):
            await job.fork("step")


async def test_one_of_several_calls_of_an_operation_must_be_chosen(session: Session) -> None:
    with Pipeline() as pipeline:
        Yield(OPS.prepare(OPS.prepare(1)))
    job = await session.execute(pipeline)
    with pytest.raises(ParameterError, match="several calls of 'prepare'; its calls are: prepare#0, prepare#1"):
        await job.fork("prepare")
    CALLS.clear()
    assert (await (await job.fork("prepare#1")).first()).value == 3
    assert dict(CALLS) == {("prepare", (0,)): 1}


async def test_a_failed_job_can_be_forked(session: Session) -> None:
    with Pipeline() as pipeline:
        first = OPS.prepare(1)
        Yield(OPS.total(OPS.publish(first)))
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed):
        await job
    fork = await job.fork("publish")
    with pytest.raises(JobFailed):
        await fork
    assert CALLS == {("prepare", (0,)): 1, ("publish", (0,)): 2, ("total", (0,)): 2}
