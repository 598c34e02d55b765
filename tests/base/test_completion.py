"""Work that is completed, however often its caller is cancelled."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from dfm_async.base.tasks import completed


class Work:
    """Work that ends when it is released, with a result or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.released = asyncio.Event()
        self.error = error
        self.done = False

    async def run(self) -> str:
        self.begun.set()
        await self.released.wait()
        self.done = True
        if self.error is not None:
            raise self.error
        return "result"


async def cancelled(work: Work, call: asyncio.Task[str], times: int) -> None:
    """Cancels a call several times while its work runs, and then lets the work end."""
    await work.begun.wait()
    for _ in range(times):
        call.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not call.done()
    work.released.set()
    await asyncio.wait([call])


async def test_completed_returns_the_result() -> None:
    work = Work()
    work.released.set()
    assert await completed(work.run()) == "result"


async def test_completed_raises_the_error() -> None:
    work = Work(ValueError("broken"))
    work.released.set()
    with pytest.raises(ValueError, match="broken"):
        await completed(work.run())


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled_caller_waits_for_the_end_of_the_work(times: int) -> None:
    work = Work()
    call = asyncio.ensure_future(completed(work.run()))
    await cancelled(work, call, times)
    assert work.done
    assert call.cancelled()


@pytest.mark.parametrize("times", [1, 2])
async def test_error_of_the_work_is_the_cause_of_the_cancellation(times: int) -> None:
    work = Work(ValueError("broken"))

    causes = []

    async def caller() -> str:
        try:
            return await completed(work.run())
        except asyncio.CancelledError as error:
            causes.append(error.__cause__)
            raise

    call = asyncio.ensure_future(caller())
    await cancelled(work, call, times)
    assert call.cancelled()
    assert causes == [work.error]


@pytest.mark.parametrize("times", [1, 2])
async def test_result_that_a_cancelled_caller_does_not_receive_is_undone(times: int) -> None:
    work = Work()
    undone: list[str] = []

    async def undo(result: str) -> None:
        call.cancel()  # also while it is undone
        await asyncio.sleep(0)
        undone.append(result)

    call = asyncio.ensure_future(completed(work.run(), undo))
    await cancelled(work, call, times)
    assert undone == ["result"]
    assert call.cancelled()


async def test_result_that_arrives_is_not_undone() -> None:
    work = Work()
    undone: list[str] = []

    async def undo(result: str) -> None:
        undone.append(result)

    work.released.set()
    assert await completed(work.run(), undo) == "result"
    assert not undone


async def test_work_is_completed_in_a_cancelled_anyio_scope() -> None:
    work = Work()

    async def release() -> None:
        await work.begun.wait()
        scope.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        work.released.set()

    releasing = asyncio.ensure_future(release())
    with anyio.CancelScope() as scope:  # noqa: TID251 - it shields nothing
        await completed(work.run())
        await anyio.lowlevel.checkpoint()  # the cancellation arrives here
    await releasing
    assert work.done
    assert scope.cancelled_caught
