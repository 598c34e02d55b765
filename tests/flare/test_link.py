"""Links between the processes of a carrier, over a wire that fails, repeats and reorders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.link import Inbox, Link, Refused, Undelivered
from dfm_async.targets.flare.node import Node, TooLarge

Plan = Callable[[str, bytes], str]


class Wires:
    """Wires between nodes of this process; a test says what becomes of each packet."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.fate: Callable[[str, str, int], str] = lambda _sender, _peer, _number: "arrives"
        self.carried = 0

    def wire(self, sender: str) -> _Wire:
        return _Wire(self, sender)


class _Wire:
    def __init__(self, wires: Wires, sender: str) -> None:
        self._wires = wires
        self._sender = sender

    async def carry(self, peer: str, packet: bytes) -> str:
        wires = self._wires
        wires.carried += 1
        fate = wires.fate(self._sender, peer, wires.carried)
        await asyncio.sleep(0)
        if fate == "lost":
            raise Undelivered("the wire is cut")
        node = wires.nodes[peer]
        try:
            node.take(self._sender, packet)
        except TooLarge as error:
            raise Refused(str(error)) from error
        if fate == "twice":
            node.take(self._sender, packet)
        if fate == "unanswered":
            raise Undelivered("no answer")
        return node.life


class Peer:
    """A node and what it was told."""

    def __init__(self, wires: Wires, name: str, *, patience: float = 5.0, largest: int = 10_000) -> None:
        self.told, self.heard = asyncio.Event(), asyncio.Event()
        self.got: list[tuple[str, Any]] = []
        self.broken: list[tuple[str, str, str]] = []
        self.refused: list[tuple[str, list[Any], str]] = []
        self.node = wires.nodes[name] = Node(
            name,
            wires.wire(name),
            self._receive,
            self._broken,
            lambda *told: self.refused.append(told),
            patience=patience,
            largest=largest,
        )

    def _receive(self, peer: str, message: Any) -> None:
        self.got.append((peer, message))
        self.heard.set()

    def _broken(self, peer: str, reason: str, life: str) -> None:
        self.broken.append((peer, reason, life))
        self.told.set()

    def numbers(self) -> list[int]:
        return [message.request for _, message in self.got]


@pytest.fixture
def wires() -> Wires:
    return Wires()


@pytest.mark.parametrize("fate", ["arrives", "twice", "unanswered first", "lost first"])
async def test_messages_arrive_once_and_in_order_whatever_the_wire_does(wires: Wires, fate: str) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two")
    if fate.endswith("first"):
        wires.fate = lambda _sender, _peer, count: fate.split()[0] if count % 3 == 1 else "arrives"
    else:
        wires.fate = lambda *_: fate
    for number in range(50):
        one.node.send("two", fm.Echo(number))
        if number % 5 == 0:
            await asyncio.sleep(0)
    await one.node.drained()
    assert two.numbers() == list(range(50))
    assert not one.broken
    await one.node.close()


async def test_messages_of_one_turn_of_the_loop_go_together(wires: Wires) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two")
    for number in range(1000):
        one.node.send("two", fm.Echo(number))
    await one.node.drained()
    assert two.numbers() == list(range(1000))
    assert wires.carried == 1
    await one.node.close()


async def test_a_link_that_breaks_tells_why_and_the_next_message_takes_a_new_one(wires: Wires) -> None:
    one, two = Peer(wires, "one", patience=0.12), Peer(wires, "two")
    one.node.send("two", fm.Echo(0))
    await one.node.drained()
    wires.fate = lambda *_: "lost"
    one.node.send("two", fm.Echo(1))
    await one.told.wait()
    assert one.broken[0][0] == "two"
    assert "the wire is cut" in one.broken[0][1]
    assert one.broken[0][2] == two.node.life
    assert one.node.backlog == 0
    wires.fate = lambda *_: "arrives"
    one.node.send("two", fm.Echo(2))
    await one.node.drained()
    assert two.numbers() == [0, 2]
    await one.node.close()


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
    await one.node.close()


