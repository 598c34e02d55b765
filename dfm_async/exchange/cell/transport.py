"""The transport of programs that use ``nvflare.client`` of NVFLARE 2.9: a cell instead of a socket."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, Final, cast

from dfm_async.base.text import install_hint
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.nvflare import (
    ModelCodec,
    ParamsExchange,
    ParamsFormat,
    ParamsTransfer,
    dxo_of,
    model_of_dxo,
    task_headers,
    unreadable,
)
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.task import OK, Model
from dfm_async.exchange.transports import Invitation

try:
    from nvflare.apis.dxo import DXO, DataKind, from_shareable

    from dfm_async.exchange.cell.host import BOOTSTRAP_VARIABLE, CellHost, CellLaunch
except ImportError as error:
    raise ImportError(f"programs of NVFLARE 2.9 need it here too: {install_hint('flare')}") from error

_SETTLE: Final = 30.0
"""How long a program may take to report that its result is handed over, before it is asked to end, in seconds."""


class CellTransport:
    """Connects programs that use ``nvflare.client`` (2.9), unmodified: ``LauncherExecutor(transport="nvflare-2.9")``.

    Needs the extra ``flare``. NVFLARE runs threads of its own in this process. Those of the connection end when the
    executor does; a few that it has once per process stay, and do not keep the process from ending.
    Tasks and results are a ``Model``, or a mapping of parameter names and arrays.

    Args:
        params_exchange_format: what the script works with: ``pytorch`` for PyTorch and Lightning,
            ``keras_layer_weights`` for Keras. NVFLARE's client converts in the program; here, arrays are numpy's.
        params_transfer_type: ``DIFF`` lets NVFLARE's client send differences, where the script sends parameters.
    """

    codec = ModelCodec()

    def __init__(
        self,
        *,
        folder: object = None,
        params_exchange_format: ParamsFormat = "numpy",
        params_transfer_type: ParamsTransfer = "FULL",
    ) -> None:
        del folder  # programs may be started anywhere
        self._params = ParamsExchange(params_exchange_format, params_transfer_type)
        self._options = ExecutorOptions()
        self._host: CellHost | None = None
        self._folder: str | None = None
        self._launches = itertools.count(1)
        self._pipe: CellPipe | None = None

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Start the cell."""
        if self._host is None:
            self._options = options
            self._host = CellHost(site, job, options.heartbeat_interval, options.heartbeat_timeout)
            self._folder = tempfile.mkdtemp(prefix="dfm-async-")
            await self._host.open()

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Expect one program, and write the file by which it finds us."""
        host, folder = self._host, self._folder
        if host is None or folder is None:
            raise RuntimeError("the transport is not open: LauncherExecutor opens it in 'async with'")
        self.forget()
        pipe = self._pipe = CellPipe(host, on_up, self._options.submit_model_task_name)
        host.expect(pipe)
        path = os.path.join(folder, f"{next(self._launches)}.json")
        host.write_bootstrap(pipe, path, self._params.task_exchange(self._options, launch_once=launch_once))
        return Invitation({BOOTSTRAP_VARIABLE: path, "RANK": "0", "CLIENT_API_TYPE": "CELL_API"})

    def forget(self) -> None:
        """Stop expecting a program, unless one has connected."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None and not pipe.up:
            pipe.abort()
            if self._host is not None:
                self._host.expect(None)

    async def close(self) -> None:
        """Stop the cell, and remove every trace."""
        self.forget()
        host, self._host = self._host, None
        if host is not None:
            await host.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class CellPipe(CellLaunch):
    """The site's end of a connection to one program.

    Args:
        host: our cell.
        on_up: is called when the program is there.
        submit_model: the name of tasks that ask for a model.
    """

    def __init__(self, host: CellHost, on_up: Callable[[Pipe], None], submit_model: str) -> None:
        super().__init__(host.new_name())
        self.up = False
        self._submit_model = submit_model
        self._host = host
        self._on_up = on_up

    # Pipe

    def send(self, message: msg.Message, data: memoryview | None = None) -> None:
        """Say the same in NVFLARE's words, as far as it has some."""
        del data
        if self.closing is not None:
            return
        if isinstance(message, msg.TaskOffer):
            self.tasks.spawn(self._give(message), f"giving task {message.task}")
        elif isinstance(message, msg.EndOfTasks):
            self.tasks.spawn(self._end(message.reason), "asking the program to end")
        elif isinstance(message, msg.Abort):
            self.tasks.spawn(self._host.abort(self, message.reason), "telling the program to stop")

    async def finish(self, flush: bool) -> None:
        """Send what is queued, or drop it."""
        self.signal.trigger("the connection was closed")
        if not flush:
            self.tasks.cancel()
        await self.tasks.wait()

    def abort(self) -> None:
        """End the connection at once: what is queued is not waited for."""
        super().abort()
        self.tasks.cancel()

    # CellLaunch

    def came(self) -> None:
        """Pass the connection on, once."""
        if not self.up and self.closing is None:
            self.up = True
            self._on_up(self)

    def answered(self, task: str, result: Any) -> None:
        """Fetch the arrays of an answer."""
        if self.closing is None:
            self.tasks.spawn(self._fetch(task, result), f"fetching the result of task {task}")

    def unreadable(self, reason: str) -> None:
        """Answer the current task with what is wrong with its result."""
        task, self.task = self.task, None
        if task is not None:
            self.settled.set()
            self._failed(task, f"the result cannot be read: {reason}")

    async def _give(self, offer: msg.TaskOffer) -> None:
        model = cast("Model | None", cast("object", offer.data))
        self.settled.clear()
        try:
            kind, data, meta = dxo_of(Model(params={}) if model is None else model)
            shareable = DXO(DataKind(kind), data=data, meta=meta).to_shareable()
            if offer.round is not None:
                shareable.set_header("current_round", offer.round)
            if offer.total_rounds is not None:
                shareable.set_header("num_rounds", offer.total_rounds)
            asks = offer.name == self._submit_model
            headers = task_headers(model, self._host.site, self._host.job, submit_model=asks)
            for name, value in headers.items():
                shareable.set_header(name, value)
            await self._host.give_task(self, offer.task, offer.name, shareable)
        except ConnectionError as error:  # no answer of the program: most likely it has ended
            self.settled.set()
            self.lose(str(error))
        except Exception as error:  # noqa: BLE001 - NVFLARE can raise anything; it is reported
            self.settled.set()
            self.deliver(msg.TaskAnswer(offer.task, False, str(error) or type(error).__name__))
        else:
            self.deliver(msg.TaskAnswer(offer.task, True))

    def _failed(self, task: str, reason: str) -> None:
        self.deliver(msg.ResultOffer(task, task, "BAD_TASK_DATA", cast("bytes", None), [], reason))

    async def _fetch(self, task: str, result: Any) -> None:
        try:
            dxo = from_shareable(await self._host.fetch(self, result))
            model = model_of_dxo(dxo.data_kind, dxo.data, dxo.meta)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(task, f"the result could not be fetched, or is not a model: {unreadable(error)}")
        else:
            self.deliver(msg.ResultOffer(task, task, OK, cast("bytes", model), []))

    async def _end(self, reason: str) -> None:
        """Ask the program to end, when it has handed over its result: else it would drop it."""
        try:
            async with asyncio.timeout(_SETTLE):
                await self.settled.wait()
        except TimeoutError:
            pass
        await self._host.shut_down(self, reason)
