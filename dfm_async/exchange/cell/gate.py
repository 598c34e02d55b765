"""The site's door for programs that use ``nvflare.client`` of NVFLARE 2.9: a cell instead of a socket."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, Final, cast

from dfm_async.base.installation import install_hint
from dfm_async.exchange import messages as msg
from dfm_async.exchange.launcher import Invitation
from dfm_async.exchange.nvflare import ParamsExchange, ParamsFormat, ParamsTransfer, task_headers, unreadable
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.pipes.base import Pipe, Receiver
from dfm_async.exchange.task import OK, Model
from dfm_async.exchange.tasks import OwnedTasks

try:
    from dfm_async.exchange.cell.host import BOOTSTRAP_VARIABLE, CellHost, CellLaunch
    from dfm_async.exchange.cell.models import CellCodec, to_model, to_shareable
except ImportError as error:
    raise ImportError(f"programs of NVFLARE 2.9 need it here too: {install_hint('flare')}") from error

__all__ = ["CellGate"]

_SETTLE: Final = 30.0
"""How long a program may take to say that its result is handed over, before it is asked to end, in seconds."""


class CellGate:
    """Lets in a program that uses ``nvflare.client`` (2.9), unmodified: ``LauncherExecutor(transport=CellGate())``.

    Needs the extra ``flare``. NVFLARE runs threads of its own in this process. Those of the connection end when the
    executor does; a few that it has once per process stay, and do not keep the process from ending.
    Tasks and results are a ``Model``, or a mapping of parameter names and arrays.

    Args:
        params_exchange_format: what the script works with: ``pytorch`` for PyTorch and Lightning,
            ``keras_layer_weights`` for Keras. NVFLARE's client converts in the program; here, arrays are numpy's.
        params_transfer_type: ``DIFF`` lets NVFLARE's client send differences, where the script sends parameters.
    """

    codec = CellCodec()

    def __init__(
        self, *, params_exchange_format: ParamsFormat = "numpy", params_transfer_type: ParamsTransfer = "FULL"
    ) -> None:
        self._params = ParamsExchange(params_exchange_format, params_transfer_type)
        self._options = ExecutorOptions()
        self._host: CellHost | None = None
        self._folder: str | None = None
        self._launches = itertools.count(1)
        self._pipe: CellPipe | None = None

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Starts the cell."""
        if self._host is None:
            self._options = options
            self._host = CellHost(site, job, options.heartbeat_interval, options.heartbeat_timeout)
            self._folder = tempfile.mkdtemp(prefix="dfm-async-")
            await self._host.open()

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Expects one program, and writes the file by which it finds us."""
        host, folder = self._host, self._folder
        if host is None or folder is None:
            raise RuntimeError("the gate is not open")
        self.forget()
        pipe = self._pipe = CellPipe(host, on_up, self._options.submit_model_task_name)
        host.expect(pipe.launch)
        path = os.path.join(folder, f"{next(self._launches)}.json")
        options = self._options
        host.write_bootstrap(
            pipe.launch,
            path,
            {
                **self._params.config,
                "train_with_eval": options.train_with_evaluation,
                "train_task_name": options.train_task_name,
                "eval_task_name": options.evaluate_task_name,
                "submit_model_task_name": options.submit_model_task_name,
                "launch_once": launch_once,
            },
        )
        return Invitation({BOOTSTRAP_VARIABLE: path, "RANK": "0", "CLIENT_API_TYPE": "CELL_API"})

    def forget(self) -> None:
        """Expects nobody, unless somebody has come."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None and not pipe.up:
            pipe.abort()
            if self._host is not None:
                self._host.expect(None)

    async def close(self) -> None:
        """Stops the cell, and removes every trace."""
        self.forget()
        host, self._host = self._host, None
        if host is not None:
            await host.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class CellPipe:
    """The site's end of a connection to one program.

    Args:
        host: our cell.
        on_up: is called when the program is there.
        submit_model: the name of tasks that ask for a model.
    """

    can_resend = False
    shows_progress = False
    silence = 0.0
    has_metrics = True

    def __init__(self, host: CellHost, on_up: Callable[[Pipe], None], submit_model: str) -> None:
        self.up = False
        self._submit_model = submit_model
        self._host = host
        self._on_up = on_up
        self._receiver: Receiver | None = None
        self._tasks = OwnedTasks()
        self._numbers = itertools.count(1)
        self._settled = asyncio.Event()
        self._settled.set()
        self._closing: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told = False
        self.launch = CellLaunch(
            host.new_name(),
            on_up=self._came,
            on_alive=lambda: self._deliver(msg.Beat()),
            on_result=self._answered,
            on_unreadable=self._unreadable,
            on_settled=self._settled.set,
            on_metric=self._measured,
        )

    # Pipe

    def open(self, receiver: Receiver) -> None:
        """Names who takes what comes."""
        self._receiver = receiver

    def send(self, message: msg.Message, data: memoryview | None = None) -> None:
        """Says the same in NVFLARE's words, as far as it has some."""
        del data
        if self._closing is not None:
            return
        if isinstance(message, msg.TaskOffer):
            self._tasks.start(self._give(message), f"giving task {message.task}")
        elif isinstance(message, msg.End):
            self._tasks.start(self._end(message.reason), "asking the program to end")
        elif isinstance(message, msg.Abort):
            self._tasks.start(self._host.abort(self.launch, message.reason), "telling the program to stop")

    async def drain(self) -> None:
        """There is nothing to wait for: NVFLARE keeps what is sent."""

    def close(self) -> None:
        """Says what was to be said, and ends the connection."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="closing a connection by cells")

    def abort(self) -> None:
        """Ends the connection at once: what was to be said last is not waited for."""
        self.close()
        self._tasks.cancel()

    async def _close(self) -> None:
        self.launch.signal.trigger("the connection was closed")
        try:
            await self._tasks.wait()
        finally:
            if not self._ended.done():
                self._ended.set_result(None)
            self._lost("the connection was closed")

    async def wait_closed(self) -> None:
        """Waits until the connection has ended."""
        await asyncio.shield(self._ended)

    # what happens

    def _came(self) -> None:
        if not self.up and self._closing is None:
            self.up = True
            self._on_up(self)

    def _deliver(self, message: msg.Message) -> None:
        if self._receiver is not None and not self._told:
            self._receiver.received(message, 0)

    def _lost(self, reason: str) -> None:
        if not self._told:
            self._told = True
            if self._receiver is not None:
                self._receiver.lost(reason)

    def _measured(self, values: dict[str, Any], step: int | None) -> None:
        self._deliver(msg.Metrics(next(self._numbers), cast("bytes", values), step))

    async def _give(self, offer: msg.TaskOffer) -> None:
        model = cast("Model | None", cast("object", offer.data))
        self._settled.clear()
        try:
            shareable = to_shareable(model)
            if offer.round is not None:
                shareable.set_header("current_round", offer.round)
            if offer.total_rounds is not None:
                shareable.set_header("num_rounds", offer.total_rounds)
            asks = offer.name == self._submit_model
            headers = task_headers(model, self._host.site, self._host.job, submit_model=asks)
            for name, value in headers.items():
                shareable.set_header(name, value)
            await self._host.give_task(self.launch, offer.task, offer.name, shareable)
        except ConnectionError as error:  # no answer of the program: most likely it has ended, and that is the news
            self._settled.set()
            self._lost(str(error))
        except Exception as error:  # noqa: BLE001 - NVFLARE can raise anything; it is told
            self._settled.set()
            self._deliver(msg.TaskAnswer(offer.task, False, str(error) or type(error).__name__))
        else:
            self._deliver(msg.TaskAnswer(offer.task, True))

    def _answered(self, task: str, result: Any) -> None:
        if self._closing is None:
            self._tasks.start(self._fetch(task, result), f"fetching the result of task {task}")

    def _unreadable(self, reason: str) -> None:
        task, self.launch.task = self.launch.task, None
        if task is not None:
            self._settled.set()
            self._failed(task, f"the result cannot be read: {reason}")

    def _failed(self, task: str, reason: str) -> None:
        self._deliver(msg.ResultOffer(task, task, "BAD_TASK_DATA", cast("bytes", None), [], reason))

    async def _fetch(self, task: str, result: Any) -> None:
        try:
            model = to_model(await self._host.fetch(self.launch, result))
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(task, f"the result could not be fetched, or is not a model: {unreadable(error)}")
        else:
            self._deliver(msg.ResultOffer(task, task, OK, cast("bytes", model), []))

    async def _end(self, reason: str) -> None:
        """A program that is asked to end while it still hands over its result would drop it."""
        try:
            async with asyncio.timeout(_SETTLE):
                await self._settled.wait()
        except TimeoutError:
            pass
        await self._host.shut_down(self.launch, reason)
