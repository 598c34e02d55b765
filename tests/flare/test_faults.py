"""Participants of a real federation that die, end or come back, while jobs run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

import psutil
import pytest
import pytest_asyncio

from dfm_async import (
    Federation,
    Job,
    JobAborted,
    JobFailed,
    JobStatus,
    Pipeline,
    PipelineError,
    PlaceParam,
    RetryPolicy,
    Session,
    WorkerLost,
    Yield,
)
from dfm_async.deploy.flare_process import marked
from dfm_async.deploy.local_flare import LocalFlare, Places
from dfm_async.model.flare import FlareOptions
from tests.flare.doors import Door, knock
from tests.flare.shared import KITS, ROOT
from tests.support.pipelines import pipeline_of
from tests.support.waiting import PROMPT, until

fed = Federation("mortal", api_version="1.0.0")
archive, lab = fed.site("archive"), fed.site("lab")

MIB = 1 << 20
LARGEST = 3 * MIB
"""The size limit of messages to the lab; other sites have the default."""
BOUND = 3.0
"""For how many seconds messages are sent again."""
HASTY, PATIENT = "hasty@dfm.local", "patient@dfm.local"
"""Users: the timeout of a host job is that of the session which has it started."""


@archive.operation
async def fetch(n: int) -> int:
    return n


@archive.operation
async def hold(door: str, n: int) -> int:
    await knock(door, f"hold {n}")
    return n


@lab.operation
async def weigh(door: str, n: int) -> int:
    await knock(door, f"weigh {n}")
    return n * 10


@lab.operation
async def pid() -> int:
    return os.getpid()


@archive.operation
async def stored(size: int) -> bytes:
    return bytes(size)


@lab.operation
async def length(data: bytes) -> int:
    return len(data)


@lab.operation
async def measured(size: int) -> bytes:
    return bytes(size)


@archive.operation
async def archived(data: bytes) -> int:
    return len(data)


with Pipeline("weighing") as weighing:
    Yield(weigh(PlaceParam("door"), fetch(PlaceParam("n"))))

with Pipeline("to the lab") as to_lab:
    Yield(length(stored(PlaceParam("size"))))

with Pipeline("to the archive") as to_archive:
    Yield(archived(measured(PlaceParam("size"))))

fetching, holding = pipeline_of(fetch, "n"), pipeline_of(hold, "door", "n")
who, from_lab = pipeline_of(pid), pipeline_of(measured, "size")


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def flare(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFlare]:
    # One federation for all of them: it takes seconds to start. What dies in a test is started again by its end.
    folder, environment = tmp_path_factory.mktemp("flare"), {"PYTHONPATH": str(ROOT)}
    for name in ("pipe", "answer"):
        os.mkfifo(folder / name)
    hostile = ("env", f"PYTHONPATH={ROOT}/tests/flare/hostile_site:{ROOT}", f"HOSTILE_PIPE={folder / 'pipe'}")
    async with LocalFlare.up(
        ["archive", "lab"],
        folder,
        users=(HASTY, PATIENT),
        allow_code=True,
        kits=KITS,
        environment=environment,
        places=Places(prefixes={"archive": hostile}),  # when it is asked to be
    ) as found:
        with (found.folder / "lab" / "local" / "dfm_async.yaml").open("a") as settings:
            settings.write(f"\nmax_message_bytes: {LARGEST}\n")
        yield found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(flare: LocalFlare) -> AsyncIterator[Session]:
    """A session that outlives the host jobs that tests break: each new one takes seconds to start."""
    async with connect(flare) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def door() -> AsyncIterator[Door]:
    async with Door.hung() as found:
        yield found


def connect(flare: LocalFlare, user: str = HASTY, *, delivery_timeout: float = BOUND, **more: Any) -> Session:
    kit = flare.folder / user
    options = FlareOptions(startup_kit=kit, user=user, code="travels", delivery_timeout=delivery_timeout, **more)
    return Session(fed, target="flare", options=options)


async def values(job: Job) -> list[Any]:
    return sorted([result.value async for result in job])


_APPLICATION = """
import asyncio, sys
from tests.flare.test_faults import BOUND, FlareOptions, Session, fed, weighing

