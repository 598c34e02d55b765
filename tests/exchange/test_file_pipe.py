"""Connections by files, with both ends in this process: what goes wrong with names, disks, metrics and odd messages."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import ExchangeError, PeerGone, TaskAborted, TaskRejected
from dfm_async.exchange import (
    AgentOptions,
    ExecutorOptions,
    FlareAgent,
    Invitation,
    LauncherExecutor,
    ProgramState,
    ProgramStatus,
    Task,
)
from dfm_async.exchange.filepipe import fobs, queue
from dfm_async.exchange.filepipe.models import Shareable, ShareableCodec, metrics_to_dxos
from dfm_async.exchange.filepipe.pipe import FilePipe
from dfm_async.exchange.filepipe.queue import DirectoryQueue, MessageName, Side
from dfm_async.exchange.filepipe.transport import FilePipeTransport
from tests.support.waiting import PROMPT

Work = Callable[[str], Awaitable[None]]

OPTIONS = ExecutorOptions(other_tasks=("*",), peer_read_timeout=30)
TRAIN = Task("train", {"w": np.ones(2)}, round=0, total_rounds=1)


class Within:
    """Launches a coroutine instead of a program; it gets the folder of the pipes."""

    launch_once = True
    needs_deferred_stop = False

    def __init__(self, work: Work) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def initialize(self) -> None: ...

    async def launch(self, task: Task, invitation: Invitation) -> None:
        assert invitation.cwd is not None
        config = json.loads(Path(invitation.cwd, "config/client_api_config.json").read_text())
        root = config["TASK_EXCHANGE"]["pipe"]["ARG"]["root_path"]
        self._task = asyncio.ensure_future(self._work(root))

    async def stop(self, *, asked: bool = True) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=1 if asked else 0)
            self._task.cancel()
            await asyncio.wait({self._task})

    async def finalize(self) -> None:
        await self.stop()

    def status(self) -> ProgramStatus:
        if self._task is None:
            return ProgramStatus(ProgramState.NOT_RUNNING)
        done = self._task.done()
        return ProgramStatus(ProgramState.SUCCESS if done else ProgramState.RUNNING, 0 if done else None)

    async def ended(self) -> ProgramStatus:
        assert self._task is not None
        await asyncio.wait({self._task})
        return self.status()


def agent_at(root: str, **options: Any) -> FlareAgent:
    def connect() -> FilePipe:
        pipe = FilePipe(root, Side.ACTIVE, silence=0.9)
        pipe.start()
        return pipe

    return FlareAgent(None, AgentOptions(**options), codec=ShareableCodec(), pipe=connect)


async def echo(root: str) -> None:
    async with agent_at(root) as agent:
        async for task in agent:
            await agent.submit_result(task.data)


def executor_of(work: Work, options: ExecutorOptions = OPTIONS, **rest: Any) -> LauncherExecutor:
    return LauncherExecutor(Within(work), options, transport=FilePipeTransport(), **rest)


@asynccontextmanager
async def channel(root: str, name: str = "task") -> AsyncIterator[DirectoryQueue]:
    """The program's end of a channel, played by hand."""
    async with DirectoryQueue(root, name, Side.ACTIVE) as found:
        yield found


async def answer(tasks: DirectoryQueue, content: bytes | None = None) -> None:
    """Answer one task, with its own data or with other content, and stay."""
    task = await tasks.get()
    await tasks.put(MessageName("train", "r1", task.name.id), [task.data if content is None else content])
    await asyncio.sleep(60)


# folders


