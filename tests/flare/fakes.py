"""A site without processes: an agent whose workers only note what they get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from dfm_async.errors import WorkerLost
from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.net import spec
from dfm_async.site.authorizing import Authorizer
from dfm_async.targets.flare import crews as crews_module
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.admission import User
from dfm_async.targets.flare.agent import SiteAgent
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.crews import Installed
from dfm_async.targets.flare.node import HUB
from dfm_async.wire import messages as msg

SITES = ("lab", "there")


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if type(message) is kind]


class FakeWorker:
    """A worker that is ready when the test says so."""

    def __init__(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self.seats: dict[tuple[Any, int], None] = {}
        self.nets: dict[tuple[str, int], None] = {}
        self.address = address
        self.channel = FakeChannel()
        self.killed: str | None = None
        self.retired = False

    @property
    def shared(self) -> bool:
        return len(self.seats) > 1

    def launched(self) -> None:
        """Nothing to do."""

    def leave(self, seat: Any, at: int, *, well: bool) -> None:
        self.seats.pop((seat, at), None)

    def retire(self) -> None:
        self.retired = True

    def abandon(self, job: int, at: int) -> None:
        self.retire()

    def kill(self, reason: str = "") -> None:
        self.killed = reason
        self.die()

    def die(self) -> None:
        """It ends, and its seats are told, as its pool does."""
        error = WorkerLost("lab", -9, "it died \x1b[2J", ("last\x07 words",))
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()
        self.ended.set_result(-9)
        for seat, at in list(self.seats):
            seat.lost(at, error)
        self.seats.clear()

    def when_read(self, call: Any) -> None:
        call()


class FakePool:
    def __init__(self, worker: FakeWorker) -> None:
        self.processes = [worker]


class FakeCrew:
    """In the place of a crew: one worker for each location, and how it was made."""

    made: list[FakeCrew]
    hold = False
    """Whether workers wait for the test before they are ready."""

    def __init__(self, *args: Any, installed: bool) -> None:
        self.args = args
        self.installed = installed
        self.on_message = args[7]
        self.pools: dict[str, FakePool] = {}
        self.seats = 0
        self.wanted = True
        FakeCrew.made.append(self)

    def worker(self, location: str, lane: int) -> FakeWorker:
        found = self.pools.get(location)
        if found is None or found.processes[0].ended.done():
            worker = FakeWorker(f"\0own-{location}")
            if not FakeCrew.hold:
                worker.ready.set_result(None)
            found = self.pools[location] = FakePool(worker)
        return found.processes[0]

    async def shut_down(self, grace: float) -> None:
        for pool in self.pools.values():
            if not pool.processes[0].ended.done():
                pool.processes[0].die()


class FakeNode:
    """Notes what the agent says."""

    backlog = 0

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def send(self, peer: str, message: Any) -> None:
        self.said.append((peer, message))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in self.said if type(message) is kind]


@pytest.fixture
def fake_crews(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Agents have no processes."""
    FakeCrew.made, FakeCrew.hold = [], False
    monkeypatch.setattr(crews_module, "Crew", FakeCrew)
    yield
    FakeCrew.made = []


class Lab:
    """The agent of a site, and what it did."""

    def __init__(
        self,
        folder: Path,
        authorizer: Authorizer | None = None,
        installed: Installed | None = None,
        *,
        brings_code: bool = False,
        options: LocalOptions | None = None,
        **settings: Any,
    ) -> None:
        self.path = folder / "audit.jsonl"
        self.audit = AuditLog(self.path, {"site": "lab"})
        user = User("ann@lab.org", "lab", "lead", brings_code)
        offered = installed or Installed({}, b"shipped", own_process=frozenset({"heavy"}))
        given = options or LocalOptions(start_method="spawn")
        self.agent = SiteAgent(
            SiteSettings(site="lab", allow_code=brings_code, **settings), user, offered, given, self.audit, authorizer
        )
        self.node = FakeNode()
        self.agent.attach(self.node)

    async def __aenter__(self) -> Self:
        await self.agent.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.agent.__aexit__(None, None, None)

    def hear(self, *messages: Any, peer: str = HUB) -> None:
        for message in messages:
            self.agent.receive(peer, message)

    async def seat(self, *requests: fm.Seat) -> None:
        """Asks for seats, and waits for the answers."""
        self.hear(*requests)
        await settle()

    def worker(self, location: str = "lab") -> FakeWorker:
        return FakeCrew.made[-1].pools[location].processes[0]

    def from_worker(self, message: Any) -> None:
        FakeCrew.made[-1].on_message(message)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def recorded(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


async def settle() -> None:
    """Lets everything happen that is about to."""
    for _ in range(10):
        await asyncio.sleep(0)


def calling(*operations: str, at: int = 0, locations: tuple[str, ...] = SITES, literals: tuple[Any, ...] = ()) -> bytes:
    """A net that calls operations."""
    transitions = tuple(
        spec.Transition(name, 0, (), spec.Call(name, "maker", {}, index)) for index, name in enumerate(operations)
    )
    scopes = (spec.Scope(0, None, None),)
    return msgspec.msgpack.encode(spec.Net(at, locations, scopes, (), (), transitions, (), (), literals))


def seat(job: int = 1, net: bytes | None = None, **changes: Any) -> fm.Seat:
    """What the hub asks for."""
    given: dict[str, Any] = {
        "job": job,
        "at": 0,
        "job_id": f"job-{job}",
        "pipeline": "rivers",
        "location": "lab",
        "sites": SITES,
        "offer": "",
        "plan": "plan",
        "net": calling("stats") if net is None else net,
        "lane": 0,
        "size": 0,
    }
    return fm.Seat(**{**given, **changes})


def start(job: int = 1, **changes: Any) -> msg.StartJob:
    """What the hub says when all are seated."""
    given = msg.StartJob(job, 0, f"job-{job}", "plan", ("\0evil", "/etc/x"), 10, 10, 0, 1, b"", True)
    return msgspec.structs.replace(given, **changes)
