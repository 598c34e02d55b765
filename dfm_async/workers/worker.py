"""A worker process: one event loop, and the runtime of one site."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from dfm_async.base.descriptors import close_in_children
from dfm_async.base.sockets import LocalListener, connect_local, same_user
from dfm_async.base.suspension import suspension
from dfm_async.base.tasks import in_thread
from dfm_async.errors import DfmError, LoadingError
from dfm_async.federation.operation import Adapter, Signature
from dfm_async.model.ids import HOME
from dfm_async.model.resources import ClassPath, SiteConfig
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.core_use import CoreUse
from dfm_async.runtime.operation_errors import broken_record, keep_causes_here
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.site_runtime import SiteRuntime
from dfm_async.site.loading import Loader, lacks_body
from dfm_async.wire import messages as msg
from dfm_async.wire.channel import Channel
from dfm_async.wire.codec import Codec, KnownClasses
from dfm_async.wire.memory import Arena
from dfm_async.workers.heartbeat import HeartbeatThread
from dfm_async.workers.lent_terminal import TerminalAccess
from dfm_async.workers.module_loading import check_preloaded, loading
from dfm_async.workers.output import OutputPipe, capture
from dfm_async.workers.shipping import load_site

_log = logging.getLogger(__name__)

ELSEWHERE: Final = "@"
"""The prefix of addresses on other machines: the process that started us forwards messages there."""

_MOST_DESCRIPTORS: Final = 4096
_SWITCH_INTERVAL: Final = 0.001
"""How long a thread that computes may keep the event loop waiting, in seconds; Python's own choice is 0.005."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The arguments of a worker process."""

    site: str
    threads: int
    shipped: bytes = field(repr=False)
    channel: socket.socket
    lifeline: socket.socket
    output: OutputPipe
    level: int
    """From which level on the application wants log records."""
    streams: bool
    """Whether standard output and standard error go through the pipe, too."""
    heartbeat: float | None
    """The seconds between two heartbeats; None if nobody waits for them."""
    environment: dict[str, str] = field(repr=False)
    """The environment of the application: that of the fork server may be older."""
    terminal: TerminalAccess | None = None
    """The terminal that debuggers may use."""
    enough_workers: int | None = None
    """With how many other workers this one does not compute itself; None: it always does."""
    apart: bool = False
    """Whether other sites and the application are elsewhere: what they send is not unpickled, and nothing is pickled
    for them."""
    checkpoints: tuple[str | None, int] = (None, 0)
    """The folder for checkpoints, if there is one, and how many bytes they may take."""
    known_only: bool = False
    """Whether what they send may only be of classes that the operations of this site take and return."""


