"""The program's side: takes tasks, hands back results and metrics."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import operator
import os
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, SupportsFloat, SupportsIndex

from dfm_async.base.tasks import in_thread
from dfm_async.errors import AgentClosed, CallStateError, ConversionError, ExchangeError
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.agent_machine import LAST_MESSAGE, AgentMachine, DecodeTask
from dfm_async.exchange.bootstrap import VARIABLE, Bootstrap, read_bootstrap
from dfm_async.exchange.connection import Connection, Pipe
from dfm_async.exchange.handshake import perform_handshake
from dfm_async.exchange.options import AgentOptions
from dfm_async.exchange.task import OK, Task
from dfm_async.exchange.transports import TRANSPORTS, load
from dfm_async.exchange.value_codec import Encoded, PlainCodec, ValueCodec

_log = logging.getLogger(__name__)

FAILED: Final = "EXECUTION_EXCEPTION"
"""The return code of a task whose handler raised."""
_LAST_METRICS: Final = 5.0
"""How long closing waits until the site has taken all metrics, in seconds."""
_LAST_METRICS_AFTER_END: Final = 1.0
"""The same, if the site has ended the exchange: it may not read any longer."""


class FlareAgent:
    """Receive tasks from a site, and return results. An async context manager.

    ``convert_task`` and ``convert_result`` convert between the data of the site and the data of the program.

    Args:
        bootstrap: the address of the site; by default, the environment contains it.
        options: timeouts and limits of the agent.
        codec: how values become bytes; both sides must have the same.
        convert_task: takes a task, returns the one that :meth:`get_task` returns.
        convert_result: takes what was submitted and the task, returns what is sent.
        pipe: creates a connection of another kind, such as files, which has no handshake.
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
        self.options: AgentOptions = options or AgentOptions()
        self._bootstrap = bootstrap
        self._make_pipe = pipe
        self._codec: ValueCodec = codec or PlainCodec()
        self._convert_task = convert_task
        self._convert_result = convert_result
        self._launch_once = True
        self._connection: Connection[AgentMachine] | None = None
        self._closed: AgentClosed | None = None
        """Set if it was closed before it was started."""
        self.site: str = ""
        """The name of the site."""
        self.job: str = ""
        """The job that the program works for."""

    @classmethod
    def from_environment(cls, options: AgentOptions | None = None, **rest: Any) -> FlareAgent:
        """Make an agent for a program that a site has launched, ours or one of NVFLARE.

        NVFLARE 2.5 to 2.8 must use a ``FilePipe``; 2.9 needs the extra ``flare``.

        Raises:
            HandshakeRefused: no site has launched this program.
        """
        _check_options(options)
        if VARIABLE not in os.environ:
            for row in TRANSPORTS.values():
                if row.variable and row.variable in os.environ:
                    made: FlareAgent = load(row.agent)(cls, options, **rest)
                    return made
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
        """Connect, and perform the handshake; ``async with`` does it.

        Raises:
            HandshakeRefused: the site does not accept this program, or cannot be found.
            TimeoutError: it did not answer.
        """
        if self._connection is not None or self._closed is not None:
            raise CallStateError("start", "the agent was started already")
        early: list[msg.Message] = []
        if self._make_pipe is not None:
            pipe = self._make_pipe()
        else:
            pipe, early = await self._perform_handshake()
        clock = asyncio.get_running_loop().time
        machine = AgentMachine(self.options, pipe.traits, clock, pipe.silence, launch_once=self.launch_once)
        self._connection = Connection(pipe, machine, self._decode_task)
        for message in early:
            self._connection.received(message, 0)
        self._connection.open()

    async def _perform_handshake(self) -> tuple[Pipe, list[msg.Message]]:
        found = self._bootstrap
        bootstrap = found if isinstance(found, Bootstrap) else read_bootstrap(found)
        pipe, welcome, early = await perform_handshake(
            bootstrap, self.options.connect_timeout, self.options.heartbeat_timeout
        )
        self.site, self.job = welcome.site, welcome.job
        self._launch_once = bootstrap.launch_once
        return pipe, early

    def _opened(self, call: str) -> tuple[AgentMachine, Connection[AgentMachine]]:
        if self._connection is None:
            if self._closed is not None:
                raise AgentClosed(self._closed.reason, self._closed.detail)
            raise CallStateError(call, "the agent is not started: use 'async with'")
        return self._connection.machine, self._connection

    @property
    def launch_once(self) -> bool:
        """Whether the program serves many tasks."""
        chosen = self.options.launch_once
        return self._launch_once if chosen is None else chosen

    @property
    def closed(self) -> AgentClosed | None:
        """Why there are no more tasks; None while there may be. Tasks that are queued come before the end."""
        return self._closed if self._connection is None else self._connection.machine.closed

    # tasks

    async def get_task(self, timeout: float | None = None) -> Task | None:  # noqa: ASYNC109 - None is an answer
        """Wait for a task.

        Args:
            timeout: how long, in seconds; None means without end. A task that has come is returned even with 0.

        Returns:
            The task, or None after the timeout.

        Raises:
            AgentClosed: there will be no more; ``reason`` says why.
            CallStateError: the last task is not answered.
        """
        machine, connection = self._opened("get_task")
        due = None if timeout is None else asyncio.get_running_loop().time() + timeout
        return await connection.until(machine.next_task, due)

    def _decode_task(self, effect: DecodeTask) -> None:
        """Carry out the only effect of the machine that is not about the connection."""
        machine, _ = self._opened("get_task")
        offer = effect.offer
        try:
            with machine.payload():
                data = self._codec.decode(Encoded(offer.data, effect.parts))
                task = Task(offer.name, data, id=offer.task, round=offer.round, total_rounds=offer.total_rounds)
                if self._convert_task is not None:
                    task = self._convert_task(task)
        except Exception as error:  # noqa: BLE001 - it is reported to the site
            machine.refuse_task(offer, f"the task could not be converted: {type(error).__name__}: {error}")
        else:
            machine.task_decoded(offer, task)

    def __aiter__(self) -> AsyncIterator[Task]:
        return self

    async def __anext__(self) -> Task:
        """Return the next task; end when the site ends the exchange, raise AgentClosed if it aborts or is gone."""
        try:
            task = await self.get_task()
        except AgentClosed as closed:
            if closed.reason in ("ended", "closed here"):
                raise StopAsyncIteration from None
            raise
        assert task is not None  # noqa: S101 - there was no timeout
        return task

    async def run(self, handler: Callable[[Task], Any]) -> None:
        """Call a handler for every task, and submit what it returns, until the site ends the exchange.

        A handler that is not async runs in a thread, so that heartbeats go on. What it raises is reported to the site
        as the result of the task, with the return code ``EXECUTION_EXCEPTION``, and the next task is waited for. A
        result that could not be delivered is logged: the site knows, and decides.
        """
        async for task in self:
            try:
                if inspect.iscoroutinefunction(handler):
                    result = await handler(task)
                else:
                    result = await in_thread(functools.partial(handler, task), f"task {task.name}")
                    if inspect.isawaitable(result):
                        result = await result
            except Exception as error:  # noqa: BLE001 - it is reported to the site
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
        """Answer the current task; return when the result has arrived with all its large parts.

        Whatever happens, the task is answered by this call, and the next one can be taken. Until it returns, arrays in
        the result must not be changed: they are not copied.

        Args:
            result: the answer.
            rc: the return code.
            reason: why it is not ``OK``.

        Raises:
            CallStateError: there is no task to answer.
            ConversionError: the result could not be converted or encoded; the site was notified.
            ResultNotDelivered: it did not arrive, or was refused; says how far it came, and why no further.
            AgentClosed: the connection had ended before.
            TimeoutError: the site did not accept it in time.
        """
        machine, connection = self._opened("submit_result")
        task = machine.begin_answer()
        try:
            machine.check_open()
            encoded = Encoded(b"")
            problem: ConversionError | None = None
            try:
                _check_code(rc)
                with machine.payload():
                    if self._convert_result is not None:
                        result = self._convert_result(result, task)
                    encoded = self._encode(result)
            except Exception as error:  # noqa: BLE001 - raised again, when the site was notified
                encoded, rc = self._nothing(), FAILED
                reason = f"the result could not be converted: {type(error).__name__}: {error}"
                problem = ConversionError("result", str(task), f"{type(error).__name__}: {error}")
                problem.__cause__ = error
            machine.submit(encoded, rc, str(reason))
            connection.run()
            try:
                await connection.until(machine.delivered)
            except (ExchangeError, TimeoutError):
                if problem is None:
                    raise
            if problem is not None:
                raise problem
        finally:
            machine.end_answer()
            connection.run()

    def _nothing(self) -> Encoded:
        """Return what is sent for a result that cannot be sent: the site reads the reason, not this."""
        try:
            return self._codec.encode(None)
        except Exception:  # noqa: BLE001 - a codec that cannot even do this; then the site reports that it got nothing
            return Encoded(b"")

    def _encode(self, result: Any) -> Encoded:
        encoded = self._codec.encode(result)
        if encoded.parts and self.options.max_resends is None:
            raise ValueError("max_resends=None is not allowed for results with large parts")
        return encoded

    # metrics and progress

    async def log(self, record: Mapping[str, Any], *, step: SupportsIndex | None = None) -> None:
        """Send metrics to the site. May be called at any time, by any number of tasks.

        Returns as soon as the record is queued; waits only if more than ``metric_queue`` of them are in flight.

        Args:
            record: names and numbers.
            step: which step of the training they belong to.

        Raises:
            CallStateError: the connection has no channel for metrics.
            AgentClosed: the connection has ended.
            EncodingError: the record cannot be sent.
        """
        machine, connection = self._opened("log")
        if not machine.traits.has_metrics:
            raise CallStateError("log", "this connection has no channel for metrics")
        if not isinstance(record, Mapping):
            raise TypeError(f"metrics must be names and numbers, not {record!r}")
        number = None if step is None else operator.index(step)
        data = self._codec.encode_metrics(record)
        await connection.until(machine.may_log)
        machine.log(data, number)
        connection.run()

    def progress(self, done: SupportsFloat, total: SupportsFloat | None = None, note: str = "") -> None:
        """Report the progress of the task to the site."""
        machine, connection = self._opened("progress")
        machine.send(msg.ProgramProgress(float(done), None if total is None else float(total), str(note)))
        connection.run()

    # the end

    async def abort(self, reason: str = "the program aborted it") -> None:
        """Abort the task, and report the reason to the site."""
        if self._connection is not None:
            self._connection.machine.stop(msg.Abort(reason))
            self._connection.run()

    async def close(self) -> None:
        """End the connection. A result that is in flight is abandoned, unless it arrives at the last moment."""
        if self._connection is None:
            self._closed = self._closed or AgentClosed("closed here")
            return
        machine, connection = self._opened("close")
        clock = asyncio.get_running_loop().time
        if machine.stopped is None or machine.stopped.reason == "ended":
            due = clock() + (_LAST_METRICS_AFTER_END if machine.ending else _LAST_METRICS)
            if not await connection.until(lambda: not machine.metrics_missing or machine.gone is not None, due):
                _log.warning("%d metrics were not accepted by the site", machine.metrics_missing)
        if machine.stopped is None:
            await connection.until(lambda: not machine.unanswered, clock() + LAST_MESSAGE)
        machine.stop(msg.EndOfTasks("the program is done"))
        connection.run()
        await connection.until(lambda: not machine.delivering)
        await connection.aclose()

    def __repr__(self) -> str:
        machine = None if self._connection is None else self._connection.machine
        closed = self._closed if machine is None else machine.stopped
        state = str(closed) if closed is not None else "not started" if machine is None else "up"
        task = f", working on {machine.current}" if machine is not None and machine.current is not None else ""
        return f"<FlareAgent of {self.site or 'a site'}: {state}{task}>"


def _check_options(options: object) -> None:
    if options is not None and not isinstance(options, AgentOptions):
        raise TypeError(f"options must be AgentOptions, not {options!r}")


def _check_code(rc: object) -> None:
    if not isinstance(rc, str) or not rc:
        raise TypeError(f"rc must be a return code, not {rc!r}")
