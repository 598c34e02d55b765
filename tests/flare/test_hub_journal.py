"""Hubs that keep a journal, with sites and applications that a test plays: one hub after the other."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from dfm_async import JobStatus, LocalOptions
from dfm_async.errors import StoreError
from dfm_async.model.flare import SiteSettings
from dfm_async.model.ids import JobId
from dfm_async.model.job_spec import JobSpec
from dfm_async.results.event_codec import decode_error
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.hub import Hub
from dfm_async.targets.flare.hub_journal import JournalPlace
from dfm_async.wire import messages as msg
from tests.flare.test_hub import A, App, B, Sites, codec, hello, plan, submission
from tests.support.postgres import PostgresServer

SETTINGS: Final = SiteSettings(site="server", journal=True)


class Server:
    """The server: hubs of one user follow each other, with the same journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = SETTINGS
        self.deployed = ["server", "a", "b"]

    @asynccontextmanager
    async def hub(
        self, sites: Sites | None = None, *, user: str = "ann", brings_code: bool = False, killed: bool = False
    ) -> AsyncIterator[Hub]:
        """Run a hub. ``killed``: its process dies at the end."""
        place = JournalPlace.find(self.settings, self.folder, user, "lab", brings_code=brings_code)
        hub = Hub("host_job", "1", self.deployed, LocalOptions(), 60.0, 1 << 28, place)
        await hub.open()
        hub.attach_node(sites or Sites(), lambda _site: None)  # type: ignore[arg-type] # it sends and drops
        for site in ("a", "b"):
            hub.receive(site, hello(site))
        try:
            yield hub
        finally:
            if killed:
                await die(hub)
            else:
                await hub.close("the test ends")


async def die(hub: Hub) -> None:
    """End the tasks of a hub and drop its locks, without a last word to the journal or to applications."""
    await hub._tasks.close()
    for job in hub._jobs.values():
        job.close()
        job.record.journal = None
    hub._apps.clear()
    await hub._opened.aclose()
    await hub.close("its process has died")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def assigned(hub: Hub, sites: Sites, job_id: str) -> int:
    """Assign the workers of a job that wants some; return the number of its run."""
    await sites.wait_until(lambda: any(assign.job_id == job_id for assign in sites.all(fm.Assign)))
    number = int([assign for assign in sites.all(fm.Assign) if assign.job_id == job_id][-1].job)
    for at, site in enumerate(plan.sites_at):
        hub.receive(site, fm.Assigned(number, at))
    return number


def done(hub: Hub, number: int, frame: int, value: int) -> None:
    """Yield a value of a parameter set, and end it."""
    hub.receive("b", msg.ResultBatch(number, B, [(0, (frame,), -1, 1)], codec.dumps([value]), [frame]))
    hub.receive("a", msg.FramesDone(number, A, [frame]))


def offsets(app: App) -> list[int]:
    """The offsets of all events that an application was sent."""
    return [offset for found in app.all(fm.Events) for offset in range(found.first, found.first + len(found.heads))]


def values(app: App) -> list[int]:
    return [value for found in app.all(fm.Events) if found.values for value in codec.loads_batch(found.values)]


def status_of(app: App, job_id: str) -> JobStatus | None:
    found = [state.status for state in app.all(fm.JobState) if state.job_id == job_id]
    return found[-1] if found else None


async def submitted(app: App, message: fm.Submit) -> fm.Submitted:
    app.send_to_hub(message)
    count = len(app.all(fm.Submitted))
    await app.wait_until(lambda: len(app.all(fm.Submitted)) > count)
    return app.all(fm.Submitted)[-1]  # type: ignore[no-any-return]


async def known(app: App, job_id: str, request: int = 1) -> fm.Known | None:
    """What the hub answers about a job."""
    app.send_to_hub(fm.Find(request, job_id))
    await app.wait_until(lambda: any(found.request == request for found in app.all(fm.FoundJob)))
    return app.all(fm.FoundJob)[-1].known  # type: ignore[no-any-return]


def follow(app: App, job_id: str, start: int) -> None:
    app.send_to_hub(fm.Follow(job_id, start))
    app.send_to_hub(fm.EventsTaken(job_id, start, 1000, 0))


