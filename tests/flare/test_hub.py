"""The hub, with sites and applications that a test plays."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, LocalOptions, Pipeline, PlaceParam, ResultLimits, WorkerLost, Yield
from dfm_async.planner.plan import prepare
from dfm_async.results.error_values import decode_error
from dfm_async.runtime.site import encode_net
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.duplex import Duplex
from dfm_async.targets.flare.hub import Hub
from dfm_async.targets.flare.ports import Commands, GatewayPorts
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

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

codec = Codec(trusted=False)
plan = prepare(pipeline, fed, "home")
nets = tuple(encode_net(net, codec) for net in plan.nets)
plan_b = prepare(at_b, fed, "b")
nets_b = tuple(encode_net(net, codec) for net in plan_b.nets)
A, B = plan.sites_at.index("a"), plan.sites_at.index("b")


class Heard:
    """What somebody was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self._news = asyncio.Event()

    def send(self, peer: str, message: Any) -> None:
        self.told.append((peer, message))
        self._news.set()

    def all(self, kind: type) -> list[Any]:
        return [message for _, message in self.told if type(message) is kind]

    async def heard(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not enough():
                self._news.clear()
                await self._news.wait()


class Sites(Heard):
    """The sites."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []

    def drop(self, peer: str) -> None:
        self.dropped.append(peer)


class App(Heard):
    """An application."""

    def __init__(self, hub: Hub, name: str = "app", **hello: Any) -> None:
        super().__init__()
        self.duplex = Duplex(lambda data: self.send("hub", fm.decode_hub(data)))
        given = {"lanes": 1, "slots": 2, "queue_limit": 3, "overflow": "block", "linger": 60.0, **hello}
        known = fm.AppHello(
            fm.PROTOCOL,
            "1",
            "home",
            given["lanes"],
            given["slots"],
            given["queue_limit"],
            given["overflow"],
            given["linger"],
            given.get("start", 60.0),
            given.get("keep", 3600.0),
            given.get("patience", 60.0),
        )
        self.attach = fm.Attach(name, True, 0, known)
        assert hub.attach(self.attach) == fm.Attached(0)
        self.there = hub.application(name)
        assert self.there is not None
        self.there.duplex.attach(self.duplex.take, 0)
        self.duplex.attach(self.there.duplex.take, 0)

    def say(self, message: Any) -> None:
        self.duplex.send(fm.encode(message))


async def turn() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.fixture
async def sites() -> Sites:
    return Sites()


@pytest.fixture
async def hub(sites: Sites) -> AsyncIterator[Hub]:
    hub = Hub("carrier", "1", ["server", "a", "b"], LocalOptions(), 60.0, 1 << 28)
    hub.attach_node(sites, lambda _site: None)
    for site in ("a", "b"):
        hub.receive(site, hello(site))
    yield hub
    await hub.close("the test ends")


def hello(site: str, life: str = "1") -> fm.SiteHello:
    return fm.SiteHello(site, fm.PROTOCOL, "1", "host", {"first": "", "second": ""}, False, life=life)


def submission(job_id: str, *, stopped: bool = True, count: int = 1, reruns: int = 0) -> fm.Submit:
    rows = codec.dumps([{"x": n} for n in range(count)])
    limits = ResultLimits()
    return fm.Submit(
        job_id,
        plan.to_json(),
        nets,
        {},
        "continue",
        reruns,
        256,
        5.0,
        limits,
        rows,
        stopped,
        None,
        None,
        0,
        None,
        False,
        None,
        False,
        0.0,
        "token",
        1000,
    )


async def launched(hub: Hub, sites: Sites, app: App, job_id: str, **given: Any) -> int:
    """Submits a job and seats it; gives the number of its run."""
    app.say(submission(job_id, **given))
    await turn()
    seats = [seat for seat in sites.all(fm.Seat) if seat.job_id == job_id]
    number = int(seats[-1].job)
    for at, site in enumerate(plan.sites_at):
        hub.receive(site, fm.Seated(number, at, "address"))
    return number


def results(number: int, value: int, *, at: int = B, frames: tuple[int, ...] = (0,)) -> msg.Results:
    return msg.Results(number, at, [(0, (0,), -1, 1)], codec.dumps([value]), list(frames))


async def test_no_site_starts_before_all_are_seated(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    app.say(submission("job"))
    await turn()
    number = sites.all(fm.Seat)[0].job
    hub.receive("a", fm.Seated(number, A, "address"))
    assert sites.all(msg.StartJob) == []
    hub.receive("b", fm.Seated(number, B, "address"))
    assert len(sites.all(msg.StartJob)) == 2


async def test_a_job_runs_and_its_events_come(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    number = await launched(hub, sites, app, "job")
    hub.receive("b", results(number, 7))
    hub.receive("a", msg.FramesDone(number, A, [0]))
    await turn()
    heads = [head.kind for events in app.all(fm.Events) for head in events.heads]
    assert heads == ["s", "r", "d", "s"]
    assert app.all(fm.JobState)[-1].status == "finished"


async def test_a_site_cannot_speak_for_another_one(hub: Hub, sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    app = App(hub)
    number = await launched(hub, sites, app, "job")
    hub.receive("a", results(number, 666))  # of the location at b
    hub.receive("a", results(number, 666, at=A))  # of a yield that is not its own
    hub.receive("a", msg.FramesDone(number, A, [0]))
    hub.receive("a", msg.FramesDone(number, A, [0]))  # for b, too
    hub.receive("a", fm.LogLines("b", []))
    hub.receive("a", fm.SiteReport("", "b", (fm.WorkerReport(1, 0, None, None, False, False),), 0, (0, 0)))
    await turn()
    assert not [head for events in app.all(fm.Events) for head in events.heads if head.kind in "rd"]
    assert not app.all(fm.LogLines)
    assert not app.all(fm.SiteReport)
    hub.receive("b", results(number, 7))
    await turn()
    assert app.all(fm.JobState)[-1].status == "finished"
    assert "not its own" in caplog.text


async def test_a_hub_without_linger_waits_for_its_first_application(sites: Sites) -> None:
    hub = Hub("carrier", "1", ["server"], LocalOptions(), 0.0, 1 << 28)
    hub.attach_node(sites, lambda _site: None)
    await asyncio.sleep(0.02)
    assert not hub.ended.done()
    App(hub, linger=0.0).say(fm.Leave())
    async with asyncio.timeout(20):
        assert await hub.ended == "nobody needs it any more"
    await hub.close("the test ends")


@pytest.mark.parametrize("read", [0, 2, 3])
async def test_a_host_job_stays_for_results_that_nobody_has_read(hub: Hub, sites: Sites, read: int) -> None:
    app = App(hub, linger=0.0)
    number = await launched(hub, sites, app, "job")
    hub.receive("b", results(number, 7))
    hub.receive("a", msg.FramesDone(number, A, [0]))
    await turn()
    (job,) = hub._jobs.values()
    assert [type(job.record.log.get(at)).__name__ for at in range(3)] == ["StatusChanged", "Result", "FrameCompleted"]
    app.say(fm.Taken("job", 4, 1000, 0))  # the application has them, but its program has not
    app.say(fm.Read("job", read))
    app.say(fm.Leave())
    await asyncio.sleep(0.05)
    assert hub.ended.done() is (read > 1)


@pytest.mark.parametrize("sender", ["a", "hub"])
async def test_a_message_that_cannot_be_delivered_fails_its_job(hub: Hub, sites: Sites, sender: str) -> None:
    app = App(hub)
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
    await turn()
    states = {state.job_id: state.status for state in app.all(fm.JobState)}
    assert states["job"] == "failed"
    assert states.get("other", "running") == "running"  # reported after a while, if it was not before
    (error,) = [decode_error(data) for events in app.all(fm.Events) for _, data in events.errors]
    assert str(error) == "a message to site 'b' cannot be delivered: too large"


async def test_only_the_homesite_speaks_for_applications(
    hub: Hub, sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    node = Sites()
    ports = GatewayPorts(hub, node, "home")  # type: ignore[arg-type] # it only sends
    attach = fm.encode(App(hub, "known").attach)
    ports.receive("a", fm.AppBytes("connection", [attach]))
    await turn()
    assert node.told == []
    assert "only home may do" in caplog.text
    ports.receive("home", fm.AppBytes("connection", [fm.encode(_another("new"))]))
    await turn()
    assert fm.decode_attached(node.all(fm.AppBytes)[0].data[0]) == fm.Attached(0)


def _another(session: str) -> fm.Attach:
    hello = fm.AppHello(fm.PROTOCOL, "1", "home", 1, 1, 1, "block", 1.0, 1.0, 1.0, 1.0)
    return fm.Attach(session, True, 0, hello)


async def test_a_full_queue_blocks_those_who_submit(hub: Hub, sites: Sites) -> None:
    app = App(hub, slots=1, queue_limit=2)
    for number in range(10):
        app.say(submission(f"job-{number}"))
    await turn()
    assert [found.job_id for found in app.all(fm.Submitted)] == ["job-0", "job-1", "job-2"]
    app.say(fm.Halt("job-0", "", "aborted", "enough", 0.0))
    await turn()
    assert [found.job_id for found in app.all(fm.Submitted)][:4] == ["job-0", "job-1", "job-2", "job-3"]


async def test_a_full_queue_refuses_if_asked_to(hub: Hub) -> None:
    app = App(hub, slots=1, queue_limit=1, overflow="fail")
    for number in range(3):
        app.say(submission(f"job-{number}"))
    await turn()
    assert [found.outcome for found in app.all(fm.Submitted)] == ["new", "new", "full"]


async def test_hundreds_of_jobs_end_when_their_site_does_not_come_back(hub: Hub) -> None:
    app = App(hub, slots=1, queue_limit=1000, start=0.01)
    for number in range(400):
        app.say(submission(f"job-{number}"))
    await turn()
    hub.lost_site("b", "its machine has burnt")
    await app.heard(lambda: len({state.job_id for state in app.all(fm.JobState) if state.status == "aborted"}) == 400)
    assert hub._jobs["job-399"].slots.running == 0


async def test_a_job_that_may_run_again_waits_for_its_site(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    number = await launched(hub, sites, app, "job", reruns=1)
    hub.lost_site("b", "the network was cut")
    hub.receive("a", msg.JobStopped(number, A))
    before = len(sites.all(fm.Seat))
    assert [message.site for message in sites.all(fm.SiteLost)] == ["b"]
    hub.receive("b", hello("b", "2"))
    await turn()
    assert len(sites.all(fm.Seat)) == before + 2
    assert sites.dropped[-1] == "b"


async def test_a_job_that_has_not_begun_does_not_mind_that_a_site_starts_again(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    app.say(submission("job"))
    await turn()
    (number,) = {seat.job for seat in sites.all(fm.Seat)}
    hub.receive("a", fm.Seated(number, A, "address"))
    hub.receive("b", hello("b", "2"))  # it has forgotten what it was asked
    await turn()
    (again,) = {seat.job for seat in sites.all(fm.Seat)} - {number}
    assert fm.Unseat(number, A, False) in sites.all(fm.Unseat)
    hub.receive("b", fm.Seated(number, B, "address"))  # from its former life
    hub.receive("a", fm.Seated(again, A, "address"))
    assert sites.all(msg.StartJob) == []
    hub.receive("b", fm.Seated(again, B, "address"))
    assert len(sites.all(msg.StartJob)) == 2


async def test_a_job_shares_the_fate_of_a_site_that_starts_again_and_again(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    app.say(submission("job"))
    await turn()
    for life in range(2, 12):
        hub.receive("b", hello("b", str(life)))
    await turn()
    assert app.all(fm.JobState)[-1].status == "aborted"
    assert len({seat.job for seat in sites.all(fm.Seat)}) < 6


@pytest.mark.parametrize("may_run_again", [True, False])
async def test_who_waits_for_a_site_that_starts_again_is_seated(hub: Hub, sites: Sites, *, may_run_again: bool) -> None:
    """The loss of the site itself makes them wait: the job that was lost with it, or the next in the queue."""
    app = App(hub, slots=1)
    at_b = msgspec.structs.replace(submission("first", reruns=int(may_run_again)), plan=plan_b.to_json(), nets=nets_b)
    app.say(at_b)
    app.say(msgspec.structs.replace(at_b, job_id="second"))
    await turn()
    hub.receive("b", fm.Seated(sites.all(fm.Seat)[-1].job, 0, "address"))
    assert len(sites.all(msg.StartJob)) == 1
    hub.receive("b", hello("b", "2"))
    await turn()
    hub.receive("b", fm.Seated(sites.all(fm.Seat)[-1].job, 0, "address"))
    assert len(sites.all(msg.StartJob)) == 2


async def test_a_job_that_runs_is_lost_with_a_site_that_starts_again(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    number = await launched(hub, sites, app, "job")
    hub.receive("b", hello("b", "2"))
    hub.receive("a", msg.JobStopped(number, A))
    await turn()
    last = app.all(fm.JobState)[-1]
    assert last.status == "aborted"
    assert "it has started again" in str(last.reason)
    assert isinstance(decode_error(last.cause), WorkerLost)


async def test_a_site_that_was_given_up_is_told_so_until_it_comes_anew(hub: Hub, sites: Sites) -> None:
    hub.lost_site("b", "the network was cut")
    hub.receive("b", fm.Pulse())
    hub.receive("b", fm.Pulse())
    assert [message.life for message in sites.all(fm.GivenUp)] == ["1"]
    hub.lost_site("b", "late news of its former life", "1")
    hub.receive("b", hello("b", "2"))
    hub.lost_site("b", "late news of its former life", "1")
    app = App(hub)
    await turn()
    assert set(app.all(fm.Welcome)[-1].sites) == {"a", "b"}


async def test_what_is_asked_of_a_job_that_is_not_known_is_answered(hub: Hub) -> None:
    app = App(hub)
    app.say(fm.Follow("nobody", 0))
    app.say(fm.Find(1, "nobody"))
    await turn()
    assert app.all(fm.Expired) == [fm.Expired("nobody", None)]
    assert app.all(fm.Found) == [fm.Found(1, None)]


async def test_an_application_that_is_gone_for_long_is_forgotten_and_its_jobs_go_on(hub: Hub, sites: Sites) -> None:
    app = App(hub, patience=0.01, keep=100.0)
    await launched(hub, sites, app, "job")
    assert app.there is not None
    app.there.connection = "c"
    hub.detach(app.there, "c")
    left = asyncio.Event()
    forget, hub._drop_offers = hub._drop_offers, left.set  # type: ignore[method-assign] # done when it is forgotten
    async with asyncio.timeout(5):
        await left.wait()
    hub._drop_offers = forget  # type: ignore[method-assign] # as before
    assert hub.application("app") is None
    assert not hub._jobs["job"].record.status.ended
    assert hub.attach(fm.Attach("app", False, 3, app.attach.hello)).refused
    another = App(hub, "another")
    another.say(fm.Find(1, "job"))
    await turn()
    assert another.all(fm.Found)[0].known.job_id == "job"


async def test_a_job_that_can_only_wait_for_somebody_ends_after_a_while(hub: Hub, sites: Sites) -> None:
    app = App(hub, keep=0.02)
    number = await launched(hub, sites, app, "job", stopped=False, count=0)
    app.say(fm.Leave())
    await sites.heard(lambda: len(sites.all(msg.CancelJob)) == 2)
    for at, site in enumerate(plan.sites_at):
        hub.receive(site, msg.JobStopped(number, at))
    async with asyncio.timeout(5):
        await hub._jobs["job"].record.completion_event.wait()
    assert "no application" in str(hub._jobs["job"].record.reason)


async def test_a_hostile_submission_harms_nobody(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    broken = submission("job")
    for changed in ({"nets": ()}, {"plan": b"{}"}, {"plan": b"["}, {"rows": b"\x01"}):
        values = {name: getattr(broken, name) for name in broken.__struct_fields__}
        app.say(fm.Submit(**{**values, **changed}))
    app.duplex.send(b"\xc1 this is no message")
    await turn()
    assert [found.outcome for found in app.all(fm.Submitted)] == ["other"] * 4
    assert await launched(hub, sites, app, "good")


async def test_commands_answer_at_once_also_what_cannot_be_understood(hub: Hub) -> None:
    commands = Commands(hub)

    async def ask(data: Any) -> dict[str, Any]:
        return await asyncio.to_thread(commands, data)

    attached = await ask({"session": "s", "attach": base64.b64encode(fm.encode(_another("s"))).decode()})
    assert fm.decode_attached(base64.b64decode(attached["attached"])) == fm.Attached(0)
    assert await ask({"session": "other", "packet": ""}) == {"gone": True}
    for nonsense in ({}, {"session": "s"}, {"session": "s", "packet": "AAAA"}, {"session": "s", "attach": "AAAA"}):
        async with asyncio.timeout(1):
            with pytest.raises((KeyError, ValueError)):
                await ask(nonsense)
    told: list[bytes] = []
    duplex = Duplex(lambda data: told.append(bytes(data)))
    answer = await ask({"session": "s", "packet": base64.b64encode(duplex.pull()).decode(), "wait": 0.1})
    duplex.take(base64.b64decode(answer["packet"]))
    assert isinstance(fm.decode_hub(told[0]), fm.Welcome)
    empty = await ask({"session": "s", "packet": base64.b64encode(duplex.pull()).decode(), "wait": 0.01})
    assert not empty["more"]
    commands.close()


async def test_applications_with_impossible_wishes_are_refused() -> None:
    for lanes in (0, -1, 10**10):
        hello = msgspec_hello(lanes)
        with pytest.raises(ValueError, match="Expected"):
            fm.decode_attach(hello)


def msgspec_hello(lanes: int) -> bytes:
    hello = fm.AppHello(fm.PROTOCOL, "1", "home", lanes, 1, 1, "block", 1.0, 1.0, 1.0, 1.0)
    return fm.encode(fm.Attach("s", True, 0, hello))


async def test_participants_that_the_host_job_was_not_sent_to_are_ignored(hub: Hub, sites: Sites) -> None:
    app = App(hub)
    await turn()
    before = len(app.told), len(sites.told)
    hub.receive("mallory", hello("mallory"))
    hub.receive("mallory", fm.LogLines("mallory", [], 1))
    hub.receive("mallory", fm.SiteReport("", "mallory", (), 1, (0, 0)))
    hub.receive("mallory", fm.PeerLost("a", "made up"))
    await turn()
    assert sorted(hub.sites) == ["a", "b"]
    assert (len(app.told), len(sites.told)) == before
