"""What FLARE runs of us: a controller at the server, an executor at each site."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

from nvflare.apis.dxo import DXO  # noqa: F401 - registers what FLARE needs to read tasks
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from dfm_async.errors import StoreError
from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.admin_process import COMMAND
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.authentication import Credentials
from dfm_async.targets.flare.cell_wire import CellWire
from dfm_async.targets.flare.gateway import Gateway
from dfm_async.targets.flare.hub import Hub
from dfm_async.targets.flare.hub_endpoints import CommandEndpoint, GatewayEndpoint
from dfm_async.targets.flare.hub_journal import JournalPlace
from dfm_async.targets.flare.node import HUB, HostNode
from dfm_async.targets.flare.protocol import ROUTES, TO_HUB, Route
from dfm_async.targets.flare.site_agent import SiteAgent
from dfm_async.targets.flare.site_code import load_authorizer, load_installed, load_user, read_settings
from dfm_async.version import __version__

_log = logging.getLogger(__name__)

_ENDS: Final = (EventType.ABORT_TASK, EventType.ABOUT_TO_END_RUN, EventType.END_RUN)
_FULL: Final = 64 * 1024 * 1024
"""The backlog to the hub, in bytes, at which a gateway stops reading."""
_OPTIONS: Final = LocalOptions(shutdown_grace=1.0)
"""How workers start, and end with their site: its jobs have ended then."""
_REPORTED: Final = 5.0
"""The number of seconds for which a hub that cannot begin reports why."""
_ABANDONED: Final = 600.0
"""The number of seconds without the hub after which a site leaves the host job."""


def _when_triggered(signal: Signal, call: Callable[[], None]) -> None:
    """Call a function when FLARE sets a signal, which by itself can only be polled."""
    original = signal.trigger

    def trigger(value: Any) -> None:
        original(value)
        call()

    signal.trigger = trigger
    if signal.triggered:
        call()


class _Process:
    """What the hub's process and those of the sites have in common."""

    def __init__(self, fl_ctx: FLContext, timeout: float) -> None:
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        self.job_id = str(fl_ctx.get_job_id())
        self.name = str(fl_ctx.get_identity_name())
        self.timeout = timeout
        self.local = Path(workspace.get_site_config_dir())
        self.root = Path(workspace.get_root_dir())
        self.meta = Path(workspace.get_job_meta_path(self.job_id))
        self._startup = Path(workspace.get_startup_kit_dir())
        self.wire = CellWire(fl_ctx.get_engine().get_cell(), self.job_id, timeout)
        self._run_folder = Path(workspace.get_run_dir(self.job_id))
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ended: concurrent.futures.Future[str] = concurrent.futures.Future()

    def may_die(self) -> None:
        """Have FLARE take the end of this process for a good one: else it would end the host job at all other sites.

        The hub detects that the process is gone, and handles its jobs.
        """
        with suppress(OSError):
            (self._run_folder / FLMetaKey.PROCESS_RC_FILE).write_text("0")

    def settings(self) -> SiteSettings:
        return read_settings(self.local, self.name)

    def node(self, settings: SiteSettings, agent: SiteAgent, *handlers: Any, **given: Any) -> HostNode:
        """Make the node of this process; ``handlers``, ``given``: further arguments of :class:`HostNode`."""
        return HostNode(
            Credentials.load(self._startup, self.name, self.job_id),
            self.wire,
            *handlers,
            timeout=self.timeout,
            largest=settings.max_message_bytes,
            on_forged=agent.forged,
            **given,
        )

    def agent(self, settings: SiteSettings) -> SiteAgent:
        audit = None if settings.audit is None else self.root / settings.audit
        return SiteAgent(
            settings,
            load_user(self.meta),
            load_installed(settings, self.local),
            _OPTIONS,
            AuditLog(audit, {"site": settings.site, "host_job": self.job_id}),
            load_authorizer(settings),
        )

    def begin(self) -> asyncio.Future[str]:
        """Run on this loop; return a future of the reason to end, which must be cancelled before the loop ends."""
        self.loop = asyncio.get_running_loop()
        return asyncio.wrap_future(self._ended)

    def end(self, reason: str) -> None:
        """End what runs, from any thread; only the first reason counts."""
        with suppress(concurrent.futures.InvalidStateError):
            self._ended.set_result(reason)


