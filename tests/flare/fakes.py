"""A site without processes: an agent whose workers only note what they get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from dfm_async.engine import site_host
from dfm_async.errors import WorkerLost
from dfm_async.model.flare import SiteSettings
from dfm_async.model.ids import JobId, Location
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.options import LocalOptions
from dfm_async.net import spec
from dfm_async.site.authorizing import PipelineAuthorizer
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.admission import HostJobUser
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.site_agent import SiteAgent
from dfm_async.targets.flare.site_code import Installed
from dfm_async.wire import messages as msg
from dfm_async.wire.messages import Envelope
from tests.support.waiting import settled

SITES = ("lab", "there")
LOCATIONS = tuple(map(Location, SITES))


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        """Nothing to do."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if type(message) is kind]


class FakeWorker:
    """A worker that is ready when the test says so."""

    def __init__(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self.assignments: dict[Any, None] = {}
        self._nets: set[tuple[str, int]] = set()
        self.address = address
        self.channel = FakeChannel()
        self.killed: str | None = None
        self.retired = False

    @property
    def shared(self) -> bool:
        return len({assigned.job for assigned in self.assignments}) > 1

    def launched(self, assigned: Any) -> None:
        """Nothing to do."""

    def teach(self, plan: str, at: int, net: Any) -> None:
        if (plan, at) not in self._nets:
            self._nets.add((plan, at))
            self.channel.send(msg.SendNet(plan, at, net()))

    def leave(self, assigned: Any, *, succeeded: bool) -> None:
        self.assignments.pop(assigned, None)

    def retire(self) -> None:
        self.retired = True

    def abandon(self, job: int, at: int) -> None:
        self.retire()

    def kill(self, reason: str = "") -> None:
        self.killed = reason
        self.die()

    def die(self) -> None:
        """End, and notify what is assigned, as its pool does."""
        error = WorkerLost("lab", -9, "it died \x1b[2J", ("last\x07 words",))
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()
        self.ended.set_result(-9)
        for assigned in list(self.assignments):
            assigned.lost(error)
        self.assignments.clear()

    def when_read(self, call: Any) -> None:
        call()


class FakePool:
    def __init__(self, worker: FakeWorker) -> None:
        self.processes = [worker]


class FakeGroup:
    """In the place of a group of workers: one worker for each location."""

    made: list[FakeGroup]
    hold = False
    """Whether workers wait for the test before they are ready."""

    def __init__(self, code: site_host.Code, make_pool: Any, on_left: Any) -> None:
        self.code = code
        self.pools: dict[Location, FakePool] = {}
        self.assignments = 0
        self.dropped = False
        self._on_left = on_left
        FakeGroup.made.append(self)

    def worker(self, location: Location, lane: int) -> FakeWorker:
        found = self.pools.get(location)
        if found is None or found.processes[0].ended.done():
            worker = FakeWorker(f"\0own-{location}")
            if not FakeGroup.hold:
                worker.ready.set_result(None)
            found = self.pools[location] = FakePool(worker)
        return found.processes[0]

    def left(self) -> None:
        self.assignments -= 1
        self._on_left(self)

    async def shut_down(self, grace: float) -> None:
        for pool in self.pools.values():
            if not pool.processes[0].ended.done():
                pool.processes[0].die()


class FakeNode:
    """Records what the agent sends."""

    backlog = 0

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, peer: str, message: Any) -> None:
        self.sent.append((peer, message.decode() if isinstance(message, Envelope) else message))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in self.sent if type(message) is kind]


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Agents have no processes."""
    FakeGroup.made, FakeGroup.hold = [], False
    monkeypatch.setattr(site_host, "_WorkerGroup", FakeGroup)
    yield
    FakeGroup.made = []


class Lab:
    """The agent of a site, and what it did."""

    def __init__(
        self,
        folder: Path,
        authorizer: PipelineAuthorizer | None = None,
        installed: Installed | None = None,
        *,
        brings_code: bool = False,
        options: LocalOptions | None = None,
        **settings: Any,
    ) -> None:
        self.path = folder / "audit.jsonl"
        self.audit = AuditLog(self.path, {"site": "lab"})
        user = HostJobUser("ann@lab.org", "lab", "lead", brings_code)
        offered = installed or Installed(operations={}, shipped=b"shipped", own_process=frozenset({"heavy"}))
        given = options or LocalOptions(start_method="spawn")
        self.agent = SiteAgent(
            SiteSettings(site="lab", allow_code=brings_code, **settings), user, offered, given, self.audit, authorizer
        )
        self.node = FakeNode()
        self.agent.attach(self.node)  # type: ignore[arg-type] # it only sends

    async def __aenter__(self) -> Self:
        await self.agent.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.agent.__aexit__(None, None, None)

    def receive(self, *messages: Any, peer: str = HUB) -> None:
        for message in messages:
            self.agent.receive(peer, message)

    async def assign(self, *requests: fm.Assign) -> None:
        """Request workers, and wait for the answers."""
        self.receive(*requests)
        await settled()

    def worker(self, location: Location = LOCATIONS[0]) -> FakeWorker:
        return FakeGroup.made[-1].pools[location].processes[0]

    def from_worker(self, message: Any) -> None:
        self.agent.host._on_message(message)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def recorded(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


def calling(
    *operations: str, at: int = 0, locations: tuple[Location, ...] = LOCATIONS, literals: tuple[Any, ...] = ()
) -> bytes:
    """A net that calls operations."""
    transitions = tuple(
        spec.Transition(name, 0, (), spec.Call(operation=name, provider="maker", args={}, output=index))
        for index, name in enumerate(operations)
    )
    return encoded(*transitions, at=at, locations=locations, literals=literals)


def encoded(
    *transitions: spec.Transition,
    at: int = 0,
    locations: tuple[Location, ...] = LOCATIONS,
    literals: tuple[Any, ...] = (),
) -> bytes:
    """A net without places."""
    net = spec.Net(
        location=at,
        locations=locations,
        scopes=(spec.Scope(0, None, None),),
        places=(),
        loops=(),
        transitions=transitions,
        params=(),
        points=(),
        literals=literals,
    )
    return msgspec.msgpack.encode(net)


def request(job: int = 1, net: bytes | None = None, **changes: Any) -> fm.Assign:
    """What the hub asks for."""
    given: dict[str, Any] = {
        "job": job,
        "at": 0,
        "job_id": f"job-{job}",
        "pipeline": "rivers",
        "location": LOCATIONS[0],
        "sites": SITES,
        "offer": "",
        "plan": "plan",
        "net": calling("stats") if net is None else net,
        "lane": 0,
        "size": 0,
    }
    return fm.Assign(**{**given, **changes})


def start(job: int = 1, **changes: Any) -> msg.StartJob:
    """What the hub sends when all have workers."""
    given = msg.StartJob(
        job=job,
        at=0,
        spec=JobSpec(job_id=JobId(f"job-{job}")),
        plan="plan",
        routes=("\0evil", "/etc/x"),
        first=0,
        count=1,
        payload=b"",
        last=True,
    )
    return msgspec.structs.replace(given, **changes)
