"""The program's side: takes tasks, hands back results and metrics."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import operator
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, SupportsFloat, SupportsIndex

from dfm_async.errors import (
    AgentClosed,
    CallStateError,
    ConversionError,
    ExchangeError,
    PeerGone,
    ResultNotDelivered,
    TransferFailed,
)
from dfm_async.exchange import messages as msg
from dfm_async.exchange.bootstrap import VARIABLE, Bootstrap, read_bootstrap
from dfm_async.exchange.greeting import greet
from dfm_async.exchange.link import Link
from dfm_async.exchange.metrics import MetricQueue
from dfm_async.exchange.options import AgentOptions
from dfm_async.exchange.pipes.base import Pipe
from dfm_async.exchange.settling import LAST_WORD, Settling
from dfm_async.exchange.states import Exchange, ExchangeState
from dfm_async.exchange.task import OK, Task, new_id
from dfm_async.exchange.values import Encoded, PlainCodec, ValueCodec
from dfm_async.runtime.once import in_thread

__all__ = ["FAILED", "FlareAgent"]

_log = logging.getLogger(__name__)

FAILED: Final = "EXECUTION_EXCEPTION"
"""The return code of a task whose handler raised."""
_QUEUED: Final = 16
"""How many tasks may wait; the site gives one at a time, so more than one is unusual."""
_REMEMBERED: Final = 64
_LAST_METRICS: Final = 5.0
"""How long closing waits until the site has taken all metrics, in seconds."""
_LAST_METRICS_AFTER_END: Final = 1.0
"""The same, if the site has ended the exchange: it may not look any more."""
_RECEIVER: Final = "program"


class _Current:
    """The task that must be answered."""

    __slots__ = ("exchange", "receivers", "task")

    def __init__(self, task: Task, exchange: Exchange, receivers: list[str]) -> None:
        self.task = task
        self.exchange = exchange
        self.receivers = receivers


class FlareAgent:
    """Takes tasks from a site, and hands back results. An async context manager.

    ``convert_task`` and ``convert_result`` can be given to turn data into what the program works with, and back.

    Args:
        bootstrap: how to find the site; by default as the environment says.
        options: how long to wait for what.
        codec: how values become bytes; both sides must have the same.
        convert_task: gets a task, gives the one that :meth:`get_task` returns.
        convert_result: gets what was submitted and the task, gives what is sent.
        pipe: a connection of another kind, such as files; then there is no handshake.
    """

    def __init__(
        self,
        bootstrap: Bootstrap | str | os.PathLike[str] | None = None,
        options: AgentOptions | None = None,
        *,
        codec: ValueCodec | None = None,
        convert_task: Callable[[Task], Task] | None = None,
        convert_result: Callable[[Any, Task], Any] | None = None,
        pipe: Callable[[], Pipe] | None = None,
    ) -> None:
        _check_options(options)
        self.options = options or AgentOptions()
        self._bootstrap = bootstrap
        self._make_pipe = pipe
        self._codec: ValueCodec = codec or PlainCodec()
        self._convert_task = convert_task
        self._convert_result = convert_result
        self._link: Link | None = None
        self._launch_once = True
        self._queue: deque[_Current] = deque()
        self._answers: OrderedDict[str, msg.TaskAnswer | None] = OrderedDict()
        self._current: _Current | None = None
        self._submitted: Task | None = None
        self._taking = 0
        self._result: asyncio.Future[msg.ResultAnswer] | None = None
        self._result_id = ""
        self._settling: Settling | None = None
        self._closed: AgentClosed | None = None
        self._ending: AgentClosed | None = None
        self._changed: asyncio.Future[None] | None = None
        self._metrics = MetricQueue(self.options.metric_queue)
        self.site = ""
        """The name of the site."""
        self.job = ""
        """The job that the program works for."""

    @classmethod
    def from_environment(cls, options: AgentOptions | None = None, **rest: Any) -> FlareAgent:
        """An agent for a program that a site has launched, ours or one of NVFLARE.

        NVFLARE 2.5 to 2.8 must use a ``FilePipe``; 2.9 needs the extra ``flare``.

        Raises:
            HandshakeRefused: it has not.
        """
        _check_options(options)
        if VARIABLE not in os.environ and "NVFLARE_CLIENT_API_BOOTSTRAP" in os.environ:
            from dfm_async.exchange.cell.agent import agent_of_cell_api

            return agent_of_cell_api(cls, options, **rest)
        if VARIABLE not in os.environ and "CLIENT_API_TYPE" in os.environ:
            from dfm_async.exchange.filepipe.agent import agent_of_client_api

            return agent_of_client_api(cls, options, **rest)
        return cls(read_bootstrap(), options, **rest)

    # connection

    async def __aenter__(self) -> FlareAgent:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, Exception) and not issubclass(kind, AgentClosed):
            await self.abort(f"{kind.__name__}: {error}")
        await self.close()

    async def start(self) -> None:
        """Connects, and says hello; ``async with`` does it.

        Raises:
            HandshakeRefused: the site does not want this program, or cannot be found.
            TimeoutError: it did not answer.
        """
        if self._link is not None or self._closed is not None:
            raise CallStateError("start", "the agent was started already")
        early: list[msg.Message] = []
        if self._make_pipe is not None:
            pipe = self._make_pipe()
        else:
            pipe, early = await self._greet()
        self._link = Link(pipe, self.options, self._received, self._gone)
        for message in early:
            self._link.received(message, 0)
        self._link.open()

    async def _greet(self) -> tuple[Pipe, list[msg.Message]]:
        found = self._bootstrap
        bootstrap = found if isinstance(found, Bootstrap) else read_bootstrap(found)
        pipe, welcome, early = await greet(bootstrap, self.options.connect_timeout, self.options.heartbeat_timeout)
        self.site, self.job = welcome.site, welcome.job
        self._launch_once = bootstrap.launch_once
        return pipe, early

    @property
    def launch_once(self) -> bool:
        """Whether the program serves many tasks."""
        chosen = self.options.launch_once
        return self._launch_once if chosen is None else chosen

    @property
    def closed(self) -> AgentClosed | None:
        """Why there are no more tasks; None while there may be. Tasks that are queued come before the end."""
        if self._closed is not None:
            return self._closed
        return None if self._has_work else self._ending

    @property
    def _has_work(self) -> bool:
        """Whether there are tasks that were given to the program before an end."""
        return bool(self._queue or self._taking) or self._current is not None or self._submitted is not None

    # tasks

    async def get_task(self, timeout: float | None = None) -> Task | None:  # noqa: ASYNC109 - None is an answer
        """Waits for a task.

        Args:
            timeout: how long, in seconds; None means without end. A task that is there is returned even with 0.

        Returns:
            The task, or None after the timeout.

        Raises:
            AgentClosed: there will be no more; ``reason`` says why.
            CallStateError: the last task is not answered.
        """
        loop = self._opened("get_task")
        due = None if timeout is None else loop.time() + timeout
        while True:
            if self._closed is not None:
                raise _anew(self._closed)
            if self._current is not None:
                raise CallStateError("get_task", f"task {self._current.task} is not answered: call submit_result first")
            if self._submitted is not None:
                raise CallStateError("get_task", f"the result of task {self._submitted} is still on its way")
            if self._queue:
                self._current = self._queue.popleft()
                return self._current.task
            if self._ending is not None and not self._taking:
                self._closed = self._ending
                continue
            if due is not None and loop.time() >= due:
                return None
            await self._change(due)

    async def _change(self, due: float | None) -> None:
        """Waits until something has happened that getting a task depends on."""
        loop = asyncio.get_running_loop()
        if self._changed is None or self._changed.done():
            self._changed = loop.create_future()
        timer = None if due is None else loop.call_at(due, self._wake)
        try:
            await asyncio.shield(self._changed)
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def __aiter__(self) -> AsyncIterator[Task]:
        return self

    async def __anext__(self) -> Task:
        """The next task; ends when the site says so, raises AgentClosed if it gave up or is gone."""
        try:
            task = await self.get_task()
        except AgentClosed as closed:
            if closed.reason in ("ended", "closed here"):
                raise StopAsyncIteration from None
            raise
        assert task is not None  # noqa: S101 - there was no timeout
        return task

    async def run(self, handler: Callable[[Task], Any]) -> None:
        """Calls a handler for every task, and submits what it returns, until the site ends it.

        A handler that is not async runs in a thread, so that signs of life go on. What it raises is told to the site
        as the result of the task, with the return code ``EXECUTION_EXCEPTION``, and the next task is waited for.
        So it is when a result could not be delivered, which is logged: the site knows, and decides.
        """
        async for task in self:
            try:
                if inspect.iscoroutinefunction(handler):
                    result = await handler(task)
                else:
                    result = await in_thread(functools.partial(handler, task), f"task {task.name}")
                    if inspect.isawaitable(result):
                        result = await result
            except Exception as error:  # noqa: BLE001 - it is told to the site
                await self._submit_and_go_on(None, FAILED, f"{type(error).__name__}: {error}")
            else:
                await self._submit_and_go_on(result, OK, "")

    async def _submit_and_go_on(self, result: Any, rc: str, reason: str) -> None:
        try:
            await self.submit_result(result, rc, reason=reason)
        except (ExchangeError, TimeoutError):
            _log.exception("a result was not delivered")

    # results

    async def submit_result(self, result: Any, rc: str = OK, *, reason: str = "") -> None:
        """Answers the current task; returns when the result has arrived with all its large parts.

        Whatever happens, the task is answered by this call, and the next one can be got. Until it returns, arrays in
        the result must not be changed: they are not copied.

        Args:
            result: the answer.
            rc: the return code.
            reason: why it is not ``OK``.

        Raises:
            CallStateError: there is no task to answer.
            ConversionError: the result could not be converted or encoded; the site was told.
            ResultNotDelivered: it did not arrive, or was refused; says how far it came, and why no further.
            AgentClosed: the connection had ended before.
            TimeoutError: the site did not accept it in time.
        """
        self._opened("submit_result")
        current, self._current = self._current, None
        if current is None:
            if self._closed is not None:
                raise _anew(self._closed)
            raise CallStateError("submit_result", "there is no task: call get_task first")
        self._submitted = current.task
        try:
            await self._answer(current, result, rc, str(reason))
        finally:
            self._submitted = self._result = None
            if not self.launch_once and self._closed is None:
                self._ending = AgentClosed("ended", "the program serves one task")
            self._wake()

    async def _answer(self, current: _Current, result: Any, rc: str, reason: str) -> None:
        link = self._link
        assert link is not None  # noqa: S101 - there was a task
        if self._closed is not None:
            raise _anew(self._closed)
        encoded = Encoded(b"")
        problem: ConversionError | None = None
        try:
            _check_code(rc)
            with link.payload():
                if self._convert_result is not None:
                    result = self._convert_result(result, current.task)
                encoded = self._encode(result)
        except Exception as error:  # noqa: BLE001 - raised again, when the site has been told
            encoded, rc = self._nothing(), FAILED
            reason = f"the result could not be converted: {type(error).__name__}: {error}"
            problem = ConversionError("result", str(current.task), f"{type(error).__name__}: {error}")
            problem.__cause__ = error
        try:
            await self._deliver(link, current, encoded, rc, reason)
        except (ExchangeError, TimeoutError):
            if problem is None:
                raise
        if problem is not None:
            raise problem

    def _nothing(self) -> Encoded:
        """What stands for a result that cannot be sent: the site reads the reason, not this."""
        try:
            return self._codec.encode(None)
        except Exception:  # noqa: BLE001 - a codec that cannot even do this; then the site says that it got nothing
            return Encoded(b"")

    def _encode(self, result: Any) -> Encoded:
        encoded = self._codec.encode(result)
        if encoded.parts and self.options.max_resends is None:
            raise ValueError("max_resends=None is not allowed for results with large parts")
        return encoded

    async def _deliver(self, link: Link, current: _Current, encoded: Encoded, rc: str, reason: str) -> None:
        exchange = current.exchange
        tx = self._result_id = new_id()
        parts = [(number, len(data)) for number, data in encoded.parts.items()]
        settling = None
        if parts:
            settling = Settling(link, tx, encoded.parts, current.receivers)
        self._settling = settling
        self._result = asyncio.get_running_loop().create_future()
        exchange.advance(ExchangeState.RESULT_OFFERED)
        offer = msg.ResultOffer(current.task.id, tx, rc, encoded.data, parts, reason)
        limit = self.options.submit_result_timeout
        if not link.pipe.shows_progress:
            limit = max(limit, self.options.download_complete_timeout)
        try:
            answer = await link.confirm(
                offer, self._result, limit, f"the site did not accept the result of task {current.task}: that", tx=tx
            )
            if not answer.accepted:
                exchange.advance(ExchangeState.REJECTED, answer.reason)
                raise ResultNotDelivered(current.task.id, exchange.state.value, answer.reason)
            exchange.advance(ExchangeState.RESULT_ACCEPTED)
            if settling is not None:
                exchange.advance(ExchangeState.TRANSFERRING)
                with link.payload():  # the site may be busy with rebuilding it
                    problem = await settling.wait()
                if problem:
                    exchange.advance(ExchangeState.FAILED, problem)
                    raise ResultNotDelivered(current.task.id, exchange.state.value, problem)
            exchange.advance(ExchangeState.SETTLED)
        except AgentClosed as error:
            exchange.advance(ExchangeState.ABORTED, str(error))
            raise ResultNotDelivered(current.task.id, exchange.state.value, str(error)) from error
        except PeerGone as error:
            exchange.advance(ExchangeState.FAILED, error.detail)
            raise ResultNotDelivered(current.task.id, exchange.state.value, error.detail) from error
        except TimeoutError as error:
            exchange.advance(ExchangeState.FAILED, str(error))
            raise
        finally:
            if not exchange.ended:
                exchange.advance(ExchangeState.ABORTED, "it was cancelled")
            self._settling = None
            if settling is not None:
                settling.free()

    # metrics and progress

    async def log(self, record: Mapping[str, Any], *, step: SupportsIndex | None = None) -> None:
        """Sends metrics to the site. May be called at any time, by any number of tasks.

        Returns as soon as the record is queued; waits only if more than ``metric_queue`` of them are on their way.

        Args:
            record: names and numbers.
            step: which step of the training they belong to.

        Raises:
            CallStateError: there is no way for metrics.
            AgentClosed: the connection has ended.
            EncodingError: the record cannot be sent.
        """
        self._opened("log")
        link = self._link
        assert link is not None  # noqa: S101 - it is open
        if not link.pipe.has_metrics:
            raise CallStateError("log", "this connection has no channel for metrics")
        if not isinstance(record, Mapping):
            raise TypeError(f"metrics must be names and numbers, not {record!r}")
        number = None if step is None else operator.index(step)
        data = self._codec.encode_metrics(record)
        while self._metrics.full and self._closed is None:
            await self._metrics.changed()
        if self._closed is not None:
            raise _anew(self._closed)
        link.send(msg.Metrics(self._metrics.next(), data, number))

    def progress(self, done: SupportsFloat, total: SupportsFloat | None = None, note: str = "") -> None:
        """Tells the site how far the program is with its task."""
        self._opened("progress")
        if self._link is not None:
            self._link.send(msg.Progress(float(done), None if total is None else float(total), str(note)))

    # what comes

    def _received(self, message: msg.Message) -> None:
        if isinstance(message, msg.TaskOffer):
            self._task_offered(message)
        elif isinstance(message, msg.ResultAnswer):
            self._result_answered(message)
        elif isinstance(message, msg.Settled):
            if self._settling is not None:
                self._settling.settled(message)
        elif isinstance(message, msg.MetricTaken):
            self._metrics.taken(message.number)
        elif isinstance(message, msg.End):
            self._stop("ended", message.reason)
        elif isinstance(message, msg.Abort):
            self._stop("aborted", message.reason)

    def _result_answered(self, answer: msg.ResultAnswer) -> None:
        # Nothing about this task is on its way any more: it may be given again.
        self._answers.pop(answer.task, None)
        waiting = self._result
        # An answer that comes twice must not be taken for that of the next result.
        if waiting is not None and not waiting.done() and answer.result == self._result_id:
            waiting.set_result(answer)

    def _task_offered(self, offer: msg.TaskOffer) -> None:
        link = self._link
        assert link is not None  # noqa: S101 - it came from there
        if offer.task in self._answers:  # it came again: so does the answer, when there is one
            answer = self._answers[offer.task]
            if answer is not None:
                link.send(answer)
            return
        self._answers[offer.task] = None
        while len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)
        if self._closed is not None or self._ending is not None:
            self._reply(offer, "the program takes no more tasks")
        elif len(self._queue) >= _QUEUED:
            self._reply(offer, f"{_QUEUED} tasks are waiting already")
        elif offer.parts:
            self._taking += 1
            link.tasks.start(self._take_large(link, offer), f"task {offer.task}")
        else:
            self._take(link, offer, {})

    async def _take_large(self, link: Link, offer: msg.TaskOffer) -> None:
        try:
            parts = await link.pull(link.pulls(offer.task, offer.parts, _RECEIVER))
        except TransferFailed as error:
            self._reply(offer, str(error))
        else:
            self._take(link, offer, parts)
        finally:
            self._taking -= 1
            self._wake()

    def _take(self, link: Link, offer: msg.TaskOffer, parts: Mapping[int, memoryview]) -> None:
        try:
            with link.payload():
                data = self._codec.decode(Encoded(offer.data, parts))
                task = Task(offer.name, data, id=offer.task, round=offer.round, total_rounds=offer.total_rounds)
                if self._convert_task is not None:
                    task = self._convert_task(task)
        except Exception as error:  # noqa: BLE001 - it is told to the site
            self._reply(offer, f"the task could not be converted: {type(error).__name__}: {error}")
            return
        exchange = Exchange(offer.task)
        exchange.advance(ExchangeState.ACCEPTED)
        self._queue.append(_Current(task, exchange, offer.receivers))
        self._reply(offer, "")
        self._wake()

    def _reply(self, offer: msg.TaskOffer, problem: str) -> None:
        answer = msg.TaskAnswer(offer.task, not problem, problem)
        self._answers[offer.task] = answer
        if self._link is not None:
            self._link.send(answer)

    def _gone(self, reason: str) -> None:
        self._stop("peer gone", reason)

    def _stop(self, reason: str, detail: str) -> None:
        """The other side has ended, gave up, or is gone; or this one was closed."""
        if reason == "ended":
            self._ending = self._ending or AgentClosed(reason, detail)  # what is queued comes first
            self._wake()
            return
        closed = AgentClosed(reason, detail)
        if reason == "peer gone" and self._ending is not None and not self._has_work:
            closed = self._ending  # it said so before
        if self._closed is None:
            self._closed = closed
            self._queue.clear()
        if reason != "ended" and self._settling is not None:
            self._settling.abandon(str(closed))
        if self._result is not None and not self._result.done():
            self._result.set_exception(_anew(closed))
        self._metrics.wake()
        self._wake()

    def _opened(self, call: str) -> asyncio.AbstractEventLoop:
        if self._link is None:
            if self._closed is not None:
                raise _anew(self._closed)
            raise CallStateError(call, "the agent is not started: use 'async with'")
        return asyncio.get_running_loop()

    # the end

    async def abort(self, reason: str = "the program gave up") -> None:
        """Gives up, and tells the site why."""
        if self._link is not None and self._closed is None:
            self._link.send(msg.Abort(reason))
            self._stop("closed here", reason)

    async def close(self) -> None:
        """Ends the connection. A result that is on its way is given up, unless it has arrived after all."""
        link = self._link
        if link is None:
            self._closed = self._closed or AgentClosed("closed here")
            return
        if self._closed is None or self._closed.reason == "ended":
            await self._last_metrics(link)
        if self._closed is None and self._result is not None:
            await asyncio.wait({self._result}, timeout=LAST_WORD)
        if self._closed is None:
            link.send(msg.End("the program is done"))
            self._stop("closed here", "")
        settling = self._settling
        if settling is not None:
            await settling.over.wait()
        await link.aclose()

    async def _last_metrics(self, link: Link) -> None:
        """Waits until the site has taken all metrics, as far as it can be expected to."""
        loop = asyncio.get_running_loop()
        due = loop.time() + (_LAST_METRICS if self._ending is None else _LAST_METRICS_AFTER_END)
        while self._metrics.missing and link.gone is None:
            if loop.time() >= due:
                _log.warning("%d metrics were not taken by the site", self._metrics.missing)
                return
            await self._metrics.changed(due)

    def __repr__(self) -> str:
        state = str(self._closed) if self._closed is not None else "up" if self._link is not None else "not started"
        task = f", working on {self._current.task}" if self._current is not None else ""
        return f"<FlareAgent of {self.site or 'a site'}: {state}{task}>"


def _check_options(options: object) -> None:
    if options is not None and not isinstance(options, AgentOptions):
        raise TypeError(f"options must be AgentOptions, not {options!r}")


def _check_code(rc: object) -> None:
    if not isinstance(rc, str) or not rc:
        raise TypeError(f"rc must be a return code, not {rc!r}")


def _anew(closed: AgentClosed) -> AgentClosed:
    """The same for another caller: an exception that is raised twice would keep the frames of both."""
    return AgentClosed(closed.reason, closed.detail)