async def test_executors_in_one_folder_have_their_own_pipes_and_leave_those_of_others(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("of the user")
    first, second = (
        LauncherExecutor(Within(echo), OPTIONS, transport=FilePipeTransport(folder=tmp_path)) for _ in "12"
    )
    async with asyncio.timeout(PROMPT):
        await first.initialize()
        await second.initialize()
        await first.execute(TRAIN)
        await second.execute(TRAIN)
        await second.finalize()
        assert (await first.execute(TRAIN)).ok
        await first.finalize()
    assert os.listdir(tmp_path) == ["data.txt"]


# names and disks


@pytest.mark.parametrize("name", ["my-task", "schön", "a.b", "x" * 300])
async def test_a_task_with_an_invalid_file_name_is_refused_and_the_next_passes(name: str) -> None:
    async with executor_of(echo) as executor, asyncio.timeout(PROMPT):
        with pytest.raises(TaskRejected, match="cannot be written"):
            await executor.execute(Task(name, {"w": np.zeros(2)}))
        result = await executor.execute(TRAIN)
        assert list(result.data.params["w"]) == [1, 1]


async def test_a_task_that_does_not_fit_on_the_disk_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = queue._write_somewhere

    async def full(file: Any, pieces: list[memoryview]) -> None:
        if sum(len(piece) for piece in pieces) > 10_000:
            file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await write(file, pieces)

    monkeypatch.setattr(queue, "_write_somewhere", full)
    async with executor_of(echo) as executor, asyncio.timeout(PROMPT):
        with pytest.raises(TaskRejected, match="No space left"):
            await executor.execute(Task("train", {"w": np.zeros(10_000)}, round=0, total_rounds=1))
        await executor.execute(Task("train", {"w": np.zeros(10)}, round=0, total_rounds=1))


async def test_files_that_cannot_be_read_end_the_connection_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    take = DirectoryQueue._take
    broken = False

    def refuse(self: DirectoryQueue) -> Any:
        if broken and self._inbox.name == "y":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return take(self)

    monkeypatch.setattr(DirectoryQueue, "_take", refuse)

    async def program(root: str) -> None:
        nonlocal broken
        async with agent_at(root) as agent:
            await agent.get_task()
            broken = True
            await asyncio.sleep(60)

    async with executor_of(program) as executor, asyncio.timeout(PROMPT):
        with pytest.raises(PeerGone, match="Permission denied"):
            await executor.execute(TRAIN)


# metrics


async def metrics_of(program: Work) -> list[Mapping[str, Any]]:
    """The metrics that a program sends with the result of a task."""
    found: list[Mapping[str, Any]] = []
    async with (
        executor_of(program, on_metrics=lambda values, _: found.append(values)) as executor,
        asyncio.timeout(PROMPT),
    ):
        await executor.execute(TRAIN)
    return found


async def test_records_without_metrics_do_not_fill_the_queue_of_metrics() -> None:
    async def program(root: str) -> None:
        async with agent_at(root, metric_queue=3) as agent:
            async for task in agent:
                for _ in range(10):
                    await agent.log({})
                await agent.log({"loss": 0.5})
                await agent.submit_result(task.data)

    assert await metrics_of(program) == [{"loss": 0.5}]


async def test_many_metrics_come_in_order_and_leave_the_loop_free() -> None:
    async def program(root: str) -> None:
        async with agent_at(root) as agent:
            async for task in agent:
                for number in range(500):
                    await agent.log({"loss": number}, step=number)
                await agent.submit_result(task.data)

    steps: list[int | None] = []
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with executor_of(program, on_metrics=lambda _, step: steps.append(step)) as executor:
        counting = asyncio.create_task(count())
        await executor.execute(TRAIN)
        counting.cancel()
    assert steps == list(range(500))
    assert turns > 500


async def test_a_metric_that_is_the_first_message_is_not_lost() -> None:
    async def program(root: str) -> None:
        async with channel(root, "metric") as metrics, channel(root) as tasks:
            (dxo,) = metrics_to_dxos({"loss": 0.5}, 1)
            await metrics.put(MessageName("metric", "m1"), [fobs.dumps(dxo)])
            await answer(tasks)

    assert await metrics_of(program) == [{"loss": 0.5}]


# odd messages


@pytest.mark.parametrize(
    "content",
    [b"garbage", b"", fobs.dumps(5), fobs.dumps({"__headers__": 5}), fobs.dumps(Shareable({"__headers__": 5}))],
)
async def test_a_result_that_cannot_be_read_ends_the_task_and_not_the_site(content: bytes) -> None:
    async def program(root: str) -> None:
        async with channel(root) as tasks:
            await tasks.put(MessageName("_HEARTBEAT_", "b1"), [fobs.dumps("")])
            await answer(tasks, content)

    async with executor_of(program) as executor, asyncio.timeout(PROMPT):
        with pytest.raises(TaskAborted, match="cannot be read"):
            await executor.execute(TRAIN)
        with pytest.raises(ExchangeError):
            await executor.execute(TRAIN)
