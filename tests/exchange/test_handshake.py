"""The handshake: a hello with the right token is accepted, others are refused with a reason (3.1.1)."""

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
from dfm_async.exchange import FlareAgent, handshake
from dfm_async.exchange.bootstrap import VARIABLE, Bootstrap, read_bootstrap, stamp_of
from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.handshake import HandshakeTransport, connect
from dfm_async.exchange.options import AgentOptions, ExecutorOptions
from dfm_async.exchange.program_messages import (
    VERSION,
    Abort,
    Beat,
    EndOfTasks,
    Hello,
    Message,
    Refused,
    TaskOffer,
    Welcome,
)
from dfm_async.exchange.transports import site_transport
from tests.exchange.rig import Recorder, on_virtual_time

Kind = Literal["unix", "tcp", "memory"]


class Doors:
    """A gate, who came in, and who knocked."""

    def __init__(self, gate: HandshakeTransport) -> None:
        self.gate = gate
        self.up: list[Pipe] = []
        self.left = asyncio.Event()
        self._pipes: list[Any] = []
        forget, gate.no_longer_pending = gate.no_longer_pending, self._left  # type: ignore[method-assign]
        self._forget = forget

    def invite(self, **options: Any) -> Bootstrap:
        return read_bootstrap(self.gate.invite(self._came, launch_once=True, **options))

    def _left(self, connection: Any) -> None:
        self._forget(connection)
        self.left.set()

    def _came(self, pipe: Pipe) -> None:
        self.up.append(pipe)
        Recorder(pipe)

    async def knock(self, bootstrap: Bootstrap, *messages: Message) -> tuple[Any, Recorder]:
        pipe: Any = await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token))
        self._pipes.append(pipe)
        peer = Recorder(pipe)
        for message in messages:
            pipe.send(message)
        return pipe, peer

    async def refused(self, bootstrap: Bootstrap, *messages: Message) -> str:
        """Knocks, and gives the reason for which it was sent away."""
        _, peer = await self.knock(bootstrap, *messages)
        await peer.end()
        (answer,) = peer.got
        assert isinstance(answer, Refused)
        assert self.up == []
        return answer.reason

    async def welcomes(self, bootstrap: Bootstrap) -> None:
        """The right hello still lets a program in."""
        _, peer = await self.knock(bootstrap, hello(bootstrap))
        assert await peer.until(1) == [Welcome("berlin", "j1", 60.0)]

    async def close(self) -> None:
        await self.gate.close()
        for pipe in (*self._pipes, *self.up):
            pipe.abort()
            await pipe.wait_closed()