async def main():
    kit, user, door = sys.argv[1:]
    options = FlareOptions(startup_kit=kit, user=user, code="travels", delivery_timeout=BOUND)
    session = Session(fed, target="flare", options=options)
    await session.connect()
    rows = [{"door": door, "n": n} for n in range(4)]
    job = await session.execute(weighing, rows, job_id="left-alone")
    first = await anext(job.results())
    print(first.offset, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def host_job_of(session: Session) -> str:
    """The FLARE job that takes a session's new jobs."""
    return session._target._host_jobs.current.host_job  # type: ignore[attr-defined,no-any-return] # that of FLARE


def processes_of(flare: LocalFlare, site: str) -> list[psutil.Process]:
    """All processes of a site."""
    variables = psutil.Process(flare.pids[site]).environ()
    return marked(variables["DFM_FLARE_MARK"])


def part_of(flare: LocalFlare, site: str, host_job: str) -> psutil.Process:
    """The process of a site that has its part of a host job."""
    kind = "runner_process" if site == "server" else "client.worker_process"
    commands = {process: " ".join(process.cmdline()) for process in processes_of(flare, site)}
    (found,) = [process for process, text in commands.items() if kind in text and host_job in text]
    return found


def audited(flare: LocalFlare) -> list[dict[str, Any]]:
    """What the lab has recorded."""
    return [json.loads(line) for line in (flare.folder / "lab" / "audit.jsonl").read_text().splitlines()]


async def test_a_host_job_of_which_everything_was_read_ends_after_linger(flare: LocalFlare) -> None:
    async with connect(flare, linger=0.2) as session:
        assert await values(await session.execute(fetching, [{"n": n} for n in range(3)])) == [0, 1, 2]
        process = part_of(flare, "server", host_job_of(session))
    await asyncio.to_thread(process.wait, 60)  # with unread results it would stay for an hour


async def test_a_job_outlives_the_application_and_another_one_reads_on(
    flare: LocalFlare, session: Session, door: Door
) -> None:
    application = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _APPLICATION, str(flare.startup_kit), flare.user, door.path),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        for n in range(4):
            await door.knocked(f"weigh {n}")
        door.let_in("weigh 2")
        assert application.stdout is not None
        offset = int(await application.stdout.readline())
    finally:
        application.kill()
        await application.wait()
    door.open()
    job = await session.reattach("left-alone", after=offset)
    assert await values(job) == [0, 10, 30]
    again = await session.reattach("left-alone")
    assert sorted([result.value async for result in again.results(after=-1)]) == [0, 10, 20, 30]
    assert "left-alone" in [found.job_id for found in await session.refresh_jobs()]
    assert len(door.visits) == 4


async def test_the_audit_log_of_a_site_records_who_did_what(flare: LocalFlare, session: Session, door: Door) -> None:
    door.open()
    assert await values(await session.execute(weighing, {"door": door.path, "n": 1}, job_id="audited")) == [10]
    asked = next(line for line in audited(flare) if line["event"] == "asked" and line["job"] == "audited")
    assert (asked["user"], asked["operations"]) == (flare.user, ["weigh"])
    assert asked["brings_code"] is True


async def test_a_job_of_a_killed_worker_runs_again(session: Session, door: Door) -> None:
    worker = (await values(await session.execute(who)))[0]
    job = await session.execute(weighing, {"door": door.path, "n": 1}, retry=RetryPolicy(on_worker_lost=1))
    await door.knocked("weigh 1")
    os.kill(worker, signal.SIGKILL)
    await door.knocked("weigh 1", times=2)
    door.open()
    assert await values(job) == [10]


async def test_a_value_above_the_limit_of_a_site_fails_its_job_with_the_reason(session: Session) -> None:
    with pytest.raises(JobFailed, match=rf"'lab' cannot be delivered: .* at most {LARGEST:,} bytes .* has 4,19"):
        await (await session.execute(to_lab, {"size": 4 * MIB}))
    assert await values(await session.execute(to_lab, {"size": 7})) == [7]


async def test_many_large_values_arrive_although_together_they_exceed_the_limit(session: Session) -> None:
    sizes = [{"size": 2 * MIB + n} for n in range(6)]
    assert await values(await session.execute(to_lab, sizes)) == [2 * MIB + n for n in range(6)]


@pytest.mark.parametrize("gateway", ["auto", "never"])
async def test_a_large_result_comes_back_in_parts(
    flare: LocalFlare, session: Session, gateway: Literal["auto", "never"]
) -> None:
    async with connect(flare, gateway=gateway) as found:
        (result,) = await values(await found.execute(from_lab, {"size": 11 * MIB}))
        assert result == bytes(11 * MIB)


@pytest.mark.long
async def test_hundreds_of_mebibytes_arrive_or_fail_with_the_reason(flare: LocalFlare) -> None:
    async with connect(flare, PATIENT, delivery_timeout=30.0) as session, asyncio.timeout(300):
        assert await values(await session.execute(to_archive, {"size": 200 * MIB})) == [200 * MIB]
        assert await values(await session.execute(to_archive, [{"size": 8 * MIB}] * 40)) == [8 * MIB] * 40
        with pytest.raises(JobFailed, match=r"'archive' cannot be delivered: .*max_message_bytes"):
            await (await session.execute(to_archive, {"size": 300 * MIB}))


async def test_packets_in_the_name_of_another_are_refused(flare: LocalFlare, session: Session) -> None:
    """Sent by a program on the machine of a site: without a startup kit, and with that of another site."""
    assert await values(await session.execute(to_lab, {"size": 1})) == [1]
    host_job = host_job_of(session)
    command = part_of(flare, "lab", host_job).cmdline()
    url = command[command.index("-p") + 1]
    arguments = (url, "lab.intruder", f"server.{host_job}", f"lab.{host_job}", str(flare.folder / "archive"))
    intruder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.flare.hostile", *arguments), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await intruder.communicate()
    assert output.split() == [b"timeout"] * 20  # FLARE delivers them, and the answer to whom they name
    assert await values(await session.execute(to_lab, {"size": 2})) == [2]
    assert host_job_of(session) == host_job

    def forgeries() -> list[dict[str, Any]]:
        return [line for line in audited(flare) if line["event"] == "forged" and line["host_job"] == host_job]

    await until(lambda: len(forgeries()) >= 2)  # they take another route than the job
    forged = forgeries()
    assert [(line["peer"], line["count"]) for line in forged] == [("server", 1), ("server", 10)]
    assert "not issued by this federation" in forged[0]["reason"]
    assert forged[1]["reason"] == "a handshake in the name of server has the certificate of archive"


