"""One process of the carrier: its links to the others, and what comes from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from dfm_async.targets.flare.link import Inbox, Link, Wire, new_life
from dfm_async.targets.flare.messages import decode_node, encode

__all__ = ["HUB", "Node"]

HUB: Final = "server"
"""The name of the server's process: what FLARE calls it, and so the site that runs there."""


class Node:
    """Sends to and receives from the other processes of a carrier, by their names.

    Args:
        name: our own name. What is sent there comes back to us.
        wire: what carries packets.
        receive: takes messages: the peer, the message. Must not raise.
        on_broken: is told that a peer cannot be reached any more, and why.
        patience: for how many seconds a packet is sent again.
        largest: how many bytes a packet from outside may have.
        on_room: is called when what waits to be sent has become less.
    """

    def __init__(
        self,
        name: str,
        wire: Wire,
        receive: Callable[[str, Any], None],
        on_broken: Callable[[str, str], None],
        *,
        patience: float,
        largest: int,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._wire = wire
        self._receive = receive
        self._on_broken = on_broken
        self._patience = patience
        self._largest = largest
        self._on_room = on_room
        self._life = new_life()
        self._links: dict[str, Link] = {}
        self._inboxes: dict[str, Inbox] = {}

    def send(self, peer: str, message: Any) -> None:
        """Sends a message; ignored when the peer cannot be reached any more: ``on_broken`` was told."""
        if peer == self.name:
            asyncio.get_running_loop().call_soon(self._receive, peer, message)
            return
        self.link(peer).send(encode(message))

    def link(self, peer: str) -> Link:
        """The link to a peer."""
        link = self._links.get(peer)
        if link is None:
            link = Link(peer, self._wire, self._life, self._patience, self._on_broken, self._on_room)
            self._links[peer] = link
        return link

    @property
    def links(self) -> list[Link]:
        """All links so far."""
        return list(self._links.values())

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent, or are under way."""
        return sum(link.backlog for link in self._links.values())

    def take(self, peer: str, packet: bytes) -> None:
        """Takes a packet of a peer.

        Raises:
            ValueError: it is not one that may come, and why.
        """
        if len(packet) > self._largest:
            raise ValueError(f"a packet of {len(packet):,} bytes is larger than the {self._largest:,} that are allowed")
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = Inbox()
        for data in inbox.take(packet):
            try:
                message = decode_node(data)
            except ValueError as error:  # the packet counts as taken: again it would be no better
                self._on_broken(peer, f"a message of {peer} cannot be read: {error}")
                return
            self._receive(peer, message)

    async def drained(self) -> None:
        """Waits until everything has arrived, as far as it can."""
        for link in self.links:
            await link.drained()

    async def close(self) -> None:
        """Ends all links."""
        for link in self.links:
            await link.close()
