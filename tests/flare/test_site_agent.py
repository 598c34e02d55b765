"""The agent of a site: what it admits, what it records, and what becomes of assigned locations."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.model.ids import Location
from dfm_async.model.options import LocalOptions
from dfm_async.net import spec
from dfm_async.site.authorizing import PipelineRequest, RuleAuthorizer
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.site_code import Installed
from dfm_async.wire import messages as msg
from dfm_async.workers.worker import ELSEWHERE
from tests.flare.fakes import LOCATIONS, FakeGroup, Lab, calling, encoded, fake_workers, request, start
from tests.support.waiting import settled

__all__ = ["fake_workers"]

pytestmark = pytest.mark.usefixtures("fake_workers")


@pytest.fixture
async def lab(fake_workers: None, tmp_path: Path) -> AsyncIterator[Lab]:
    async with Lab(tmp_path) as found:
        yield found


class Asked:
    """An authorizer that notes what it is asked."""

    def __init__(self, allowed: int | None = None) -> None:
        self.allowed = allowed
        self.requests: list[PipelineRequest] = []

    async def authorize(self, request: PipelineRequest) -> int | None:
        self.requests.append(request)
        return self.allowed


class Fails:
    async def authorize(self, request: PipelineRequest) -> int | None:
        raise KeyError("the password of the policy database is hunter2")


def tokens(size: int, job: int = 1, at: int = 0) -> msg.Tokens:
    return msg.Tokens(job, at, [], b"x" * size)


# nets


async def test_the_net_that_was_authorized_is_the_one_that_runs(lab: Lab) -> None:
    one, two = calling("heavy"), calling("harmless")
    await lab.assign(request(1, one), request(2, two), request(3, one))  # all claim to be of the same plan
    nets = lab.worker().channel.of(msg.SendNet)
    assert [(net.plan, net.net) for net in nets] == [(hashlib.sha256(net).hexdigest(), net) for net in (one, two)]
    announced = lab.worker().channel.of(msg.Announce)
    assert [found.plan for found in announced] == [nets[0].plan, nets[1].plan, nets[0].plan]
    assert [found.operations for found in announced] == [["heavy"], ["harmless"], ["heavy"]]
    lab.receive(start(2))
    (started,) = lab.worker().channel.of(msg.StartJob)
    assert started.plan == nets[1].plan
    assert lab.recorded("assigned")[1]["sha256"] == nets[1].plan


@pytest.mark.parametrize(
    "net",
    [
        b"",
        b"\xc1",
        calling("stats", at=1),
        calling("stats", locations=(Location("lab"),)),
        calling("stats", locations=(Location("x"), Location("y"))),
    ],
)
async def test_what_is_no_net_for_this_location_is_refused(lab: Lab, net: bytes) -> None:
    await lab.assign(request(1, net))
    assert [found.kind for found in lab.node.of(fm.AssignmentRefused)] == ["denied"]
    assert not FakeGroup.made


async def test_a_net_that_cannot_be_played_is_refused(lab: Lab) -> None:
    emit = spec.Transition("t", 0, (), spec.Emit(7, spec.NetLiteral(0)))
    await lab.assign(request(1, encoded(emit)))
    (refused,) = lab.node.of(fm.AssignmentRefused)
    assert "cannot be read: invalid net" in refused.reason


# who may what


def asking(operation: spec.Formula) -> bytes:
    """A net that asks the advisors of an operation."""
    args = {"operation": operation, "provider": spec.NetLiteral(1), "given": spec.NetLiteral(2)}
    call = spec.Transition("advice", 0, (), spec.Call(operation=DISCOVER, provider=None, args=args, output=0))
    literals: tuple[Any, ...] = ("secrets.read", "maker", {})
    return encoded(call, literals=literals)


async def test_asking_for_advice_about_an_operation_counts_as_using_it(tmp_path: Path) -> None:
    rules = RuleAuthorizer([{"operations": ["stats.*"]}])
    async with Lab(tmp_path, rules) as lab:
        await lab.assign(request(1, asking(spec.NetLiteral(0))))
        (refused,) = lab.node.of(fm.AssignmentRefused)
        assert "may not call operation 'secrets.read'" in refused.reason
        (asked,) = lab.recorded("asked")
        assert asked["operations"] == ["secrets.read"]
        assert asked["providers"] == ["maker"]
    asked_for = Asked()
    async with Lab(tmp_path, asked_for) as lab:
        await lab.assign(request(1, asking(spec.NetLiteral(0))))
        assert asked_for.requests[0].operations == ("secrets.read",)
        (announced,) = lab.worker().channel.of(msg.Announce)
        assert sorted(announced.operations) == [DISCOVER, "secrets.read"]


async def test_advice_about_what_is_not_named_is_refused(lab: Lab) -> None:
    await lab.assign(request(1, asking(spec.Build("list", ()))), request(2, asking(spec.NetLiteral(2))))
    assert [found.kind for found in lab.node.of(fm.AssignmentRefused)] == ["denied", "denied"]


async def test_a_failing_authorizer_admits_nobody_and_reveals_nothing(tmp_path: Path) -> None:
    async with Lab(tmp_path, Fails()) as lab:
        await lab.assign(request())
        (refused,) = lab.node.of(fm.AssignmentRefused)
        assert refused.kind == "failed"
        assert "authorizer of site 'lab' has failed" in refused.reason
        assert "hunter2" not in refused.reason
        (failed,) = lab.recorded("authorizer failed")
        assert failed["error"].startswith("KeyError")
        assert lab.recorded("failed")


async def test_an_authorizer_that_does_not_answer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.admission._AUTHORIZER", 0.0)

    class Thinks:
        async def authorize(self, request: PipelineRequest) -> int | None:
            await asyncio.Event().wait()
            return None

    async with Lab(tmp_path, Thinks()) as lab:
        lab.receive(request())
        await asyncio.wait(list(lab.agent._admitting.values()))
        assert [refused.kind for refused in lab.node.of(fm.AssignmentRefused)] == ["failed"]
        assert lab.recorded("authorizer failed")[0]["error"].startswith("TimeoutError")


# locations


@pytest.mark.parametrize("location", [Location("lab"), Location("lab", cache=True), Location("lab", "heavy")])
async def test_a_site_has_these_locations(lab: Lab, location: Location) -> None:
    await lab.assign(request(1, calling("heavy", locations=(location, Location("there"))), location=location))
    assert len(lab.node.of(fm.Assigned)) == 1


ABSENT = [Location("lab", name) for name in ("x1", "stats", "#cache")]
ABSENT += [Location(name) for name in ("lab#heavy", "there", "LAB", "")]
ABSENT += [Location("there", "heavy"), Location("there", cache=True)]


@pytest.mark.parametrize("location", ABSENT)
async def test_a_site_has_no_other_locations(lab: Lab, location: Location) -> None:
    sites = (location.site, "there")
    net = calling("stats", locations=(location, Location("there")))
    await lab.assign(request(1, net, location=location), request(2, net, location=location, sites=sites))
    assert len(lab.node.of(fm.AssignmentRefused)) == 2
    assert not FakeGroup.made


async def test_a_job_has_a_limited_number_of_locations(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.admission._MOST_LOCATIONS_PER_JOB", 3)
    sites = ("lab",) * 5
    for at in range(5):
        net = calling("stats", at=at, locations=(Location("lab"),) * 5)
        await lab.assign(request(1, net, at=at, sites=sites))
    assert len(lab.node.of(fm.Assigned)) == 3
    assert len(lab.node.of(fm.AssignmentRefused)) == 2


# bytes


async def test_all_locations_and_runs_of_a_job_share_one_account(tmp_path: Path) -> None:
    locations = (Location("lab"), Location("lab", "heavy"), Location("there"))
    sites = ("lab", "lab", "there")
    nets = [calling("heavy", at=at, locations=locations) for at in range(2)]
    weight = sum(map(len, nets))
    async with Lab(tmp_path, max_job_bytes=5000) as lab:
        requests = [request(1, nets[at], at=at, location=locations[at], sites=sites) for at in range(2)]
        await lab.assign(*requests)
        lab.receive(tokens(2000, at=0), tokens(2000, at=1), peer="there")
        assert not lab.node.of(msg.JobBroken)
        lab.receive(tokens(1000 - weight, at=0), tokens(1, at=1), peer="there")
        (broken,) = lab.node.of(msg.JobBroken)
        assert "may send 5,000 bytes to site 'lab', and has sent more" in broken.error.message
        sent = lab.worker().channel.of(msg.Tokens) + lab.worker(locations[1]).channel.of(msg.Tokens)
        assert sum(len(token.payload) for token in sent) <= 5000 - weight
        lab.receive(fm.Unassign(1, 0, False), fm.Unassign(1, 1, False))
        await lab.assign(msgspec.structs.replace(requests[0], job=2))  # the same job runs again
        (refused,) = lab.node.of(fm.AssignmentRefused)
        assert refused.kind == "denied"
        assert lab.recorded("too much")[0]["allowed"] == 5000


async def test_a_cancellation_comes_through_whatever_was_sent(tmp_path: Path) -> None:
    async with Lab(tmp_path, max_job_bytes=1000) as lab:
        await lab.assign(request())
        lab.receive(start(), tokens(1000), msg.CancelJob(1, 0))
        assert lab.worker().channel.of(msg.CancelJob)


async def test_what_a_net_brings_counts(tmp_path: Path) -> None:
    asked = Asked(5000)
    async with Lab(tmp_path, asked) as lab:
        large = calling("stats", literals=(b"x" * 6000,))
        small = calling("stats")
        await lab.assign(request(1, large), request(2, small, size=100), request(3, small, size=5000))
        assert [request.bytes for request in asked.requests] == [len(large), len(small) + 100, len(small) + 5000]
        assert {found.job for found in lab.node.of(fm.AssignmentRefused)} == {1, 3}


async def test_heads_of_tokens_count_too(tmp_path: Path) -> None:
    async with Lab(tmp_path, max_job_bytes=10_000) as lab:
        await lab.assign(request())
        lab.receive(msg.Tokens(1, 0, [(1, (number,), 1) for number in range(5000)], b""), peer="there")
        assert lab.node.of(msg.JobBroken)


# what is recorded


async def test_code_that_is_refused_is_recorded(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        lab.receive(
            fm.Offer(
                key=hashlib.sha256(b"code").hexdigest(),
                site="lab",
                shipped=b"code",
                workers=1,
                threads=1,
                lanes=1,
                python=fm.PYTHON,
            )
        )
        (line,) = lab.recorded("code refused")
        assert line["sha256"] == hashlib.sha256(b"code").hexdigest()
    async with Lab(tmp_path, brings_code=True) as lab:
        lab.receive(
            fm.Offer(key="another", site="lab", shipped=b"code", workers=1, threads=1, lanes=1, python=fm.PYTHON)
        )
        assert len(lab.recorded("code refused")) == 2
        lab.receive(
            fm.Offer(
                key=hashlib.sha256(b"code").hexdigest(),
                site="lab",
                shipped=b"code",
                workers=1,
                threads=1,
                lanes=1,
                python="2.7",
            )
        )
        assert "from Python 2.7, and this site runs Python" in lab.recorded("code refused")[2]["reason"]
        assert not lab.recorded("code")


async def test_messages_that_only_the_hub_may_send_are_recorded_once(lab: Lab) -> None:
    for _ in range(3):
        lab.receive(request(), start(), fm.Unassign(1, 0, True), peer="there")
    await settled()
    assert not lab.node.sent
    assert [line["message"] for line in lab.recorded("not allowed")] == ["Assign", "StartJob", "Unassign"]


async def test_what_is_recorded_is_cut(lab: Lab) -> None:
    net = calling(*(f"op{number}" for number in range(3000)))
    await lab.assign(request(1, net, pipeline="p" * 100_000, job_id="j" * 100_000))
    (asked,) = lab.recorded("asked")
    assert len(asked["pipeline"]) < 1100
    assert len(asked["job"]) < 1100
    assert len(asked["operations"]) == 1001
    assert asked["operations"][-1] == "and 2000 more"


async def test_lost_locations_and_those_at_the_end_are_recorded(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.assign(request(1))
        lab.worker().die()
        await lab.assign(request(2))
    assert [line["job"] for line in lab.recorded("lost")] == ["job-1"]
    (left,) = lab.recorded("left")
    assert (left["job"], left["reason"]) == ("job-2", "the site leaves")
    assert lab.lines[-1]["event"] == "closed"


class _Full:
    """The audit log on a disk that is full from a certain event on."""

    def __init__(self, lab: Lab, event: str) -> None:
        self._write = lab.audit.write
        self._event = event
        lab.audit.write = self.write  # type: ignore[method-assign]

    def write(self, event: str, **what: Any) -> None:
        if event == self._event:
            raise OSError(28, "No space left on device")
        self._write(event, **what)


@pytest.mark.parametrize("event", ["asked", "assigned"])
async def test_what_cannot_be_recorded_does_not_happen(lab: Lab, event: str) -> None:
    _Full(lab, event)
    await lab.assign(request())
    (refused,) = lab.node.of(fm.AssignmentRefused)
    assert "No space left" in refused.reason
    assert not lab.node.of(fm.Assigned)
    assert not any(group.assignments or group.worker(LOCATIONS[0], 0).assignments for group in FakeGroup.made)
    lab.receive(start())
    assert not any(group.worker(LOCATIONS[0], 0).channel.of(msg.StartJob) for group in FakeGroup.made)


async def test_a_full_disk_keeps_no_location(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    await lab.assign(request())
    _Full(lab, "left")
    lab.receive(fm.Unassign(1, 0, True))
    assert not lab.worker().assignments
    assert FakeGroup.made[-1].assignments == 0


# workers


async def test_a_worker_lost_while_it_is_assigned_is_reported_once(tmp_path: Path) -> None:
    for turns in range(6):
        FakeGroup.hold = True
        async with Lab(tmp_path) as lab:
            lab.receive(request())
            await asyncio.sleep(0)
            worker = lab.worker()
            worker.ready.set_result(None)
            for _ in range(turns):
                await asyncio.sleep(0)
            FakeGroup.hold = False
            worker.die()
            await settled()
            sent = [type(message) for _, message in lab.node.sent]
            # Before it is assigned, another worker is taken; after that, the loss is reported.
            assert sent in ([fm.Assigned], [fm.Assigned, fm.AssignmentLost]), turns
            assert any(lab.agent._locations) == (sent == [fm.Assigned])


async def test_a_job_without_a_worker_is_answered(lab: Lab) -> None:
    lab.receive(start(7), msg.OpenFrames(8, 0, 0, 1, b"", True), msg.CancelJob(9, 0), msg.Credit(10, 0, 1, 1))
    assert [(type(message), message.job) for _, message in lab.node.sent] == [
        (fm.AssignmentLost, 7),
        (fm.AssignmentLost, 8),
        (msg.JobStopped, 9),
    ]


async def test_what_a_lost_worker_said_last_is_cleaned(lab: Lab) -> None:
    await lab.assign(request())
    lab.worker().die()
    (lost,) = lab.node.of(fm.AssignmentLost)
    assert lost.detail == "it died \\x1b[2J"
    assert lost.lines == ("last\\x07 words",)


async def test_a_job_that_was_never_started_is_withdrawn(lab: Lab) -> None:
    await lab.assign(request())
    lab.receive(fm.Unassign(1, 0, False))
    assert lab.worker().channel.of(msg.Withdraw) == [msg.Withdraw(1, 0)]
    assert not lab.worker().assignments


async def test_a_worker_that_is_not_ready_receives_nothing(lab: Lab) -> None:
    FakeGroup.hold = True
    await lab.assign(request())
    lab.receive(tokens(10), peer="there")
    lab.receive(start(), msg.CancelJob(1, 0), fm.Unassign(1, 0, False))
    await settled()
    assert not lab.worker().channel.sent
    assert not lab.worker().assignments
    assert FakeGroup.made[-1].assignments == 0


async def test_a_location_that_still_runs_is_stopped_before_its_worker_is_free(lab: Lab) -> None:
    await lab.assign(request())
    lab.receive(start(), fm.Unassign(1, 0, False))
    worker = lab.worker()
    assert worker.channel.of(msg.CancelJob) == [msg.CancelJob(1, 0)]
    assert worker.assignments
    lab.receive(tokens(10), peer="there")  # nobody sends to it any longer
    assert not worker.channel.of(msg.Tokens)
    before = list(lab.node.sent)
    lab.from_worker(msg.CancelSeen(1, 0))
    lab.from_worker(msg.FramesDone(1, 0, [0]))
    lab.from_worker(msg.JobStopped(1, 0))
    assert lab.node.sent == before  # the hub has forgotten it
    assert not worker.assignments
    assert FakeGroup.made[-1].assignments == 0
    assert worker.killed is None


async def test_a_location_that_has_stopped_leaves_at_once(lab: Lab) -> None:
    await lab.assign(request())
    lab.receive(start(), msg.CancelJob(1, 0))
    lab.from_worker(msg.JobStopped(1, 0))
    lab.receive(fm.Unassign(1, 0, False))
    assert not lab.worker().assignments
    assert len(lab.worker().channel.of(msg.CancelJob)) == 1


@pytest.mark.parametrize("seen", [True, False])
async def test_a_location_that_does_not_stop_is_ended_by_force(tmp_path: Path, seen: bool) -> None:
    async with Lab(tmp_path, options=LocalOptions(start_method="spawn", cancel_grace=0.0)) as lab:
        await lab.assign(request(1), request(2))
        lab.receive(start(1), start(2))
        worker = lab.worker()
        lab.receive(fm.Unassign(1, 0, False))
        if seen:
            lab.from_worker(msg.CancelSeen(1, 0))
        await asyncio.sleep(0.001)
        await settled()
        if seen:  # only an operation does not return: the other job goes on there
            assert worker.retired
            assert worker.killed is None
            assert len(worker.assignments) == 1
            assert not lab.node.of(fm.AssignmentLost)
        else:
            assert worker.killed is not None
            assert "job-1" in worker.killed
            assert [lost.job for lost in lab.node.of(fm.AssignmentLost)] == [2]
        assert not any(location.leaving for location in lab.agent._locations)


async def test_addresses_come_from_the_site_itself(lab: Lab) -> None:
    locations = (Location("lab"), Location("there"), Location("lab", "heavy"))
    sites = ("lab", "there", "lab")
    for at in (0, 2):
        net = calling("heavy", at=at, locations=locations)
        await lab.assign(request(1, net, at=at, location=locations[at], sites=sites))
    lab.receive(start(1, routes=("\0evil", "/etc/passwd", "home")))
    (started,) = lab.worker().channel.of(msg.StartJob)
    assert started.routes == ("\0own-lab", f"{ELSEWHERE}there", "\0own-lab:heavy")


# faults


async def test_a_message_that_cannot_be_dealt_with_is_an_error_of_its_job(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await lab.assign(request(1), request(2))

    def fail(message: Any) -> None:
        if message.job == 1:
            raise RuntimeError("broken pipe")
        lab.worker().channel.sent.append(message)

    monkeypatch.setattr(lab.worker().channel, "send", fail)
    lab.receive(start(1), start(2))
    assert [broken.job for broken in lab.node.of(msg.JobBroken)] == [1]
    assert [started.job for started in lab.worker().channel.of(msg.StartJob)] == [2]
    lab.from_worker(msg.ElementDone(2, 99, 0, []))  # for a location that there is not
    lab.from_worker(msg.ElementDone(2, -1, 0, []))
    assert [(broken.job, broken.at) for broken in lab.node.of(msg.JobBroken)] == [(1, 0), (2, 0), (2, 0)]
    monkeypatch.setattr(lab.agent, "_admit", None)
    lab.receive(request(5))
    assert [refused.job for refused in lab.node.of(fm.AssignmentRefused)] == [5]


async def test_workers_can_send_only_messages_of_workers(lab: Lab) -> None:
    await lab.assign(request())
    before = len(lab.node.sent)
    for message in (msg.CancelJob(1, 0), msg.SendNet("plan", 0, b""), start(), fm.PeerLost("there", "no")):
        lab.from_worker(message)
    assert len(lab.node.sent) == before
    lab.from_worker(msg.FramesDone(1, 0, [0]))
    assert len(lab.node.sent) == before + 1


async def test_a_question_is_answered_behind_the_log(lab: Lab) -> None:
    logger = logging.getLogger("dfm_async.site.lab")
    logger.warning("before the question")
    lab.receive(fm.Echo(5))
    assert [type(message) for _, message in lab.node.sent] == [fm.LogLines, fm.Echoed]
    assert lab.node.of(fm.Echoed) == [fm.Echoed(5)]
    assert fm.decode_node(fm.encode(fm.Echoed(5))) == fm.Echoed(5)


# code


def offer(**changes: Any) -> fm.Offer:
    given = fm.Offer(
        key=hashlib.sha256(b"code").hexdigest(),
        site="lab",
        shipped=b"code",
        workers=None,
        threads=8,
        lanes=1,
        python=fm.PYTHON,
    )
    return msgspec.structs.replace(given, **changes)


async def test_workers_of_dropped_code_leave_no_report(tmp_path: Path) -> None:
    async with Lab(tmp_path, brings_code=True) as lab:
        found = offer()
        lab.receive(found)
        await lab.assign(request(1, offer=found.key))
        lab.receive(fm.Drop(found.key))
        assert not lab.node.of(fm.SiteReport)
        lab.receive(fm.Unassign(1, 0, True))
        assert lab.node.of(fm.SiteReport) == [fm.SiteReport(found.key, Location("lab"), (), 0, (0, 0))]
        await settled()


async def test_the_settings_of_a_site_reach_its_workers(tmp_path: Path) -> None:
    async with Lab(tmp_path, environment={"LAB_DATA": "/data"}) as lab:
        await lab.assign(request())
        assert lab.agent.host._environment == {"LAB_DATA": "/data"}


async def test_there_is_a_limit_to_what_a_user_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.site_code._MOST_OFFERS", 2)
    async with Lab(tmp_path, brings_code=True) as lab:
        for number in range(4):
            code = f"code {number}".encode()
            lab.receive(offer(key=hashlib.sha256(code).hexdigest(), shipped=code))
        assert len(lab.recorded("code")) == 2
        assert len(lab.recorded("code refused")) == 2


async def test_code_that_a_user_brings_has_the_locations_that_it_calls(tmp_path: Path) -> None:
    async with Lab(tmp_path, installed=Installed(operations={}, shipped=None), brings_code=True) as lab:
        found = offer()
        lab.receive(found)
        for job, location in enumerate([Location("lab", "own"), Location("lab", "other")]):
            net = calling("own", locations=(location, Location("there")))
            await lab.assign(request(job, net, location=location, offer=found.key))
        assert [found.job for found in lab.node.of(fm.Assigned)] == [0]
        assert [refused.job for refused in lab.node.of(fm.AssignmentRefused)] == [1]
