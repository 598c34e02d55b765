"""The site's door for programs that were written for NVFLARE 2.5 to 2.8: folders instead of a socket."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from dfm_async.exchange import messages as msg
from dfm_async.exchange.filepipe.config import API_TYPE, CONFIG_FILE, EX_PROCESS, ClientConfig, client_config
from dfm_async.exchange.filepipe.models import ModelCodec
from dfm_async.exchange.filepipe.pipe import FilePipe
from dfm_async.exchange.filepipe.queue import Side
from dfm_async.exchange.filepipe.translate import SiteSide
from dfm_async.exchange.launcher import Invitation
from dfm_async.exchange.nvflare import ParamsExchange, ParamsFormat, ParamsTransfer
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.pipes.base import Pipe

__all__ = ["FilePipeGate"]


class FilePipeGate:
    """Lets in a program that uses ``nvflare.client`` (2.5 to 2.8), unmodified: ``LauncherExecutor(transport=...)``.

    The program is started in a folder of its own, where NVFLARE looks for its configuration; so name files by absolute
    paths in its command line. Tasks and results are a ``Model``, or a mapping of parameter names and arrays.

    Args:
        metrics: whether there is a channel for metrics.
        folder: where the program is started; by default a new folder, which is removed at the end. Programs that are
            started at the same time need different ones: each reads the configuration that it finds there.
        params_exchange_format: what the script works with: ``pytorch`` for PyTorch and Lightning,
            ``keras_layer_weights`` for Keras. NVFLARE's client (since 2.7.3) converts in the program; here, arrays are
            numpy's.
        params_transfer_type: ``DIFF`` lets NVFLARE's client send differences, where the script sends parameters.
    """

    codec = ModelCodec(site=True)

    def __init__(
        self,
        *,
        metrics: bool = True,
        folder: str | os.PathLike[str] | None = None,
        params_exchange_format: ParamsFormat = "numpy",
        params_transfer_type: ParamsTransfer = "FULL",
    ) -> None:
        self._params = ParamsExchange(params_exchange_format, params_transfer_type)
        self._options = ExecutorOptions()
        self._site = ""
        self._job = ""
        self._metrics = metrics
        self._given = None if folder is None else Path(folder).absolute()
        self._folder: Path | None = None
        self._pipe: FilePipe | None = None
        self._launches = 0
        self._name = secrets.token_hex(8)
        self._config = b""

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Makes the folder."""
        self._options, self._site, self._job = options, site, job
        if self._folder is None:
            self._folder = self._given or Path(tempfile.mkdtemp(prefix="dfm-async-"))

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Makes pipes for one launch, and writes the configuration."""
        if self._folder is None:
            raise RuntimeError("the gate is not open")
        self.forget()
        self._launches += 1
        # In one folder there can be several, of other jobs: they must not take each other's messages.
        root = self._folder / "pipes" / self._name / str(self._launches)
        options = self._options
        config = ClientConfig(
            root=str(root),
            site=self._site,
            job=self._job,
            metrics=self._metrics,
            launch_once=launch_once,
            heartbeat_timeout=_stock_timeout(options.heartbeat_timeout),
            submit_result_timeout=options.streaming_idle_timeout,
        )
        text = client_config(
            config,
            self._params,
            train=options.train_task_name,
            evaluate=options.evaluate_task_name,
            submit_model=options.submit_model_task_name,
            train_with_evaluation=options.train_with_evaluation,
        )
        _write(self._folder / CONFIG_FILE, text)
        self._config = text
        pipe = self._pipe = FilePipe(
            root,
            Side.PASSIVE,
            metrics=self._metrics,
            metrics_matter=options.end_with_metrics,
            translator=SiteSide(self._site, self._job, options.submit_model_task_name),
        )
        pipe.open(_Knocking(pipe, on_up, self))
        pipe.start()
        return Invitation({API_TYPE: EX_PROCESS, "RANK": "0"}, str(self._folder))

    def came(self) -> None:
        """The program is there: its pipe belongs to whoever talks to it."""
        self._pipe = None

    def forget(self) -> None:
        """Expects nobody."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.abort()

    async def close(self) -> None:
        """Removes every trace."""
        pipe = self._pipe
        self.forget()
        if pipe is not None:
            await pipe.wait_closed()
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._given is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        shutil.rmtree(folder / "pipes" / self._name, ignore_errors=True)
        config = folder / CONFIG_FILE
        with contextlib.suppress(OSError):
            if config.read_bytes() == self._config:  # else it is another's by now
                config.unlink()
        for made in (folder / "pipes", config.parent):
            with contextlib.suppress(OSError):  # others use it, too
                made.rmdir()


class _Knocking:
    """Waits for the first sign of life. A program that says END or ABORT has not come up."""

    def __init__(self, pipe: FilePipe, on_up: Callable[[Pipe], None], gate: FilePipeGate) -> None:
        self._pipe = pipe
        self._on_up = on_up
        self._gate = gate
        self._up = False

    def room(self, chunk: msg.Chunk, size: int) -> memoryview | None:
        del chunk, size
        return None

    def received(self, message: msg.Message, size: int) -> None:
        del size
        if not self._up and not isinstance(message, (msg.End, msg.Abort)):
            self._up = True
            self._gate.came()
            self._on_up(self._pipe)
            self._pipe.deliver(message)  # it may be more than a sign of life

    def lost(self, reason: str) -> None:
        del reason


def _stock_timeout(seconds: float) -> float:
    """A stock program gives a sign of life every 5 s, and refuses a timeout that is not longer."""
    return seconds if seconds == 0 or seconds > 5 else 6.0


def _write(path: Path, text: bytes) -> None:
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)
    os.replace(temporary, path)
