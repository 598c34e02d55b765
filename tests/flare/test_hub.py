"""The hub, with sites and applications that a test plays."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, JobStatus, LocalOptions, Pipeline, PlaceParam, WorkerLost, Yield
from dfm_async.model.ids import JobId, Location
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.stats import WorkerStats
from dfm_async.planning.prepare import prepare
from dfm_async.results.event_codec import decode_error
from dfm_async.runtime.site_runtime import encode_net
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.hub import Hub
from dfm_async.targets.flare.hub_endpoints import CommandEndpoint, GatewayEndpoint
from dfm_async.targets.flare.reliable_stream import ReliableStream
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from tests.support.waiting import PROMPT, settled

fed = Federation("played")
a, b = fed.site("a"), fed.site("b")


@a.operation
def first(x: int) -> int:
    return x


@b.operation
def second(x: int) -> int:
    return x


with Pipeline("both") as pipeline:
    Yield(second(first(PlaceParam("x"))))

with Pipeline("at b") as at_b:
    Yield(second(PlaceParam("x")))

codec = Codec.for_untrusted()
plan = prepare(pipeline, fed, "home")
nets = tuple(encode_net(net, codec) for net in plan.nets)
plan_b = prepare(at_b, fed, "b")
nets_b = tuple(encode_net(net, codec) for net in plan_b.nets)
A, B = plan.sites_at.index("a"), plan.sites_at.index("b")


class Recorder:
    """Records messages."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Any]] = []
        self._arrived = asyncio.Event()

    def send(self, peer: str, message: Any) -> None:
        self.received.append((peer, message))
        self._arrived.set()

    def all(self, kind: type) -> list[Any]:
        return [message for _, message in self.received if type(message) is kind]

    async def wait_until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(PROMPT):
            while not enough():
                self._arrived.clear()
                await self._arrived.wait()