async def test_a_message_that_is_too_large_is_told_and_those_behind_it_arrive(wires: Wires) -> None:
    one, two = Peer(wires, "one"), Peer(wires, "two", largest=100)
    one.node.send("two", fm.Echo(0))
    one.node.send("two", fm.Bye("x" * 1000))
    await one.node.drained()
    one.node.send("two", fm.Echo(1))
    await one.node.drained()
    assert one.refused[0][0] == "two"
    assert [type(message) for message in one.refused[0][1]] == [fm.Echo, fm.Bye]
    assert "max_message_bytes" in one.refused[0][2]
    assert two.numbers() == [1]
    assert not one.broken
    await one.node.close()


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
    await one.node.close()


async def test_what_is_sent_to_oneself_comes_back(wires: Wires) -> None:
    one = Peer(wires, "one")
    one.node.send("one", fm.Echo(1))
    await asyncio.sleep(0)
    assert one.got == [("one", fm.Echo(1))]
    assert wires.carried == 0


async def test_silent_peers_are_asked_whether_they_are_there(wires: Wires) -> None:
    one, two = Peer(wires, "one", patience=0.2), Peer(wires, "two")
    one.node.watch(lambda: ["one", "two"])
    await two.heard.wait()
    assert two.got[0] == ("one", fm.Pulse())
    wires.fate = lambda *_: "lost"
    await one.told.wait()
    assert one.broken[0][0] == "two"
    await one.node.close()


async def test_closing_a_link_leaves_nothing_under_way() -> None:
    class Never:
        async def carry(self, _peer: str, _packet: bytes) -> str:
            await asyncio.Event().wait()
            return ""

    link = Link("two", Never(), 5.0, lambda *_: None, lambda *_: None)
    for _ in range(10):
        link.send(b"x" * 600_000)
    await asyncio.sleep(0)
    assert link.backlog == 6_000_000
    await link.close()
    assert link.backlog == 0
    link.send(b"late")
    assert link.backlog == 0


async def test_packets_of_an_ended_life_are_not_taken_again() -> None:
    inbox = Inbox()
    old, new = _packets(3), _packets(2)
    assert inbox.take(old[0]) == [b"0"]
    assert inbox.take(new[0]) == [b"0"]
    assert inbox.take(old[1]) == []
    assert inbox.take(new[1]) == [b"1"]


async def test_late_packets_of_a_link_that_was_never_heard_of_do_not_end_the_present_one() -> None:
    inbox = Inbox()  # that of a site that has begun anew, while packets for the one before were under way
    old, new = _packets(3), _packets(3)
    assert inbox.take(new[0]) == [b"0"]
    assert inbox.take(old[2]) == []
    assert [inbox.take(new[1]), inbox.take(new[2])] == [[b"1"], [b"2"]]


async def test_a_process_that_was_there_before_is_refused_and_one_that_comes_later_is_not() -> None:
    inbox = Inbox()
    later, now, before = _packets(1, began=3), _packets(2, began=2), _packets(1, began=1)
    assert inbox.take(now[0]) == [b"0"]
    with pytest.raises(ValueError, match="there before"):
        inbox.take(before[0])
    assert inbox.take(now[1]) == [b"1"]
    assert inbox.take(later[0]) == [b"0"]


async def test_packets_far_ahead_are_refused() -> None:
    inbox = Inbox()
    packets = _packets(40)
    with pytest.raises(ValueError, match="missing"):
        inbox.take(packets[30])


_links = itertools.count(1)


def _packets(count: int, began: int = 1) -> list[bytes]:
    from dfm_async.targets.flare.link import _encoder, _Packet

    link = (began, next(_links))
    return [_encoder.encode(_Packet(link, number, [str(number).encode()])) for number in range(count)]


@given(st.data())
def test_packets_in_any_order_and_repeated_give_each_message_once_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    packets = _packets(count)
    order = data.draw(st.permutations(range(count)))
    again = data.draw(st.lists(st.integers(0, count - 1), max_size=10))
    inbox = Inbox()
    got: list[memoryview] = []
    for position, number in enumerate([*order, *again]):
        got += inbox.take(packets[number])
        if position < len(again):
            got += inbox.take(packets[again[position]])
    assert got == [str(number).encode() for number in range(count)]