async def test_a_site_cannot_send_packets_in_the_name_of_another(flare: LocalFlare, session: Session) -> None:
    def assigned() -> int:
        return sum(line["event"] == "assigned" for line in audited(flare))

    pipes = flare.folder.parent
    assert await values(await session.execute(to_lab, {"size": 1})) == [1]
    host_job, before = host_job_of(session), assigned()
    await asyncio.to_thread((pipes / "pipe").write_text, f"server.{host_job} lab.{host_job}")
    assert await asyncio.to_thread((pipes / "answer").read_text) == "timeout"  # FLARE's server drops it
    assert await values(await session.execute(to_lab, {"size": 2})) == [2]
    assert host_job_of(session) == host_job
    assert assigned() == before + 1


# What follows breaks host jobs. The order is such that few new ones have to start.


async def test_a_site_that_dies_ends_its_jobs_and_serves_again_when_it_is_back(
    flare: LocalFlare, session: Session, door: Door
) -> None:
    async with connect(flare, on_close="detach") as leaving:  # a job that the site has no part in
        await leaving.execute(holding, {"door": door.path, "n": 5}, job_id="stays")
        await door.knocked("hold 5")
    job = await session.execute(weighing, {"door": door.path, "n": 1})
    await door.knocked("weigh 1")
    await flare.kill_client("lab")
    async with asyncio.timeout(2 * BOUND + PROMPT):
        with pytest.raises(JobAborted, match="'lab'") as caught:
            await job
    assert isinstance(caught.value.__cause__, WorkerLost)
    assert caught.value.__cause__.site == "lab"
    assert await values(await session.execute(fetching, {"n": 7})) == [7]  # other sites go on
    async with connect(flare) as other:  # FLARE still lists the client
        assert await values(await other.execute(fetching, {"n": 8})) == [8]
        assert host_job_of(other) == host_job_of(session)
        with pytest.raises(PipelineError, match="site lab: lab has not taken"):
            await other.prepare(who)
    await flare.start_client("lab")
    again = await session.execute(weighing, {"door": door.path, "n": 2})  # the same session
    await door.knocked("weigh 2")
    door.let_in("weigh 2")
    assert await values(again) == [20]
    async with connect(flare) as other:  # what went on meanwhile is found where it is
        stays = await other.reattach("stays")
        assert (await other.reattach("no such job")).status is JobStatus.UNKNOWN
        door.open()
        assert await values(stays) == [5]


async def test_a_killed_process_of_a_site_harms_no_other_site(flare: LocalFlare, session: Session, door: Door) -> None:
    job = await session.execute(weighing, {"door": door.path, "n": 1})
    await door.knocked("weigh 1")
    host_job = host_job_of(session)
    part_of(flare, "lab", host_job).kill()
    async with asyncio.timeout(2 * BOUND + PROMPT):
        with pytest.raises(JobAborted, match="'lab'"):
            await job
    assert await values(await session.execute(fetching, {"n": 7})) == [7]
    assert host_job_of(session) == host_job


async def test_a_job_of_a_server_that_starts_again_goes_on(flare: LocalFlare, session: Session, door: Door) -> None:
    job = await session.execute(holding, {"door": door.path, "n": 1})
    await door.knocked("hold 1")
    host_job = host_job_of(session)
    await flare.kill_server()
    await flare.start_server()
    await door.knocked("hold 1", times=2)
    door.open()
    assert await values(job) == [1]
    again = await session.execute(weighing, {"door": door.path, "n": 2})
    assert await values(again) == [20]
    connection = session._target._host_jobs.current  # type: ignore[attr-defined] # that of FLARE
    running = await connection.host_jobs()
    assert host_job_of(session) in running
    assert host_job not in running, "FLARE reports it as running for ever"


async def test_jobs_go_on_without_the_gateway_and_each_result_comes_once(flare: LocalFlare, door: Door) -> None:
    async with connect(flare, delivery_timeout=60.0) as session:
        assert session.stats().transport == "gateway"
        job = await session.execute(weighing, [{"door": door.path, "n": n} for n in range(4)])
        for n in range(4):
            await door.knocked(f"weigh {n}")
        door.let_in("weigh 0")
        results = job.results()
        assert (await anext(results)).value == 0
        await flare.kill_client("home")
        door.open()
        assert sorted([result.value async for result in results]) == [10, 20, 30]
        assert session.stats().transport == "commands"
        assert await job is JobStatus.FINISHED
