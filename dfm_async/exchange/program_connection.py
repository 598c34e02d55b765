"""A site's connection to a program that is up: tasks go out, results come in."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dfm_async.errors import BadResult, BadTask, TransferFailed
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.connection import Connection, Pipe
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.site_machine import SiteMachine, result_problem
from dfm_async.exchange.task import OK, Exchange, ExchangeState, Task, TaskResult, new_id
from dfm_async.exchange.transfers import Download, MemorySink, Sink, TransferFile
from dfm_async.exchange.value_codec import Encoded, ValueCodec

_log = logging.getLogger(__name__)

SITE: Final = "site"
"""The receiver that is the executor itself."""


class OfferedResult:
    """A result whose large parts are with the program until all receivers have pulled them.

    Attributes:
        task: the task.
        rc: the program's return code.
        reason: why it is not ``OK``.
    """

    def __init__(
        self,
        connection: ProgramConnection,
        task: Task,
        offer: msg.ResultOffer,
        receivers: Sequence[str],
    ) -> None:
        exchange = connection.machine.exchange
        assert exchange is not None  # noqa: S101 - it has a result
        self.task = task
        self.rc: str = offer.rc
        self.reason: str = offer.reason
        self._connection = connection
        self._exchange: Exchange = exchange
        self._offer = offer
        self.value: TaskResult | None = None
        """The result, if it has no large parts."""
        self._open = set(receivers)
        self._downloads: dict[str, Download] = {}
        self._problems: list[str] = []
        self.settled: asyncio.Event = asyncio.Event()
        """Set when no receiver needs the program any longer."""
        if not offer.parts:
            self.settled.set()

    @property
    def state(self) -> ExchangeState:
        """How far the exchange is."""
        return self._exchange.state

    @property
    def size(self) -> int:
        """The number of bytes of the large parts."""
        return sum(size for _, size in self._offer.parts)

    async def pull(self, receiver: str, *, folder: str | None = None) -> TaskResult:
        """Pull everything for one receiver. If it is cancelled, it can be called again, and resumes where it was.

        Args:
            receiver: the name of the receiver; one of those that the task named.
            folder: write large parts to files there, and map them, instead of keeping them in memory. The caller
                removes the files.

        Raises:
            TransferFailed: a large part did not come.
            BadResult: the data cannot be decoded here, or is not what the task asks for.
        """
        if self.value is not None:
            return self.value
        if receiver not in self._open:
            raise TransferFailed("all", receiver, "it is not a receiver of this result, or has it already")

        def sink(number: int, size: int) -> Sink:
            if folder is None:
                return MemorySink(size)
            # Nothing that the program sends is part of a name: it could lead anywhere.
            return TransferFile(size, os.path.join(folder, f"{new_id()}.{number}"))

        try:
            if receiver not in self._downloads:
                self._downloads[receiver] = self._connection.machine.download(
                    self._offer.result, self._offer.parts, receiver, sink
                )
            data = self._decode(await self._connection.pull(self._downloads[receiver]))
        except (TransferFailed, BadResult) as error:
            self._done(receiver, str(error))
            raise
        self._done(receiver, "")
        return TaskResult(data, rc=self.rc, task=self.task.id, reason=self.reason)

    def decode(self) -> None:
        """Decode a result without large parts."""
        self.value = TaskResult(self._decode({}), rc=self.rc, task=self.task.id, reason=self.reason)

    def _decode(self, parts: Mapping[int, memoryview]) -> Any:
        if self._offer.data == b"":  # the program had none to send, and says why by its return code
            return None
        try:
            with self._connection.machine.payload():
                data = self._connection.codec.decode(Encoded(self._offer.data, parts))
        except Exception as error:
            raise BadResult(self.task.name, f"it cannot be decoded here: {error}") from error
        if self.rc == OK and (problem := result_problem(self._connection.options, self.task, data)):
            raise BadResult(self.task.name, problem)
        return data

    def _done(self, receiver: str, problem: str) -> None:
        """Take note that one receiver has ended. When all have, the program is notified."""
        if problem:
            self._problems.append(problem)
        self._open.discard(receiver)
        self._downloads.pop(receiver, None)
        if not self._open and not self.settled.is_set():
            self.settled.set()
            reason = "; ".join(self._problems)
            self._exchange.advance(ExchangeState.FAILED if reason else ExchangeState.SETTLED, reason)
            self._connection.send(msg.Settled(self._offer.result, "failed" if reason else "finished", reason))


class ProgramConnection(Connection[SiteMachine]):
    """Talks to one program, from its hello to its end.

    Args:
        pipe: the transport.
        options: how long to wait for what.
        codec: how values become bytes.
        on_metrics: gets what the program measures.
        on_progress: gets how far the program is.
    """

    def __init__(
        self,
        pipe: Pipe,
        options: ExecutorOptions,
        codec: ValueCodec,
        *,
        on_metrics: Callable[[Mapping[str, Any], int | None], None],
        on_progress: Callable[[float, float | None, str], None],
    ) -> None:
        self.options = options
        self.codec = codec
        self._on_metrics = on_metrics
        self._on_progress = on_progress
        machine = SiteMachine(options, pipe.traits, asyncio.get_running_loop().time, pipe.silence)
        super().__init__(pipe, machine, self._carry_out)
        self.open()

    @property
    def up(self) -> bool:
        """Whether the program can be given a task."""
        return self.machine.up

    @property
    def state(self) -> ExchangeState | None:
        """How far the current exchange is."""
        return self.machine.exchange.state if self.machine.exchange is not None else None

    def send(self, message: msg.Message) -> None:
        """Send a message."""
        self.machine.send(message)
        self.run()

    @property
    def end_detail(self) -> str:
        """Why there is nothing more to expect from the program."""
        return self.machine.end.detail if self.machine.end is not None else ""

    async def exchange(self, task: Task, receivers: Sequence[str] = (SITE,)) -> OfferedResult:
        """Send a task, and wait for its result.

        Returns:
            The result, whose large parts can be pulled.

        Raises:
            ExchangeError: it failed, in one of many ways.
            TimeoutError: the program took too long.
        """
        machine = self.machine
        machine.begin_exchange(task)
        try:
            try:
                with machine.payload():
                    encoded = self.codec.encode(task.data)
            except Exception as error:
                raise BadTask(task.name, f"its data cannot be encoded: {error}") from error
            machine.offer(task, encoded, receivers)
            self.run()
            offer = await self.until(machine.result)
            assert offer is not None  # noqa: S101 - there was no timeout
            found = OfferedResult(self, task, offer, receivers)
            if not offer.parts:
                try:
                    found.decode()
                except BadResult as error:
                    machine.reject(offer, error.problem)
                    raise
            machine.accept(offer)
        except BaseException as error:
            machine.end_exchange(error)
            raise
        else:
            machine.end_exchange(None)
            return found
        finally:
            self.run()

    async def pull(self, download: Download) -> Mapping[int, memoryview]:
        """Pull large parts. If it is cancelled, it can be called again, and resumes where it was.

        Raises:
            TransferFailed: a part did not come.
        """
        self.machine.pull(download)
        self.run()
        try:
            await self.until(lambda: download.ended)
        finally:
            self.machine.pause(download)
            self.run()
        if download.error is not None:
            raise download.error
        return download.data

    def _carry_out(self, effect: Any) -> None:
        try:
            if isinstance(effect, msg.ProgramMetrics):
                self._on_metrics(self.codec.decode_metrics(effect.data), effect.step)
            else:
                self._on_progress(effect.done, effect.total, effect.note)
        except Exception:  # noqa: BLE001 - what the user's function raises must not end the exchange
            what = "metrics" if isinstance(effect, msg.ProgramMetrics) else "progress"
            _log.exception("%s of a program cannot be handled", what)

    def fail(self, error: Exception) -> None:
        """Fail what is in flight: the program will not go on with it."""
        self.machine.fail(error)
        self.run()

    def end(self, reason: str) -> None:
        """Ask the program to finish what it has, and then to stop."""
        self.machine.dismiss(msg.EndOfTasks(reason))
        self.run()

    def abort(self, reason: str) -> None:
        """Tell the program to stop now. It is not up any longer."""
        self.machine.dismiss(msg.Abort(reason))
        self.run()
