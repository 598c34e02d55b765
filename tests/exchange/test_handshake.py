"""The site's door: who says hello with the right token is let in, everybody else is told why not (3.1.1)."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from dfm_async.errors import HandshakeRefused
from dfm_async.exchange import FlareAgent, gate
from dfm_async.exchange.bootstrap import VARIABLE, Bootstrap, read_bootstrap
from dfm_async.exchange.gate import SocketGate, connect
from dfm_async.exchange.messages import (
    VERSION,
    Abort,
    Beat,
    Chunk,
    End,
    Hello,
    Message,
    Refused,
    TaskOffer,
    Welcome,
)
from dfm_async.exchange.options import AgentOptions, ExecutorOptions
from dfm_async.exchange.pipes.base import Pipe, stamp_of
from tests.exchange.rig import on_virtual_time

Kind = Literal["unix", "tcp", "memory"]


class Peer:
    """Somebody who connects, and keeps what it is told."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.gone = asyncio.Event()
        self._more = asyncio.Event()

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        return None

    def received(self, message: Message, size: int) -> None:
        self.got.append(message)
        self._more.set()

    def lost(self, reason: str) -> None:
        self.gone.set()
        self._more.set()

    async def answer(self) -> Message:
        await self._more.wait()
        return self.got[0]


class Doors:
    """A gate, who came in, and who knocked."""

    def __init__(self, gate: SocketGate) -> None:
        self.gate = gate
        self.up: list[Pipe] = []
        self.left = asyncio.Event()
        self._pipes: list[Any] = []
        forget, gate.left = gate.left, self._left  # type: ignore[method-assign]
        self._forget = forget

    def invite(self, **options: Any) -> Bootstrap:
        return read_bootstrap(self.gate.invite(self._came, launch_once=True, **options))

    def _left(self, stranger: Any) -> None:
        self._forget(stranger)
        self.left.set()

    def _came(self, pipe: Pipe) -> None:
        self.up.append(pipe)
        pipe.open(Peer())

    async def knock(self, bootstrap: Bootstrap, *messages: Message) -> tuple[Any, Peer]:
        pipe: Any = await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token))
        self._pipes.append(pipe)
        peer = Peer()
        pipe.open(peer)
        for message in messages:
            pipe.send(message)
        return pipe, peer

    async def refused(self, bootstrap: Bootstrap, *messages: Message) -> str:
        """Knocks, and gives the reason for which it was sent away."""
        _, peer = await self.knock(bootstrap, *messages)
        answer = await peer.answer()
        await peer.gone.wait()
        assert isinstance(answer, Refused)
        assert peer.got == [answer]
        assert self.up == []
        return answer.reason

    async def close(self) -> None:
        await self.gate.close()
        for pipe in (*self._pipes, *self.up):
            pipe.abort()
            await pipe.wait_closed()


@pytest.fixture(params=["unix", "tcp", "memory"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def doors(kind: Kind) -> AsyncIterator[Doors]:
    found = Doors(SocketGate(kind))
    await found.gate.open(ExecutorOptions(), "berlin", "j1")
    yield found
    await found.close()


def hello(bootstrap: Bootstrap, **changed: Any) -> Hello:
    said = {"version": VERSION, "token": bootstrap.token, "session": bootstrap.session, "pid": os.getpid()}
    return Hello(**{**said, **changed})


async def test_the_right_token_is_let_in(doors: Doors) -> None:
    bootstrap = doors.invite()
    _, peer = await doors.knock(bootstrap, hello(bootstrap))
    assert await peer.answer() == Welcome("berlin", "j1", 60.0)
    assert len(doors.up) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"token": "guessed"}, "it is not expected"),
        ({"token": ""}, "it is not expected"),
        ({"session": "another"}, "it belongs to another session"),
        ({"version": VERSION + 1}, f"it speaks version {VERSION + 1} of the protocol, the site version {VERSION}"),
    ],
)
async def test_a_wrong_hello_is_refused_with_a_reason(doors: Doors, changed: dict[str, Any], reason: str) -> None:
    bootstrap = doors.invite()
    assert await doors.refused(bootstrap, hello(bootstrap, **changed)) == reason
    _, peer = await doors.knock(bootstrap, hello(bootstrap))
    assert await peer.answer() == Welcome("berlin", "j1", 60.0), "the right one can still come"


async def test_a_token_is_good_for_one_hello(doors: Doors) -> None:
    bootstrap = doors.invite()
    _, first = await doors.knock(bootstrap, hello(bootstrap))
    await first.answer()
    _, second = await doors.knock(bootstrap, hello(bootstrap))
    assert await second.answer() == Refused("its token was used already")
    assert len(doors.up) == 1


