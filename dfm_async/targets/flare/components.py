"""What FLARE runs of us: a controller at the server, an executor at each site."""

from __future__ import annotations

import asyncio
import logging
import platform
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from nvflare.apis.dxo import DXO  # noqa: F401 - registers what FLARE needs to read tasks
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.agent import SiteAgent
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.authentication import Credentials
from dfm_async.targets.flare.cell_wire import CellWire
from dfm_async.targets.flare.connector import COMMAND
from dfm_async.targets.flare.gateway import Gateway
from dfm_async.targets.flare.hub import FOR_HUB, Hub
from dfm_async.targets.flare.installed import load_authorizer, load_installed, load_user, read_settings
from dfm_async.targets.flare.node import HUB, Node
from dfm_async.targets.flare.ports import Commands, GatewayPorts
from dfm_async.version import __version__

__all__ = ["HubController", "SiteExecutor"]

_log = logging.getLogger(__name__)

_ENDS: Final = (EventType.ABORT_TASK, EventType.ABOUT_TO_END_RUN, EventType.END_RUN)
_FULL: Final = 64 * 1024 * 1024
"""From how many bytes on that wait for the hub a gateway reads nothing more."""
_OPTIONS: Final = LocalOptions(shutdown_grace=1.0)
"""How workers start, and end with their site: its jobs have ended then."""
_ABANDONED: Final = 600.0
"""After how many seconds without the hub a site leaves the carrier."""


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
        self._startup = Path(workspace.get_startup_kit_dir())
        self.wire = CellWire(fl_ctx.get_engine().get_cell(), self.job_id, patience)
        self._run_folder = Path(workspace.get_run_dir(self.job_id))
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[str] | None = None
        self._too_late: str | None = None
        """Why it has to end before it could begin, if so."""
        self._lock = threading.Lock()

    def may_die(self) -> None:
        """Has FLARE take the end of this process for a good one: else it would end the carrier at all other sites.

        What was lost with the process is the hub's affair, which sees that it is gone.
        """
        with suppress(OSError):
            (self._run_folder / FLMetaKey.PROCESS_RC_FILE).write_text("0")

    def settings(self, site: str) -> SiteSettings:
        """The settings of the site."""
        return read_settings(self.local, site)

    def credentials(self) -> Credentials:
        """Who we are, by the startup kit."""
        return Credentials.load(self._startup, self.name, self.job_id)

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

    def begin(self) -> asyncio.Future[str]:
        """Runs on this loop; gives what tells why it has to end, when it has to."""
        with self._lock:
            self.loop = asyncio.get_running_loop()
            self._ended = self.loop.create_future()
            if self._too_late is not None:
                self._ended.set_result(self._too_late)
        return self._ended

    def end(self, reason: str) -> None:
        """Ends it, from any thread."""
        with self._lock:
            loop, ended = self.loop, self._ended
            if loop is None or ended is None:
                self._too_late = reason
                return

        def set_result() -> None:
            if not ended.done():
                ended.set_result(reason)

        with suppress(RuntimeError):  # it has ended already
            loop.call_soon_threadsafe(set_result)


class SiteExecutor(Executor):  # type: ignore[misc] # nvflare has no type information
    """Runs a site's part of all jobs of a carrier, as one FLARE task that lasts as long as the carrier."""

    def __init__(self, patience: float = 30.0) -> None:
        super().__init__()
        self._patience = patience
        self._process: _Process | None = None
        self._thread: threading.Thread | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begins before any task comes, and ends when FLARE ends the job."""
        if event_type == EventType.START_RUN:
            process = self._process = _Process(fl_ctx, self._patience)
            process.may_die()
            # Not only when the task comes: clients ask for tasks every two seconds.
            thread = self._thread = threading.Thread(target=_serve_site, args=(process,), name="dfm-site", daemon=True)
            thread.start()
        elif event_type in _ENDS and self._process is not None:
            self._process.end("FLARE has ended the job")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Runs the site until the carrier ends."""
        process, thread = self._process, self._thread
        if process is None or thread is None:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        _when_triggered(abort_signal, lambda: process.end("FLARE has ended the job"))
        thread.join()
        return make_reply(ReturnCode.OK)


def _serve_site(process: _Process) -> None:
    asyncio.run(_run_site(process))


async def _run_site(process: _Process) -> None:
    """Serves the hub. When that cannot be reached any more, its jobs end here, and the site comes to it anew."""
    loop = asyncio.get_running_loop()
    ended = process.begin()
    reason = ""
    heard = loop.time()
    try:
        while not ended.done() and loop.time() - heard < _ABANDONED:
            site = _Site(process, ended)
            reason = await site.serve()
            heard = max(heard, site.heard)
            _log.info("site %s begins anew, or leaves: %s", process.name, reason)
    finally:
        process.wire.close()


