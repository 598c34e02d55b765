"""Links between the processes of a host job, over a wire that fails, repeats and reorders."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.targets.flare import link as link_module
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.authentication import Forged
from dfm_async.targets.flare.link import Inboxes, Link, Undelivered
from dfm_async.targets.flare.message_parts import MessagePart
from dfm_async.targets.flare.node import HostNode
from tests.flare.identities import credentials

Fate: TypeAlias = Callable[[str, str, int], str]
"""What becomes of a packet: by its sender, its receiver, and its number."""


class Wires:
    """Wires between nodes of this process; a test says what becomes of each packet."""

    def __init__(self) -> None:
        self.nodes: dict[str, HostNode] = {}
        self.fate: Fate = lambda _sender, _peer, _number: "arrives"
        self.carried = 0
        self.largest = 0

    def wire(self, sender: str) -> _Wire:
        return _Wire(self, sender)


class _Wire:
    def __init__(self, wires: Wires, sender: str) -> None:
        self._wires = wires
        self._sender = sender

    async def carry(self, peer: str, packet: bytes) -> bytes:
        wires = self._wires
        wires.carried += 1
        wires.largest = max(wires.largest, len(packet))
        fate = wires.fate(self._sender, peer, wires.carried)
        await asyncio.sleep(0)
        if fate == "lost":
            raise Undelivered("the wire is cut")
        node = wires.nodes[peer]
        try:
            answer = node.take(self._sender, packet)
        except ValueError as error:
            raise Undelivered(str(error)) from error
        if fate == "twice":
            assert node.take(self._sender, packet) == answer
        if fate == "unanswered":
            raise Undelivered("no answer")
        return answer


class Peer:
    """A node, and what it has received."""

    def __init__(self, wires: Wires, name: str, *, timeout: float = 5.0, largest: int = 10_000, **more: Any) -> None:
        self.told, self.heard = asyncio.Event(), asyncio.Event()
        self.got: list[tuple[str, Any]] = []
        self.broken: list[tuple[str, str, str]] = []
        self.refused: list[tuple[str, Any, str]] = []
        self.node = wires.nodes[name] = HostNode(
            credentials(name),
            wires.wire(name),
            self._receive,
            self._broken,
            lambda *told: self.refused.append(told),
            timeout=timeout,
            largest=largest,
            **more,
        )

    def _receive(self, peer: str, message: Any) -> None:
        self.got.append((peer, message))
        self.heard.set()

    def _broken(self, peer: str, reason: str, incarnation: str) -> None:
        self.broken.append((peer, reason, incarnation))
        self.told.set()

    def numbers(self) -> list[int]:
        return [message.request for _, message in self.got]


FATES: dict[str, Fate] = {
    "arrives": lambda *_: "arrives",
    "twice": lambda *_: "twice",
    "unanswered first": lambda _sender, _peer, count: "unanswered" if count % 3 == 1 else "arrives",
    "lost first": lambda _sender, _peer, count: "lost" if count % 3 == 1 else "arrives",
}


@pytest.fixture
async def wires() -> AsyncIterator[Wires]:
    found = Wires()
    yield found
    for node in found.nodes.values():
        await node.close()


@pytest.mark.parametrize("fate", FATES)
async def test_messages_arrive_once_and_in_order_whatever_the_wire_does(wires: Wires, fate: str) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two")
    wires.fate = FATES[fate]
    for number in range(50):
        one.node.send("two", fm.Echo(number))
        if number % 5 == 0:
            await asyncio.sleep(0)
    await one.node.drained()
    assert two.numbers() == list(range(50))
    assert not one.broken


async def test_messages_of_one_turn_of_the_loop_go_together(wires: Wires) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two")
    for number in range(1000):
        one.node.send("two", fm.Echo(number))
    await one.node.drained()
    assert two.numbers() == list(range(1000))
    assert wires.carried == 2  # the greeting, and all of them


async def test_a_broken_link_reports_why_and_the_next_message_takes_a_new_one(wires: Wires) -> None:
    one, two = Peer(wires, "one", timeout=0.5), Peer(wires, "two")
    one.node.send("two", fm.Echo(0))
    await one.node.drained()
    wires.fate = lambda *_: "lost"
    one.node.send("two", fm.Echo(1))
    await one.told.wait()
    assert one.broken[0][0] == "two"
    assert "the wire is cut" in one.broken[0][1]
    assert one.broken[0][2] == two.node.incarnation
    assert one.node.backlog == 0
    wires.fate = lambda *_: "arrives"
    one.node.send("two", fm.Echo(2))
    await one.node.drained()
    assert two.numbers() == [0, 2]


async def test_a_peer_that_has_started_again_breaks_the_link(wires: Wires) -> None:
    one, _ = Peer(wires, "one"), Peer(wires, "two")
    one.node.send("two", fm.Echo(0))
    await one.node.drained()
    again = Peer(wires, "two")
    one.node.send("two", fm.Echo(1))
    await one.node.drained()
    assert [told[0] for told in one.broken] == ["two"]
    assert "started again" in one.broken[0][1]
    one.node.send("two", fm.Echo(2))
    await one.node.drained()
    assert again.numbers() == [2]


async def test_a_message_above_the_receivers_limit_is_refused_and_others_arrive(wires: Wires) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two", largest=100)
    for _ in range(2):  # before the receiver has told its limit, and after that
        one.node.send("two", fm.Echo(0))
        one.node.send("two", fm.Bye("x" * 1000))
        one.node.send("two", fm.Echo(1))
        await one.node.drained()
    await asyncio.sleep(0)
    assert [(peer, type(message)) for peer, message, _ in one.refused] == [("two", fm.Bye)] * 2
    assert re.search(r"at most 100 bytes \(max_message_bytes\), and this one has 1,\d\d\d", one.refused[0][2])
    assert two.numbers() == [0, 1, 0, 1]
    assert not one.broken
    assert one.node.backlog == 0


@pytest.mark.parametrize("fate", FATES)
async def test_large_messages_travel_in_packets_of_bounded_size(
    wires: Wires, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_PACKET", 1000)
    wires.fate = FATES[fate]
    one, two = Peer(wires, "one"), Peer(wires, "two", largest=100_000)
    sizes = [0, 10, 990, 1000, 1001, 50_000, 3, 7000, 99_000]
    texts = [(chr(97 + index) * size) for index, size in enumerate(sizes)]
    for text in texts:
        one.node.send("two", fm.Bye(text))
    await one.node.drained()
    assert [message.reason for _, message in two.got] == texts
    assert wires.largest < 1100
    assert not one.refused


async def test_a_sender_that_ignores_the_limit_is_not_taken_any_further(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_PACKET", 100)
    one, two = Peer(wires, "one", timeout=0.5), Peer(wires, "two", largest=1000)
    one.node.send("two", fm.Echo(0))
    await one.node.drained()
    (link,) = one.node.links
    link._largest = 1_000_000
    one.node.send("two", fm.Bye("x" * 5000))
    one.node.send("two", fm.Echo(1))
    await one.told.wait()
    assert "max_message_bytes" in one.broken[0][1]
    assert two.numbers() == [0]


async def test_a_message_that_cannot_be_handled_does_not_harm_the_others(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two")
    seen: list[int] = []

    def take(_peer: str, message: Any) -> None:
        if message.request == 1:
            raise RuntimeError("no")
        seen.append(message.request)

    two.node._receive = take
    for number in range(3):
        one.node.send("two", fm.Echo(number))
    await one.node.drained()
    assert seen == [0, 2]
    assert "cannot be handled" in caplog.text


async def test_what_is_sent_to_oneself_comes_back(wires: Wires) -> None:
    one = Peer(wires, "one")
    one.node.send("one", fm.Echo(1))
    await asyncio.sleep(0)
    assert one.got == [("one", fm.Echo(1))]
    assert wires.carried == 0


async def test_silent_peers_are_asked_whether_they_are_there(wires: Wires) -> None:
    one, two = Peer(wires, "one", timeout=0.5), Peer(wires, "two")
    one.node.watch(lambda: ["one", "two"])
    await two.heard.wait()
    assert two.got[0] == ("one", fm.Heartbeat())
    wires.fate = lambda *_: "lost"
    await one.told.wait()
    assert one.broken[0][0] == "two"


class Intercepted:
    """A wire to a peer of which another program answers some packets."""

    def __init__(self, forge: Callable[[bytes], bytes | None]) -> None:
        self.packets: list[bytes] = []
        self.taken: list[bytes | memoryview] = []
        self._forge = forge
        self._inboxes = Inboxes(credentials("two"), "life", 10_000)

    async def carry(self, _peer: str, packet: bytes) -> bytes:
        self.packets.append(packet)
        await asyncio.sleep(0)
        forged = self._forge(packet)
        if forged is not None:
            return forged
        answer, messages = self._inboxes.take("one", packet)
        self.taken += messages
        return answer


@pytest.mark.parametrize(
    "wrong", [link_module._TAKEN + bytes(32), link_module._UNKNOWN, b""], ids=["taken", "unknown", "empty"]
)
async def test_wrong_acknowledgements_break_a_link_after_its_timeout(wrong: bytes) -> None:
    wire = Intercepted(lambda packet: wrong if packet[:1] == link_module._MESSAGES else None)
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = Link("two", wire, credentials("one"), 0.3, lambda _, reason: broken.set_result(reason), lambda *_: None)
    link.send(b"hello")
    assert "does not acknowledge" in await asyncio.wait_for(broken, 60)
    assert len(wire.packets) < 20
    await link.close()


async def test_forged_answers_to_a_greeting_are_ignored() -> None:
    forged = [b"", b"garbage", link_module._UNKNOWN]
    wire = Intercepted(lambda _packet: forged.pop() if forged else None)
    broken: list[str] = []
    link = Link("two", wire, credentials("one"), 60.0, lambda _, reason: broken.append(reason), lambda *_: None)
    link.send(b"hello")
    await link.drained()
    assert not broken
    assert wire.taken == [b"hello"]
    await link.close()


async def test_an_intercepted_packet_shows_nothing_of_its_messages() -> None:
    lost = [True]

    def lose(packet: bytes) -> bytes | None:
        return b"" if packet[:1] == link_module._MESSAGES and lost and lost.pop() else None

    wire = Intercepted(lose)
    link = Link("two", wire, credentials("one"), 60.0, lambda *_: None, lambda *_: None)
    for number in range(2):
        link.send(b"a secret value")
        await link.drained()
        assert len(wire.taken) == number + 1
    assert all(b"secret" not in packet for packet in wire.packets)
    first, again, second = [packet for packet in wire.packets if packet[:1] == link_module._MESSAGES]
    assert first == again  # the same number may only ever encrypt the same messages
    assert first[link_module._head.size :] != second[link_module._head.size :]
    await link.close()


async def test_participants_of_other_host_jobs_are_refused(wires: Wires) -> None:
    node = Peer(wires, "two", peers=["two", "three"]).node
    with pytest.raises(Forged, match="one does not take part in this host job"):
        node.take("one", Stream(1).greeting)
    assert node.forged == 1


async def test_closing_a_link_leaves_nothing_in_flight() -> None:
    class Never:
        async def carry(self, _peer: str, _packet: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

    link = Link("two", Never(), credentials("one"), 5.0, lambda *_: None, lambda *_: None)
    for _ in range(10):
        link.send(b"x" * 600_000)
    await asyncio.sleep(0)
    assert link.backlog == 6_000_000
    await link.close()
    assert link.backlog == 0
    link.send(b"late")
    assert link.backlog == 0


class Incoming:
    """The receiving end, without a sender."""

    def __init__(self) -> None:
        self.inboxes = Inboxes(credentials("two"), "life", 10_000)

    def take(self, packet: bytes) -> list[bytes | memoryview]:
        return self.inboxes.take("one", packet)[1]

    def greet(self, stream: Stream) -> bytes:
        answer, messages = self.inboxes.take("one", stream.greeting)
        assert not messages
        stream.take(answer)
        return answer


async def test_packets_of_a_replaced_link_are_not_taken() -> None:
    end, old, new = Incoming(), Stream(3), Stream(2)
    end.greet(old)
    assert end.take(old.packets[0]) == [b"0"]
    end.greet(new)
    assert end.take(new.packets[0]) == [b"0"]
    assert end.inboxes.take("one", old.packets[1]) == (link_module._UNKNOWN, [])
    assert end.take(new.packets[1]) == [b"1"]


async def test_a_late_greeting_does_not_end_a_later_link() -> None:
    end, old, new = Incoming(), Stream(3), Stream(2)
    assert end.greet(new) == end.greet(new)
    assert end.take(new.packets[0]) == [b"0"]
    with pytest.raises(ValueError, match="replaced"):
        end.greet(old)
    assert end.greet(new)
    assert end.take(new.packets[1]) == [b"1"]


async def test_an_earlier_process_is_refused_and_a_later_one_is_not() -> None:
    end, later, now, before = Incoming(), Stream(1, began=3), Stream(2, began=2), Stream(1, began=1)
    end.greet(now)
    with pytest.raises(ValueError, match="replaced"):
        end.greet(before)
    assert end.take(now.packets[0]) == [b"0"]
    end.greet(later)
    assert end.take(later.packets[0]) == [b"0"]


async def test_packets_far_ahead_are_refused() -> None:
    end, stream = Incoming(), Stream(40)
    end.greet(stream)
    with pytest.raises(ValueError, match="missing"):
        end.take(stream.packets[30])


_links = itertools.count(1)


class Stream:
    """The packets of one link."""

    def __init__(self, count: int, began: int = 1) -> None:
        self._link, self._count = (began, next(_links)), count
        self._opening = credentials("one").greet("two", link_module._encoder.encode(link_module._Greeting(self._link)))
        self.greeting = link_module._GREETING + self._opening.greeting
        self.packets: list[bytes] = []

    def take(self, answer: bytes) -> None:
        """Take the answer to the greeting; from then on there are packets."""
        self.keys, _ = self._opening.finish(answer)
        self.packets = [self.packet(number) for number in range(self._count)]

    def packet(self, number: int) -> bytes:
        data = link_module._encoder.encode([MessagePart(memoryview(str(number).encode()))])
        head = link_module._head.pack(link_module._MESSAGES, *self._link, number)
        return head + self.keys.encrypt(number, head, data)


async def test_packets_that_are_changed_or_made_up_are_refused(wires: Wires, caplog: pytest.LogCaptureFixture) -> None:
    forged: list[tuple[str, str, int]] = []
    peer = Peer(wires, "two", on_forged=lambda *told: forged.append(told))
    node, stream = peer.node, Stream(2)
    stream.take(node.take("one", stream.greeting))
    packet = stream.packets[0]
    for at in range(1, len(packet)):
        changed = packet[:at] + bytes([packet[at] ^ 1]) + packet[at + 1 :]
        link = range(1, 17)  # which link: a packet of an earlier one may come late
        if at in link:
            assert node.take("one", changed) == link_module._UNKNOWN
        else:
            with pytest.raises(Forged):
                node.take("one", changed)
    assert node.take("three", packet) == link_module._UNKNOWN
    with pytest.raises(Forged):
        node.take("three", stream.greeting)
    assert node.forged == len(packet) - 16
    assert [count for *_, count in forged] == [1, 10]
    assert caplog.text.count("is refused") == 2
    assert not peer.got
    assert node.take("one", packet)[:1] == link_module._TAKEN


@given(st.data())
def test_packets_in_any_order_and_repeated_give_each_message_once_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    stream, end = Stream(count), Incoming()
    order = data.draw(st.permutations(range(count)))
    again = data.draw(st.lists(st.integers(0, count - 1), max_size=10))
    end.greet(stream)
    got: list[bytes | memoryview] = []
    for position, number in enumerate([*order, *again]):
        got += end.take(stream.packets[number])
        if position < len(again):
            got += end.take(stream.packets[again[position]])
    assert got == [str(number).encode() for number in range(count)]