@pytest.mark.parametrize("killed", [True, False])
async def test_a_job_goes_on_at_the_next_hub_behind_what_was_recorded(server: Server, *, killed: bool) -> None:
    sites = Sites()
    async with server.hub(sites, killed=killed) as hub:
        app = App(hub)
        assert await submitted(app, submission("job", count=3)) == fm.Submitted("job", "new")
        assert app.all(fm.Welcome)[-1].journal
        number = await assigned(hub, sites, "job")
        done(hub, number, 1, 11)
        hub.receive("b", msg.ResultBatch(number, B, [(0, (0,), -1, 1)], codec.dumps([10]), []))  # its set is not done
        await app.wait_until(lambda: (values(app), offsets(app)) == ([11, 10], [0, 1, 2, 3]))
    sites = Sites()
    async with server.hub(sites) as hub:
        number = await assigned(hub, sites, "job")
        starts = {start.at: start for start in sites.all(msg.StartJob)}
        opened = [(found.first, found.count) for found in (starts[A], *sites.all(msg.OpenFrames)) if found.at == A]
        assert opened == [(0, 1), (2, 1)]
        later = App(hub, "later")
        found = await known(later, "job")
        assert found is not None
        assert (found.first, found.state.added, found.state.stopped) == (0, 3, True)
        follow(later, "job", 4)
        done(hub, number, 0, 10)  # the log has this result
        done(hub, number, 2, 12)
        await later.wait_until(lambda: status_of(later, "job") is JobStatus.FINISHED)
        end = later.all(fm.JobState)[-1].end
        await later.wait_until(lambda: offsets(later) == list(range(4, end)))
        assert values(later) == [12]


async def test_the_results_of_ended_jobs_are_read_from_the_journal(server: Server) -> None:
    sites = Sites()
    async with server.hub(sites) as hub:
        app = App(hub)
        await submitted(app, submission("job", count=2))
        number = await assigned(hub, sites, "job")
        done(hub, number, 0, 1)
        done(hub, number, 1, 2)
        await app.wait_until(lambda: status_of(app, "job") is JobStatus.FINISHED)
        assert not any(job.unread for job in hub._jobs.values())  # the host job need not stay for them
    async with server.hub() as hub:
        app = App(hub)
        app.send_to_hub(fm.ListJobs(7))
        await app.wait_until(lambda: bool(app.all(fm.Listed)))
        assert app.all(fm.Listed) == [fm.Listed(7, ["job"])]
        found = await known(app, "job")
        assert found is not None
        assert found.state.status is JobStatus.FINISHED
        follow(app, "job", 0)
        await app.wait_until(lambda: values(app) == [1, 2])
        await app.wait_until(lambda: offsets(app) == list(range(found.end)))
        app.send_to_hub(fm.Forget("job"))
        assert await known(app, "job", 2) is None
    async with server.hub() as hub:
        assert await known(App(hub), "job") is None


async def test_what_cannot_be_written_is_never_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites()
    async with server.hub(sites) as hub:
        app = App(hub)
        await submitted(app, submission("job", count=2))
        number = await assigned(hub, sites, "job")
        done(hub, number, 0, 1)
        await app.wait_until(lambda: offsets(app) == [0, 1, 2])

        async def full(_batch: Any, _wait: bool) -> None:
            raise StoreError("jobs.db", "the disk is full", "Make room")

        writer = hub._journal.store._writer  # type: ignore[union-attr] # that of SQLite
        monkeypatch.setattr(writer, "_commit_batch", full)
        done(hub, number, 1, 2)
        for at, site in enumerate(plan.sites_at):
            hub.receive(site, msg.JobStopped(number, at))
        await app.wait_until(lambda: status_of(app, "job") is JobStatus.INTERRUPTED)
        state = app.all(fm.JobState)[-1]
        assert "the disk is full" in str(state.reason)
        assert (state.end, offsets(app), values(app)) == (3, [0, 1, 2], [1])
        assert (await submitted(app, submission("another"))).outcome == "other"
        assert "the disk is full" in app.all(fm.Submitted)[-1].reason
        monkeypatch.undo()
        before = len(sites.received)
        found = await known(app, "job")  # who asks for it makes it go on
        assert found is not None
        del sites.received[:before]
        follow(app, "job", 3)
        number = await assigned(hub, sites, "job")
        done(hub, number, 1, 2)
        await app.wait_until(lambda: status_of(app, "job") is JobStatus.FINISHED)
        await app.wait_until(lambda: values(app) == [1, 2])


