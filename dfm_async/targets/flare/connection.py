"""The application's connection to the hub: finds a carrier or has one started, and another way when one breaks."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import platform
import secrets
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from dfm_async.base.completion import completed
from dfm_async.errors import FlareError
from dfm_async.model.flare import FlareOptions
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.admin import Admin
from dfm_async.targets.flare.duplex import Duplex
from dfm_async.targets.flare.gateway_memory import GatewayMemory
from dfm_async.targets.flare.job_folder import carrier_name, write_job
from dfm_async.targets.flare.line import CarrierEnded, CommandLine, GatewayLine, Line
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.parts import TooLarge
from dfm_async.targets.flare.user_kit import UserKit

__all__ = ["HubConnection"]

_log = logging.getLogger(__name__)

_FOUND: Final = 3.0
"""For how many seconds a carrier that was found is asked; one that has just ended is listed for a while."""
_ASK_AGAIN: Final = 0.5
_AGAIN: Final = "Connect again"
_NONE: Final[Mapping[str, float]] = {}


def _has_all(heard: Mapping[str, float], welcome: fm.Welcome) -> bool | None:
    """Whether a carrier has all sites that a new one would have; None if that is not known yet.

    A site that was lost, or that the carrier was never sent to, can be in a new one if its client was heard since then.
    """
    missing = heard.keys() - welcome.sites.keys()
    missing -= set(welcome.deployed) - welcome.gone.keys()  # these start
    if any(heard[site] > welcome.since.get(site, welcome.began) for site in missing):
        return False
    return True if HUB in welcome.sites else None


class HubConnection:
    """One session at one hub.

    Args:
        options: where the federation is, and how it is reached.
        hello: what the application tells of itself.
        offers: the code that the application brings.
        on_message: takes what the hub says.
        on_lost: is told, once, that the hub cannot be reached any more, and why.
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
        """What the hub has told of the sites."""
        self.lost: FlareError | None = None
        """Why the hub cannot be reached any more, if so."""
        self._options = options
        self._hello = hello
        self._offers = offers
        self._offered: dict[str, str] = {}
        self._on_message = on_message
        self._on_lost = on_lost
        self._admin = Admin(options.startup_kit, options.user)
        self._memory: GatewayMemory | None = GatewayMemory(Path(options.startup_kit), carrier_name(options))
        self._carrier = ""
        self._session = ""
        self._duplex = Duplex(self._take)
        self._line: Line | None = None
        self._broken: FlareError | None = None
        self._busy = False
        self._better = False
        self._closed = False
        self._ended: set[str] = set()
        """Gateways that are not there any more."""
        self._changed = asyncio.Event()
        self._arrivals: list[asyncio.Future[None]] = []
        """Those who wait for sites."""
        self.clients: dict[str, float] = {}
        """The clients that were registered when it was opened, and when the server has heard of them last."""

    # what users of the connection see

    @property
    def way(self) -> Literal["gateway", "commands"] | None:
        """How it goes at present: ``gateway``, ``commands``, or not at all."""
        return None if self._line is None else self._line.kind

    def send(self, message: Any) -> None:
        """Says something to the hub; what is said while there is no way waits for one.

        Raises:
            TooLarge: the hub does not take so much at a time.
        """
        data = fm.encode(message)
        largest = math.inf if self.welcome is None else self.welcome.largest
        if len(data) > largest:
            raise TooLarge(f"{len(data):,} bytes are more than the {int(largest):,} that the server takes at a time")
        self._duplex.send(data)

    def offer(self, offers: Sequence[fm.Offer]) -> None:
        """Brings code to the hub, as far as it does not have it from us.

        Raises:
            TooLarge: the hub does not take so much at a time.
        """
        self._offers = offers
        for offer in offers:
            if self._offered.get(offer.site) != offer.key:
                self.send(offer)
                self._offered[offer.site] = offer.key

    def expect(self, *, busy: bool) -> None:
        """Says whether the hub will have something to say."""
        self._busy = busy
        if self._line is not None:
            self._line.expect(busy=busy)

    @property
    def carrier(self) -> str:
        """The FLARE job whose hub this is."""
        return self._carrier

    # opening

    async def open(self, sites: Collection[str], homesite: str, needed: Mapping[str, float] = _NONE) -> None:
        """Connects to the carrier of this user's jobs, or has one started.

        Only the hub, and the homesite's gateway if there may be one, must be ready: sites that are missing, or need
        longer, do not hold up those that are not needed (see :meth:`arrived`).

        Args:
            sites: the sites that are wanted.
            homesite: the application's own site.
            needed: sites that were lost, and when, by the clock of the server: it waits for them, for a while.

        Raises:
            FlareError: the federation cannot be reached, or the hub does not start.
        """
        wanted = {homesite, *sites}
        try:
            async with asyncio.timeout(self._options.start_timeout):
                await self._open(wanted, {site: since for site, since in needed.items() if site != HUB})
        except TimeoutError:
            raise FlareError(await self._what_is_missing(), "Ask 'dfm-async flare doctor'") from None

    async def arrived(self, sites: Collection[str]) -> None:
        """Wait until sites that the carrier was sent to are ready, or lost, or have had ``start_timeout`` seconds."""

        def decided(welcome: fm.Welcome) -> bool:
            coming = set(welcome.deployed) - welcome.sites.keys() - welcome.gone.keys()
            return coming.isdisjoint(sites)

        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.start_timeout):
                while self.lost is None and self.welcome is not None and not decided(self.welcome):
                    arrival = asyncio.get_running_loop().create_future()
                    self._arrivals.append(arrival)
                    await arrival

    async def open_at(self, carrier: str) -> None:
        """Connects to one carrier of this user's jobs, whatever sites it has.

        Raises:
            FlareError: it cannot be reached.
        """
        self._memory = None  # others are to take the carrier for new jobs
        try:
            async with asyncio.timeout(self._options.start_timeout):
                await self._admin.open(self._options.start_timeout)
                if not await self._by_commands(carrier, _FOUND, lambda _welcome: True):
                    raise self._broken or FlareError("the carrier of the job has ended", _AGAIN)
                await self._switch_to_gateway()
        except TimeoutError:
            raise FlareError(await self._what_is_missing(), "Ask 'dfm-async flare doctor'") from None

    async def carriers(self) -> list[str]:
        """The carriers of this user's jobs that run, the oldest first.

        Raises:
            FlareError: the federation cannot be reached.
        """
        admin, seconds = Admin(self._options.startup_kit, self._options.user), self._options.start_timeout
        try:
            async with asyncio.timeout(seconds):
                await admin.open(seconds)
                return list(await admin.carriers(carrier_name(self._options)))
        except TimeoutError:
            raise FlareError(f"the federation has not answered within {seconds:g} s", "Try again") from None
        finally:
            await completed(admin.close())

    async def _open(self, wanted: set[str], needed: dict[str, float]) -> None:
        if await self._through_known_gateway(wanted):
            return
        await self._admin.open(self._options.start_timeout)
        heard = self.clients = await self._clients(needed)
        name = carrier_name(self._options)
        tried = await self._admin.carriers(name)
        for carrier, refused in tried.items():
            asked = {site: heard[site] for site in wanted if site in heard and site not in refused}
            if await self._by_commands(carrier, _FOUND, functools.partial(_has_all, asked)):
                break
        else:
            await self._start(name, list(heard), tried)
        if self._options.gateway == "auto" and self._hello.homesite in heard:
            await self.arrived([self._hello.homesite])
        if self._gateway is not None:
            await self._switch_to_gateway()
        elif self._options.gateway == "auto" and self._hello.homesite not in heard:
            _log.warning(
                "no client of the federation is called %r, so results come by app commands, which are slower; "
                "gateway='never' says that this is meant",
                self._hello.homesite,
            )

    async def _clients(self, needed: dict[str, float]) -> dict[str, float]:
        """The clients that are registered, when there is one, and those that are needed are back or do not come."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            heard = await self._admin.heard()
            back = all(heard.get(site, -math.inf) > since for site, since in needed.items())
            if heard and (back or loop.time() - began > self._options.start_timeout / 2):
                return heard
            await asyncio.sleep(_ASK_AGAIN)  # FLARE tells nobody that a client has come

    async def _start(self, name: str, clients: list[str], tried: Collection[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
            write_job(Path(folder) / "job", name, clients, self._options)
            ours = await self._admin.submit(Path(folder) / "job")
        # Another application may have done the same in this moment: all take the oldest.
        oldest = next(carrier for carrier in [*await self._admin.carriers(name), ours] if carrier not in tried)
        if oldest != ours:
            await self._admin.abort(ours)
        if not await self._by_commands(
            oldest, self._options.start_timeout, lambda welcome: HUB in welcome.sites or None
        ):
            raise self._broken or FlareError("the carrier of the jobs does not start", "Look at the server's log")

    def _begin(self, carrier: str) -> fm.Attach:
        """Begins a session at a carrier."""
        self._carrier, self._session = carrier, secrets.token_hex(16)
        self._duplex = Duplex(self._take)
        self.welcome = self._broken = None
        self._offered.clear()
        self.offer(self._offers)
        return self._attach(new=True)

    def _attach(self, *, new: bool) -> fm.Attach:
        return fm.Attach(self._session, new, self._duplex.have, self._hello)

    async def _take_way(self, line: Line, attach: fm.Attach) -> None:
        """Goes a way from now on.

        Raises:
            FlareError: the hub cannot be reached this way, or does not take us.
        """
        try:
            attached = await line.open(attach)
        except BaseException:
            await line.close(at_once=True)
            raise
        if attached.refused:
            await line.close(at_once=True)
            raise FlareError(attached.refused, _AGAIN)
        self._line, self._broken = line, None
        line.expect(busy=self._busy or self.welcome is None)

    async def _through_known_gateway(self, wanted: set[str]) -> bool:
        """Goes through the gateway of an earlier session, if all sites are there; that takes no time."""
        memory = self._memory if self._options.gateway == "auto" else None
        address = None if memory is None else memory.address()
        if memory is None or address is None:
            return False
        attach = self._begin("")
        try:
            await self._take_way(GatewayLine(address, self._duplex, self._lose), attach)
        except FlareError:
            memory.forget()
            return False
        if await self._welcomed(lambda welcome: wanted <= welcome.sites.keys()):
            assert self.welcome is not None  # noqa: S101 - it was just seen
            self._carrier = self.welcome.carrier
            return True
        await self._leave()
        return False

    async def _by_commands(self, carrier: str, patience: float, fits: Callable[[fm.Welcome], bool | None]) -> bool:
        """Connects to a carrier; False if it does not run, or what its hub tells of the sites does not fit."""
        attach = self._begin(carrier)
        try:
            line = CommandLine(self._admin, carrier, self._duplex, self._lose, patience, ran=False)
            await self._take_way(line, attach)
        except FlareError as error:
            self._broken = error
            return False
        if await self._welcomed(fits):
            return True
        await self._leave()
        return False

    async def _welcomed(self, fits: Callable[[fm.Welcome], bool | None]) -> bool:
        """Waits for what the hub tells of the sites, until that fits or cannot, or the way is lost."""
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
        """Goes on through the homesite's gateway, if that can be reached; else as before."""
        address, before = self._gateway, self._line
        if address is None or before is None or before.kind == "gateway":
            return
        await before.close(at_once=True)
        self._line = None
        try:
            await self._take_way(GatewayLine(address, self._duplex, self._lose), self._attach(new=False))
        except FlareError as error:
            _log.info("the gateway of %s is not used: %s", self._hello.homesite, error)
            self._ended.add(address)
            await self._take_way(self._commands(), self._attach(new=False))
        else:
            if self._memory is not None:
                self._memory.keep(address)
            await self._admin.close()

    def _commands(self) -> CommandLine:
        """Another way to the same hub."""
        patience = self._options.delivery_timeout
        return CommandLine(self._admin, self._carrier, self._duplex, self._lose, patience, ran=True)

    async def _what_is_missing(self) -> str:
        seconds = self._options.start_timeout
        told = await UserKit.read(Path(self._options.startup_kit)).why_not()
        why = told or ("" if self._broken is None else self._broken.problem)
        return f"the federation has not answered within {seconds:g} s{': ' * bool(why)}{why}"

    # while it is open

    def _take(self, data: bytes | memoryview) -> None:
        message = fm.decode_hub(data)
        if isinstance(message, fm.Welcome):
            self.welcome = message
            self._tell_arrivals()
            self._better = self._line is not None and self._line.kind == "commands" and self._gateway is not None
            self._changed.set()
        if isinstance(message, fm.Bye):
            self._give_up(FlareError(f"the carrier has ended: {message.reason}", _AGAIN))
            return
        try:
            self._on_message(self, message)
        except Exception:  # noqa: BLE001 - one message that cannot be handled must not cut off the others
            _log.exception("what the hub says cannot be handled: %s", type(message).__name__)

    def _lose(self, line: Line, error: FlareError) -> None:
        """A way is lost; only that which is gone at present counts."""
        if isinstance(line, GatewayLine):
            self._ended.add(line.address)
        if line is self._line:
            self._line, self._broken = None, error
            self._duplex.detach()
            self._changed.set()

    async def supervise(self) -> None:
        """Finds other ways, until the hub cannot be reached any more."""
        while self.lost is None and not self._closed:
            self._changed.clear()
            if self._broken is not None:
                await self._mend(self._broken)
            elif self._better:
                self._better = False
                await self._try_better()
            else:
                await self._changed.wait()

    async def _try_better(self) -> None:
        try:
            await self._switch_to_gateway()
        except FlareError as error:
            self._broken = error

    async def _mend(self, error: FlareError) -> None:
        """The way to the hub is lost: takes another one, or gives up."""
        if isinstance(error, CarrierEnded):
            self._give_up(error)
            return
        _log.info("the way to the hub is lost: %s", error)
        if self._memory is not None:
            self._memory.forget()
        patience = self._options.delivery_timeout
        try:
            async with asyncio.timeout(patience):
                await self._admin.close()  # FLARE ends sessions of users that say nothing for a while
                await self._admin.open(patience)
                await self._take_way(self._commands(), self._attach(new=False))
        except TimeoutError:
            self._give_up(FlareError(f"the hub cannot be reached for {patience:g} s: {error.problem}", _AGAIN))
        except FlareError as reason:
            self._give_up(FlareError(f"the hub cannot be reached any more: {reason.problem}", _AGAIN))
        else:
            self._better = self._gateway is not None and self._broken is None

    def _tell_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(None)

    def _give_up(self, error: FlareError) -> None:
        if self.lost is None:
            self.lost = error
            self._tell_arrivals()
            self._duplex.detach()
            self._changed.set()
            self._on_lost(self, error)

    # closing

    async def _leave(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            self.send(fm.Leave())
            await line.close(at_once=False)

    async def close(self) -> None:
        """Says what is left to be said, and leaves."""
        self._closed = True
        self._changed.set()
        await self._leave()
        self._duplex.detach()
        await self._admin.close()
