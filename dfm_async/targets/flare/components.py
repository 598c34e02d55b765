"""What FLARE runs of us: a controller at the server, an executor at each site. Nothing else here knows FLARE."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import logging
import platform
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from nvflare.apis.dxo import DXO  # noqa: F401 - registers what FLARE needs to read tasks
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.message import Message

from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.agent import SiteAgent
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.connector import COMMAND
from dfm_async.targets.flare.gateway import Gateway
from dfm_async.targets.flare.hub import FOR_HUB, Hub
from dfm_async.targets.flare.installed import load_authorizer, load_installed, load_user, read_settings
from dfm_async.targets.flare.link import Undelivered
from dfm_async.targets.flare.node import HUB, Node
from dfm_async.version import VERSION

__all__ = ["HubController", "SiteExecutor"]

_log = logging.getLogger(__name__)

_CHANNEL: Final = "dfm_async"
_PACKET: Final = "packet"
_ONE_FRAME: Final = 2 * 1024 * 1024
"""Up to how many bytes a packet goes as one frame; larger ones are streamed."""
_TRY: Final = 10.0
"""For how many seconds one try to hand over a packet may take; large ones get longer."""
_SLOWEST: Final = 1024 * 1024
"""How many bytes per second a large packet must make at least."""
_THREADS: Final = 32
_ENDS: Final = (EventType.ABORT_TASK, EventType.ABOUT_TO_END_RUN, EventType.END_RUN)


class CellWire:
    """Carries packets by FLARE's cells: authenticated and encrypted as the federation is provisioned.

    Args:
        cell: the cell of this process.
        job_id: the FLARE job.
        receive: takes a packet of a peer, on the loop. Raises ValueError if it may not come.
    """

    def __init__(self, cell: Any, job_id: str, receive: Callable[[str, bytes], None]) -> None:
        self._cell = cell
        self._job_id = job_id
        self._receive = receive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="dfm-wire")
        cell.core_cell.register_request_cb(_CHANNEL, _PACKET, self._packet)
        cell.register_request_cb(channel=_CHANNEL, topic="large", cb=self._packet)

    def open(self) -> None:
        """Takes packets from now on."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Takes no further packet."""
        self._loop = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def carry(self, peer: str, packet: bytes) -> None:
        """Hands a packet to a peer.

        Raises:
            Undelivered: it may not have it.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._carry, f"{peer}.{self._job_id}", packet)
        except RuntimeError as error:
            raise Undelivered(str(error)) from error

    def _carry(self, target: str, packet: bytes) -> None:
        limit = _TRY + len(packet) / _SLOWEST
        request = Message({}, packet)
        if len(packet) <= _ONE_FRAME:
            send = self._cell.core_cell.send_request
            reply = send(channel=_CHANNEL, topic=_PACKET, target=target, request=request, timeout=limit, optional=True)
        else:
            reply = self._cell.send_request(
                channel=_CHANNEL, topic="large", target=target, request=request, timeout=limit, optional=True
            )
        code = None if reply is None else reply.get_header(MessageHeaderKey.RETURN_CODE)
        if code != CellReturnCode.OK:
            why = "" if reply is None else reply.get_header(MessageHeaderKey.ERROR, "")
            raise Undelivered(f"FLARE says {code!r}{': ' * bool(why)}{why}")

    def _packet(self, message: Message) -> Message:
        """Takes a packet, in a thread of FLARE's; its sender waits until our loop has it."""
        loop, origin = self._loop, str(message.get_header(MessageHeaderKey.ORIGIN, ""))
        peer, _, job_id = origin.rpartition(".")
        if loop is None or job_id != self._job_id:
            return _reply(CellReturnCode.SERVICE_UNAVAILABLE, "not ready")
        taken: concurrent.futures.Future[None] = concurrent.futures.Future()
        data = bytes(message.payload) if not isinstance(message.payload, bytes) else message.payload

        def take() -> None:
            try:
                self._receive(peer, data)
            except BaseException as error:  # noqa: BLE001 - told to whoever has sent it
                taken.set_exception(error)
            else:
                taken.set_result(None)

        try:
            loop.call_soon_threadsafe(take)
            taken.result(_TRY)
        except Exception as error:  # noqa: BLE001 - told to whoever has sent it
            return _reply(CellReturnCode.PROCESS_EXCEPTION, f"{type(error).__name__}: {error}")
        return _reply(CellReturnCode.OK, "")