class Sites(Recorder):
    """The sites."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []

    def drop(self, peer: str) -> None:
        self.dropped.append(peer)


class App(Recorder):
    """An application."""

    def __init__(self, hub: Hub, name: str = "app", **hello: Any) -> None:
        super().__init__()
        self.stream = ReliableStream(lambda data: self.send("hub", fm.decode_hub(data)))
        limits: dict[str, Any] = {"lanes": 1, "slots": 2, "queue_limit": 3, "overflow": "block"}
        times = {"linger": 60.0, "start": 60.0, "keep": 3600.0, "timeout": 60.0}
        given = {"protocol": fm.PROTOCOL, "version": "1", "homesite": "home", **limits, **times, **hello}
        known = fm.AppHello(**given)
        self.attach = fm.Attach(name, True, 0, known)
        assert hub.attach(self.attach) == fm.Attached(0)
        self.there = hub.application(name)
        assert self.there is not None
        self.there.stream.attach(self.stream.take, 0)
        self.stream.attach(self.there.stream.take, 0)

    def send_to_hub(self, message: Any) -> None:
        self.stream.send(fm.encode(message))


@pytest.fixture
async def sites() -> Sites:
    return Sites()


@pytest.fixture
async def hub(sites: Sites) -> AsyncIterator[Hub]:
    hub = Hub("host_job", "1", ["server", "a", "b"], LocalOptions(), 60.0, 1 << 28)
    hub.attach_node(sites, lambda _site: None)  # type: ignore[arg-type] # it sends and drops
    for site in ("a", "b"):
        hub.receive(site, hello(site))
    yield hub
    await hub.close("the test ends")


@pytest.fixture
async def app(hub: Hub) -> App:
    return App(hub)


def hello(site: str, incarnation: str = "1") -> fm.SiteHello:
    return fm.SiteHello(
        site=site,
        protocol=fm.PROTOCOL,
        version="1",
        host="host",
        operations={"first": "", "second": ""},
        allow_code=False,
        incarnation=incarnation,
    )


def submission(job_id: str, *, stopped: bool = True, count: int = 1, reruns: int = 0) -> fm.Submit:
    rows = codec.dumps([{"x": n} for n in range(count)])
    spec = JobSpec(job_id=JobId(job_id), reruns=reruns)
    return fm.Submit(
        spec=spec,
        plan=plan.to_json(),
        nets=nets,
        offers={},
        rows=rows,
        stopped=stopped,
        elapsed=0.0,
        trace=None,
        token="token",
        until=1000,
    )


async def launched(hub: Hub, sites: Sites, app: App, job_id: str, **given: Any) -> int:
    """Submit a job, and assign its workers; return the number of its run."""
    app.send_to_hub(submission(job_id, **given))
    await settled()
    assigns = [assign for assign in sites.all(fm.Assign) if assign.job_id == job_id]
    number = int(assigns[-1].job)
    for at, site in enumerate(plan.sites_at):
        hub.receive(site, fm.Assigned(number, at))
    return number


def results(number: int, value: int, *, at: int = B, frames: tuple[int, ...] = (0,)) -> msg.ResultBatch:
    return msg.ResultBatch(number, at, [(0, (0,), -1, 1)], codec.dumps([value]), list(frames))


async def test_no_site_starts_before_all_have_workers(hub: Hub, sites: Sites, app: App) -> None:
    app.send_to_hub(submission("job"))
    await settled()
    number = sites.all(fm.Assign)[0].job
    hub.receive("a", fm.Assigned(number, A))
    assert sites.all(msg.StartJob) == []
    hub.receive("b", fm.Assigned(number, B))
    assert len(sites.all(msg.StartJob)) == 2


async def test_a_job_runs_and_its_events_come(hub: Hub, sites: Sites, app: App) -> None:
    number = await launched(hub, sites, app, "job")
    hub.receive("b", results(number, 7))
    hub.receive("a", msg.FramesDone(number, A, [0]))
    await settled()
    heads = [head.kind for events in app.all(fm.Events) for head in events.heads]
    assert heads == ["status", "result", "frame", "status"]
    assert app.all(fm.JobState)[-1].status is JobStatus.FINISHED


async def test_a_site_cannot_send_messages_about_another_one(
    hub: Hub, sites: Sites, caplog: pytest.LogCaptureFixture, app: App
) -> None:
    number = await launched(hub, sites, app, "job")
    hub.receive("a", results(number, 666))  # of the location at b
    hub.receive("a", results(number, 666, at=A))  # of a yield that is not its own
    hub.receive("a", msg.FramesDone(number, A, [0]))
    hub.receive("a", msg.FramesDone(number, A, [0]))  # for b, too
    hub.receive("a", fm.LogLines("b", []))
    hub.receive("a", fm.SiteReport("", Location("b"), (WorkerStats(pid=1, jobs=0),), 0, (0, 0)))
    await settled()
    assert not [head for events in app.all(fm.Events) for head in events.heads if head.kind in ("result", "frame")]
    assert not app.all(fm.LogLines)
    assert not app.all(fm.SiteReport)
    hub.receive("b", results(number, 7))
    await settled()
    assert app.all(fm.JobState)[-1].status is JobStatus.FINISHED
    assert "not its own" in caplog.text


async def test_a_hub_without_linger_waits_for_its_first_application(sites: Sites) -> None:
    hub = Hub("host_job", "1", ["server"], LocalOptions(), 0.0, 1 << 28)
    hub.attach_node(sites, lambda _site: None)  # type: ignore[arg-type] # it sends and drops
    await asyncio.sleep(0.02)
    assert not hub.ended.done()
    App(hub, linger=0.0).send_to_hub(fm.Leave())
    async with asyncio.timeout(PROMPT):
        assert await hub.ended == "nobody needs it any longer"
    await hub.close("the test ends")


@pytest.mark.parametrize("read", [0, 2, 3])
async def test_a_host_job_stays_for_results_that_nobody_has_read(hub: Hub, sites: Sites, read: int) -> None:
    app = App(hub, linger=0.0)
    number = await launched(hub, sites, app, "job")
    hub.receive("b", results(number, 7))
    hub.receive("a", msg.FramesDone(number, A, [0]))
    await settled()
    (job,) = hub._jobs.values()
    assert [type(job.record.log.get(at)).__name__ for at in range(3)] == ["StatusChanged", "Result", "FrameCompleted"]
    app.send_to_hub(fm.EventsTaken("job", 4, 1000, 0))  # the application has them, but its program has not
    app.send_to_hub(fm.Read("job", read))
    app.send_to_hub(fm.Leave())
    if read > 1:
        async with asyncio.timeout(PROMPT):
            await hub.ended
    else:
        await asyncio.sleep(0.05)
        assert not hub.ended.done()


@pytest.mark.parametrize("sender", ["a", "hub"])
async def test_a_message_that_cannot_be_delivered_fails_its_job(hub: Hub, sites: Sites, sender: str, app: App) -> None:
    number, other = await launched(hub, sites, app, "job"), await launched(hub, sites, app, "other")
    hub.receive("stranger", fm.Undeliverable(other, B, "a site that has no part in the job"))
    hub.receive("a", fm.Undeliverable(other, 99, "there is no such location"))
    if sender == "hub":
        hub.refused("b", msg.OpenFrames(number, B, 0, 1, b"", True), "too large")
    else:
        hub.receive("a", fm.Undeliverable(number, B, "too large"))
    assert [cancel.job for cancel in sites.all(msg.CancelJob)] == [number, number]
    for at, site in enumerate(plan.sites_at):
        hub.receive(site, msg.JobStopped(number, at))
    await settled()
    states = {state.job_id: state.status for state in app.all(fm.JobState)}
    assert states["job"] is JobStatus.FAILED
    assert states.get("other", JobStatus.RUNNING) is JobStatus.RUNNING  # reported after a while, if it was not before
    (error,) = [decode_error(data) for events in app.all(fm.Events) for _, data in events.errors]
    assert str(error) == "a message to site 'b' cannot be delivered: too large"


async def test_only_the_homesite_forwards_messages_of_applications(
    hub: Hub, sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    node = Sites()
    ports = GatewayEndpoint(hub, node, "home")  # type: ignore[arg-type] # it only sends
    attach = fm.encode(App(hub, "known").attach)
    ports.receive("a", fm.AppBytes("connection", [attach]))
    await settled()
    assert node.received == []
    assert "only home may do" in caplog.text
    ports.receive("home", fm.AppBytes("connection", [fm.encode(_another("new"))]))
    await settled()
    assert fm.decode_attached(node.all(fm.AppBytes)[0].data[0]) == fm.Attached(0)


def _another(session: str, lanes: int = 1) -> fm.Attach:
    hello = fm.AppHello(
        protocol=fm.PROTOCOL,
        version="1",
        homesite="home",
        lanes=lanes,
        slots=1,
        queue_limit=1,
        overflow="block",
        linger=1.0,
        start=1.0,
        keep=1.0,
        timeout=1.0,
    )
    return fm.Attach(session, True, 0, hello)


async def test_a_full_queue_blocks_submitters(hub: Hub, sites: Sites) -> None:
    app = App(hub, slots=1, queue_limit=2)
    for number in range(10):
        app.send_to_hub(submission(f"job-{number}"))
    await settled()
    assert [found.job_id for found in app.all(fm.Submitted)] == ["job-0", "job-1", "job-2"]
    app.send_to_hub(fm.Halt("job-0", "", "aborted", "enough", 0.0))
    await settled()
    assert [found.job_id for found in app.all(fm.Submitted)][:4] == ["job-0", "job-1", "job-2", "job-3"]


async def test_a_full_queue_refuses_if_asked_to(hub: Hub) -> None:
    app = App(hub, slots=1, queue_limit=1, overflow="fail")
    for number in range(3):
        app.send_to_hub(submission(f"job-{number}"))
    await settled()
    assert [found.outcome for found in app.all(fm.Submitted)] == ["new", "new", "full"]


async def test_hundreds_of_jobs_end_when_their_site_does_not_come_back(hub: Hub) -> None:
    app = App(hub, slots=1, queue_limit=1000, start=0.001)
    for number in range(400):
        app.send_to_hub(submission(f"job-{number}"))
    await settled()
    hub.lost_site("b", "its machine has burnt")
    await app.wait_until(
        lambda: len({state.job_id for state in app.all(fm.JobState) if state.status is JobStatus.ABORTED}) == 400
    )
    assert not hub._engine._runs


async def test_a_job_that_may_run_again_waits_for_its_site(hub: Hub, sites: Sites, app: App) -> None:
    number = await launched(hub, sites, app, "job", reruns=1)
    hub.lost_site("b", "the network was cut")
    hub.receive("a", msg.JobStopped(number, A))
    assert [message.site for message in sites.all(fm.SiteLost)] == ["b"]
    before = {request.job for request in sites.all(fm.Assign) if request.at == B}
    hub.receive("b", hello("b", "2"))
    await settled()
    assert len({request.job for request in sites.all(fm.Assign) if request.at == B} - before) == 1
    assert sites.dropped[-1] == "b"


async def test_a_job_that_has_not_begun_does_not_mind_that_a_site_starts_again(
    hub: Hub, sites: Sites, app: App
) -> None:
    app.send_to_hub(submission("job"))
    await settled()
    (number,) = {assign.job for assign in sites.all(fm.Assign)}
    hub.receive("a", fm.Assigned(number, A))
    hub.receive("b", hello("b", "2"))  # it has forgotten what it was asked
    await settled()
    (again,) = {assign.job for assign in sites.all(fm.Assign)} - {number}
    assert fm.Unassign(number, A, False) in sites.all(fm.Unassign)
    hub.receive("b", fm.Assigned(number, B))  # from its earlier incarnation
    hub.receive("a", fm.Assigned(again, A))
    assert sites.all(msg.StartJob) == []
    hub.receive("b", fm.Assigned(again, B))
    assert len(sites.all(msg.StartJob)) == 2


async def test_a_job_shares_the_fate_of_a_site_that_starts_again_and_again(hub: Hub, sites: Sites, app: App) -> None:
    app.send_to_hub(submission("job"))
    await settled()
    for incarnation in range(2, 12):
        hub.receive("b", hello("b", str(incarnation)))
    await settled()
    assert app.all(fm.JobState)[-1].status is JobStatus.ABORTED
    assert len({assign.job for assign in sites.all(fm.Assign)}) < 6


@pytest.mark.parametrize("may_run_again", [True, False])
async def test_jobs_that_wait_for_a_restarted_site_get_workers(hub: Hub, sites: Sites, *, may_run_again: bool) -> None:
    """The loss of the site itself makes them wait: the job that was lost with it, or the next in the queue."""
    app = App(hub, slots=1)
    at_b = msgspec.structs.replace(submission("first", reruns=int(may_run_again)), plan=plan_b.to_json(), nets=nets_b)
    app.send_to_hub(at_b)
    app.send_to_hub(msgspec.structs.replace(at_b, spec=JobSpec(job_id=JobId("second"), reruns=int(may_run_again))))
    await settled()
    hub.receive("b", fm.Assigned(sites.all(fm.Assign)[-1].job, 0))
    assert len(sites.all(msg.StartJob)) == 1
    hub.receive("b", hello("b", "2"))
    await settled()
    hub.receive("b", fm.Assigned(sites.all(fm.Assign)[-1].job, 0))
    assert len(sites.all(msg.StartJob)) == 2


async def test_a_job_that_runs_is_lost_with_a_site_that_starts_again(hub: Hub, sites: Sites, app: App) -> None:
    number = await launched(hub, sites, app, "job")
    hub.receive("b", hello("b", "2"))
    hub.receive("a", msg.JobStopped(number, A))
    await settled()
    last = app.all(fm.JobState)[-1]
    assert last.status is JobStatus.ABORTED
    assert "it has started again" in str(last.reason)
    assert isinstance(decode_error(last.cause), WorkerLost)


async def test_an_evicted_site_is_notified_until_it_reconnects(hub: Hub, sites: Sites) -> None:
    hub.lost_site("b", "the network was cut")
    hub.receive("b", fm.Heartbeat())
    hub.receive("b", fm.Heartbeat())
    assert [message.incarnation for message in sites.all(fm.Evicted)] == ["1"]
    hub.lost_site("b", "a late report about its earlier incarnation", "1")
    hub.receive("b", hello("b", "2"))
    hub.lost_site("b", "a late report about its earlier incarnation", "1")
    app = App(hub)
    await settled()
    assert set(app.all(fm.Welcome)[-1].sites) == {"a", "b"}


async def test_what_is_asked_of_a_job_that_is_not_known_is_answered(app: App) -> None:
    app.send_to_hub(fm.Follow("nobody", 0))
    app.send_to_hub(fm.Find(1, "nobody"))
    await settled()
    assert app.all(fm.Expired) == [fm.Expired("nobody", None)]
    assert app.all(fm.FoundJob) == [fm.FoundJob(1, None)]


async def test_an_application_that_is_gone_for_long_is_forgotten_and_its_jobs_go_on(hub: Hub, sites: Sites) -> None:
    app = App(hub, timeout=0.01, keep=100.0)
    await launched(hub, sites, app, "job")
    assert app.there is not None
    app.there.connection = "c"
    hub.detach(app.there, "c")
    left = asyncio.Event()
    forget, hub._drop_offers = hub._drop_offers, left.set  # type: ignore[method-assign] # done when it is forgotten
    async with asyncio.timeout(PROMPT):
        await left.wait()
    hub._drop_offers = forget  # type: ignore[method-assign] # as before
    assert hub.application("app") is None
    assert not hub._jobs["job"].record.status.ended
    assert hub.attach(fm.Attach("app", False, 3, app.attach.hello)).refused
    another = App(hub, "another")
    another.send_to_hub(fm.Find(1, "job"))
    await settled()
    assert another.all(fm.FoundJob)[0].known.spec.job_id == "job"


async def test_a_job_that_only_waits_for_a_follower_ends_after_a_while(hub: Hub, sites: Sites) -> None:
    app = App(hub, keep=0.02)
    number = await launched(hub, sites, app, "job", stopped=False, count=0)
    app.send_to_hub(fm.Leave())
    await sites.wait_until(lambda: len(sites.all(msg.CancelJob)) == 2)
    for at, site in enumerate(plan.sites_at):
        hub.receive(site, msg.JobStopped(number, at))
    async with asyncio.timeout(PROMPT):
        await hub._jobs["job"].record.completion_event.wait()
    assert "no application" in str(hub._jobs["job"].record.reason)


async def test_a_hostile_submission_harms_nobody(hub: Hub, sites: Sites, app: App) -> None:
    broken = submission("job")
    for changed in ({"nets": ()}, {"plan": b"{}"}, {"plan": b"["}, {"rows": b"\x01"}):
        values = {name: getattr(broken, name) for name in broken.__struct_fields__}
        app.send_to_hub(fm.Submit(**{**values, **changed}))
    app.stream.send(b"\xc1 this is no message")
    await settled()
    assert [found.outcome for found in app.all(fm.Submitted)] == ["other"] * 4
    assert await launched(hub, sites, app, "good")


async def test_commands_answer_at_once_also_what_cannot_be_understood(hub: Hub) -> None:
    commands = CommandEndpoint(hub)

    async def ask(data: Any) -> dict[str, Any]:
        return await asyncio.to_thread(commands, data)

    attached = await ask({"session": "s", "attach": base64.b64encode(fm.encode(_another("s"))).decode()})
    assert fm.decode_attached(base64.b64decode(attached["attached"])) == fm.Attached(0)
    assert await ask({"session": "other", "packet": ""}) == {"gone": True}
    for nonsense in ({}, {"session": "s"}, {"session": "s", "packet": "AAAA"}, {"session": "s", "attach": "AAAA"}):
        async with asyncio.timeout(PROMPT):
            with pytest.raises((KeyError, ValueError)):
                await ask(nonsense)
    received: list[bytes] = []
    stream = ReliableStream(lambda data: received.append(bytes(data)))
    answer = await ask({"session": "s", "packet": base64.b64encode(stream.pull()).decode(), "wait": 0.1})
    stream.take(base64.b64decode(answer["packet"]))
    assert isinstance(fm.decode_hub(received[0]), fm.Welcome)
    empty = await ask({"session": "s", "packet": base64.b64encode(stream.pull()).decode(), "wait": 0.01})
    assert not empty["more"]
    commands.close()


@pytest.mark.parametrize("lanes", [0, -1, 10**10])
def test_applications_with_impossible_wishes_are_refused(lanes: int) -> None:
    with pytest.raises(ValueError, match="Expected"):
        fm.decode_attach(fm.encode(_another("s", lanes)))


async def test_participants_that_the_host_job_was_not_sent_to_are_ignored(hub: Hub, sites: Sites, app: App) -> None:
    await settled()
    before = len(app.received), len(sites.received)
    hub.receive("mallory", hello("mallory"))
    hub.receive("mallory", fm.LogLines("mallory", [], 1))
    hub.receive("mallory", fm.SiteReport("", Location("mallory"), (), 1, (0, 0)))
    hub.receive("mallory", fm.PeerLost("a", "made up"))
    await settled()
    assert sorted(hub.sites) == ["a", "b"]
    assert (len(app.received), len(sites.received)) == before
