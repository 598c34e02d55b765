"""A session's connections to several host jobs, with hubs that a test plays."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dfm_async import Federation, FlareOptions, SessionClosed
from dfm_async.errors import FlareError
from dfm_async.model.ids import Location
from dfm_async.model.stats import WorkerStats
from dfm_async.results.record import JobRecord
from dfm_async.targets.flare import flare_target as target_module
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.flare_target import FlareTarget
from tests.support.waiting import settled

fed = Federation("played")
fed.site("a")


class Hubs:
    """The hubs of a user's host jobs: which jobs they have, and who is connected to them."""

    def __init__(self) -> None:
        self.jobs = {"new": ["n"], "old": ["o", "p"], "older": ["q"]}
        self.unreachable: set[str] = set()
        self.silent: set[str] = set()
        """Those that do not answer."""
        self.connections: list[Connection] = []
        self.opening = asyncio.Event()
        """Whether other host jobs can be connected to."""
        self.opening.set()
        self.asked: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Whether the hub of a host job was."""
        self.joining = asyncio.Event()

    @property
    def open(self) -> list[str]:
        return [found.host_job for found in self.connections if not found.closed]


class Connection:
    """Stands for :class:`HubConnection`."""

    def __init__(self, hubs: Hubs, on_message: Any, on_lost: Any) -> None:
        self.welcome = SimpleNamespace(sites={})
        self.lost: FlareError | None = None
        self.host_job = ""
        self.transport = None
        self.closed = False
        self.sent: list[Any] = []
        self._hubs, self._on_message, self.on_lost = hubs, on_message, on_lost
        self._end = asyncio.Event()
        hubs.connections.append(self)

    async def open(self, *_: Any) -> None:
        self.host_job = "new"

    async def open_at(self, host_job: str) -> None:
        self._hubs.joining.set()
        await self._hubs.opening.wait()
        if host_job in self._hubs.unreachable:
            raise FlareError("it has ended", "Connect again")
        self.host_job = host_job

    async def host_jobs(self) -> list[str]:
        return list(self._hubs.jobs)

    async def supervise(self) -> None:
        await self._end.wait()

    async def close(self) -> None:
        self.closed = True
        self._end.set()

    def expect(self, *, busy: bool) -> None:
        pass

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self._hubs.asked[self.host_job].set()
        jobs = self._hubs.jobs[self.host_job]
        if self.host_job in self._hubs.silent:
            return
        if isinstance(message, fm.Find):
            known = SimpleNamespace(job_id=message.job_id) if message.job_id in jobs else None
            self.answer(SimpleNamespace(request=message.request, known=known, missing=()), fm.FoundJob)
        elif isinstance(message, fm.ListJobs):
            self.answer(SimpleNamespace(request=message.request, job_ids=jobs), fm.Listed)

    def answer(self, message: Any, kind: type) -> None:
        handler = target_module._HANDLERS[kind]
        asyncio.get_running_loop().call_soon(handler, self._on_message.__self__, self, message)  # type: ignore[arg-type]

    def end(self) -> None:
        self.lost = FlareError("the host job has ended", "Connect again")
        self.on_lost(self, self.lost)


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hubs]:
    found = Hubs()

    def connection(_options: Any, _hello: Any, _greetings: Any, on_message: Any, on_lost: Any) -> Connection:
        return Connection(found, on_message, on_lost)

    def adopt(target: FlareTarget, connection: Connection, known: Any) -> JobRecord:
        target._note_host_job(SimpleNamespace(connection=connection, record=SimpleNamespace(job_id=known.job_id)))  # type: ignore[arg-type]
        return f"{known.job_id} at {connection.host_job}"  # type: ignore[return-value]

    monkeypatch.setattr(target_module, "HubConnection", connection)
    monkeypatch.setattr(FlareTarget, "_adopt", adopt)
    yield found
    assert found.open == [], "connections are left"


@asynccontextmanager
async def running() -> AsyncIterator[FlareTarget]:
    target = FlareTarget(FlareOptions(startup_kit="kit", user="user"))
    async with target.running(fed, "home"):
        yield target


@pytest.fixture
async def target(hubs: Hubs) -> AsyncIterator[FlareTarget]:
    async with running() as found:
        yield found


async def test_a_job_is_found_in_every_host_job(target: FlareTarget, hubs: Hubs) -> None:
    assert await target.find("n") == "n at new"
    assert hubs.open == ["new"], "nobody looks further than needed"
    assert await target.find("q") == "q at older"
    assert await target.find("nobody") is None
    await settled()
    assert hubs.open == ["new"], "other host jobs are left again"


async def test_concurrent_lookups_find_the_same_job(target: FlareTarget, hubs: Hubs) -> None:
    assert await asyncio.gather(*(target.find("o") for _ in range(3))) == ["o at old"] * 3


async def test_an_unreachable_host_job_hides_no_other(
    target: FlareTarget, hubs: Hubs, caplog: pytest.LogCaptureFixture
) -> None:
    hubs.unreachable.add("old")
    assert await target.find("q") == "q at older"
    assert "cannot be reached" in caplog.text
    assert await target.find("o") is None


async def test_a_host_job_that_ends_during_a_request_hides_no_other(target: FlareTarget, hubs: Hubs) -> None:
    hubs.silent.add("old")
    finding = asyncio.create_task(target.find("q"))
    await hubs.asked["old"].wait()
    next(found for found in hubs.connections if found.host_job == "old").end()
    assert await finding == "q at older"


async def test_the_loss_of_the_host_job_for_new_jobs_is_raised(target: FlareTarget, hubs: Hubs) -> None:
    hubs.silent.add("new")
    finding = asyncio.create_task(target.find("q"))
    await hubs.asked["new"].wait()
    hubs.connections[0].end()
    with pytest.raises(FlareError, match="has ended"):
        await finding


async def test_all_jobs_of_the_user_are_listed(target: FlareTarget, hubs: Hubs) -> None:
    await target.refresh()
    found = {said.job_id for connection in hubs.connections for said in connection.sent if isinstance(said, fm.Find)}
    assert found == {"n", "o", "p", "q"}


async def test_a_job_is_forgotten_where_it_is(hubs: Hubs) -> None:
    async with running() as target:
        await target.find("o")
        await settled()
        assert hubs.open == ["new"]
        await target.forget("o")
        await target.forget("n")
    forgotten = {
        (connection.host_job, said.job_id)
        for connection in hubs.connections
        for said in connection.sent
        if isinstance(said, fm.Forget)
    }
    assert forgotten == {("old", "o"), ("new", "n")}


async def test_a_session_that_is_closed_while_it_looks_leaves_nothing(hubs: Hubs) -> None:
    hubs.opening.clear()
    async with running() as target:
        finding = asyncio.create_task(target.find("q"))
        await hubs.joining.wait()
    hubs.opening.set()
    with pytest.raises(SessionClosed):
        await finding


async def test_a_session_that_is_closed_while_it_asks_says_so(hubs: Hubs) -> None:
    hubs.silent.add("new")
    async with running() as target:
        finding = asyncio.create_task(target.find("q"))
        await hubs.asked["new"].wait()
    with pytest.raises(SessionClosed):
        await finding


async def test_a_cancelled_lookup_leaves_nothing(target: FlareTarget, hubs: Hubs) -> None:
    hubs.opening.clear()
    finding = asyncio.create_task(target.find("q"))
    await hubs.joining.wait()
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    assert hubs.open == ["new"]
    hubs.opening.set()
    assert await target.find("q") == "q at older"


async def test_workers_of_all_host_jobs_are_reported(target: FlareTarget, hubs: Hubs) -> None:
    def report(pid: int) -> fm.SiteReport:
        return fm.SiteReport("", Location("a"), (WorkerStats(pid=pid, jobs=1),), 1, (2, 3))

    current = hubs.connections[0]
    target._receive(current, report(1))  # type: ignore[arg-type]
    other = await target._host_jobs.at("old")
    assert other is not None
    target._receive(other, report(2))
    stats = target.stats().sites["a"]
    assert ([worker.pid for worker in stats.workers], stats.restarts, stats.tokens.count) == ([1, 2], 2, 4)
    target._host_jobs.tidy()
    assert [worker.pid for worker in target.stats().sites["a"].workers] == [1]