class SiteExecutor(Executor):  # type: ignore[misc] # nvflare has no type information
    """Runs a site's part of all jobs of a host job, as one FLARE task that lasts as long as the host job."""

    def __init__(self, timeout: float = 30.0) -> None:
        super().__init__()
        self._timeout = timeout
        self._process: _Process | None = None
        self._thread: threading.Thread | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin before any task comes, and end when FLARE ends the job."""
        if event_type == EventType.START_RUN:
            process = self._process = _Process(fl_ctx, self._timeout)
            process.may_die()
            # Not only when the task comes: clients ask for tasks every two seconds.
            self._thread = threading.Thread(
                target=lambda: asyncio.run(_run_site(process)), name="dfm-site", daemon=True
            )
            self._thread.start()
        elif event_type in _ENDS and self._process is not None:
            self._process.end("FLARE has ended the job")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run the site until the host job ends."""
        process, thread = self._process, self._thread
        if process is None or thread is None:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        _when_triggered(abort_signal, lambda: process.end("FLARE has ended the job"))
        thread.join()
        return make_reply(ReturnCode.OK)


async def _run_site(process: _Process) -> None:
    """Serve the hub. When that cannot be reached any longer, its jobs end at the site, and the site connects again."""
    loop = asyncio.get_running_loop()
    ended = process.begin()
    last_seen = loop.time()
    try:
        while not ended.done() and loop.time() - last_seen < _ABANDONED:
            site = _Site(process, ended)
            reason = await site.serve()
            last_seen = max(last_seen, site.last_seen)
            _log.info("site %s reconnects or leaves: %s", process.name, reason)
    finally:
        process.wire.close()
        ended.cancel()


class _Site:
    """A site, for as long as it reaches the hub."""

    def __init__(self, process: _Process, ended: asyncio.Future[str]) -> None:
        self._process = process
        self._settings = process.settings()
        self._ended = ended
        self._left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._gateway: Gateway | None = None
        self.last_seen = 0.0
        """When something of the hub was last received."""

    async def serve(self) -> str:
        """Serve the hub; return why it cannot any longer."""
        process, settings = self._process, self._settings
        async with AsyncExitStack() as stack:
            agent = self._agent = await stack.enter_async_context(process.agent(settings))
            handlers = (self._receive, self._broken, self._refused)
            node = self._node = process.node(settings, agent, *handlers, on_room=self._has_room)
            stack.push_async_callback(node.close)
            agent.attach(node)
            if settings.site == settings.homesite:
                self._gateway = Gateway(self._from_app)
                await self._gateway.open()
                stack.push_async_callback(self._gateway.close)
            process.wire.open(node)
            address = "" if self._gateway is None else self._gateway.address
            node.send(HUB, agent.hello(node.incarnation, address))
            node.watch(lambda: (HUB,))
            await asyncio.wait((self._ended, self._left), return_when=asyncio.FIRST_COMPLETED)
            return self._ended.result() if self._ended.done() else self._left.result()

    def _leave(self, reason: str) -> None:
        if not self._left.done():
            self._left.set_result(reason)

    def _receive(self, peer: str, message: Any) -> None:
        kind = type(message)
        if peer == HUB:
            self.last_seen = asyncio.get_running_loop().time()
        if kind is fm.Heartbeat:
            return
        if peer != HUB:
            self._agent.receive(peer, message)
        elif kind is fm.Bye:
            self._process.end(message.reason)
        elif kind is fm.SiteLost:
            self._node.drop(message.site)
        elif kind is fm.Evicted:
            if message.incarnation == self._node.incarnation:
                self._leave("the hub could not reach the site for a while, and has evicted it")
        elif kind in (fm.AppBytes, fm.AppGone):
            if self._gateway is not None:
                self._gateway.receive(message)
        else:
            self._agent.receive(peer, message)

    def _broken(self, peer: str, reason: str, incarnation: str) -> None:
        if peer == HUB:
            self._leave(f"the hub cannot be reached any longer: {reason}")
        else:
            self._node.send(HUB, fm.PeerLost(peer, reason, incarnation))

    def _refused(self, peer: str, message: Any, reason: str) -> None:
        job, at = getattr(message, "job", None), getattr(message, "at", None)
        if isinstance(message, fm.AppBytes):  # it is about one application
            _log.warning("the hub refuses the messages of an application: %s", reason)
            if self._gateway is not None:
                self._gateway.disconnect(message.app)
        elif job is None or at is None:  # it is about the site as a whole
            self._broken(peer, f"{peer} does not take {type(message).__name__}: {reason}", "")
        else:
            self._node.send(HUB, fm.Undeliverable(job, at, reason))

    def _from_app(self, message: Any) -> None:
        self._node.send(HUB, message)
        if self._gateway is not None and self._node.backlog > _FULL:
            self._gateway.pause(paused=True)

    def _has_room(self) -> None:
        self._agent.has_room()
        if self._gateway is not None and self._node.backlog <= _FULL // 2:
            self._gateway.pause(paused=False)


