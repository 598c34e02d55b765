"""Tasks with an owner, and blocking calls in threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from dfm_async.base.tasks import OwnedTasks, in_thread


async def test_owned_tasks_are_named_and_forgotten_at_their_end() -> None:
    tasks = OwnedTasks()

    async def work() -> str:
        return "result"

    task = tasks.spawn(work(), "work of a test")
    assert task.get_name() == "work of a test"
    assert len(tasks) == 1
    assert await task == "result"
    await tasks.wait()
    assert not len(tasks)


async def test_owned_tasks_run_in_the_context_that_is_passed() -> None:
    tasks, variable = OwnedTasks(), contextvars.ContextVar("variable", default="outside")

    async def work() -> str:
        return variable.get()

    context = contextvars.copy_context()
    context.run(variable.set, "inside")
    assert await tasks.spawn(work(), "work", context=context) == "inside"
    await tasks.wait()


async def test_error_of_an_owned_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = OwnedTasks()

    async def fail() -> None:
        raise ValueError("broken")

    tasks.spawn(fail(), "failing work")
    await tasks.wait()
    (record,) = caplog.records
    assert "failing work" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


async def test_error_of_an_owned_task_is_passed_to_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[tuple[str, BaseException]] = []
    tasks = OwnedTasks(lambda task, error: errors.append((task.get_name(), error)))
    error = ValueError("broken")

    async def fail() -> None:
        raise error

    tasks.spawn(fail(), "failing work")
    await tasks.wait()
    assert errors == [("failing work", error)]
    assert not caplog.records


async def test_owned_tasks_wait_for_tasks_that_are_started_meanwhile() -> None:
    tasks, done = OwnedTasks(), list[int]()

    async def work(depth: int) -> None:
        await asyncio.sleep(0)
        if depth:
            tasks.spawn(work(depth - 1), "work")
        done.append(depth)

    tasks.spawn(work(3), "work")
    await tasks.wait()
    assert done == [3, 2, 1, 0]


async def test_owned_tasks_close_ends_tasks_that_are_started_meanwhile() -> None:
    tasks, ended = OwnedTasks(), list[str]()

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            if name == "first":
                tasks.spawn(work("second"), "second")
                await asyncio.sleep(0)

    tasks.spawn(work("first"), "first")
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["first", "second"]
    assert not len(tasks)


async def test_owned_tasks_close_that_is_cancelled_loses_no_task() -> None:
    tasks, release = OwnedTasks(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()

    tasks.spawn(work(), "work")
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(tasks.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert len(tasks) == 1
    release.set()
    await tasks.wait()


async def test_owned_tasks_close_without_tasks_returns_at_once() -> None:
    await OwnedTasks().close()


async def test_in_thread_returns_the_result_of_another_thread() -> None:
    name = await in_thread(lambda: threading.current_thread().name, "test")
    assert name == "dfm-test"


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError(), SystemExit(3)])
async def test_in_thread_raises_what_the_call_raises(error: BaseException) -> None:
    def call() -> Any:
        raise error

    with pytest.raises(type(error)):
        await in_thread(call, "test")


async def test_in_thread_raises_stop_iteration_as_a_cause() -> None:
    with pytest.raises(RuntimeError) as found:
        await in_thread(lambda: next(iter([])), "test")
    assert isinstance(found.value.__cause__, StopIteration)


async def test_in_thread_cancelled_leaves_the_call_running() -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        release.wait(30)
        ended.set()

    waiting = asyncio.ensure_future(in_thread(call, "test"))
    await in_thread(lambda: begun.wait(30), "gate")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not ended.is_set()
    release.set()
    assert await in_thread(lambda: ended.wait(30), "gate")
