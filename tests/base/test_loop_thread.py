"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator

import pytest

from dfm_async.base.loop_thread import LoopStopped, LoopThread
from tests.support.waiting import PROMPT


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("dfm-test")
    assert thread.start()
    yield thread
    thread.stop()


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Have Ctrl-C raise, also if the tests run in the background, where the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


async def _failing() -> None:
    raise LookupError("gone")


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    assert loop.call(threading.current_thread).name == "dfm-test"
    with pytest.raises(LookupError, match="gone"):
        loop.run(_failing())


def test_interrupt_is_raised_when_the_coroutine_has_ended(loop: LoopThread) -> None:
    ended = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)
            raise LookupError("while cleaning up")

    with pytest.raises(KeyboardInterrupt) as caught:
        loop.run(work())
    assert ended == [True]
    assert isinstance(caught.value.__cause__, LookupError)


def test_second_interrupt_is_raised_at_once(loop: LoopThread) -> None:
    go_on = asyncio.Event()

    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        try:
            await asyncio.Event().wait()
        finally:
            interrupt()
            await go_on.wait()

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    loop.call_soon(go_on.set)


def test_loop_that_does_not_run_refuses_work_but_calls_functions() -> None:
    loop = LoopThread("dfm-test")
    for state in ("not started", "stopped"):
        with pytest.raises(LoopStopped, match=state):
            loop.run(asyncio.sleep(0))
        loop.spawn(asyncio.sleep(0))
        loop.call_soon(print, "never")
        assert loop.call(threading.current_thread) is threading.current_thread()
        loop.stop()
    assert not loop.start()


def test_stop_ends_calls_of_other_threads(loop: LoopThread) -> None:
    began, failed = threading.Event(), []

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(LoopStopped):
            loop.run(work())
        failed.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(PROMPT)
    loop.stop()
    waiting.join(PROMPT)
    assert failed == [True]


def test_call_in_the_thread_of_the_loop_is_refused(loop: LoopThread) -> None:
    with pytest.raises(RuntimeError, match="would wait for itself"):
        loop.call(lambda: loop.run(asyncio.sleep(0)))


def test_errors_of_work_that_nobody_waits_for_are_logged(loop: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    loop.spawn(_failing())
    loop.call(lambda: None)
    loop.stop()
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR]
