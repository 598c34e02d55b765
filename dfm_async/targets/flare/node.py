"""One process of the host job: its links to the others, and what comes from them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Final

from dfm_async.base.tasks import OwnedTasks
from dfm_async.targets.flare.authentication import Credentials, Forged
from dfm_async.targets.flare.link import LARGEST_PACKET, Inboxes, Link, Wire
from dfm_async.targets.flare.message_parts import TooLarge
from dfm_async.targets.flare.protocol import TO_LOCATIONS, Heartbeat, decode_node, encode
from dfm_async.wire.messages import Envelope, kind_of, peek

_log = logging.getLogger(__name__)

HUB: Final = "server"
"""The name of the server's process: what FLARE calls it, and so the site that runs there."""


_HEARTBEATS: Final = 4
"""The number of heartbeats within the timeout of a node."""
_SLOWEST_HEARTBEAT: Final = 5.0
_NOTED: Final = frozenset(10**power for power in range(12))
"""The numbers of forged packets at which they are recorded: attackers choose how many there are."""


class HostNode:
    """Sends to and receives from the other processes of a host job, by their names.

    Args:
        credentials: who we are. What is sent to ourselves comes back to us.
        wire: what carries packets.
        receive: takes messages: the peer, the message.
        on_broken: is called when what was sent to a peer may be lost, with the reason and the incarnation of the peer.
            What is sent from then on is not lost.
        on_refused: is called with a message that a peer does not take, and the reason.
        timeout: the number of seconds for which a packet is retried.
        largest: the size limit of a message from outside, in bytes.
        on_room: is called when what waits to be sent has become less.
        on_forged: is called with the name that a packet that is not authentic gives, the reason, and how many of them
            there were: for the first one, and then each time when there are ten times as many.
        peers: the participants that packets are accepted from; None means all of the federation.
    """

    def __init__(
        self,
        credentials: Credentials,
        wire: Wire,
        receive: Callable[[str, Any], None],
        on_broken: Callable[[str, str, str], None],
        on_refused: Callable[[str, Any, str], None],
        *,
        timeout: float,
        largest: int,
        on_room: Callable[[], None] | None = None,
        on_forged: Callable[[str, str, int], None] | None = None,
        peers: Iterable[str] | None = None,
    ) -> None:
        self.name = credentials.name
        self._credentials = credentials
        self.incarnation = secrets.token_hex(8)
        """Names this process, and no other."""
        self._wire = wire
        self._receive = receive
        self._on_broken = on_broken
        self._on_refused = on_refused
        self._timeout = timeout
        self._on_room = on_room
        self._on_forged = on_forged
        self.forged = 0
        """The number of packets that were refused because they are not authentic."""
        self._links: dict[str, Link] = {}
        self._ending = OwnedTasks()
        self._inboxes = Inboxes(credentials, self.incarnation, largest, peers)
        self._peers: Callable[[], Iterable[str]] = tuple
        self._heartbeat: asyncio.TimerHandle | None = None

    def watch(self, peers: Callable[[], Iterable[str]]) -> None:
        """Detect lost peers by heartbeats while there is nothing else to send."""
        self._peers = peers
        seconds = min(self._timeout / _HEARTBEATS, _SLOWEST_HEARTBEAT)
        self._heartbeat = asyncio.get_running_loop().call_later(seconds, self._beat, seconds)

    def _beat(self, seconds: float) -> None:
        self._heartbeat = asyncio.get_running_loop().call_later(seconds, self._beat, seconds)
        for peer in list(self._peers()):
            if peer != self.name and not self._link(peer).backlog:
                self.send(peer, Heartbeat())

    def send(self, peer: str, message: Any) -> None:
        """Send a message."""
        enveloped = type(message) is Envelope
        if peer == self.name:
            here = self._read(message.data) if enveloped else message
            asyncio.get_running_loop().call_soon(self._handle, peer, here)
        else:
            self._link(peer).send(message.data if enveloped else encode(message))

    @staticmethod
    def _read(data: bytes | memoryview) -> Any:
        """Decode a message, unless it is only forwarded to a location here.

        Raises:
            ValueError: it is malformed.
        """
        head = peek(data)
        return Envelope(*head, bytes(data)) if head is not None and head[0] in TO_LOCATIONS else decode_node(data)

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(
                peer, self._wire, self._credentials, self._timeout, self._broken, self._undeliverable, self._on_room
            )
        return link

    def _broken(self, link: Link, reason: str) -> None:
        self._forget(link)
        self._on_broken(link.peer, reason, link.their_incarnation or "")

    def _undeliverable(self, peer: str, message: bytes, reason: str) -> None:
        self._on_refused(peer, decode_node(message), reason)

    def _forget(self, link: Link) -> None:
        """Replace the link to a peer."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._ending.spawn(link.close(), f"end of the link to {link.peer}")

    def drop(self, peer: str) -> None:
        """Note that the peer is another process now: messages for the former one are dropped."""
        link = self._links.get(peer)
        if link is not None:
            self._forget(link)

    @property
    def links(self) -> list[Link]:
        """All links that work."""
        return list(self._links.values())

    @property
    def backlog(self) -> int:
        """The number of bytes that wait or are in flight."""
        return sum(link.backlog for link in self._links.values())

    def take(self, peer: str, packet: bytes) -> bytes:
        """Take a packet of a peer; return the answer.

        Raises:
            ValueError: it is not one that may come, and why.
        """
        if len(packet) > LARGEST_PACKET:
            raise TooLarge(f"a packet has {len(packet):,} bytes; at most {LARGEST_PACKET:,} are allowed")
        try:
            answer, messages = self._inboxes.take(peer, packet)
        except Forged as error:
            self.forged += 1
            if self.forged in _NOTED:
                _log.warning("a packet in the name of %s is refused (%d in all): %s", peer, self.forged, error)
                if self._on_forged is not None:
                    self._on_forged(peer, str(error), self.forged)
            raise
        for data in messages:
            try:
                message = self._read(data)
            except ValueError as error:  # the packet counts as taken: a second time it would be no better
                _log.warning("a message of %s cannot be read: %s", peer, error)
                self._on_broken(peer, f"a message of {peer} cannot be read: {error}", "")
                continue
            self._handle(peer, message)
        return answer

    def _handle(self, peer: str, message: Any) -> None:
        try:
            self._receive(peer, message)
        except Exception:  # noqa: BLE001 - its handler fails its jobs; other messages must not suffer
            _log.exception("a message of %s cannot be handled: %s", peer, kind_of(message).__name__)

    async def drained(self) -> None:
        """Wait until everything has arrived, as far as it can."""
        for link in self.links:
            await link.drained()

    async def close(self) -> None:
        """End all links."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for link in self.links:
            await link.close()
        await self._ending.wait()
