"""The transport of programs that were written for NVFLARE 2.5 to 2.8: folders instead of a socket."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dfm_async.errors import HandshakeRefused
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.connection import Pipe, Receiver
from dfm_async.exchange.filepipe.models import ShareableCodec
from dfm_async.exchange.filepipe.pipe import FilePipe
from dfm_async.exchange.filepipe.queue import Side
from dfm_async.exchange.filepipe.translate import SiteSide
from dfm_async.exchange.nvflare import ParamsExchange, ParamsFormat, ParamsTransfer
from dfm_async.exchange.options import AgentOptions, ExecutorOptions
from dfm_async.exchange.transports import Invitation

if TYPE_CHECKING:
    from dfm_async.exchange.agent import FlareAgent

API_TYPE: Final = "CLIENT_API_TYPE"
"""The environment variable that says how the program reaches its site."""
EX_PROCESS: Final = "EX_PROCESS_API"
CONFIG_FILE: Final = "config/client_api_config.json"
_FILE_PIPE: Final = "nvflare.fuel.utils.pipe.file_pipe.FilePipe"
_SILENCE: Final = 0.9
"""A stock executor waits for a fresh heartbeat before each task, as if it accepted no more silence than this."""


class FilePipeTransport:
    """Connects programs that use ``nvflare.client`` (2.5 to 2.8), unmodified: ``LauncherExecutor(transport=...)``.

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

    codec: ShareableCodec = ShareableCodec(site=True)

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
        """Make the folder."""
        self._options, self._site, self._job = options, site, job
        if self._folder is None:
            self._folder = self._given or Path(tempfile.mkdtemp(prefix="dfm-async-"))

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Make pipes for one launch, and write the configuration."""
        if self._folder is None:
            raise RuntimeError("the transport is not open: LauncherExecutor opens it in 'async with'")
        self.forget()
        self._launches += 1
        # In one folder there can be several, of other jobs: they must not take each other's messages.
        root = self._folder / "pipes" / self._name / str(self._launches)
        options = self._options
        text = self._client_config(str(root), launch_once)
        _write(self._folder / CONFIG_FILE, text)
        self._config = text
        pipe = self._pipe = FilePipe(
            root,
            Side.PASSIVE,
            metrics=self._metrics,
            metrics_matter=options.end_with_metrics,
            translator=SiteSide(self._site, self._job, options.submit_model_task_name),
        )
        pipe.open(_FirstMessage(pipe, on_up, self))
        pipe.start()
        return Invitation({API_TYPE: EX_PROCESS, "RANK": "0"}, str(self._folder))

    def _client_config(self, root: str, launch_once: bool) -> bytes:
        """Return what a stock program reads; see :func:`read_client_config`."""
        # It sends a heartbeat every 5 s, and refuses a shorter timeout.
        silence = self._options.heartbeat_timeout
        common = {"HEARTBEAT_TIMEOUT": silence if silence == 0 or silence > 5 else 6.0}

        def pipe(**more: Any) -> dict[str, Any]:
            return {"CLASS_NAME": _FILE_PIPE, "ARG": {"mode": "ACTIVE", "root_path": root, **more}}

        found: dict[str, Any] = {
            "site_name": self._site or "site",
            "job_id": self._job or "job",
            "TASK_EXCHANGE": {
                **self._params.task_exchange(self._options, launch_once=launch_once),
                **common,
                "pipe_channel_name": "task",
                "pipe": pipe(),
                "submit_result_timeout": self._options.streaming_idle_timeout,
            },
        }
        if self._metrics:
            # The program waits until a record is read; it would check only every 0.1 s.
            metric_pipe = pipe(file_check_interval=0.005)
            found["METRICS_EXCHANGE"] = {**common, "pipe_channel_name": "metric", "pipe": metric_pipe}
        return json.dumps(found, indent=2).encode()

    def came(self) -> None:
        """Take note that the program is up: its pipe belongs to its connection now."""
        self._pipe = None

    def forget(self) -> None:
        """Expect no program."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.abort()

    async def close(self) -> None:
        """Remove every trace."""
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


