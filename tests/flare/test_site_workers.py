"""A site's agent with real workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async.errors import DfmError
from dfm_async.model.options import LocalOptions
from dfm_async.net import spec
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.crew import Crew
from dfm_async.targets.flare.crews import Installed
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.workers.shipping import ship_site
from tests.flare.fakes import Lab, seat, start
from tests.flare.operations import Password, Reading
from tests.flare.operations import lab as site

codec = Codec(trusted=False)


def calling(operation: str, location: str = "lab") -> bytes:
    """A net that calls an operation, and yields what it returns."""
    return msgspec.msgpack.encode(
        spec.Net(
            location=0,
            locations=(location,),
            scopes=(spec.Scope(0, None, None),),
            places=(spec.Place(0, 0, "made"),),
            loops=(),
            transitions=(
                spec.Transition("call", 0, (), spec.Call(operation, None, {}, 0)),
                spec.Transition("out", 0, (spec.Input(0),), spec.Emit(0, spec.Slot(0))),
            ),
            params=(),
            points=(spec.YieldPoint("out", "n"),),
        )
    )


class RealLab(Lab):
    def __init__(self, folder: Path, **options: Any) -> None:
        installed = Installed({}, ship_site(site, "home").data, 1, 2)
        super().__init__(folder, installed=installed, **options)
        self.changed = asyncio.Event()
        say = self.node.send

        def send(peer: str, message: Any) -> None:
            say(peer, message)
            self.changed.set()

        self.node.send = send  # type: ignore[method-assign]
        release = self.agent._seats.release

        def released(*args: Any, **named: Any) -> None:
            release(*args, **named)
            self.changed.set()

        self.agent._seats.release = released  # type: ignore[method-assign]

    async def until(self, holds: Callable[[], Any]) -> Any:
        while not (found := holds()):
            self.changed.clear()
            await self.changed.wait()
        return found

    async def heard(self, kind: type[Any], job: int) -> Any:
        found = await self.until(lambda: [message for message in self.node.of(kind) if message.job == job])
        return found[0]

    async def run(self, job: int, operation: str) -> None:
        self.hear(seat(job, calling(operation), sites=("lab",)))
        await self.heard(fm.Seated, job)
        self.hear(start(job))

    async def result(self, job: int) -> Any:
        return codec.loads_batch((await self.heard(msg.Results, job)).payload)[0]


async def test_workers_get_the_environment_of_the_site_and_no_arguments_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["flare", "-t", "the token of the job"])
    async with RealLab(tmp_path, environment={"LAB_DATA": "/data"}) as lab:
        await lab.run(1, "surroundings")
        found = await lab.result(1)
        assert found["argv"] == ["flare"]
        assert found["data"] == "/data"


async def test_a_location_that_is_given_up_is_stopped_and_its_worker_stays(tmp_path: Path) -> None:
    async with RealLab(tmp_path) as lab:
        await lab.run(1, "surroundings")
        pid = (await lab.result(1))["pid"]
        lab.hear(fm.Unseat(1, 0, True))
        await lab.run(2, "for_ever")
        lab.hear(fm.Unseat(2, 0, False))  # its site was given up by the hub
        await lab.run(3, "surroundings")
        assert (await lab.result(3))["pid"] == pid
        await lab.until(lambda: not lab.agent._seats._leaving)  # it has stopped
        lab.hear(fm.Unseat(3, 0, True))


async def test_a_worker_whose_calls_hang_is_replaced_and_its_jobs_are_notified(tmp_path: Path) -> None:
    async with RealLab(tmp_path) as lab:
        await lab.run(1, "surroundings")
        pid = (await lab.result(1))["pid"]
        lab.hear(fm.Unseat(1, 0, True))
        await lab.run(2, "for_ever")
        await lab.run(3, "hangs")
        assert (await lab.heard(msg.OperationError, 3)).error.type_name == "TimeoutError"
        lab.hear(fm.Unseat(3, 0, False))
        assert "a call of 'hangs' of job" in (await lab.heard(fm.SeatRetired, 2)).why
        await lab.run(4, "surroundings")
        assert (await lab.result(4))["pid"] != pid
        for job in (2, 4):
            lab.hear(fm.Unseat(job, 0, job == 4))


async def test_a_job_is_seated_before_another_and_begins_after_it(tmp_path: Path) -> None:
    async with RealLab(tmp_path) as lab:
        for job in (1, 2):
            lab.hear(seat(job, calling("surroundings"), sites=("lab",)))
            await lab.heard(fm.Seated, job)
        lab.hear(start(2))
        assert await lab.result(2)
        lab.hear(start(1))
        assert await lab.result(1)


async def test_what_was_not_authorized_is_not_called(tmp_path: Path) -> None:
    async with RealLab(tmp_path) as lab:
        lab.hear(seat(1, calling("surroundings"), sites=("lab",)))
        await lab.heard(fm.Seated, 1)
        (worker,) = (worker for crew in lab.agent._crews._crews.values() for worker in crew.pools["lab"].processes)
        assert worker.channel is not None
        worker.channel.send(msg.Announce(1, 0, next(iter(worker.nets))[0], ["same"]))  # as if another net was allowed
        lab.hear(start(1))
        error = (await lab.heard(msg.OperationError, 1)).error
        assert error.type_name == "PermissionError"


async def test_an_operation_called_cache_is_not_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *args: Any, **named: Any) -> None:
            """Starts nothing."""

        def worker(self, lane: int) -> int:
            return lane

    monkeypatch.setattr("dfm_async.targets.flare.crew.SitePool", Pool)
    crew = Crew("lab", b"", None, 1, 3, LocalOptions(), None, lambda _: None, lambda: None)
    assert crew.worker("lab#cache", 2) == 2
    assert crew.worker("lab##cache", 2) == 0
    assert list(crew.pools) == ["lab#cache", "lab"]
    for number in range(62):
        crew.worker(f"lab#{number}", 0)
    with pytest.raises(DfmError, match="64 pools of workers"):
        crew.worker("lab#one more", 0)


@pytest.mark.parametrize(
    ("asked", "made"), [((10**6, 10**9, 10**9), (256, 1024)), ((-5, -5, 0), (1, 1)), ((None, 8, 3), (3, 8))]
)
async def test_users_choose_workers_and_threads_within_limits(
    asked: tuple[int | None, int, int], made: tuple[int, int]
) -> None:

    workers, threads, lanes = asked
    crew = Crew("lab", b"", workers, threads, lanes, LocalOptions(), None, lambda _: None, lambda: None)
    assert (crew._workers, crew._threads) == made


def passing(operation: str, parameter: str) -> bytes:
    """A net that passes its parameter to an operation."""
    net = msgspec.msgpack.decode(calling(operation), type=spec.Net)
    call = spec.Transition("call", 0, (spec.Input(1),), spec.Call(operation, None, {parameter: spec.Slot(0)}, 0))
    places = (*net.places, spec.Place(1, 0, "given"))
    transitions = (call, *net.transitions[1:])
    return msgspec.msgpack.encode(
        msgspec.structs.replace(net, places=places, transitions=transitions, params=(("given", 1),))
    )


async def test_installed_code_gets_values_of_the_classes_in_its_signatures_only(tmp_path: Path) -> None:
    async with RealLab(tmp_path) as lab:
        asked = [
            (1, "level", "reading", Reading(1.5)),
            (2, "shown", "x", Reading(2.5)),
            (3, "shown", "x", Password("?")),
        ]
        for job, operation, parameter, value in asked:
            lab.hear(seat(job, passing(operation, parameter), sites=("lab",)))
            await lab.heard(fm.Seated, job)
            lab.hear(start(job, payload=codec.dumps([[codec.pack(value)]])))
        assert await lab.result(1) == 1.5
        assert await lab.result(2) == "Reading"
        error = (await lab.heard(msg.OperationError, 3)).error
        assert "no signature of an operation here names it" in error.message