def _die_with_the_application(lifeline: socket.socket) -> None:
    """Has the kernel end this process when the other end of the lifeline closes, whatever the process is doing then."""
    close_in_children(lifeline)
    if sys.platform == "darwin":  # where this signal ends nothing
        threading.Thread(target=_wait_for_the_end, args=(lifeline,), name="dfm-lifeline", daemon=True).start()
        return
    number = lifeline.fileno()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(number, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        closed = lifeline.recv(1) == b""
    except BlockingIOError:
        return
    if closed:  # it closed before we asked
        os._exit(0)


def _wait_for_the_end(lifeline: socket.socket) -> None:
    lifeline.setblocking(True)
    lifeline.recv(1)
    os._exit(0)


def _keep_descriptors() -> None:
    """Keep what connects us with the application from programs that operations start: they may outlive us."""
    try:
        numbers: Iterable[int] = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # there is no /proc
        numbers = range(min(os.sysconf("SC_OPEN_MAX"), _MOST_DESCRIPTORS))
    for number in numbers:
        if number > 2:
            with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                os.set_inheritable(number, False)


def _lead_a_group() -> None:
    """Make this process the leader of a group of its own, which is killed with it. The fork server has done so."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


def _take_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def run(setup: WorkerSetup, loop_initializer: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
    """Run the site until the application closes the channel. The main function of the process.

    Unlike the one of aiomultiprocess, it is part of what the fork server has loaded.
    """
    loop = asyncio.new_event_loop() if loop_initializer is None else loop_initializer()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve(setup))
    except BaseException:
        _log.exception("worker process %d has failed", os.getpid())
        raise


async def serve(setup: WorkerSetup) -> None:
    """Run the site until the application closes the channel."""
    _lead_a_group()
    _keep_descriptors()
    if setup.apart:
        keep_causes_here()
    _take_environment(setup.environment)
    capture(setup.output, setup.level, streams=setup.streams)
    gc.freeze()  # what is loaded stays; looking through it would copy pages that the workers share
    sys.setswitchinterval(_SWITCH_INTERVAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the application, which then ends us
    _die_with_the_application(setup.lifeline)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def lost(_error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(None)

    from dfm_async.workers import debugger  # only workers need it

    debugger.install(setup.site, setup.terminal, setup.output)
    worker = _SiteWorkerProcess(setup, ended)
    if setup.apart:
        channel = Channel(worker.receive_forwarded, lost, on_malformed=worker.malformed)
    else:
        channel = Channel(worker.receive, lost)
    await loop.create_unix_connection(lambda: channel, sock=setup.channel)
    try:
        check_preloaded()
        with loading():
            config, adapters = load_site(setup.shipped)
        table = OperationTable(setup.site, adapters)
        known = None
        if setup.known_only:
            known = await in_thread(lambda: known_classes(adapters, Loader(setup.site, config)), "classes")
    except BaseException as error:  # noqa: BLE001 - whatever importing the user's code raises
        channel.send(msg.WorkerRefused(f"{type(error).__name__}: {error}", traceback.format_exc()))
        channel.close()
        await ended
        return
    await worker.run(table, config, channel, known)


class _SiteWorkerProcess:
    """Connects the runtime of a site with the application and with its peers."""

    def __init__(self, setup: WorkerSetup, ended: asyncio.Future[None]) -> None:
        self._setup = setup
        self._ended = ended
        self._runtime: SiteRuntime | None = None
        self._channel: Channel | None = None
        self._address = ""
        self._peers: dict[str, Channel] = {}
        self._accepted: set[Channel] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._heartbeat = None
        if setup.heartbeat is not None:
            core_use = CoreUse(lambda: [] if self._runtime is None else self._runtime.jobs)
            overdue = suspension().overdue
            self._heartbeat = HeartbeatThread(setup.heartbeat, setup.output.send, self._counts, core_use, overdue)

    async def run(
        self, table: OperationTable, config: SiteConfig, channel: Channel, known: KnownClasses | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._channel = channel
        among_workers = Codec.for_processes(Arena())
        resources = SiteResources(
            self._setup.site,
            table,
            Codec.for_untrusted(known) if self._setup.apart else among_workers,
            call_codec=among_workers,
            report=channel.send,
            send=self._send,
            threads=self._setup.threads,
            config=config,
            on_abandoned=lambda *found: channel.send(msg.CallsAbandoned(*found)),
            enough_workers=self._setup.enough_workers,
            checkpoints=self._setup.checkpoints,
        )
        on_busy = None if self._heartbeat is None else self._heartbeat.busy
        runtime = SiteRuntime(resources, flush=self._flush, on_busy=on_busy, announced=self._setup.apart)
        listener = LocalListener(f"dfm-async-{os.getpid()}-{os.urandom(12).hex()}")
        self._address = resources.address = listener.address
        server = await loop.create_unix_server(self._accept, sock=listener.socket)
        try:
            async with AsyncExitStack() as stack:
                try:
                    self._runtime = await stack.enter_async_context(runtime)
                except DfmError as error:  # such as a vault that does not work
                    channel.send(msg.WorkerRefused(str(error), ""))
                    channel.close()
                else:
                    channel.send(msg.WorkerReady(os.getpid(), self._address))
                await self._ended
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            server.close()
            for peer in [*self._peers.values(), *self._accepted]:
                peer.close()
            listener.close()

    def _counts(self) -> tuple[int, int, int, int]:
        if self._runtime is None:
            return 0, 0, 0, 0
        found = self._runtime.resources
        return found.tokens, found.token_bytes, found.running, found.waiting

    def receive(self, message: msg.Message) -> None:
        """Take a message of the application or of a peer."""
        assert self._runtime is not None  # noqa: S101 - nobody writes before the hello
        if isinstance(message, msg.SuspendDeadlines):
            suspended = suspension()
            (suspended.hold if message.suspended else suspended.release)()
        else:
            self._runtime.receive(message)

    def receive_forwarded(self, message: msg.Message) -> None:
        """Take a message that may come from another site, which has no calls to run here."""
        if not isinstance(message, msg.AMONG_WORKERS):
            self.receive(message)

    def malformed(self, job: int, at: int, error: Exception) -> None:
        """Report a message of another site that cannot be decoded: its job cannot go on here."""
        if self._channel is not None:
            self._channel.send(msg.JobBroken(job, at, broken_record(self._setup.site, error)))

    def _send(self, address: str, message: msg.Message) -> None:
        if address == self._address:
            asyncio.get_running_loop().call_soon(self.receive, message)
        elif address == HOME or address.startswith(ELSEWHERE):
            assert self._channel is not None  # noqa: S101 - set before the runtime runs
            self._channel.send(message)
        else:
            peer = self._peers.get(address)
            if peer is None or peer.lost:
                peer = self._peers[address] = Channel(self.receive, lambda _error: self._forget(address))
                task = asyncio.get_running_loop().create_task(self._connect(peer, address))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
            peer.send(message)

    def _forget(self, address: str) -> None:
        self._peers.pop(address, None)

    def _flush(self) -> None:
        assert self._channel is not None  # noqa: S101 - set before the runtime runs
        self._channel.flush()
        for peer in list(self._peers.values()):
            peer.flush()

    async def _connect(self, peer: Channel, address: str) -> None:
        try:
            await connect_local(lambda: peer, address)
        except (ConnectionError, FileNotFoundError) as error:  # the peer has died: the application ends the jobs on it
            peer.connection_lost(error)
        except OSError as error:
            # The peer may be alive and wait for us, or another user has its address: better no worker than one that
            # cannot answer.
            peer.connection_lost(error)
            if not self._ended.done():
                self._ended.set_exception(error)

    def _accept(self) -> Channel:
        channel = _PeerChannel(self.receive, lambda _error: self._accepted.discard(channel))
        self._accepted.add(channel)
        return channel


class _PeerChannel(Channel):
    """A connection that another worker opened to us: only processes of the same user may."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not same_user(transport.get_extra_info("socket")):
            transport.abort()  # type: ignore[attr-defined] # a stream transport has it
            return
        super().connection_made(transport)


def known_classes(adapters: Iterable[Adapter], loader: Loader) -> KnownClasses:
    """Read the signatures of operations. Imports classes that are named by a path: blocks as long as that takes."""
    known = KnownClasses()
    for adapter in adapters:
        signature = adapter.signature
        if isinstance(adapter.code, ClassPath):
            try:
                kind = loader.load(adapter.code.path, f"operation {adapter.operation!r}", lacks_body)
                signature = Signature.of(kind.body, bound=True)
            except (LoadingError, TypeError, ValueError):  # reported to its callers
                _log.debug("the signature of operation %s cannot be read", adapter.operation, exc_info=True)
        for hint in signature.named:
            known.add(hint)
    return known