async def test_of_two_that_come_at_once_with_one_token_one_is_let_in(doors: Doors) -> None:
    bootstrap = doors.invite()
    peers = [peer for _, peer in await asyncio.gather(*(doors.knock(bootstrap, hello(bootstrap)) for _ in range(5)))]
    answers = [type(await peer.answer()) for peer in peers]
    assert sorted(answers, key=str) == [Refused] * 4 + [Welcome]


@pytest.mark.parametrize("first", [Beat(), End("done"), Abort("no"), Welcome("s", "j"), Refused("you")])
async def test_who_says_something_else_first_has_not_come_up(doors: Doors, first: Message) -> None:
    """3.3.4: only *up* counts as up; a peer that says END or ABORT has not come up."""
    bootstrap = doors.invite()
    assert await doors.refused(bootstrap, first, hello(bootstrap)) == "it did not say hello first"


async def test_who_says_nothing_is_sent_away_after_a_while(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_HELLO_TIMEOUT", 0.02)
    assert await doors.refused(doors.invite()) == "it said no hello"


@on_virtual_time
async def test_who_has_said_hello_in_time_is_not_sent_away() -> None:
    doors = Doors(SocketGate("memory"))
    await doors.gate.open(ExecutorOptions(), "berlin", "j1")
    bootstrap = doors.invite()
    _, peer = await doors.knock(bootstrap)
    await asyncio.sleep(9)
    assert peer.got == []
    doors._pipes[0].send(hello(bootstrap))
    await asyncio.sleep(100)
    assert peer.got == [Welcome("berlin", "j1", 60.0)]
    await doors.close()


async def test_of_those_who_say_nothing_only_so_many_may_stand_at_the_door_and_they_keep_nobody_out(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_STRANGERS", 3)
    bootstrap = doors.invite()
    waiting = [await doors.knock(bootstrap) for _ in range(3)]
    _, peer = await doors.knock(bootstrap, hello(bootstrap))
    assert await peer.answer() == Welcome("berlin", "j1", 60.0)
    assert await waiting[0][1].answer() == Refused("it said no hello, and too many are waiting")
    assert len(doors.gate._strangers) == 2


async def test_who_leaves_without_a_word_is_forgotten(doors: Doors) -> None:
    pipe, _ = await doors.knock(doors.invite())
    pipe.abort()
    await doors.left.wait()
    assert not doors.gate._strangers


async def test_garbage_at_the_door_harms_nobody(doors: Doors, kind: Kind) -> None:
    if kind == "memory":
        return
    bootstrap = doors.invite()
    loop = asyncio.get_running_loop()
    near = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    near.setblocking(False)
    address: Any = "\0" + bootstrap.address.name[1:] if kind == "unix" else ("127.0.0.1", bootstrap.address.port)
    await loop.sock_connect(near, address)
    await loop.sock_sendall(near, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await loop.sock_recv(near, 100) == b""
    near.close()
    _, peer = await doors.knock(bootstrap, hello(bootstrap))
    assert await peer.answer() == Welcome("berlin", "j1", 60.0)


async def test_a_new_invitation_replaces_the_one_before(doors: Doors) -> None:
    first = doors.gate.invite(lambda pipe: None, launch_once=True)
    old = read_bootstrap(first)
    new = doors.invite()
    assert not first.exists()
    assert await doors.refused(old, hello(old)) == "it is not expected"
    _, peer = await doors.knock(new, hello(new))
    assert await peer.answer() == Welcome("berlin", "j1", 60.0)


async def test_the_file_is_removed_when_it_was_used(doors: Doors, tmp_path: Path) -> None:
    bootstrap = doors.invite(path=tmp_path / "boot")
    _, peer = await doors.knock(bootstrap, hello(bootstrap))
    await peer.answer()
    assert os.listdir(tmp_path) == []


async def test_forgetting_removes_the_file_and_expects_nobody(doors: Doors, tmp_path: Path) -> None:
    bootstrap = doors.invite(path=tmp_path / "boot")
    doors.gate.forget()
    doors.gate.forget()
    assert os.listdir(tmp_path) == []
    assert await doors.refused(bootstrap, hello(bootstrap)) == "it is not expected"


async def test_a_launched_program_gets_the_file_by_its_environment(doors: Doors) -> None:
    invitation = doors.gate.expect(lambda pipe: None, launch_once=False)
    assert list(invitation.environment) == [VARIABLE]
    bootstrap = read_bootstrap(environment=invitation.environment)
    assert (bootstrap.site, bootstrap.job, bootstrap.launch_once) == ("berlin", "j1", False)
    assert bootstrap.token not in str(invitation)
    doors.gate.forget()
    with pytest.raises(HandshakeRefused, match="used already"):
        read_bootstrap(environment=invitation.environment)


async def test_closing_leaves_nothing(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    doors = Doors(SocketGate(kind))
    await doors.gate.open(ExecutorOptions(), "berlin", "j1")
    bootstrap = doors.invite()
    _, stranger = await doors.knock(bootstrap)
    await asyncio.sleep(0)
    await doors.gate.close()
    assert await stranger.answer() == Refused("the site is ending")
    await stranger.gone.wait()
    with pytest.raises(ConnectionRefusedError):
        await connect(bootstrap.address, 0)
    await doors.close()
    await doors.gate.close()
    await asyncio.sleep(0)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


async def test_opening_twice_is_opening_once(doors: Doors) -> None:
    first = doors.invite().address
    await doors.gate.open(ExecutorOptions(), "berlin", "j1")
    assert doors.invite().address == first


async def test_a_gate_that_is_not_open_invites_nobody(kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="not open"):
        SocketGate(kind).invite(lambda pipe: None, launch_once=True)


def test_a_transport_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'unix', 'tcp' or 'memory', not 'pigeon'"):
        SocketGate("pigeon")  # type: ignore[arg-type]


# the agent's hello


async def test_an_agent_learns_where_it_is(doors: Doors) -> None:
    async with FlareAgent(doors.invite()) as agent:
        assert (agent.site, agent.job, agent.launch_once) == ("berlin", "j1", True)
        assert "berlin" in repr(agent)


async def test_an_agent_that_is_refused_says_why_and_leaves_nothing(doors: Doors) -> None:
    bootstrap = doors.invite()
    agent = FlareAgent(msgspec.structs.replace(bootstrap, token="wrong"))
    with pytest.raises(HandshakeRefused, match="it is not expected"):
        await agent.start()
    assert "not started" in repr(agent)


async def test_an_agent_finds_nobody_where_the_site_was(kind: Kind) -> None:
    doors = Doors(SocketGate(kind))
    await doors.gate.open(ExecutorOptions(), "berlin", "j1")
    bootstrap = doors.invite()
    await doors.close()
    with pytest.raises(HandshakeRefused, match="nobody listens where the site was") as caught:
        await FlareAgent(bootstrap).start()
    assert isinstance(caught.value.__cause__, OSError)


async def test_an_agent_whose_site_does_not_answer_gives_up(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketGate, "admit", lambda *_: "")
    with pytest.raises(TimeoutError, match=r"did not answer the hello within 0.02 s"):
        await FlareAgent(doors.invite(), AgentOptions(connect_timeout=0.02)).start()


async def test_an_agent_that_is_cancelled_while_it_says_hello_leaves_nothing(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asyncio.Event()
    monkeypatch.setattr(SocketGate, "admit", lambda *_: (said.set(), "")[1])  # type: ignore[func-returns-value]
    starting = asyncio.ensure_future(FlareAgent(doors.invite()).start())
    await said.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_an_agent_takes_something_else_than_a_welcome_for_a_refusal(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confused(_: SocketGate, pipe: Pipe, hello: Hello) -> str:
        pipe.send(Beat())
        return ""

    monkeypatch.setattr(SocketGate, "admit", confused)
    with pytest.raises(HandshakeRefused, match="it answered with something else"):
        await FlareAgent(doors.invite()).start()


def behind_the_welcome(*messages: Message) -> Callable[[SocketGate, Any, Hello], str]:
    def admit(found: SocketGate, pipe: Any, hello: Hello) -> str:
        pipe.stamp = stamp_of(found.session, hello.token)
        pipe.open(Peer())
        for message in (Welcome("", ""), *messages):
            pipe.send(message)
        return ""

    return admit


async def test_what_comes_right_behind_the_welcome_is_not_lost(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that waits for its program sends the task at once; both may be read in one piece."""
    offer = TaskOffer("t1", "train", b"\xc0", [])
    monkeypatch.setattr(SocketGate, "admit", behind_the_welcome(offer, End("no more")))
    async with FlareAgent(doors.invite()) as agent:
        task = await agent.get_task(0)
        assert task is not None
        assert task.id == "t1"


async def test_an_abort_right_behind_the_welcome_is_not_lost(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketGate, "admit", behind_the_welcome(Abort("stop")))
    async with FlareAgent(doors.invite()) as agent:
        closed = agent.closed
        assert closed is not None
        assert (closed.reason, closed.detail) == ("aborted", "stop")