async def test_jobs_go_on_from_a_journal_in_a_database(server: Server, postgres: PostgresServer) -> None:
    server.settings = msgspec.structs.replace(SETTINGS, journal=postgres.url(postgres.new_database()))
    sites = Sites()
    async with server.hub(sites) as hub:
        app = App(hub)
        assert (await submitted(app, submission("job", count=2))).outcome == "new"
        done(hub, await assigned(hub, sites, "job"), 0, 1)
        await app.wait_until(lambda: offsets(app) == [0, 1, 2])
    sites = Sites()
    async with server.hub(sites) as hub, server.hub(user="bob") as other:
        assert await known(App(other), "job") is None
        app = App(hub)
        done(hub, await assigned(hub, sites, "job"), 1, 2)
        follow(app, "job", 0)
        await app.wait_until(lambda: values(app) == [1, 2])
    assert not list(server.folder.rglob("jobs.db"))


async def test_the_cause_of_the_end_of_a_job_comes_before_its_end(server: Server) -> None:
    sites = Sites()
    async with server.hub(sites) as hub:
        app = App(hub)
        await submitted(app, submission("job"))
        number = await assigned(hub, sites, "job")
        hub.lost_site("b", "its machine has burnt")
        hub.receive("a", msg.JobStopped(number, A))
        await app.wait_until(lambda: status_of(app, "job") is JobStatus.ABORTED)
        kinds = [type(message) for _, message in app.received if not isinstance(message, fm.JobState) or message.cause]
        last = len(kinds) - 1 - kinds[::-1].index(fm.Events)
        assert fm.JobState in kinds[:last]


async def test_a_submission_whose_answer_was_lost_can_be_repeated(server: Server) -> None:
    async with server.hub(killed=True) as hub:
        assert (await submitted(App(hub), submission("job"))).outcome == "new"
    async with server.hub() as hub:
        app = App(hub)
        assert (await submitted(app, submission("job"))).outcome == "new"
        other = msgspec.structs.replace(submission("job"), token="another")
        assert (await submitted(app, other)).outcome == "other"


async def test_the_same_content_is_the_same_job_also_after_its_hub(server: Server) -> None:
    same = msgspec.structs.replace(submission("job"), spec=JobSpec(job_id=JobId("job"), fingerprint="f"))
    async with server.hub(killed=True) as hub:
        await submitted(App(hub), same)
    async with server.hub() as hub:
        again = msgspec.structs.replace(same, token="another")
        assert (await submitted(App(hub), again)).outcome == "same"


async def test_a_job_of_another_hub_of_the_user_stays_there(server: Server) -> None:
    async with server.hub() as hub, server.hub() as other:
        await submitted(App(hub), submission("job"))
        app = App(other)
        app.send_to_hub(fm.Find(1, "job"))
        await app.wait_until(lambda: bool(app.all(fm.FoundJob)))
        assert app.all(fm.FoundJob) == [fm.FoundJob(1, None, elsewhere=True)]
        assert (await submitted(app, msgspec.structs.replace(submission("job"), token="mine"))).outcome == "other"


async def test_a_job_waits_in_the_journal_for_a_host_job_with_its_sites(server: Server) -> None:
    async with server.hub(killed=True) as hub:
        await submitted(App(hub), submission("job"))
    server.deployed = ["server", "a"]
    async with server.hub() as hub:
        app = App(hub)
        app.send_to_hub(fm.Find(1, "job"))
        await app.wait_until(lambda: bool(app.all(fm.FoundJob)))
        assert app.all(fm.FoundJob) == [fm.FoundJob(1, None, missing=("b",))]
    server.deployed = ["server", "a", "b"]
    sites = Sites()
    async with server.hub(sites) as hub:
        done(hub, await assigned(hub, sites, "job"), 0, 7)
        app = App(hub)
        assert await known(app, "job") is not None
        follow(app, "job", 0)
        await app.wait_until(lambda: values(app) == [7])


