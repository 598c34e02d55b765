"""The agent for programs without an event loop: its calls block, its thread does not outlive it (3.2)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from dfm_async.base.tasks import in_thread
from dfm_async.errors import AgentClosed, CallStateError, ConversionError, HandshakeRefused
from dfm_async.exchange import AgentOptions, FlareAgent, LauncherExecutor, PlainCodec, Task, sync
from dfm_async.exchange.bootstrap import VARIABLE
from tests.exchange.executors import ANY
from tests.support.waiting import PROMPT

LARGE = np.arange(100_000)


def agents() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dfm-agent"]


@pytest.fixture(autouse=True)
def nothing_lives_on() -> Iterator[None]:
    yield
    left = agents()
    sync.shutdown()
    assert left == [], "a thread was left behind"


@contextlib.asynccontextmanager
async def program(work: Callable[[], Any], **options: Any) -> AsyncIterator[tuple[LauncherExecutor, asyncio.Task[Any]]]:
    """An executor, and a program in a thread that uses the synchronous calls."""
    async with LauncherExecutor(None, ANY, **options) as executor:
        path = executor.bootstrap()

        def run() -> Any:
            sync.init(path)
            try:
                return work()
            finally:
                sync.shutdown()

        working = asyncio.ensure_future(in_thread(run, "program"))
        try:
            yield executor, working
        finally:
            await executor.finalize()
            await asyncio.wait({working})


def serve() -> list[Any]:
    """What a script does."""
    seen = []
    while sync.is_running():
        task = sync.receive()
        if task is None:
            break
        seen.append(task.name)
        sync.send(task.data)
    return seen


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_script_serves_tasks_until_the_end(transport: str) -> None:
    async with program(serve, transport=transport) as (executor, working):
        for data in (1, {"x": LARGE}, None):
            np.testing.assert_equal((await executor.execute(Task("any", data))).data, data)
        await executor.end()
        assert await working == ["any"] * 3


async def test_is_running_neither_waits_nor_takes_a_task() -> None:
    def work() -> Any:
        assert sync.receive(0) is sync.receive(0.01) is None
        go_on.set()
        before = [sync.is_running() for _ in range(100)]
        task = sync.receive()
        assert task is not None
        during = [sync.is_running() for _ in range(100)]
        sync.send(task.data)
        return all(before) and all(during)

    go_on = threading.Event()
    async with program(work) as (executor, working):
        assert await in_thread(lambda: go_on.wait(5), "waiting")
        assert (await executor.execute(Task("any", 7))).data == 7
        assert await working


async def test_is_running_is_false_after_the_end_and_receive_gives_none() -> None:
    def work() -> Any:
        assert sync.receive() is None
        return sync.is_running(), sync.receive()

    async with program(work) as (executor, working):
        await asyncio.wait_for(_up(executor), PROMPT)
        await executor.finalize()
        assert await working == (False, None)


async def test_receive_raises_when_the_site_aborts() -> None:
    def work() -> Any:
        with pytest.raises(AgentClosed, match=r"aborted \(enough\)"):
            sync.receive()
        return sync.is_running()

    async with program(work) as (executor, working):
        end = await asyncio.wait_for(_up(executor), PROMPT)
        end.abort("enough")
        assert await working is False


async def _up(executor: LauncherExecutor) -> Any:
    assert executor._up is not None
    return await asyncio.shield(executor._up)


async def test_the_state_of_calls_is_checked() -> None:
    def work() -> Any:
        with pytest.raises(CallStateError, match="there is no task"):
            sync.send(1)
        sync.receive()
        with pytest.raises(CallStateError, match="is not answered"):
            sync.receive()
        with pytest.raises(ConversionError):
            sync.send(object())
        sync.receive()
        sync.send("fine", "HALF", reason="the other half")

    async with program(work) as (executor, working):
        assert (await executor.execute(Task("any"))).rc == "EXECUTION_EXCEPTION"
        result = await executor.execute(Task("any"))
        assert (result.data, result.rc, result.reason) == ("fine", "HALF", "the other half")
        await working


async def test_metrics_and_progress_come_from_any_thread() -> None:
    seen: list[Any] = []

    def work() -> None:
        task = sync.receive()
        threads = [threading.Thread(target=sync.log, args=({"n": n},), kwargs={"step": n}) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sync.progress(1, 2, "half")
        assert task is not None
        sync.send(None)

    async with program(
        work,
        on_metrics=lambda values, step: seen.append((values["n"], step)),
        on_progress=lambda *what: seen.append(what),
    ) as (executor, working):
        await executor.execute(Task("any"))
        assert sorted(seen[:-1]) == [(n, n) for n in range(5)]
        assert seen[-1] == (1.0, 2.0, "half")
        await working


async def test_init_gives_the_same_agent_until_shutdown() -> None:
    def work() -> Any:
        first = sync.init("not looked at")
        same = sync.init() is first
        sync.shutdown()
        sync.shutdown()
        return same, sync.is_running()

    async with program(work) as (_, working):
        assert await working == (True, False)
        assert agents() == []


def test_every_call_before_init_is_refused() -> None:
    assert not sync.is_running()
    sync.shutdown()
    for call in (sync.receive, lambda: sync.send(1), lambda: sync.log({}), lambda: sync.progress(1)):
        with pytest.raises(CallStateError, match=r"call init\(\) first"):
            call()


def test_an_init_that_fails_leaves_no_thread_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "CLIENT_API_TYPE", "NVFLARE_CLIENT_API_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with pytest.raises(HandshakeRefused):
            sync.init()
        assert agents() == []
    with pytest.raises(TypeError):
        sync.init("not looked at", options="fast")  # type: ignore[arg-type]
    assert agents() == []


async def test_the_environment_names_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LauncherExecutor(None, ANY, site="berlin") as executor:
        monkeypatch.setenv(VARIABLE, str(executor.bootstrap()))

        def run() -> str:
            found = sync.init(options=AgentOptions(launch_once=False)).agent
            sync.shutdown()
            return f"{found.site} {found.launch_once}"

        assert await in_thread(run, "program") == "berlin False"


async def test_a_call_after_shutdown_raises_agent_closed() -> None:
    async with LauncherExecutor(None, ANY) as executor:
        path = executor.bootstrap()

        def run() -> None:
            agent = sync.SyncAgent(lambda: FlareAgent(path))
            agent.shutdown()
            agent.shutdown()
            assert not agent.is_running()
            assert agent.receive() is None
            with pytest.raises(AgentClosed, match="closed here"):
                agent.send(1)
            with pytest.raises(AgentClosed, match="closed here"):
                agent.log({})
            agent.progress(1)

        await in_thread(run, "program")


async def test_shutdown_ends_calls_of_other_threads() -> None:
    """They would wait for a loop that does not run any more."""
    async with LauncherExecutor(None, ANY) as executor:
        path = executor.bootstrap()

        def run() -> list[Any]:
            agent = sync.SyncAgent(lambda: FlareAgent(path))
            found: list[Any] = []

            def receive() -> None:
                found.append(agent.receive())

            waiting = [threading.Thread(target=receive) for _ in range(3)]
            for thread in waiting:
                thread.start()
            stopping = [threading.Thread(target=agent.shutdown) for _ in range(2)]
            for thread in stopping:
                thread.start()
            for thread in (*waiting, *stopping):
                thread.join(5)
                assert not thread.is_alive()
            return found

        assert await in_thread(run, "program") == [None] * 3


async def test_a_script_whose_site_vanishes_gets_peer_gone() -> None:
    def work() -> Any:
        sync.receive()
        sync.send(1)
        with pytest.raises(AgentClosed) as caught:
            sync.receive()
        return caught.value.reason

    async with program(work) as (executor, working):
        await executor.execute(Task("any"))
        end = executor._connection
        assert end is not None
        end._pipe.close()
        assert await working == "peer gone"


# values in several threads


BEGUN = threading.Event()
GO_ON = threading.Event()


class Halting(msgspec.Struct):
    """A value that waits in the middle of being rebuilt."""

    number: int

    def __post_init__(self) -> None:
        if threading.current_thread().name.endswith("halting"):
            BEGUN.set()
            assert GO_ON.wait(5)


async def test_values_are_rebuilt_in_several_threads_at_once() -> None:
    codec = PlainCodec()
    encoded = codec.encode([Halting(1), LARGE])
    rebuilding = asyncio.ensure_future(in_thread(lambda: codec.decode(encoded), "halting"))
    assert await in_thread(lambda: BEGUN.wait(5), "waiting")
    assert np.array_equal(codec.decode(codec.encode(LARGE)), LARGE)
    GO_ON.set()
    assert np.array_equal((await rebuilding)[1], LARGE)