def _reply(code: str, error: str) -> Message:
    headers = {MessageHeaderKey.RETURN_CODE: code}
    if error:
        headers[MessageHeaderKey.ERROR] = error
    return Message(headers, None)


def _when_triggered(signal: Signal, call: Callable[[], None]) -> None:
    """Has something called when FLARE gives a signal; by itself, one can only look at it again and again."""
    original = signal.trigger

    def trigger(value: Any) -> None:
        original(value)
        call()

    signal.trigger = trigger
    if signal.triggered:
        call()


class _Process:
    """What the hub's process and those of the sites have in common."""

    def __init__(self, fl_ctx: FLContext, patience: float) -> None:
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        self.job_id = str(fl_ctx.get_job_id())
        self.name = str(fl_ctx.get_identity_name())
        self.patience = patience
        self.local = Path(workspace.get_site_config_dir())
        self.root = Path(workspace.get_root_dir())
        self.meta = Path(workspace.get_job_meta_path(self.job_id))
        self.ended: asyncio.Future[str] | None = None
        self._receive: Callable[[str, bytes], None] = _nobody
        self.wire = CellWire(fl_ctx.get_engine().get_cell(), self.job_id, self._take)
        self.loop: asyncio.AbstractEventLoop | None = None

    def _take(self, peer: str, packet: bytes) -> None:
        self._receive(peer, packet)

    def attach(self, node: Node) -> None:
        """Packets go to this node from now on."""
        self._receive = node.take
        self.wire.open()

    def settings(self, site: str) -> SiteSettings:
        """The settings of the site."""
        return read_settings(self.local, site)

    def agent(self, settings: SiteSettings, options: LocalOptions) -> SiteAgent:
        """The site's agent."""
        audit = None if settings.audit is None else self.root / settings.audit
        return SiteAgent(
            settings,
            load_user(self.meta),
            load_installed(settings, self.local),
            options,
            AuditLog(audit, {"site": settings.site, "carrier": self.job_id}),
            load_authorizer(settings),
        )

    def end(self, reason: str) -> None:
        """Ends it, from any thread."""
        loop, ended = self.loop, self.ended
        if loop is not None and ended is not None:
            with_loop = loop

            def set_result() -> None:
                if not ended.done():
                    ended.set_result(reason)

            try:
                with_loop.call_soon_threadsafe(set_result)
            except RuntimeError:  # it has ended already
                return


def _nobody(_peer: str, _packet: bytes) -> None:
    raise ValueError("not ready")


class SiteExecutor(Executor):  # type: ignore[misc] # nvflare has no type information
    """Runs a site's part of all jobs of a carrier, as one FLARE task that lasts as long as the carrier."""

    def __init__(self, patience: float = 30.0) -> None:
        super().__init__()
        self._patience = patience
        self._process: _Process | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listens for packets before any task comes, and ends when FLARE ends the job."""
        if event_type == EventType.START_RUN:
            self._process = _Process(fl_ctx, self._patience)
        elif event_type in _ENDS and self._process is not None:
            self._process.end("FLARE has ended the job")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Runs the site until the carrier ends."""
        process = self._process
        if process is None:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        asyncio.run(_run_site(process, abort_signal))
        return make_reply(ReturnCode.OK)


