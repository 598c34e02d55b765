"""The application's connection to the hub: finds or starts a host job, and reconnects by fallback transports."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import platform
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

from dfm_async.base.signals import Signal
from dfm_async.base.tasks import completed
from dfm_async.errors import FlareError
from dfm_async.model.flare import FlareOptions
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.admin import Admin, UserKit, host_job_name, write_job
from dfm_async.targets.flare.gateway import GatewayMemory
from dfm_async.targets.flare.hub_transports import CommandTransport, GatewayTransport, HostJobEnded, Transport
from dfm_async.targets.flare.message_parts import TooLarge
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.reliable_stream import ReliableStream

_log = logging.getLogger(__name__)

_FOUND: Final = 3.0
"""The timeout of a connection to a host job that was found; one that has just ended is listed for a while."""
_POLL: Final = 0.5
_AGAIN: Final = "Open a new session"
_NONE: Final[Mapping[str, float]] = {}


def _has_all(last_seen: Mapping[str, float], welcome: fm.Welcome) -> bool | None:
    """Return whether a host job has all sites that a new one would have; None if that is not known yet.

    A site that was lost, or that the host job was never sent to, can be in a new one if its client was seen since.
    """
    missing = last_seen.keys() - welcome.sites.keys()
    missing -= set(welcome.deployed) - welcome.gone.keys()  # these start
    if any(last_seen[site] > welcome.since.get(site, welcome.began) for site in missing):
        return False
    return True if HUB in welcome.sites else None


class HubConnection:
    """One session at one hub.

    Args:
        options: where the federation is, and how it is reached.
        hello: describes the application.
        offers: the code that the application brings.
        on_message: is called with each message of the hub.
        on_lost: is called once, with the reason, when the hub cannot be reached any longer.
    """

    def __init__(
        self,
        options: FlareOptions,
        hello: fm.AppHello,
        offers: Sequence[fm.Offer],
        on_message: Callable[[HubConnection, Any], None],
        on_lost: Callable[[HubConnection, FlareError], None],
    ) -> None:
        self.welcome: fm.Welcome | None = None
        """The last report of the hub about the sites."""
        self.lost: FlareError | None = None
        """Why the hub cannot be reached any longer, if so."""
        self._options = options
        self._hello = hello
        self._offers = offers
        self._offered: dict[str, str] = {}
        self._on_message = on_message
        self._on_lost = on_lost
        self._admin = Admin(options.startup_kit, options.user)
        self._memory: GatewayMemory | None = GatewayMemory(Path(options.startup_kit), host_job_name(options))
        self.host_job = ""
        """The FLARE job whose hub this is."""
        self._session = ""
        self._stream = ReliableStream(self._take)
        self._transport: Transport | None = None
        self._broken: FlareError | None = None
        self._busy = False
        self._better = False
        """Whether the gateway can be used instead of commands."""
        self._closed = False
        self._ended: set[str] = set()
        """The addresses of gateways that have ended."""
        self._changed = asyncio.Event()
        self._arrivals = Signal()
        """Notifies the waiters for sites."""
        self.clients: dict[str, float] = {}
        """The clients that were registered when it was opened, and when the server last saw each."""

    # what users of the connection see

    @property
    def transport(self) -> Literal["gateway", "commands"] | None:
        """The kind of the present transport; None while there is none."""
        return None if self._transport is None else self._transport.kind

    @property
    def journal(self) -> bool:
        """Whether the jobs of the hub outlive it."""
        return self.welcome is not None and self.welcome.journal

    def send(self, message: Any) -> None:
        """Send a message to the hub. While there is no transport, it waits for one.

        Raises:
            TooLarge: the hub does not take so much at a time.
        """
        data = fm.encode(message)
        largest = math.inf if self.welcome is None else self.welcome.largest
        if len(data) > largest:
            raise TooLarge(f"{len(data):,} bytes are more than the {int(largest):,} that the server takes at a time")
        self._stream.send(data)

    def offer(self, offers: Sequence[fm.Offer]) -> None:
        """Bring code to the hub, as far as it does not have it from us.

        Raises:
            TooLarge: the hub does not take so much at a time.
        """
        self._offers = offers
        for offer in offers:
            if self._offered.get(offer.site) != offer.key:
                self.send(offer)
                self._offered[offer.site] = offer.key

    def expect(self, *, busy: bool) -> None:
        """Set whether messages of the hub are expected."""
        self._busy = busy
        if self._transport is not None:
            self._transport.expect(busy=busy)

    # opening

    async def open(self, sites: Collection[str], homesite: str, needed: Mapping[str, float] = _NONE) -> None:
        """Connect to the host job of this user's jobs, or start one.

        Only the hub, and the homesite's gateway if there may be one, must be ready: sites that are missing, or need
        longer, do not hold up those that are not needed (see :meth:`arrived`).

        Args:
            sites: the requested sites.
            homesite: the application's own site.
            needed: sites that were lost, and when, by the clock of the server: it waits for them, for a while.

        Raises:
            FlareError: the federation cannot be reached, or the hub does not start.
        """
        async with self._in_time():
            await self._open({homesite, *sites}, {site: since for site, since in needed.items() if site != HUB})

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Limit what opens a connection to ``start_timeout`` seconds."""
        try:
            async with asyncio.timeout(self._options.start_timeout):
                yield
        except TimeoutError:
            raise FlareError(await self._what_is_missing(), "Run 'dfm-async flare doctor'") from None

    async def arrived(self, sites: Collection[str]) -> None:
        """Wait until sites that the host job was sent to are ready, or lost, or have had ``start_timeout`` seconds."""

        def decided() -> bool:
            welcome = self.welcome
            if self.lost is not None or welcome is None:
                return True
            return (set(welcome.deployed) - welcome.sites.keys() - welcome.gone.keys()).isdisjoint(sites)

        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.start_timeout):
                await self._arrivals.wait_until(decided)

    async def open_at(self, host_job: str) -> None:
        """Connect to one host job of this user's jobs, whatever sites it has.

        Raises:
            FlareError: it cannot be reached.
        """
        self._memory = None  # others are to take the host job for new jobs
        async with self._in_time():
            await self._admin.open(self._options.start_timeout)
            if not await self._by_commands(host_job, _FOUND, lambda _welcome: True):
                raise self._broken or FlareError("the host job of the job has ended", _AGAIN)
            await self._switch_to_gateway()

    async def host_jobs(self) -> list[str]:
        """Return the host jobs of this user's jobs that run, the oldest first.

        Raises:
            FlareError: the federation cannot be reached.
        """
        admin, seconds = Admin(self._options.startup_kit, self._options.user), self._options.start_timeout
        try:
            async with asyncio.timeout(seconds):
                await admin.open(seconds)
                return list(await admin.host_jobs(host_job_name(self._options)))
        except TimeoutError:
            raise FlareError(f"the federation has not answered within {seconds:g} s", "Try again") from None
        finally:
            await completed(admin.close())

    async def _open(self, requested: set[str], needed: dict[str, float]) -> None:
        if await self._through_known_gateway(requested):
            return
        await self._admin.open(self._options.start_timeout)
        last_seen = self.clients = await self._clients(needed)
        name = host_job_name(self._options)
        tried = await self._admin.host_jobs(name)
        for host_job, refused in tried.items():
            asked = {site: last_seen[site] for site in requested if site in last_seen and site not in refused}
            if await self._by_commands(host_job, _FOUND, functools.partial(_has_all, asked)):
                break
        else:
            await self._start(name, list(last_seen), tried)
        if self._options.gateway == "auto" and self._hello.homesite in last_seen:
            await self.arrived([self._hello.homesite])
        if self._gateway is not None:
            await self._switch_to_gateway()
        elif self._options.gateway == "auto" and self._hello.homesite not in last_seen:
            _log.warning(
                "the homesite %r has no client, so results come by app commands, which are slower. "
                "Start its client, or set gateway='never' to use app commands on purpose",
                self._hello.homesite,
            )

    async def _clients(self, needed: dict[str, float]) -> dict[str, float]:
        """Wait for registered clients, above all for those that are needed; return them."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            last_seen = await self._admin.last_seen()
            back = all(last_seen.get(site, -math.inf) > since for site, since in needed.items())
            if last_seen and (back or loop.time() - began > self._options.start_timeout / 2):
                return last_seen
            await asyncio.sleep(_POLL)  # FLARE has no event for a client that registers

    async def _start(self, name: str, clients: list[str], tried: Collection[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
            write_job(Path(folder) / "job", name, clients, self._options)
            ours = await self._admin.submit(Path(folder) / "job")
        # Another application may have done the same in this moment: all take the oldest.
        oldest = next(host_job for host_job in [*await self._admin.host_jobs(name), ours] if host_job not in tried)
        if oldest != ours:
            await self._admin.abort(ours)
        timeout = self._options.start_timeout
        if not await self._by_commands(oldest, timeout, lambda welcome: HUB in welcome.sites or None):
            raise self._broken or FlareError("the host job does not start", "Read the log of the server")

    def _begin(self, host_job: str) -> fm.Attach:
        """Begin a session at a host job."""
        self.host_job, self._session = host_job, secrets.token_hex(16)
        self._stream = ReliableStream(self._take)
        self.welcome = self._broken = None
        self._offered.clear()
        self.offer(self._offers)
        return self._attach(new=True)

    def _attach(self, *, new: bool) -> fm.Attach:
        return fm.Attach(self._session, new, self._stream.have, self._hello)

    async def _use(self, transport: Transport, attach: fm.Attach) -> None:
        """Use a transport from now on.

        Raises:
            FlareError: the hub cannot be reached by it, or refuses us.
        """
        try:
            attached = await transport.open(attach)
        except BaseException:
            await transport.close(at_once=True)
            raise
        if attached.refused:
            await transport.close(at_once=True)
            raise FlareError(attached.refused, _AGAIN)
        self._transport, self._broken = transport, None
        transport.expect(busy=self._busy or self.welcome is None)

    async def _through_known_gateway(self, requested: set[str]) -> bool:
        """Use the gateway that an earlier session found, if all sites are present: that takes no time."""
        memory = self._memory if self._options.gateway == "auto" else None
        address = None if memory is None else memory.address()
        if memory is None or address is None:
            return False
        attach = self._begin("")
        transport = GatewayTransport(address, self._stream, self._transport_lost)
        if await self._try(transport, attach, lambda welcome: requested <= welcome.sites.keys()):
            assert self.welcome is not None  # noqa: S101 - it was just seen
            self.host_job = self.welcome.host_job
            return True
        if self._broken is not None:
            self._broken = None
            memory.forget()
        return False

    async def _by_commands(self, host_job: str, seconds: float, fits: Callable[[fm.Welcome], bool | None]) -> bool:
        """Connect to a host job; return False if it does not run, or does not have the sites that are needed."""
        attach = self._begin(host_job)
        return await self._try(self._command_transport(seconds, ran=False), attach, fits)

    async def _try(self, transport: Transport, attach: fm.Attach, fits: Callable[[fm.Welcome], bool | None]) -> bool:
        """Use a transport, unless the hub cannot be reached by it or does not have the sites that are needed."""
        try:
            await self._use(transport, attach)
        except FlareError as error:
            self._broken = error
            return False
        if await self._welcomed(fits):
            return True
        await self._leave()
        return False

    async def _welcomed(self, fits: Callable[[fm.Welcome], bool | None]) -> bool:
        """Wait until the hub has reported the sites that are needed, or cannot, or the transport is lost."""
        while self._broken is None:
            found = None if self.welcome is None else fits(self.welcome)
            if found is not None:
                return found
            self._changed.clear()
            await self._changed.wait()
        return False

    @property
    def _gateway(self) -> str | None:
        """Where the homesite's gateway is, if we may and can take it."""
        if self.welcome is None or self._options.gateway == "never":
            return None
        host, address = self.welcome.gateway
        return address if address and address not in self._ended and host == platform.node() else None

    async def _switch_to_gateway(self) -> None:
        """Change to the homesite's gateway if it can be reached; else keep the transport."""
        address, before = self._gateway, self._transport
        if address is None or before is None or before.kind == "gateway":
            return
        await before.close(at_once=True)
        self._transport = None
        try:
            await self._use(GatewayTransport(address, self._stream, self._transport_lost), self._attach(new=False))
        except FlareError as error:
            _log.info("the gateway of %s is not used: %s", self._hello.homesite, error)
            self._ended.add(address)
            await self._use(self._command_transport(self._options.delivery_timeout), self._attach(new=False))
        else:
            if self._memory is not None:
                self._memory.keep(address)
            await self._admin.close()

    def _command_transport(self, timeout: float, *, ran: bool = True) -> CommandTransport:
        return CommandTransport(self._admin, self.host_job, self._stream, self._transport_lost, timeout, ran=ran)

    async def _what_is_missing(self) -> str:
        seconds = self._options.start_timeout
        unreachable = await UserKit.read(Path(self._options.startup_kit)).why_not()
        why = unreachable or ("" if self._broken is None else self._broken.problem)
        return f"the federation has not answered within {seconds:g} s{': ' * bool(why)}{why}"

    # while it is open

    def _take(self, data: bytes | memoryview) -> None:
        message = fm.decode_hub(data)
        if isinstance(message, fm.Welcome):
            self.welcome = message
            self._arrivals.notify()
            self._better = self.transport == "commands" and self._gateway is not None
            self._changed.set()
        if isinstance(message, fm.Bye):
            self._abandon(FlareError(f"the host job has ended: {message.reason}", _AGAIN))
            return
        try:
            self._on_message(self, message)
        except Exception:  # noqa: BLE001 - one message that cannot be handled must not cut off the others
            _log.exception("cannot handle a %s message of the hub", type(message).__name__)

    def _transport_lost(self, transport: Transport, error: FlareError) -> None:
        """Note that a transport is lost; ignored if it is not the present one."""
        if isinstance(transport, GatewayTransport):
            self._ended.add(transport.address)
        if transport is self._transport:
            self._transport, self._broken = None, error
            self._stream.detach()
            self._changed.set()

    async def supervise(self) -> None:
        """Reconnect by fallback transports, until the hub cannot be reached any longer."""
        while self.lost is None and not self._closed:
            self._changed.clear()
            if self._broken is not None:
                await self._reconnect(self._broken)
            elif self._better:
                self._better = False
                try:
                    await self._switch_to_gateway()
                except FlareError as error:
                    self._broken = error
            else:
                await self._changed.wait()

    async def _reconnect(self, error: FlareError) -> None:
        """Reconnect after the transport is lost, or abandon the connection."""
        if isinstance(error, HostJobEnded):
            self._abandon(error)
            return
        _log.info("the connection to the hub is lost: %s", error)
        if self._memory is not None:
            self._memory.forget()
        timeout = self._options.delivery_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._admin.close()  # FLARE ends idle sessions
                await self._admin.open(timeout)
                await self._use(self._command_transport(timeout), self._attach(new=False))
        except TimeoutError:
            self._abandon(FlareError(f"the hub cannot be reached for {timeout:g} s: {error.problem}", _AGAIN))
        except FlareError as reason:
            self._abandon(FlareError(f"the hub cannot be reached any longer: {reason.problem}", _AGAIN))
        else:
            self._better = self._gateway is not None and self._broken is None

    def _abandon(self, error: FlareError) -> None:
        if self.lost is None:
            self.lost = error
            self._arrivals.notify()
            self._stream.detach()
            self._changed.set()
            self._on_lost(self, error)

    # closing

    async def _leave(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            self.send(fm.Leave())
            await transport.close(at_once=False)

    async def close(self) -> None:
        """Send what is queued, and close."""
        self._closed = True
        self._changed.set()
        await self._leave()
        self._stream.detach()
        await self._admin.close()
