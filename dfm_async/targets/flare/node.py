"""One process of the carrier: its links to the others, and what comes from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from dfm_async.targets.flare.authentication import Credentials, Forged
from dfm_async.targets.flare.link import LARGEST_PACKET, Inboxes, Link, Wire, new_life
from dfm_async.targets.flare.messages import Pulse, decode_node, encode
from dfm_async.targets.flare.parts import TooLarge

__all__ = ["HUB", "Node"]

_log = logging.getLogger(__name__)

HUB: Final = "server"
"""The name of the server's process: what FLARE calls it, and so the site that runs there."""


_PULSES: Final = 4
"""How many times within its patience a node looks whether its peers are there."""
_SLOWEST_PULSE: Final = 5.0
_NOTED: Final = frozenset(10**power for power in range(12))
"""After how many packets that are not authentic this is recorded: others choose how many there are."""


class Node:
    """Sends to and receives from the other processes of a carrier, by their names.

    Args:
        credentials: who we are. What is sent to ourselves comes back to us.
        wire: what carries packets.
        receive: takes messages: the peer, the message.
        on_broken: is told that what was said to a peer may be lost, why, and which life of the peer that was. What is
            said from then on is not lost.
        on_refused: is called with a message that a peer does not take, and the reason.
        patience: for how many seconds a packet is sent again.
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
        patience: float,
        largest: int,
        on_room: Callable[[], None] | None = None,
        on_forged: Callable[[str, str, int], None] | None = None,
        peers: Iterable[str] | None = None,
    ) -> None:
        self.name = credentials.name
        self._credentials = credentials
        self.life = new_life()
        """Names this process, and no other."""
        self._wire = wire
        self._receive = receive
        self._on_broken = on_broken
        self._on_refused = on_refused
        self._patience = patience
        self._on_room = on_room
        self._on_forged = on_forged
        self.forged = 0
        """How many packets were refused because they are not authentic."""
        self._links: dict[str, Link] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._inboxes = Inboxes(credentials, self.life, largest, peers)
        self._peers: Callable[[], Iterable[str]] = tuple
        self._pulse: asyncio.TimerHandle | None = None

    def watch(self, peers: Callable[[], Iterable[str]]) -> None:
        """Finds out that peers are gone, also while there is nothing to say to them."""
        self._peers = peers
        seconds = min(self._patience / _PULSES, _SLOWEST_PULSE)
        self._pulse = asyncio.get_running_loop().call_later(seconds, self._beat, seconds)

    def _beat(self, seconds: float) -> None:
        self._pulse = asyncio.get_running_loop().call_later(seconds, self._beat, seconds)
        for peer in list(self._peers()):
            if peer != self.name and not self._link(peer).backlog:
                self.send(peer, Pulse())

    def send(self, peer: str, message: Any) -> None:
        """Sends a message."""
        if peer == self.name:
            asyncio.get_running_loop().call_soon(self._handle, peer, message)
        else:
            self._link(peer).send(encode(message))

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(
                peer, self._wire, self._credentials, self._patience, self._broken, self._undeliverable, self._on_room
            )
        return link

    def _broken(self, link: Link, reason: str) -> None:
        self._forget(link)
        self._on_broken(link.peer, reason, link.their_life or "")

    def _undeliverable(self, peer: str, message: bytes, reason: str) -> None:
        self._on_refused(peer, decode_node(message), reason)

    def _forget(self, link: Link) -> None:
        """What is said to the peer from now on goes over a new link."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        task = asyncio.get_running_loop().create_task(link.close(), name=f"end of the link to {link.peer}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def drop(self, peer: str) -> None:
        """The peer is another process now: what was said to the one before is of no use to it."""
        link = self._links.get(peer)
        if link is not None:
            self._forget(link)

    @property
    def links(self) -> list[Link]:
        """All links that work."""
        return list(self._links.values())

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent, or are under way."""
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
                message = decode_node(data)
            except ValueError as error:  # the packet counts as taken: a second time it would be no better
                _log.warning("a message of %s cannot be read: %s", peer, error)
                self._on_broken(peer, f"a message of {peer} cannot be read: {error}", "")
                continue
            self._handle(peer, message)
        return answer

    def _handle(self, peer: str, message: Any) -> None:
        try:
            self._receive(peer, message)
        except Exception:  # noqa: BLE001 - whoever handles it answers for its jobs; other messages must not suffer
            _log.exception("a message of %s cannot be handled: %s", peer, type(message).__name__)

    async def drained(self) -> None:
        """Waits until everything has arrived, as far as it can."""
        for link in self.links:
            await link.drained()

    async def close(self) -> None:
        """Ends all links."""
        if self._pulse is not None:
            self._pulse.cancel()
        for link in self.links:
            await link.close()
        if self._ending:
            await asyncio.wait(set(self._ending))