class _Site:
    """A site, for as long as it reaches the hub."""

    def __init__(self, process: _Process, ended: asyncio.Future[str]) -> None:
        self._process = process
        self._settings = process.settings(process.name)
        self._ended = ended
        self._left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._gateway: Gateway | None = None
        self.heard = 0.0
        """When the hub was heard last."""

    async def serve(self) -> str:
        """Serves the hub; gives why it cannot any more."""
        process, settings = self._process, self._settings
        async with AsyncExitStack() as stack:
            self._agent = await stack.enter_async_context(process.agent(settings, _OPTIONS))
            node = self._node = Node(
                process.credentials(),
                process.wire,
                self._receive,
                self._broken,
                self._refused,
                patience=process.patience,
                largest=settings.max_message_bytes,
                on_room=self._has_room,
                on_forged=self._agent.forged,
            )
            stack.push_async_callback(node.close)
            self._agent.attach(node)
            if settings.site == settings.homesite:
                self._gateway = Gateway(self._from_app)
                await self._gateway.open()
                stack.push_async_callback(self._gateway.close)
            process.wire.open(node)
            address = "" if self._gateway is None else self._gateway.address
            hello = self._agent.hello(__version__, platform.node(), address)
            node.send(HUB, msgspec.structs.replace(hello, life=node.life))
            node.watch(lambda: (HUB,))
            await asyncio.wait((self._ended, self._left), return_when=asyncio.FIRST_COMPLETED)
            return self._ended.result() if self._ended.done() else self._left.result()

    def _leave(self, reason: str) -> None:
        if not self._left.done():
            self._left.set_result(reason)

    def _receive(self, peer: str, message: Any) -> None:
        kind = type(message)
        if peer == HUB:
            self.heard = asyncio.get_running_loop().time()
        if kind is fm.Pulse:
            return
        if peer == HUB and kind is fm.Bye:
            self._process.end(message.reason)
        elif peer == HUB and kind is fm.SiteLost:
            self._node.drop(message.site)
        elif peer == HUB and kind is fm.GivenUp:
            if message.life == self._node.life:
                self._leave("the hub could not reach the site for a while, and has given it up")
        elif peer == HUB and kind in (fm.AppBytes, fm.AppGone):
            if self._gateway is not None:
                self._gateway.receive(message)
        else:
            self._agent.receive(peer, message)

    def _broken(self, peer: str, reason: str, life: str) -> None:
        if peer == HUB:
            self._leave(f"the hub cannot be reached any more: {reason}")
        else:
            self._node.send(HUB, fm.PeerLost(peer, reason, life))

    def _refused(self, peer: str, message: Any, reason: str) -> None:
        job, at = getattr(message, "job", None), getattr(message, "at", None)
        if isinstance(message, fm.AppBytes):  # it is about one application
            _log.warning("the hub does not take what an application says: %s", reason)
            if self._gateway is not None:
                self._gateway.let_go(message.app)
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
    """Runs the hub of a carrier, and the site called ``server``."""

    def __init__(self, patience: float = 30.0, linger: float = 60.0) -> None:
        super().__init__()
        self._patience = patience
        self._linger = linger
        self._process: _Process | None = None
        self._hub: Hub | None = None
        self._deployed: list[str] = []
        self._serve: Callable[[Any], dict[str, Any]] = _starting

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Listens for packets and commands before any site can speak."""
        self._process = _Process(fl_ctx, self._patience)
        self._process.name = HUB
        self._deployed = [HUB, *(client.name for client in fl_ctx.get_engine().get_clients())]
        fl_ctx.get_engine().register_app_command(COMMAND, self._command)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Has nothing left to do: the hub has ended with the control flow."""

    def _command(self, topic: str, data: Any, fl_ctx: FLContext, *args: Any) -> dict[str, Any]:
        return self._serve(data)

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
        ended = process.begin()
        _when_triggered(abort_signal, lambda: process.end("FLARE has ended the job"))
        settings = process.settings(HUB)
        hub = self._hub = Hub(
            process.job_id, __version__, self._deployed, LocalOptions(), self._linger, settings.max_message_bytes
        )

        def receive(peer: str, message: Any) -> None:
            kind = type(message)
            if kind in FOR_HUB:
                hub.receive(peer, message)
            elif kind in (fm.AppBytes, fm.AppGone):
                ports.receive(peer, message)
            else:
                agent.receive(peer, message)

        def refused(peer: str, message: Any, reason: str) -> None:
            if isinstance(message, fm.AppBytes | fm.AppGone):
                ports.let_go(message.app)
            else:
                hub.refused(peer, message, reason)

        async with AsyncExitStack() as stack:
            stack.callback(process.wire.close)
            agent = await stack.enter_async_context(process.agent(settings, _OPTIONS))
            node = Node(
                process.credentials(),
                process.wire,
                receive,
                hub.lost_site,
                refused,
                patience=process.patience,
                largest=settings.max_message_bytes,
                on_room=agent.has_room,
                on_forged=agent.forged,
                peers=self._deployed,
            )
            stack.push_async_callback(node.close)
            ports = GatewayPorts(hub, node, settings.homesite)
            agent.attach(node)
            node.watch(lambda: hub.sites)
            hub.attach_node(node, lambda site: ports.lost() if site == settings.homesite else None)
            process.wire.open(node)
            commands = self._serve = Commands(hub)
            node.send(HUB, agent.hello(__version__, platform.node()))
            hub.ended.add_done_callback(lambda done: process.end(done.result()))
            reason = await ended
            await hub.close(reason)
            self._serve = lambda _data: {"ended": reason}
            commands.close()
            with suppress(TimeoutError):  # whoever cannot be reached will see that we are gone
                async with asyncio.timeout(process.patience):
                    await node.drained()
            hub.say_bye(reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(process.patience):
                    await node.drained()
        _log.info("the carrier ends: %s", reason)


def _starting(_data: Any) -> dict[str, Any]:
    return {"starting": True}
