"""Gates, on both targets and in threads."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator

import pytest

from dfm_async import Federation, JobAborted, JobFailed, Pipeline, Session
from dfm_async.testing import Gate
from tests.support.pipelines import pipeline_of

fed = Federation("gated")
lab = fed.site("lab")
at_module_level = Gate()


@lab.operation
async def wait_there(gate: Gate, x: int) -> int:
    await gate.arrive()
    return x


@lab.operation
def block_there(gate: Gate, x: int) -> int:
    gate.arrive_blocking()
    return x


@lab.operation
async def block_the_loop(gate: Gate) -> None:
    gate.arrive_blocking()


@lab.operation
async def wait_at_module_level() -> None:
    await at_module_level.arrive()


waiting = pipeline_of(wait_there, "gate", "x")
blocking = pipeline_of(block_there, "gate", "x")
blocks_the_loop = pipeline_of(block_the_loop, "gate")
stranded = pipeline_of(wait_at_module_level)

of_each_kind = pytest.mark.parametrize("pipeline", [waiting, blocking], ids=["async", "sync"])


@pytest.fixture
async def gate(session: Session) -> AsyncIterator[Gate]:
    """A gate that is open at the end of the test, before its session closes."""
    with Gate() as found:
        yield found


@of_each_kind
async def test_an_operation_waits_at_a_gate_until_the_test_opens_it(
    session: Session, gate: Gate, pipeline: Pipeline
) -> None:
    job = await session.execute(pipeline, {"gate": gate, "x": 3})
    await gate.arrived()
    assert (gate.waiting, gate.arrivals) == (1, 1)
    assert not await job.wait_until_finished(timeout=0)
    gate.open()
    assert (await job.first()).value == 3
    later = await session.execute(pipeline, {"gate": gate, "x": 4})
    assert (await later.first()).value == 4
    assert (gate.waiting, gate.arrivals) == (0, 2)


@of_each_kind
async def test_gate_lets_a_number_of_callers_pass(session: Session, gate: Gate, pipeline: Pipeline) -> None:
    gate.let_through()  # the first that comes
    job = await session.execute(pipeline, [{"gate": gate, "x": x} for x in range(3)])
    await gate.arrived(3)
    await job.first()
    assert gate.waiting == 2
    gate.let_through(2)
    assert sorted(result.value for result in await job.collect()) == [0, 1, 2]


async def test_cancelled_caller_leaves_the_gate(session: Session, gate: Gate) -> None:
    job = await session.execute(waiting, {"gate": gate, "x": 3})
    await gate.arrived()
    await job.cancel()
    with pytest.raises(JobAborted):
        await job
    await gate.cleared()
    again = await session.execute(waiting, {"gate": gate, "x": 4})
    await gate.arrived(2)
    gate.let_through()  # not for the one that has left
    assert (await again.first()).value == 4


async def test_leaving_the_block_opens_the_gate(session: Session) -> None:
    with Gate() as gate:
        job = await session.execute(blocking, {"gate": gate, "x": 3})
        await gate.arrived()
    assert (await job.first()).value == 3


async def test_blocking_on_the_loop_is_refused(session: Session, gate: Gate) -> None:
    with pytest.raises(JobFailed, match=r"await gate.arrive\(\) instead"):
        await (await session.execute(blocks_the_loop, {"gate": gate}))


async def test_gate_made_in_a_worker_raises() -> None:
    async with Session(fed) as session:
        with pytest.raises(JobFailed, match="pass it to the operation as a parameter"):
            await (await session.execute(stranded))


async def test_waiting_for_an_arrival_can_be_cancelled() -> None:
    gate = Gate()
    waiting = asyncio.ensure_future(gate.arrived(1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.gather(gate.arrived(1), _come(gate))
    assert repr(gate) == "<Gate: open, 1 arrived>"


async def _come(gate: Gate) -> None:
    gate.open()
    await gate.arrive()


async def test_gate_notifies_when_it_has_no_waiters() -> None:
    gate = Gate()
    await gate.cleared()
    coming = [asyncio.ensure_future(gate.arrive()) for _ in range(2)]
    await gate.arrived(2)
    clearing = asyncio.ensure_future(gate.cleared())
    gate.let_through()
    await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
    assert not clearing.done()
    coming[1].cancel()
    await clearing
    await asyncio.wait(coming)


def test_a_gate_that_was_sent_is_served_by_one_thread_until_it_is_closed() -> None:
    def served() -> bool:
        return any(thread.name == "dfm-testing" for thread in threading.enumerate())

    with Gate() as gate:
        assert not served()
        assert repr(pickle.loads(pickle.dumps(gate))) == "<Gate of another process>"
        assert served()
        with Gate() as other:
            pickle.dumps(other)
        assert served()
    assert not served()
