"""A cell of NVFLARE 2.9 that plays the part of a client's job for programs that use ``nvflare.client``.

NVFLARE calls back in its own threads; everything is handed over to the event loop. What blocks runs in threads of ours.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import uuid
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, cast

from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.apis.utils.task_utils import materialize_lazy_download_refs
from nvflare.app_common.decomposers import common_decomposers
from nvflare.client.cell.bootstrap import (
    BOOTSTRAP_FILE_ENV_VAR,
    BOOTSTRAP_SCHEMA_VERSION,
    EXTERNAL_PROCESS_EXECUTION_MODE,
    BootstrapKey,
    write_bootstrap_config,
)
from nvflare.client.cell.defs import CHANNEL, PROTOCOL_VERSION, MsgKey, Topic
from nvflare.fuel.f3.cellnet.cell import Adapter, Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.streaming.download_service import DownloadService
from nvflare.fuel.utils.fobs import FOBSContextKey

from dfm_async.base.tasks import in_thread
from dfm_async.errors import TaskRejected
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.nvflare import NvflarePipe, named_metrics, unreadable

BOOTSTRAP_VARIABLE: Final = BOOTSTRAP_FILE_ENV_VAR
"""The environment variable by which a program finds its site."""

_SHUTDOWN: Final = 5.0
"""How long a program may take to answer that it will end, in seconds."""
_UNSENT: Final = frozenset({CellReturnCode.COMM_ERROR, CellReturnCode.TARGET_UNREACHABLE})
"""What NVFLARE says itself if it cannot reach a program."""


def _reply(topic: str, **fields: Any) -> Any:
    return make_reply(CellReturnCode.OK, body={MsgKey.REPLY_TOPIC: topic, **fields})


class CellLaunch(NvflarePipe):
    """One launch of a program: its identity, and the site's end of the connection to it. Lives on the event loop.

    Args:
        name: the name of its cell.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.token = secrets.token_urlsafe(32)
        self.session: str | None = None
        self.task: str | None = None
        self.signal = Signal()
        self.settled = asyncio.Event()
        """Set while the program has handed over everything that belongs to its answers."""
        self.settled.set()
        self.metrics = itertools.count(1)

    @abstractmethod
    def came(self) -> None:
        """Take note that the program is there."""

    @abstractmethod
    def answered(self, task: str, result: Any) -> None:
        """Take the answer to a task, by its id: a shareable."""

    @abstractmethod
    def unreadable(self, reason: str) -> None:
        """Take note that the answer to the current task cannot be decoded, and why."""


