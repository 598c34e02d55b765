"""Messages between an application and the hub, while transports come and go."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.targets.flare import reliable_stream
from dfm_async.targets.flare.message_parts import TooLarge
from dfm_async.targets.flare.reliable_stream import ReliableStream
from tests.support.waiting import settled


class Ends:
    """Both ends, and a stream between them that can break."""

    def __init__(self) -> None:
        self.at_app: list[bytes | memoryview] = []
        self.at_hub: list[bytes | memoryview] = []
        self.app = ReliableStream(self.at_app.append)
        self.hub = ReliableStream(self.at_hub.append)
        self.broken = False

    def connect(self) -> None:
        self.broken = False
        self.app.attach(lambda packet: self._carry(self.hub, packet), self.hub.have)
        self.hub.attach(lambda packet: self._carry(self.app, packet), self.app.have)

    def _carry(self, end: ReliableStream, packet: bytes) -> None:
        if not self.broken:
            end.take(packet)

    def disconnect(self) -> None:
        self.broken = True
        self.app.detach()
        self.hub.detach()


@pytest.fixture
async def ends() -> Ends:
    return Ends()


async def test_messages_without_a_transport_wait_for_one(ends: Ends) -> None:
    ends.app.send(b"a")
    ends.hub.send(b"b")
    assert ends.app.waiting
    ends.connect()
    await settled()
    assert (ends.at_hub, ends.at_app) == ([b"a"], [b"b"])


async def test_messages_lost_with_a_transport_are_sent_again_once(ends: Ends) -> None:
    ends.connect()
    ends.app.send(b"1")
    await settled()
    ends.broken = True  # nobody knows yet
    ends.app.send(b"2")
    ends.hub.send(b"x")
    await settled()
    assert ends.at_hub == [b"1"]
    ends.disconnect()
    ends.app.send(b"3")
    ends.connect()
    await settled()
    assert (ends.at_hub, ends.at_app) == ([b"1", b"2", b"3"], [b"x"])


async def test_messages_that_the_other_end_has_are_released(ends: Ends) -> None:
    ends.connect()
    for _ in range(200):
        ends.app.send(b"x" * 100)
        await asyncio.sleep(0)
    await settled()
    assert len(ends.at_hub) == 200
    assert ends.app.backlog < 100 * 100


async def test_large_backlogs_go_in_several_packets(ends: Ends) -> None:
    packets: list[bytes] = []
    for _ in range(3):
        ends.app.send(b"x" * 3_000_000)
    ends.app.attach(packets.append, 0)
    await settled()
    assert len(packets) == 3


async def test_requests_and_answers_carry_what_the_other_end_lacks(ends: Ends) -> None:
    woken: list[None] = []
    ends.hub.attach_pull(lambda: woken.append(None))
    ends.app.send(b"1")
    ends.hub.take(ends.app.pull())
    ends.hub.send(b"a")
    assert woken == [None]
    ends.hub.pull()  # this answer is lost
    ends.hub.take(ends.app.pull())  # so the question comes again
    ends.app.take(ends.hub.pull())
    assert (ends.at_hub, ends.at_app) == ([b"1"], [b"a"])
    assert not ends.app.waiting
    ends.hub.take(ends.app.pull())
    assert not ends.hub.waiting


async def test_an_end_that_claims_impossible_messages_is_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="5 parts"):
        ends.app.attach(lambda _: None, 5)
    other = ReliableStream(lambda _: None)
    for number in range(3):
        other.send(b"%d" % number)
    other.release(2)
    with pytest.raises(ValueError, match="missing"):
        ends.app.take(other.pull())


@given(st.lists(st.sampled_from(["app", "hub", "split", "connect", "lose", "turn", "ask"]), max_size=60))
def test_whatever_happens_each_message_comes_once_and_in_order(steps: list[str]) -> None:
    async def play() -> None:
        ends = Ends()
        said: dict[str, list[bytes]] = {"app": [], "hub": []}
        for step in steps:
            if step in said:
                message = b"%d" % len(said[step])
                said[step].append(message)
                (ends.app if step == "app" else ends.hub).send(message)
            elif step == "split":
                ends.disconnect()
            elif step == "connect":
                ends.connect()
            elif step == "lose":
                ends.broken = True
            elif step == "ask":
                ends.disconnect()
                ends.hub.take(ends.app.pull())
                ends.app.take(ends.hub.pull())
            await asyncio.sleep(0)
        ends.disconnect()
        ends.connect()
        await settled()
        assert (ends.at_hub, ends.at_app) == (said["app"], said["hub"])

    asyncio.run(play())


async def test_large_messages_in_parts_survive_a_change_of_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable_stream, "_PACKET", 100)
    ends = Ends()
    ends.connect()
    message = bytes(range(256)) * 4
    ends.app.send(message)
    await settled()
    ends.app.send(message)
    ends.app.send(b"small")
    ends.disconnect()  # nothing of them was sent yet
    ends.app.attach_pull(lambda: None)
    while ends.app.waiting:
        packet = ends.app.pull()
        assert len(packet) < 200
        ends.hub.take(packet)
        ends.app.take(ends.hub.pull())
    assert ends.at_hub == [message, message, b"small"]
    assert ends.app.backlog == 0


async def test_a_message_above_the_limit_is_not_taken() -> None:
    app, hub = ReliableStream(lambda _: None), ReliableStream(lambda _: None, largest=100)
    app.send(bytes(101))
    with pytest.raises(TooLarge, match="max_message_bytes"):
        hub.take(app.pull())
