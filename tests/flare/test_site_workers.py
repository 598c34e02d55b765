"""A site's agent with real workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async.engine.site_host import Code, SiteHost
from dfm_async.errors import DfmError
from dfm_async.model.ids import Location
from dfm_async.model.options import LocalOptions
from dfm_async.net import spec
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.site_code import Installed
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.workers.shipping import ship_site
from dfm_async.workers.site_worker import WorkerOptions
from tests.flare.fakes import Lab, request, start
from tests.flare.operations import Password, Reading
from tests.flare.operations import lab as site

codec = Codec.for_untrusted()


def calling(operation: str) -> bytes:
    """A net that calls an operation, and yields what it returns."""
    return msgspec.msgpack.encode(
        spec.Net(
            location=0,
            locations=(Location("lab"),),
            scopes=(spec.Scope(0, None, None),),
            places=(spec.Place(0, 0, "made"),),
            loops=(),
            transitions=(
                spec.Transition("call", 0, (), spec.Call(operation=operation, provider=None, args={}, output=0)),
                spec.Transition("out", 0, (spec.Input(0),), spec.Emit(0, spec.Slot(0))),
            ),
            params=(),
            points=(spec.YieldPoint("out", "n"),),
        )
    )


class RealLab(Lab):
    def __init__(self, folder: Path, **options: Any) -> None:
        installed = Installed(operations={}, shipped=ship_site(site, "home").data, workers=1, threads=2)
        super().__init__(folder, installed=installed, **options)
        self.changed = asyncio.Event()
        say = self.node.send

        def send(peer: str, message: Any) -> None:
            say(peer, message)
            self.changed.set()

        self.node.send = send  # type: ignore[method-assign]
        remove = self.agent.remove

        def removed(*args: Any, **named: Any) -> bool:
            self.changed.set()
            return remove(*args, **named)

        self.agent.remove = removed  # type: ignore[method-assign]

    async def until(self, holds: Callable[[], Any]) -> Any:
        while not (found := holds()):
            self.changed.clear()
            await self.changed.wait()
        return found

    async def heard(self, kind: type[Any], job: int) -> Any:
        found = await self.until(lambda: [message for message in self.node.of(kind) if message.job == job])
        return found[0]

    async def assigned(self, job: int, net: bytes) -> None:
        self.receive(request(job, net, sites=("lab",)))
        await self.heard(fm.Assigned, job)

    async def run(self, job: int, operation: str) -> None:
        await self.assigned(job, calling(operation))
        self.receive(start(job))

    async def result(self, job: int) -> Any:
        return codec.loads_batch((await self.heard(msg.ResultBatch, job)).payload)[0]


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[RealLab]:
    async with RealLab(tmp_path) as found:
        yield found


async def test_workers_get_the_environment_of_the_site_and_no_arguments_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["flare", "-t", "the token of the job"])
    async with RealLab(tmp_path, environment={"LAB_DATA": "/data"}) as lab:
        await lab.run(1, "surroundings")
        found = await lab.result(1)
        assert found["argv"] == ["flare"]
        assert found["data"] == "/data"


async def test_an_abandoned_location_is_stopped_and_its_worker_stays(lab: RealLab) -> None:
    await lab.run(1, "surroundings")
    pid = (await lab.result(1))["pid"]
    lab.receive(fm.Unassign(1, 0, True))
    await lab.run(2, "for_ever")
    lab.receive(fm.Unassign(2, 0, False))  # its site was evicted by the hub
    await lab.run(3, "surroundings")
    assert (await lab.result(3))["pid"] == pid
    await lab.until(lambda: len(list(lab.agent._locations)) == 1)  # it has stopped
    lab.receive(fm.Unassign(3, 0, True))


async def test_a_worker_whose_calls_hang_is_replaced_and_its_jobs_are_notified(lab: RealLab) -> None:
    await lab.run(1, "surroundings")
    pid = (await lab.result(1))["pid"]
    lab.receive(fm.Unassign(1, 0, True))
    await lab.run(2, "for_ever")
    await lab.run(3, "hangs")
    assert (await lab.heard(msg.OperationError, 3)).error.type_name == "TimeoutError"
    lab.receive(fm.Unassign(3, 0, False))
    assert "a call of 'hangs' of job" in (await lab.heard(fm.WorkerRetired, 2)).why
    await lab.run(4, "surroundings")
    assert (await lab.result(4))["pid"] != pid
    for job in (2, 4):
        lab.receive(fm.Unassign(job, 0, job == 4))


async def test_a_job_assigned_before_another_may_begin_after_it(lab: RealLab) -> None:
    for job in (1, 2):
        await lab.assigned(job, calling("surroundings"))
    lab.receive(start(2))
    assert await lab.result(2)
    lab.receive(start(1))
    assert await lab.result(1)


async def test_what_was_not_authorized_is_not_called(lab: RealLab) -> None:
    await lab.assigned(1, calling("surroundings"))
    (worker,) = lab.agent.host.workers
    assert worker.channel is not None
    worker.channel.send(msg.Announce(1, 0, next(iter(worker._nets))[0], ["same"]))  # as if another net was allowed
    lab.receive(start(1))
    error = (await lab.heard(msg.OperationError, 1)).error
    assert error.type_name == "PermissionError"


class FakePool:
    """Starts nothing, and keeps how it was made."""

    made: list[FakePool]

    def __init__(self, options: WorkerOptions, workers: int, *_: Any, **_more: Any) -> None:
        self.size = (workers, options.threads)
        FakePool.made.append(self)

    def worker(self, lane: int) -> int:
        return lane


@pytest.fixture
def fake_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePool.made = []
    monkeypatch.setattr("dfm_async.engine.site_host.SitePool", FakePool)


def host_of(workers: int | None, threads: int, lanes: int) -> SiteHost:
    host = SiteHost("lab", LocalOptions(), lambda _: None, lambda: None)
    host.add_code("", Code(shipped=b"", workers=workers, threads=threads, lanes=lanes))
    return host


@pytest.mark.usefixtures("fake_pools")
async def test_an_operation_called_cache_is_not_the_cache() -> None:
    group = host_of(None, 1, 3)._groups[""]
    assert [group.worker(Location("lab", "cache"), 2), group.worker(Location("lab", cache=True), 2)] == [2, 0]
    assert list(group.pools) == [Location("lab", "cache"), Location("lab")]
    for number in range(62):
        group.worker(Location("lab", f"own{number}"), 0)
    with pytest.raises(DfmError, match="64 pools of workers"):
        group.worker(Location("lab", "one_more"), 0)


@pytest.mark.usefixtures("fake_pools")
@pytest.mark.parametrize(
    ("asked", "made"), [((10**6, 10**9, 10**9), (256, 1024)), ((-5, -5, 0), (1, 1)), ((None, 8, 3), (3, 8))]
)
async def test_users_choose_workers_and_threads_within_limits(
    asked: tuple[int | None, int, int], made: tuple[int, int]
) -> None:
    host_of(*asked)._groups[""].worker(Location("lab"), 0)
    assert FakePool.made[0].size == made


def passing(operation: str, parameter: str) -> bytes:
    """A net that passes its parameter to an operation."""
    net = msgspec.msgpack.decode(calling(operation), type=spec.Net)
    action = spec.Call(operation=operation, provider=None, args={parameter: spec.Slot(0)}, output=0)
    call = spec.Transition("call", 0, (spec.Input(1),), action)
    places = (*net.places, spec.Place(1, 0, "given"))
    transitions = (call, *net.transitions[1:])
    return msgspec.msgpack.encode(
        msgspec.structs.replace(net, places=places, transitions=transitions, params=(("given", 1),))
    )


async def test_installed_code_gets_values_of_the_classes_in_its_signatures_only(lab: RealLab) -> None:
    asked = [("level", "reading", Reading(1.5)), ("shown", "x", Reading(2.5)), ("shown", "x", Password("?"))]
    for job, (operation, parameter, value) in enumerate(asked, 1):
        await lab.assigned(job, passing(operation, parameter))
        lab.receive(start(job, payload=codec.dumps([[codec.pack(value)]])))
    assert await lab.result(1) == 1.5
    assert await lab.result(2) == "Reading"
    error = (await lab.heard(msg.OperationError, 3)).error
    assert "no signature of an operation here names it" in error.message