async def test_users_have_journals_of_their_own(server: Server) -> None:
    async with server.hub() as hub:
        await submitted(App(hub), submission("job"))
        for given in ({"user": "bob"}, {"brings_code": True}):
            async with server.hub(**given) as other:
                app = App(other)
                assert await known(app, "job") is None
                app.send_to_hub(fm.ListJobs(1))
                await app.wait_until(lambda: bool(app.all(fm.Listed)))  # noqa: B023 - awaited at once
                assert app.all(fm.Listed)[0].job_ids == []
                assert (await submitted(app, submission("job"))).outcome == "new"


def offer_of(content: bytes) -> fm.Offer:
    key = hashlib.sha256(content).hexdigest()
    return fm.Offer(key=key, site="b", shipped=content, workers=1, threads=1, lanes=1, python=fm.PYTHON)


@pytest.mark.parametrize("kept", [True, False])
async def test_code_that_was_brought_is_kept_for_the_next_hub(server: Server, *, kept: bool) -> None:
    offer = offer_of(b"code")
    async with server.hub(brings_code=True, killed=True) as hub:
        app = App(hub)
        app.send_to_hub(offer)
        await submitted(app, msgspec.structs.replace(submission("job"), offers={"b": offer.key}))
    if not kept:
        for path in server.folder.glob("journal/*/code/*"):
            path.unlink()
    sites = Sites()
    async with server.hub(sites, brings_code=True) as hub:
        app = App(hub)
        found = await known(app, "job")
        assert found is not None
        if kept:
            await assigned(hub, sites, "job")
            assert sites.all(fm.Offer) == [offer]
        else:
            follow(app, "job", 0)
            await app.wait_until(lambda: status_of(app, "job") is JobStatus.FAILED)
            await app.wait_until(lambda: any(message.errors for message in app.all(fm.Events)))
            (error,) = [decode_error(data) for message in app.all(fm.Events) for _, data in message.errors]
            assert "code that the application has brought for site 'b' is not kept" in str(error)


async def test_parameter_sets_that_came_later_are_kept(server: Server) -> None:
    async with server.hub(killed=True) as hub:
        app = App(hub)
        await submitted(app, submission("job", stopped=False))
        app.send_to_hub(fm.AddRows("job", codec.dumps([{"x": 1}, {"x": 2}])))
        app.send_to_hub(fm.StopFrames("job"))
        await app.wait_until(lambda: any(state.added == 3 and state.stopped for state in app.all(fm.JobState)))
        await hub._journal.store.flush()  # type: ignore[union-attr] # as it does soon by itself
    async with server.hub() as hub:
        found = await known(App(hub), "job")
        assert found is not None
        assert (found.state.added, found.state.stopped) == (3, True)


async def test_ended_jobs_are_deleted_after_a_time_and_above_a_size(server: Server) -> None:
    server.settings = msgspec.structs.replace(SETTINGS, journal_max_bytes=400_000)
    sites = Sites()
    async with server.hub(sites) as hub:
        journal = hub._journal
        assert journal is not None
        app = App(hub)
        for number in range(6):
            await submitted(app, submission(f"job-{number}"))
            run = await assigned(hub, sites, f"job-{number}")
            hub.receive("b", msg.ResultBatch(run, B, [(0, (0,), -1, 1)], codec.dumps([bytes(100_000)]), [0]))
            hub.receive("a", msg.FramesDone(run, A, [0]))
            await app.wait_until(lambda: status_of(app, f"job-{number}") is JobStatus.FINISHED)  # noqa: B023
        await journal.tidy()
        assert await journal.ended() == []  # all of one page
        assert (await submitted(app, submission("more", stopped=False))).outcome == "new"
        app.send_to_hub(fm.AddRows("more", codec.dumps([{"x": bytes(500_000)}])))
        await app.wait_until(lambda: any(state.added == 2 for state in app.all(fm.JobState)))
        await journal.tidy()
        refused = await submitted(app, submission("too much"))
        assert refused.outcome == "other"
        assert "journal_max_bytes" in refused.reason


async def test_a_journal_that_cannot_be_used_is_an_error(server: Server) -> None:
    (server.folder / "journal").write_text("a file, not a folder")
    with pytest.raises(StoreError, match="folder of the journal"):
        async with server.hub():
            pass