@pytest.fixture(params=["unix", "tcp", "memory"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


async def opened(kind: Kind) -> Doors:
    found = Doors(HandshakeTransport(kind))
    await found.gate.open(ExecutorOptions(), "berlin", "j1")
    return found


@pytest.fixture
async def doors(kind: Kind) -> AsyncIterator[Doors]:
    found = await opened(kind)
    yield found
    await found.close()


def hello(bootstrap: Bootstrap, **changed: Any) -> Hello:
    said = {"version": VERSION, "token": bootstrap.token, "session": bootstrap.session, "pid": os.getpid()}
    return Hello(**{**said, **changed})


async def test_the_right_token_is_let_in(doors: Doors) -> None:
    await doors.welcomes(doors.invite())
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
    await doors.welcomes(bootstrap)


async def test_a_token_is_good_for_one_hello(doors: Doors) -> None:
    bootstrap = doors.invite()
    peers = [peer for _, peer in await asyncio.gather(*(doors.knock(bootstrap, hello(bootstrap)) for _ in range(5)))]
    answers = [(await peer.until(1))[0] for peer in peers]
    assert sorted(answers, key=str) == [Refused("its token was used already")] * 4 + [Welcome("berlin", "j1", 60.0)]
    assert len(doors.up) == 1


@pytest.mark.parametrize("first", [Beat(), EndOfTasks("done"), Abort("no"), Welcome("s", "j"), Refused("you")])
async def test_another_first_message_than_hello_is_refused(doors: Doors, first: Message) -> None:
    """3.3.4: only *up* counts as up; a peer that says END or ABORT has not come up."""
    bootstrap = doors.invite()
    assert await doors.refused(bootstrap, first, hello(bootstrap)) == "the first message was not a handshake"


async def test_a_silent_connection_is_refused_after_the_timeout(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_HELLO_TIMEOUT", 0.02)
    assert await doors.refused(doors.invite()) == "no handshake was received"


@on_virtual_time
async def test_a_hello_in_time_is_accepted() -> None:
    doors = await opened("memory")
    bootstrap = doors.invite()
    _, peer = await doors.knock(bootstrap)
    await asyncio.sleep(9)
    assert peer.got == []
    doors._pipes[0].send(hello(bootstrap))
    await asyncio.sleep(100)
    assert peer.got == [Welcome("berlin", "j1", 60.0)]
    await doors.close()


async def test_silent_connections_are_limited_and_keep_no_program_out(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_PENDING", 3)
    bootstrap = doors.invite()
    waiting = [await doors.knock(bootstrap) for _ in range(3)]
    await doors.welcomes(bootstrap)
    assert await waiting[0][1].until(1) == [Refused("no handshake was received, and too many connections are pending")]
    assert len(doors.gate._pending) == 2


async def test_a_connection_that_ends_before_its_hello_is_forgotten(doors: Doors) -> None:
    pipe, _ = await doors.knock(doors.invite())
    pipe.abort()
    await doors.left.wait()
    assert not doors.gate._pending


async def test_garbage_before_the_handshake_harms_no_other_connection(doors: Doors, kind: Kind) -> None:
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
    await doors.welcomes(bootstrap)


async def test_a_new_invitation_replaces_the_one_before(doors: Doors) -> None:
    first = doors.gate.invite(lambda pipe: None, launch_once=True)
    old = read_bootstrap(first)
    new = doors.invite()
    assert not first.exists()
    assert await doors.refused(old, hello(old)) == "it is not expected"
    await doors.welcomes(new)


async def test_the_file_is_removed_when_it_was_used(doors: Doors, tmp_path: Path) -> None:
    bootstrap = doors.invite(path=tmp_path / "boot")
    _, peer = await doors.knock(bootstrap, hello(bootstrap))
    await peer.until(1)
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
    doors = await opened(kind)
    bootstrap = doors.invite()
    _, stranger = await doors.knock(bootstrap)
    await asyncio.sleep(0)
    await doors.gate.close()
    await stranger.end()
    assert stranger.got == [Refused("the site is ending")]
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


async def test_a_transport_that_is_not_open_cannot_invite(kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="not open"):
        HandshakeTransport(kind).invite(lambda pipe: None, launch_once=True)


def test_a_transport_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'pigeon'"):
        site_transport("pigeon")


# the agent's hello


async def test_an_agent_learns_where_it_is(doors: Doors) -> None:
    async with FlareAgent(doors.invite()) as agent:
        assert (agent.site, agent.job, agent.launch_once) == ("berlin", "j1", True)
        assert "berlin" in repr(agent)


async def test_a_refused_agent_raises_the_reason_and_leaves_nothing(doors: Doors) -> None:
    bootstrap = doors.invite()
    agent = FlareAgent(msgspec.structs.replace(bootstrap, token="wrong"))
    with pytest.raises(HandshakeRefused, match="it is not expected"):
        await agent.start()
    assert "not started" in repr(agent)


async def test_an_agent_whose_site_has_closed_is_refused(kind: Kind) -> None:
    doors = await opened(kind)
    bootstrap = doors.invite()
    await doors.close()
    with pytest.raises(HandshakeRefused, match="no site listens") as caught:
        await FlareAgent(bootstrap).start()
    assert isinstance(caught.value.__cause__, OSError)


async def test_an_agent_whose_site_does_not_answer_times_out(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandshakeTransport, "admit", lambda *_: "")
    with pytest.raises(TimeoutError, match=r"did not answer the hello within 0.02 s"):
        await FlareAgent(doors.invite(), AgentOptions(connect_timeout=0.02)).start()


async def test_an_agent_cancelled_during_the_handshake_leaves_nothing(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asyncio.Event()
    monkeypatch.setattr(HandshakeTransport, "admit", lambda *_: (said.set(), "")[1])  # type: ignore[func-returns-value]
    starting = asyncio.ensure_future(FlareAgent(doors.invite()).start())
    await said.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_an_agent_takes_something_else_than_a_welcome_for_a_refusal(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confused(_: HandshakeTransport, pipe: Pipe, hello: Hello) -> str:
        pipe.send(Beat())
        return ""

    monkeypatch.setattr(HandshakeTransport, "admit", confused)
    with pytest.raises(HandshakeRefused, match="unexpected answer to the handshake"):
        await FlareAgent(doors.invite()).start()


def behind_the_welcome(*messages: Message) -> Callable[[HandshakeTransport, Any, Hello], str]:
    def admit(found: HandshakeTransport, pipe: Any, hello: Hello) -> str:
        pipe.stamp = stamp_of(found.session, hello.token)
        Recorder(pipe)
        for message in (Welcome("", ""), *messages):
            pipe.send(message)
        return ""

    return admit


async def test_a_task_right_behind_the_welcome_is_not_lost(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that waits for its program sends the task at once; both may be read in one piece."""
    offer = TaskOffer(task="t1", name="train", data=b"\xc0", parts=[])
    monkeypatch.setattr(HandshakeTransport, "admit", behind_the_welcome(offer, EndOfTasks("no more")))
    async with FlareAgent(doors.invite()) as agent:
        task = await agent.get_task(0)
        assert task is not None
        assert task.id == "t1"


async def test_an_abort_right_behind_the_welcome_is_not_lost(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandshakeTransport, "admit", behind_the_welcome(Abort("stop")))
    async with FlareAgent(doors.invite()) as agent:
        closed = agent.closed
        assert closed is not None
        assert (closed.reason, closed.detail) == ("aborted", "stop")