class _FirstMessage(Receiver):
    """Waits for the first heartbeat. A program that sends END or ABORT has not come up."""

    def __init__(self, pipe: FilePipe, on_up: Callable[[Pipe], None], transport: FilePipeTransport) -> None:
        self._pipe = pipe
        self._on_up = on_up
        self._transport = transport
        self._up = False

    def received(self, message: msg.Message, size: int) -> None:
        del size
        if not self._up and not isinstance(message, (msg.EndOfTasks, msg.Abort)):
            self._up = True
            self._transport.came()
            self._on_up(self._pipe)
            self._pipe.deliver(message)  # it may be more than a heartbeat

    def lost(self, reason: str) -> None:
        del reason


def _write(path: Path, text: bytes) -> None:
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)
    os.replace(temporary, path)


# the configuration of a program


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a program must know.

    Attributes:
        root: the folder of the pipes.
        site: the name of the site.
        job: the job.
        metrics: whether there is a channel for metrics.
        launch_once: whether the program serves many tasks.
        heartbeat_timeout: how long the site may send nothing, in seconds; 0 means for ever.
        submit_result_timeout: how long the site may take to read a result, in seconds.
    """

    root: str
    site: str = ""
    job: str = ""
    metrics: bool = False
    launch_once: bool = False
    heartbeat_timeout: float = 60.0
    submit_result_timeout: float = 300.0


def read_client_config(
    path: str | os.PathLike[str] = CONFIG_FILE, environment: Mapping[str, str] | None = None
) -> ClientConfig:
    """Read what an NVFLARE site has written for this program.

    Raises:
        HandshakeRefused: the configuration is missing, or names another transport than files.
    """
    kind = (os.environ if environment is None else environment).get(API_TYPE)
    if kind != EX_PROCESS:
        raise HandshakeRefused(f"{API_TYPE} is {kind!r}: an NVFLARE site that launches programs sets {EX_PROCESS!r}")
    try:
        found = json.loads(Path(path).read_bytes())
        task = found["TASK_EXCHANGE"]
        pipe = task["pipe"]
        if pipe["CLASS_NAME"] != _FILE_PIPE:
            raise HandshakeRefused(f"{path} names {pipe['CLASS_NAME']}, but only {_FILE_PIPE} is supported")
        metric = found.get("METRICS_EXCHANGE")
        return ClientConfig(
            root=str(pipe["ARG"]["root_path"]),
            site=str(found.get("site_name", "")),
            job=str(found.get("job_id", "")),
            metrics=metric is not None and metric["pipe"]["ARG"]["root_path"] == pipe["ARG"]["root_path"],
            launch_once=bool(task.get("launch_once", False)),
            heartbeat_timeout=float(task.get("HEARTBEAT_TIMEOUT", 60)),
            submit_result_timeout=float(task.get("submit_result_timeout", 300)),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HandshakeRefused(f"{path} cannot be read as a configuration of NVFLARE: {error!r}") from error


def agent_from_environment(kind: type[FlareAgent], options: AgentOptions | None, **rest: Any) -> FlareAgent:
    """Make an agent from the configuration that the site has written.

    Raises:
        HandshakeRefused: the configuration is missing, or names another transport than files.
    """
    config = read_client_config()
    if options is None:
        interval = AgentOptions().heartbeat_interval
        silence = config.heartbeat_timeout
        options = AgentOptions(
            heartbeat_timeout=silence if silence == 0 or silence > interval else 2 * interval,
            submit_result_timeout=config.submit_result_timeout,
            launch_once=config.launch_once,
        )

    def connect() -> FilePipe:
        pipe = FilePipe(config.root, Side.ACTIVE, metrics=config.metrics, silence=_SILENCE)
        pipe.start()
        return pipe

    agent = kind(None, options, **{"codec": ShareableCodec(), **rest}, pipe=connect)
    agent.site, agent.job = config.site, config.job
    return agent