async def _run_site(process: _Process, abort_signal: Signal) -> None:
    loop = process.loop = asyncio.get_running_loop()
    ended = process.ended = loop.create_future()
    _when_triggered(abort_signal, lambda: process.end("FLARE has ended the job"))
    settings = process.settings(process.name)
    options = LocalOptions()
    gateway: Gateway | None = None

    def receive(peer: str, message: Any) -> None:
        kind = type(message)
        if peer == HUB and kind is fm.Bye:
            process.end(message.reason)
        elif peer == HUB and kind is fm.AppBytes:
            if gateway is not None:
                gateway.receive(message)
        else:
            agent.receive(peer, message)

    def broken(peer: str, reason: str) -> None:
        if peer == HUB:
            process.end(f"the hub cannot be reached any more: {reason}")
        else:
            node.send(HUB, fm.PeerLost(peer, reason))

    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(process.agent(settings, options))
        node = Node(
            process.name,
            process.wire,
            receive,
            broken,
            patience=process.patience,
            largest=settings.max_message_bytes,
            on_room=agent.has_room,
        )
        stack.push_async_callback(node.close)
        agent.attach(node)
        stack.callback(process.wire.close)
        process.attach(node)
        if settings.site == settings.homesite:
            gateway = Gateway(lambda message: node.send(HUB, message))
            await gateway.open()
            stack.push_async_callback(gateway.close)
        node.send(HUB, agent.hello(VERSION, platform.node(), "" if gateway is None else gateway.address))
        reason = await ended
        _log.info("site %s leaves: %s", process.name, reason)


class _Commands:
    """Applications that speak by app commands: each command brings messages, and takes those that wait."""

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._ports: dict[str, _CommandPort] = {}

    def __call__(self, topic: str, data: Any, fl_ctx: FLContext, *_args: Any) -> dict[str, Any]:
        """Serves one command, in a thread of FLARE's. It waits a moment, if asked to, for something to say."""
        app, number = str(data["app"]), int(data["number"])
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        messages = [base64.b64decode(part) for part in data.get("messages", ())]
        wait = min(float(data.get("wait", 0.0)), _LONGEST_COMMAND)
        self._loop.call_soon_threadsafe(self._serve, app, number, messages, wait, answer)
        return answer.result(wait + _TRY)

    def _serve(self, app: str, number: int, messages: list[bytes], wait: float, answer: Any) -> None:
        port = self._ports.get(app)
        if port is None:
            if not messages:
                answer.set_result({"gone": True})
                return
            port = self._ports[app] = _CommandPort(self._loop, lambda: self._silent(app))
        port.heard()
        if number != port.number:  # else its answer was lost, and it comes again
            port.number = number
            port.answered.clear()
            for message in messages:
                self._hub.app_came(app, port, message)
        port.answer(answer, wait)

    def _silent(self, app: str) -> None:
        self._ports.pop(app, None)
        self._hub.app_left(app)


_LONGEST_COMMAND: Final = 0.1
_SILENCE: Final = 60.0
_ANSWER_BYTES: Final = 8 * 1024 * 1024


