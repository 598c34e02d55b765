"""The site's end of a connection to a program that is up: tasks go out, results come in."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dfm_async.errors import BadResult, BadTask, ExchangeError, PeerGone, TaskAborted, TaskRejected, TransferFailed
from dfm_async.exchange import messages as msg
from dfm_async.exchange.link import Link
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.pipes.base import Pipe
from dfm_async.exchange.states import Exchange, ExchangeState
from dfm_async.exchange.task import OK, Task, TaskResult, new_id
from dfm_async.exchange.transfers import FileSink, MemorySink, Pull, Sink
from dfm_async.exchange.values import Encoded, ValueCodec

__all__ = ["Fate", "OfferedResult", "SiteEnd"]

_log = logging.getLogger(__name__)

SITE: Final = "site"
"""The receiver that is the executor itself."""
_PROGRAM: Final = "program"


@dataclass(frozen=True, slots=True)
class Fate:
    """How the connection ended.

    Attributes:
        kind: the program said that it ends; it gave up, or was told to stop; it vanished.
        detail: what is known beyond that.
    """

    kind: Literal["ended", "aborted", "peer gone"]
    detail: str


class OfferedResult:
    """A result whose large parts are with the program until all receivers have pulled them.

    Attributes:
        task: the task.
        rc: the program's return code.
        reason: why it is not ``OK``.
    """

    def __init__(
        self,
        end: SiteEnd,
        exchange: Exchange,
        task: Task,
        offer: msg.ResultOffer,
        receivers: Sequence[str],
        check: Callable[[Any], str] | None,
    ) -> None:
        self.task = task
        self.rc = offer.rc
        self.reason = offer.reason
        self._end = end
        self._exchange = exchange
        self._offer = offer
        self._check = check
        self.value: TaskResult | None = None
        """The result, if it has no large parts."""
        self._open = set(receivers)
        self._pulls: dict[str, list[Pull]] = {}
        self._problems: list[str] = []
        self.settled = asyncio.Event()
        """Set when no receiver needs the program any more."""
        if not offer.parts:
            self.settled.set()

    @property
    def state(self) -> ExchangeState:
        """How far the exchange is."""
        return self._exchange.state

    @property
    def size(self) -> int:
        """How many bytes the large parts have."""
        return sum(size for _, size in self._offer.parts)

    async def pull(self, receiver: str, *, folder: str | None = None) -> TaskResult:
        """Pulls everything for one receiver. If it is cancelled, it can be called again, and goes on where it was.

        Args:
            receiver: for whom; one of those that the task named.
            folder: write large parts to files there, and map them, instead of keeping them in memory. The caller
                removes the files.

        Raises:
            TransferFailed: a large part did not come.
            BadResult: the data cannot be rebuilt here, or is not what the task asks for.
        """
        if self.value is not None:
            return self.value
        if receiver not in self._open:
            raise TransferFailed("all", receiver, "it is not a receiver of this result, or has it already")
        link = self._end.link

        def sink(number: int, size: int) -> Sink:
            if folder is None:
                return MemorySink(size)
            # Nothing of what the program says is part of a name: it could lead anywhere.
            return FileSink(size, os.path.join(folder, f"{new_id()}.{number}"))

        try:
            if receiver not in self._pulls:
                self._pulls[receiver] = link.pulls(self._offer.result, self._offer.parts, receiver, sink)
            data = self._decode(await link.pull(self._pulls[receiver]))
        except (TransferFailed, BadResult) as error:
            self._done(receiver, str(error))
            raise
        self._done(receiver, "")
        return TaskResult(data, rc=self.rc, task=self.task.id, reason=self.reason)

    def decode(self) -> None:
        """Rebuilds a result without large parts."""
        self.value = TaskResult(self._decode({}), rc=self.rc, task=self.task.id, reason=self.reason)

    def _decode(self, parts: Mapping[int, memoryview]) -> Any:
        if self._offer.data == b"":  # the program had none to send, and says why by its return code
            return None
        try:
            with self._end.link.payload():
                data = self._end.codec.decode(Encoded(self._offer.data, parts))
        except Exception as error:
            raise BadResult(self.task.name, f"it cannot be rebuilt here: {error}") from error
        if self._check is not None and self.rc == OK and (problem := self._check(data)):
            raise BadResult(self.task.name, problem)
        return data

    def _done(self, receiver: str, problem: str) -> None:
        """One receiver has ended. When all have, the program is told."""
        if problem:
            self._problems.append(problem)
        self._open.discard(receiver)
        self._pulls.pop(receiver, None)
        if not self._open and not self.settled.is_set():
            self.settled.set()
            good = not self._problems
            self._exchange.advance(ExchangeState.SETTLED if good else ExchangeState.FAILED, "; ".join(self._problems))
            status = "finished" if good else "failed"
            self._end.link.send(msg.Settled(self._offer.result, status, "; ".join(self._problems)))


class SiteEnd:
    """Talks to one program, from its hello to its end.

    Args:
        pipe: the connection.
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
        self.codec = codec
        self.fate: asyncio.Future[Fate] = asyncio.get_running_loop().create_future()
        """Set when there is nothing more to expect from the program."""
        self._dismissed = False
        self._options = options
        self._on_metrics = on_metrics
        self._on_progress = on_progress
        self._exchange: Exchange | None = None
        self._task: Task | None = None
        self._answer: asyncio.Future[msg.TaskAnswer] | None = None
        self._result: asyncio.Future[msg.ResultOffer] | None = None
        self._replies: dict[str, msg.ResultAnswer] = {}
        self.link = Link(pipe, options, self._received, lambda reason: self._ended(Fate("peer gone", reason)))
        self.link.open()

    @property
    def up(self) -> bool:
        """Whether the program can be given a task."""
        return not self.fate.done() and not self._dismissed

    @property
    def leaving(self) -> bool:
        """Whether the process can be expected to end: one that ends in order says so first, others just vanish."""
        return self.fate.done() and self.fate.result().kind != "aborted" and not self.link.silent

    @property
    def state(self) -> ExchangeState | None:
        """How far the current exchange is."""
        return self._exchange.state if self._exchange is not None else None

    @property
    def task_name(self) -> str:
        """The name of the current task, or of the last one."""
        return self._task.name if self._task is not None else ""

    async def exchange(
        self, task: Task, receivers: Sequence[str] = (SITE,), check: Callable[[Any], str] | None = None
    ) -> OfferedResult:
        """Sends a task, and waits for its result.

        Returns:
            The result, whose large parts can be pulled.

        Raises:
            ExchangeError: it failed, in one of many ways.
            TimeoutError: the program took too long.
        """
        loop = asyncio.get_running_loop()
        exchange = self._exchange = Exchange(task.id)
        self._task = task
        self._answer = loop.create_future()
        self._result = loop.create_future()
        if self.fate.done():
            self._ended(self.fate.result())
        try:
            await self._offer(task, receivers, self._answer)
            offer = await self._wait_for_result(task, self._result)
            return self._take(exchange, task, offer, receivers, check)
        except asyncio.CancelledError:
            exchange.advance(ExchangeState.ABORTED, "it was cancelled")
            raise
        except (BadTask, TaskRejected, BadResult) as error:
            exchange.advance(ExchangeState.REJECTED, str(error))
            raise
        except TaskAborted as error:
            exchange.advance(ExchangeState.ABORTED, error.reason)
            raise
        except (ExchangeError, TimeoutError) as error:
            exchange.advance(ExchangeState.FAILED, str(error))
            raise
        finally:
            for future in (self._answer, self._result):
                if future is not None and not future.cancel() and not future.cancelled():
                    future.exception()  # nobody has to look at it
            self._answer = self._result = None

    async def _offer(self, task: Task, receivers: Sequence[str], answer: asyncio.Future[msg.TaskAnswer]) -> None:
        link, options = self.link, self._options
        try:
            with link.payload():
                encoded = self.codec.encode(task.data)
        except Exception as error:
            raise BadTask(task.name, f"its data cannot be encoded: {error}") from error
        if encoded.parts and options.max_resends is None:
            raise BadTask(task.name, "it has large parts, and for those max_resends=None is not allowed")
        parts = [(number, len(data)) for number, data in encoded.parts.items()]
        if parts:
            link.offer(task.id, encoded.parts, (_PROGRAM,), lambda: None)
        offer = msg.TaskOffer(task.id, task.name, encoded.data, parts, task.round, task.total_rounds, list(receivers))
        try:
            found = await link.confirm(
                offer,
                answer,
                options.peer_read_timeout,
                f"the program did not accept task {task}: that",
                tx=task.id,
            )
        finally:
            link.withdraw(task.id)
        if not found.accepted:
            raise TaskRejected(task.name, found.reason)

    async def _wait_for_result(self, task: Task, result: asyncio.Future[msg.ResultOffer]) -> msg.ResultOffer:
        limit = self._options.task_wait_timeout
        if limit is None:
            return await result
        await asyncio.wait({result}, timeout=limit)
        if not result.done():
            raise TimeoutError(f"the result of task {task} took longer than {limit:g} s")
        return result.result()

    def _take(
        self,
        exchange: Exchange,
        task: Task,
        offer: msg.ResultOffer,
        receivers: Sequence[str],
        check: Callable[[Any], str] | None,
    ) -> OfferedResult:
        found = OfferedResult(self, exchange, task, offer, receivers, check)
        if offer.parts:
            exchange.advance(ExchangeState.RESULT_ACCEPTED)
            exchange.advance(ExchangeState.TRANSFERRING)
            self._reply(msg.ResultAnswer(offer.task, offer.result, True))
            return found
        try:
            found.decode()
        except BadResult as error:
            self._reply(msg.ResultAnswer(offer.task, offer.result, False, error.problem))
            raise
        exchange.advance(ExchangeState.RESULT_ACCEPTED)
        exchange.advance(ExchangeState.SETTLED)
        self._reply(msg.ResultAnswer(offer.task, offer.result, True))
        return found

    def _reply(self, answer: msg.ResultAnswer) -> None:
        self._replies = {answer.result: answer}  # the last one only: one task is under way at a time
        self.link.send(answer)

    # what comes

    def _received(self, message: msg.Message) -> None:
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            _log.debug("ignored %r", message)
        else:
            handler(self, message)

    def _task_answered(self, answer: msg.TaskAnswer) -> None:
        exchange = self._exchange
        if exchange is None or answer.task != exchange.task or self._answer is None or self._answer.done():
            return
        if answer.accepted:
            exchange.advance(ExchangeState.ACCEPTED)
        self._answer.set_result(answer)

    def _result_offered(self, offer: msg.ResultOffer) -> None:
        if offer.result in self._replies:  # it came again: so does the answer
            self.link.send(self._replies[offer.result])
            return
        exchange = self._exchange
        if exchange is None or offer.task != exchange.task or self._result is None:
            self.link.send(msg.ResultAnswer(offer.task, offer.result, False, "nobody waits for this task's result"))
        elif not self._result.done():
            if self._answer is not None and not self._answer.done():
                # The result says as much as the answer that was lost on its way.
                self._task_answered(msg.TaskAnswer(offer.task, True))
            exchange.advance(ExchangeState.RESULT_OFFERED)
            self._result.set_result(offer)

    def _metrics(self, metrics: msg.Metrics) -> None:
        try:
            self._on_metrics(self.codec.decode_metrics(metrics.data), metrics.step)
        except Exception:  # noqa: BLE001 - what the user's function raises must not end the exchange
            _log.exception("metrics of a program were not taken")
        self.link.send(msg.MetricTaken(metrics.number))

    def _progress(self, progress: msg.Progress) -> None:
        try:
            self._on_progress(progress.done, progress.total, progress.note)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("the progress of a program was not taken")

    def _peer_ends(self, end: msg.End) -> None:
        self._ended(Fate("ended", end.reason or "the program ended the exchange"))

    def _peer_aborts(self, abort: msg.Abort) -> None:
        self._ended(Fate("aborted", abort.reason or "the program gave up"))

    _HANDLERS: Final[dict[type, Callable[..., None]]] = {
        msg.TaskAnswer: _task_answered,
        msg.ResultOffer: _result_offered,
        msg.Metrics: _metrics,
        msg.Progress: _progress,
        msg.End: _peer_ends,
        msg.Abort: _peer_aborts,
    }

    def _ended(self, fate: Fate) -> None:
        if not self.fate.done():
            self.fate.set_result(fate)
        name = self.task_name
        for future in (self._answer, self._result):
            if future is not None and not future.done():
                future.set_exception(
                    TaskAborted(name, fate.detail) if fate.kind == "aborted" else PeerGone(fate.detail)
                )

    def fail(self, error: ExchangeError) -> None:
        """Ends what is under way: the program will not go on with it."""
        for future in (self._answer, self._result):
            if future is not None and not future.done():
                future.set_exception(error)
        self.link.fail(error)

    # the end

    def end(self, reason: str) -> None:
        """Asks the program to finish what it has, and then to stop."""
        self._dismissed = True
        self.link.send(msg.End(reason))

    def abort(self, reason: str) -> None:
        """Tells the program to stop now. It is not up any more."""
        self._dismissed = True
        self.link.send(msg.Abort(reason))
        self._ended(Fate("aborted", reason))

    async def aclose(self, flush: float | None = None) -> None:
        """Ends the connection; what was said last may take so long, in seconds."""
        await self.link.aclose(flush)
        if not self.fate.done():
            self.fate.set_result(Fate("peer gone", "the connection was closed here"))