class CellHost:
    """One cell, for one program at a time.

    Args:
        site: the name of the site.
        job: the job.
        heartbeat_interval: how often the program shall send a heartbeat, in seconds.
        heartbeat_timeout: how long it waits for our answers to them, in seconds; 0 means for ever.
    """

    def __init__(self, site: str, job: str, heartbeat_interval: float, heartbeat_timeout: float) -> None:
        self.site = site or "site"
        self.job = job or "job"
        self._beat = (heartbeat_interval, heartbeat_timeout)
        self._loop = asyncio.get_running_loop()
        # Three parts, on the side of clients: such a cell never tries to reach a server.
        self._name = f"{_plain(self.site)}.{_plain(self.job)}.dfm_{uuid.uuid4().hex[:8]}"
        self._launch: CellLaunch | None = None
        self._cell: Any = None
        self._opening: asyncio.Task[None] | None = None
        self._url = ""

    async def open(self) -> None:
        """Start the cell, and listen on this machine. If it is cancelled, it must be closed all the same."""
        self._opening = self._loop.create_task(in_thread(self._open, "cell-open"), name="start of a cell")
        await asyncio.shield(self._opening)

    def _open(self) -> None:
        flare_decomposers.register()
        common_decomposers.register()
        cell = self._cell = Cell(
            fqcn=self._name,
            root_url="tcp://127.0.0.1:1",  # never used, but asked for
            secure=False,
            credentials={},
            create_internal_listener=False,
        )
        for topic, handler in (
            (Topic.HELLO, self._hello),
            (Topic.SESSION_READY, self._ready),
            (Topic.HEARTBEAT, self._heartbeat),
            (Topic.RESULT_READY, self._result),
            (Topic.RESULT_SOURCE_SETTLED, self._settled),
            (Topic.LOG, self._log),
        ):
            cell.register_request_cb(channel=CHANNEL, topic=topic, cb=handler)
        adapter = Adapter(self._result, cell.core_cell.my_info, cell)
        cell.register_blob_cb(CHANNEL, Topic.RESULT_READY, functools.partial(self._read_result, adapter))
        cell.start()
        DownloadService.initialize(cell)
        resources = {"host": "localhost", "listen_host": "127.0.0.1", "connection_security": "clear"}
        cell.make_internal_listener(scheme="tcp", resources=resources)
        self._url = cell.get_internal_listener_url()

    async def close(self) -> None:
        """Stop the cell, and close what NVFLARE leaves open."""
        self.expect(None)
        if self._opening is not None and not self._opening.done():  # a cell that has half begun cannot be stopped
            await asyncio.wait({self._opening})
        if self._cell is not None:
            await in_thread(self._close, "cell-close")
            self._cell = None

    def _close(self) -> None:
        cell = self._cell
        cell.stop()  # else the interpreter would wait for its threads for ever
        for connector in cell.core_cell.communicator.conn_manager.connectors.values():
            server = getattr(connector.driver, "server", None)
            if server is not None:
                server.server_close()
        cell.core_cell.ALL_CELLS.pop(self._name, None)

    def expect(self, launch: CellLaunch | None) -> None:
        """Accept messages of this launch only, from now on."""
        old, self._launch = self._launch, launch
        if old is not None and old is not launch:
            old.signal.trigger("another program was launched, or none")

    def new_name(self) -> str:
        """Return a name for the cell of a program."""
        return f"{self._name}.program_{uuid.uuid4().hex[:8]}"

    def write_bootstrap(self, launch: CellLaunch, path: str, task_exchange: dict[str, Any]) -> None:
        """Write the file by which a program finds its site."""
        write_bootstrap_config(
            path,
            {
                BootstrapKey.SCHEMA_VERSION: BOOTSTRAP_SCHEMA_VERSION,
                BootstrapKey.EXECUTION_MODE: EXTERNAL_PROCESS_EXECUTION_MODE,
                BootstrapKey.CONNECT_URL: self._url,
                BootstrapKey.CJ_FQCN: self._name,
                BootstrapKey.CJ_PID: os.getpid(),  # the program ends when this process does
                BootstrapKey.TRAINER_FQCN: launch.name,
                BootstrapKey.LAUNCH_TOKEN: launch.token,
                BootstrapKey.JOB_ID: self.job,
                BootstrapKey.SITE_NAME: self.site,
                BootstrapKey.SECURE_MODE: False,
                BootstrapKey.TASK_EXCHANGE: task_exchange,
                BootstrapKey.MEMORY_GC_ROUNDS: 0,
                BootstrapKey.CUDA_EMPTY_CACHE: False,
            },
        )

    # messages of programs: in NVFLARE's threads

    def _hello(self, request: Any) -> Any:
        said, launch = request.payload, self._launch
        good = (
            launch is not None
            and isinstance(said, dict)
            and request.get_header(MessageHeaderKey.ORIGIN) == launch.name == said.get(MsgKey.TRAINER_FQCN)
            and isinstance(said.get(MsgKey.PROOF), str)
            and secrets.compare_digest(said[MsgKey.PROOF].encode(), launch.token.encode())
            and said.get(MsgKey.PROTOCOL_VERSION) == PROTOCOL_VERSION
        )
        if not good or launch is None:
            return _reply(Topic.HELLO_REJECTED, **{MsgKey.REASON: "the site does not expect this program"})
        if launch.session is None:  # a hello can come twice, and gets the same answer
            launch.session = uuid.uuid4().hex
        return _reply(
            Topic.HELLO_ACCEPTED,
            **{
                MsgKey.SESSION_ID: launch.session,
                MsgKey.JOB_ID: self.job,
                MsgKey.SITE_NAME: self.site,
                MsgKey.HEARTBEAT_INTERVAL: self._beat[0],
                MsgKey.HEARTBEAT_TIMEOUT: self._beat[1],
                MsgKey.SECURE_MODE: False,
            },
        )

    def _known(self, request: Any) -> tuple[CellLaunch, dict[str, Any]] | None:
        """Return the sender and the content of a message; None if it is not the expected program."""
        launch, said = self._launch, request.payload
        if (
            launch is None
            or launch.session is None
            or not isinstance(said, dict)
            or request.get_header(MessageHeaderKey.ORIGIN) != launch.name
            or said.get(MsgKey.SESSION_ID) != launch.session
        ):
            return None
        self._post(launch.deliver, msg.Beat())
        return launch, said

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _ready(self, request: Any) -> Any:
        known = self._known(request)
        if known is None:
            return _unknown_session()
        self._post(known[0].came)
        return _reply(Topic.SESSION_READY, **{MsgKey.SESSION_ID: known[0].session})

    def _heartbeat(self, request: Any) -> Any:
        known = self._known(request)
        return _unknown_session() if known is None else _reply(Topic.HEARTBEAT, **{MsgKey.SESSION_ID: known[0].session})

    def _read_result(self, adapter: Any, future: Any, *args: Any, **kwargs: Any) -> None:
        """Take a result that NVFLARE may not be able to decode: the program would be notified, and the executor not."""
        try:
            adapter.call(future, *args, **kwargs)
        except Exception as error:
            launch = self._launch
            if (
                launch is not None
                and launch.session is not None
                and future.headers.get(MessageHeaderKey.ORIGIN) == launch.name
            ):
                self._post(launch.unreadable, unreadable(error))
            raise

    def _result(self, request: Any) -> Any:
        known = self._known(request)
        if known is None:
            return _unknown_session()
        launch, said = known
        task, result = said.get(MsgKey.TASK_ID), said.get(MsgKey.RESULT)
        if task is None or task != launch.task or not isinstance(result, Shareable):
            return _reply(Topic.RESULT_REJECTED, **{MsgKey.REASON: "nobody waits for this task's result"})
        launch.task = None
        self._post(launch.answered, task, result)
        return _reply(Topic.RESULT_ACCEPTED)

    def _settled(self, request: Any) -> Any:
        known = self._known(request)
        if known is None:
            return _unknown_session()
        self._post(known[0].settled.set)
        return _reply(Topic.RESULT_SOURCE_SETTLED, **{MsgKey.TASK_ID: known[1].get(MsgKey.TASK_ID)})

    def _log(self, request: Any) -> None:
        known = self._known(request)
        if known is not None:
            launch, said = known
            step, kind = said.get("global_step"), said.get("data_type")
            values = named_metrics(str(said.get("key")), said.get("value"), str(getattr(kind, "value", kind)))
            number = step if isinstance(step, int) else None
            self._post(launch.deliver, msg.ProgramMetrics(next(launch.metrics), cast("bytes", values), number))

    # messages to programs

    def _ask(self, launch: CellLaunch, topic: str, said: dict[str, Any], limit: float | None, **more: Any) -> Any:
        return self._cell.send_request(
            channel=CHANNEL,
            topic=topic,
            target=launch.name,
            timeout=limit,
            request=new_cell_message({}, {MsgKey.SESSION_ID: launch.session, **said}),
            **more,
        )

    async def give_task(self, launch: CellLaunch, task: str, name: str, shareable: Any) -> None:
        """Give the program a task; return when the program has all of it.

        Raises:
            ConnectionError: it could not be sent: the program is gone, or about to be.
            TaskRejected: the program does not take it.
        """
        shareable.set_header(FOBSContextKey.RECEIVER_IDS, [self._name])  # who will fetch the arrays of the result
        launch.task = task
        said = {MsgKey.TASK_ID: task, MsgKey.TASK_NAME: name, MsgKey.MODEL: shareable}

        def ask() -> Any:
            return self._ask(
                launch, Topic.TASK_READY, said, None, abort_signal=launch.signal, receiver_ids=(launch.name,)
            )

        answer = await in_thread(ask, "cell-task")
        code = None if answer is None else answer.get_header(MessageHeaderKey.RETURN_CODE)
        if code in _UNSENT:
            raise ConnectionError(f"task {name!r} could not be sent ({code})")
        body = answer.payload if code == CellReturnCode.OK and isinstance(answer.payload, dict) else {}
        if body.get(MsgKey.REPLY_TOPIC) != Topic.TASK_ACCEPTED:
            raise TaskRejected(name, str(body.get(MsgKey.REASON) or f"it did not answer ({code})"))

    async def fetch(self, launch: CellLaunch, result: Any) -> Any:
        """Fetch the arrays of a result."""
        cell = self._cell
        return await in_thread(lambda: materialize_lazy_download_refs(result, cell, launch.signal), "cell-result")

    async def shut_down(self, launch: CellLaunch, reason: str) -> None:
        """Ask the program to end."""
        said = {MsgKey.REASON: reason}
        await in_thread(lambda: self._ask(launch, Topic.SHUTDOWN, said, _SHUTDOWN, optional=True), "cell-end")

    async def abort(self, launch: CellLaunch, reason: str) -> None:
        """Tell the program to stop now."""
        message = new_cell_message({}, {MsgKey.SESSION_ID: launch.session, MsgKey.REASON: reason})

        def tell() -> None:
            self._cell.fire_and_forget(
                channel=CHANNEL, topic=Topic.ABORT, targets=[launch.name], message=message, optional=True
            )

        await in_thread(tell, "cell-abort")


def _unknown_session() -> Any:
    return _reply(Topic.ERROR, **{MsgKey.REASON: "the site does not know this session"})


def _plain(name: str) -> str:
    """Return a name without the dots that separate the parts of a cell's name."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