class HubController(Controller):  # type: ignore[misc] # nvflare has no type information
    """Runs the hub of a host job, and the site called ``server``."""

    def __init__(self, timeout: float = 30.0, linger: float = 60.0) -> None:
        super().__init__()
        self._timeout = timeout
        self._linger = linger
        self._process: _Process | None = None
        self._hub: Hub | None = None
        self._deployed: list[str] = []
        self._serve: Callable[[Any], dict[str, Any]] = _starting

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Listen for packets and commands before any site can connect."""
        self._process = _Process(fl_ctx, self._timeout)
        self._process.name = HUB
        self._deployed = [HUB, *(client.name for client in fl_ctx.get_engine().get_clients())]
        fl_ctx.get_engine().register_app_command(COMMAND, self._command)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: the hub has ended with the control flow."""

    def _command(self, topic: str, data: Any, fl_ctx: FLContext, *args: Any) -> dict[str, Any]:
        return self._serve(data)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle FLARE's events: a client is gone for good, or the job ends."""
        process, hub = self._process, self._hub
        if process is None:
            return
        if event_type in (EventType.ABOUT_TO_END_RUN, EventType.END_RUN):
            process.end("FLARE has ended the job")
        elif event_type == EventType.CLIENT_DISCONNECTED and process.loop is not None and hub is not None:
            name = str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME))
            process.loop.call_soon_threadsafe(hub.lost_site, name, "FLARE reports that its client is gone")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the hub until nobody needs it any longer."""
        task = Task(name="dfm_async", data=Shareable())
        self.broadcast(task=task, fl_ctx=fl_ctx, targets=None, min_responses=0, wait_time_after_min_received=0)
        assert self._process is not None  # noqa: S101 - set when the controller started
        asyncio.run(self._run(self._process, abort_signal))

    async def _run(self, process: _Process, abort_signal: Signal) -> None:
        ended = process.begin()
        _when_triggered(abort_signal, lambda: process.end("FLARE has ended the job"))
        settings = process.settings()
        user = load_user(process.meta)
        try:
            place = JournalPlace.find(settings, process.root, user.name, user.org, brings_code=user.brings_code)
            largest = settings.max_message_bytes
            hub = Hub(process.job_id, __version__, self._deployed, LocalOptions(), self._linger, largest, place)
            await hub.open()
        except StoreError as error:
            _log.error("the journal cannot be used: %s", error)
            reason = f"the server cannot open the journal: {error}"
            self._serve = lambda _data: {"ended": reason}
            await _reported(ended)
            return
        self._hub = hub

        def receive(peer: str, message: Any) -> None:
            route = ROUTES.get(type(message))
            if route in TO_HUB:
                hub.receive(peer, message)
            elif route is Route.GATEWAY:
                gateway.receive(peer, message)
            else:
                agent.receive(peer, message)

        def refused(peer: str, message: Any, reason: str) -> None:
            if isinstance(message, fm.AppBytes | fm.AppGone):
                gateway.disconnect(message.app)
            else:
                hub.refused(peer, message, reason)

        async with AsyncExitStack() as stack:
            stack.callback(process.wire.close)
            agent = await stack.enter_async_context(process.agent(settings))
            handlers = (receive, hub.lost_site, refused)
            node = process.node(settings, agent, *handlers, on_room=agent.has_room, peers=self._deployed)
            stack.push_async_callback(node.close)
            gateway = GatewayEndpoint(hub, node, settings.homesite)
            agent.attach(node)
            node.watch(lambda: hub.sites)
            hub.attach_node(node, lambda site: gateway.lost() if site == settings.homesite else None)
            process.wire.open(node)
            commands = self._serve = CommandEndpoint(hub)
            node.send(HUB, agent.hello())
            hub.ended.add_done_callback(lambda done: process.end(done.result()))
            reason = await ended
            await hub.close(reason)
            self._serve = lambda _data: {"ended": reason}
            commands.close()
            await _drained(node, process.timeout)
            hub.release_sites(reason)
            await _drained(node, process.timeout)
        _log.info("the host job ends: %s", reason)


async def _drained(node: HostNode, seconds: float) -> None:
    with suppress(TimeoutError):  # peers that cannot be reached will notice
        async with asyncio.timeout(seconds):
            await node.drained()


async def _reported(ended: asyncio.Future[str]) -> None:
    """Wait until the applications that have started the host job have had time to be notified of its end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REPORTED):
            await ended


def _starting(_data: Any) -> dict[str, Any]:
    return {"starting": True}