class _CommandPort:
    """What waits for an application that speaks by commands."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_silence: Callable[[], None]) -> None:
        self.number = -1
        self.answered: list[bytes] = []
        self._loop = loop
        self._on_silence = on_silence
        self._waiting: deque[bytes] = deque()
        self._answer: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self._loop.call_later(_SILENCE, self._on_silence)

    def send(self, data: bytes) -> None:
        self._waiting.append(data)
        if self._answer is not None:
            self._loop.call_soon(self._flush)

    def answer(self, answer: Any, wait: float) -> None:
        self._answer = answer
        if self._waiting or self.answered or wait <= 0:
            self._flush()
        else:
            self._timer = self._loop.call_later(wait, self._flush)

    def _flush(self) -> None:
        answer, self._answer = self._answer, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if answer is None:
            return
        if not self.answered:
            size = 0
            while self._waiting and (not self.answered or size + len(self._waiting[0]) <= _ANSWER_BYTES):
                size += len(self._waiting[0])
                self.answered.append(self._waiting.popleft())
        encoded = [base64.b64encode(part).decode() for part in self.answered]
        answer.set_result({"messages": encoded, "more": bool(self._waiting)})


class _GatewayPort:
    """The way to an application at a site's gateway. What is said in one turn of the loop goes together."""

    def __init__(self, node: Node, site: str, app: str) -> None:
        self._node = node
        self._site = site
        self._app = app
        self._waiting: list[bytes] = []

    def send(self, data: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(data)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._node.send(self._site, fm.AppBytes(self._app, waiting))


class HubController(Controller):  # type: ignore[misc] # nvflare has no type information
    """Runs the hub of a carrier, and the site called ``server``."""

    def __init__(self, patience: float = 30.0, linger: float = 60.0) -> None:
        super().__init__()
        self._patience = patience
        self._linger = linger
        self._process: _Process | None = None
        self._hub: Hub | None = None
        self._deployed: list[str] = []
        self._commands: _Commands | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Listens for packets and commands before any site can speak."""
        self._process = _Process(fl_ctx, self._patience)
        self._process.name = HUB
        self._deployed = [HUB, *(client.name for client in fl_ctx.get_engine().get_clients())]
        fl_ctx.get_engine().register_app_command(COMMAND, self._command)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Has nothing left to do: the hub has ended with the control flow."""

    def _command(self, topic: str, data: Any, fl_ctx: FLContext, *args: Any) -> dict[str, Any]:
        if self._commands is None:
            return {"starting": True}
        return self._commands(topic, data, fl_ctx, *args)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Is told when a client is gone for good, and when FLARE ends the job."""
        if event_type == EventType.CLIENT_DISCONNECTED:
            name = str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME))
            self._lost(name, "FLARE says that its client is gone")
        elif event_type in (EventType.ABOUT_TO_END_RUN, EventType.END_RUN) and self._process is not None:
            self._process.end("FLARE has ended the job")

    def _lost(self, name: str, reason: str) -> None:
        process, hub = self._process, self._hub
        if process is not None and process.loop is not None and hub is not None:
            process.loop.call_soon_threadsafe(hub.lost_site, name, reason)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Runs the hub until nobody needs it any more."""
        task = Task(name="dfm_async", data=Shareable())
        self.broadcast(task=task, fl_ctx=fl_ctx, targets=None, min_responses=0, wait_time_after_min_received=0)
        assert self._process is not None  # noqa: S101 - set when the controller started
        asyncio.run(self._run(self._process, abort_signal))

    async def _run(self, process: _Process, abort_signal: Signal) -> None:
        loop = process.loop = asyncio.get_running_loop()
        ended = process.ended = loop.create_future()
        _when_triggered(abort_signal, lambda: process.end("FLARE has ended the job"))
        settings = process.settings(HUB)
        options = LocalOptions()
        hub = self._hub = Hub(process.job_id, VERSION, self._deployed, options)
        ports: dict[tuple[str, str], _GatewayPort] = {}

        def receive(peer: str, message: Any) -> None:
            kind = type(message)
            if kind in FOR_HUB:
                hub.receive(peer, message)
            elif kind is fm.AppBytes:
                from_app(peer, message)
            elif kind is fm.AppGone:
                ports.pop((peer, message.app), None)
                hub.app_left(f"{peer}/{message.app}")
            else:
                agent.receive(peer, message)

        def from_app(peer: str, message: fm.AppBytes) -> None:
            port = ports.get((peer, message.app))
            if port is None:
                port = ports[peer, message.app] = _GatewayPort(node, peer, message.app)
            for data in message.data:
                hub.app_came(f"{peer}/{message.app}", port, data)

        async with AsyncExitStack() as stack:
            agent = await stack.enter_async_context(process.agent(settings, options))
            node = Node(
                HUB,
                process.wire,
                receive,
                hub.lost_site,
                patience=process.patience,
                largest=settings.max_message_bytes,
                on_room=agent.has_room,
            )
            stack.push_async_callback(node.close)
            agent.attach(node)
            hub.attach(node)
            stack.callback(process.wire.close)
            process.attach(node)
            self._commands = _Commands(hub, loop)
            node.send(HUB, agent.hello(VERSION, platform.node()))
            hub.ended.add_done_callback(lambda done: process.end(done.result()))
            reason = await ended
            self._commands = None
            await hub.close(reason)
            async with asyncio.timeout(process.patience):
                await node.drained()
        _log.info("the carrier ends: %s", reason)
