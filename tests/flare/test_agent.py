"""A site's agent: whom it lets in, what it records, and what becomes of its seats."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.model.options import LocalOptions
from dfm_async.net import spec
from dfm_async.site.authorizing import PipelineRequest, RuleAuthorizer
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.crews import Installed
from dfm_async.wire import messages as msg
from dfm_async.workers.worker import ELSEWHERE
from tests.flare.fakes import SITES, FakeCrew, Lab, calling, fake_crews, seat, settle, start

__all__ = ["fake_crews"]

pytestmark = pytest.mark.usefixtures("fake_crews")


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


async def test_the_net_that_was_authorized_is_the_one_that_runs(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        one, two = calling("heavy"), calling("harmless")
        await lab.seat(seat(1, one), seat(2, two), seat(3, one))  # all claim to be of the same plan
        nets = lab.worker().channel.of(msg.SendNet)
        assert [(net.plan, net.net) for net in nets] == [(hashlib.sha256(net).hexdigest(), net) for net in (one, two)]
        announced = lab.worker().channel.of(msg.Announce)
        assert [found.plan for found in announced] == [nets[0].plan, nets[1].plan, nets[0].plan]
        assert [found.operations for found in announced] == [["heavy"], ["harmless"], ["heavy"]]
        lab.hear(start(2))
        (started,) = lab.worker().channel.of(msg.StartJob)
        assert started.plan == nets[1].plan
        assert lab.recorded("seated")[1]["sha256"] == nets[1].plan


@pytest.mark.parametrize(
    "net",
    [
        b"",
        b"\xc1",
        calling("stats", at=1),
        calling("stats", locations=("lab",)),
        calling("stats", locations=("x", "y")),
    ],
)
async def test_what_is_no_net_for_this_location_is_refused(tmp_path: Path, net: bytes) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat(1, net))
        assert [found.kind for found in lab.node.of(fm.SeatRefused)] == ["denied"]
        assert not FakeCrew.made


async def test_a_net_that_cannot_be_played_is_refused(tmp_path: Path) -> None:
    emit = spec.Transition("t", 0, (), spec.Emit(7, spec.Const(0)))
    net = spec.Net(0, SITES, (spec.Scope(0, None, None),), (), (), (emit,), (), ())
    async with Lab(tmp_path) as lab:
        await lab.seat(seat(1, msgspec.msgpack.encode(net)))
        (refused,) = lab.node.of(fm.SeatRefused)
        assert "cannot be read: the net is not in order" in refused.reason


# who may what


def asking(operation: spec.Formula) -> bytes:
    """A net that asks the advisors of an operation."""
    args = {"operation": operation, "provider": spec.Const(1), "given": spec.Const(2)}
    call = spec.Transition("advice", 0, (), spec.Call(DISCOVER, None, args, 0))
    literals: tuple[Any, ...] = ("secrets.read", "maker", {})
    return msgspec.msgpack.encode(spec.Net(0, SITES, (spec.Scope(0, None, None),), (), (), (call,), (), (), literals))


async def test_asking_for_advice_about_an_operation_counts_as_using_it(tmp_path: Path) -> None:
    rules = RuleAuthorizer([{"operations": ["stats.*"]}])
    async with Lab(tmp_path, rules) as lab:
        await lab.seat(seat(1, asking(spec.Const(0))))
        (refused,) = lab.node.of(fm.SeatRefused)
        assert "may not call operation 'secrets.read'" in refused.reason
        (asked,) = lab.recorded("asked")
        assert asked["operations"] == ["secrets.read"]
        assert asked["providers"] == ["maker"]
    asked_for = Asked()
    async with Lab(tmp_path, asked_for) as lab:
        await lab.seat(seat(1, asking(spec.Const(0))))
        assert asked_for.requests[0].operations == ("secrets.read",)
        (announced,) = lab.worker().channel.of(msg.Announce)
        assert sorted(announced.operations) == [DISCOVER, "secrets.read"]


async def test_advice_about_what_is_not_named_is_refused(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat(1, asking(spec.Build("list", ()))), seat(2, asking(spec.Const(2))))
        assert [found.kind for found in lab.node.of(fm.SeatRefused)] == ["denied", "denied"]


async def test_an_authorizer_that_fails_lets_nobody_in_and_tells_them_nothing(tmp_path: Path) -> None:
    async with Lab(tmp_path, Fails()) as lab:
        await lab.seat(seat())
        (refused,) = lab.node.of(fm.SeatRefused)
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
        lab.hear(seat())
        await asyncio.wait(lab.agent._seating.values())
        assert [refused.kind for refused in lab.node.of(fm.SeatRefused)] == ["failed"]
        assert lab.recorded("authorizer failed")[0]["error"].startswith("TimeoutError")


# locations


@pytest.mark.parametrize("location", ["lab", "lab##cache", "lab#heavy"])
async def test_a_site_has_these_locations(tmp_path: Path, location: str) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat(1, calling("heavy", locations=(location, "there")), location=location))
        assert len(lab.node.of(fm.Seated)) == 1


@pytest.mark.parametrize("location", ["lab#x1", "lab#stats", "lab#", "lab#heavy#heavy", "there", "there#heavy", "LAB"])
async def test_a_site_has_no_other_locations(tmp_path: Path, location: str) -> None:
    async with Lab(tmp_path) as lab:
        sites = (location.partition("#")[0], "there")
        net = calling("stats", locations=(location, "there"))
        await lab.seat(seat(1, net, location=location), seat(2, net, location=location, sites=sites))
        assert len(lab.node.of(fm.SeatRefused)) == 2
        assert not FakeCrew.made


async def test_a_job_has_a_limited_number_of_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.admission._MOST_SEATS", 3)
    locations = ("lab",) * 5
    async with Lab(tmp_path) as lab:
        for at in range(5):
            net = calling("stats", at=at, locations=locations)
            await lab.seat(seat(1, net, at=at, sites=locations))
        assert len(lab.node.of(fm.Seated)) == 3
        assert len(lab.node.of(fm.SeatRefused)) == 2


# bytes


async def test_all_locations_and_runs_of_a_job_share_one_account(tmp_path: Path) -> None:
    locations = ("lab", "lab#heavy", "there")
    sites = ("lab", "lab", "there")
    nets = [calling("heavy", at=at, locations=locations) for at in range(2)]
    weight = sum(map(len, nets))
    async with Lab(tmp_path, max_job_bytes=5000) as lab:
        seats = [seat(1, nets[at], at=at, location=locations[at], sites=sites) for at in range(2)]
        await lab.seat(*seats)
        lab.hear(tokens(2000, at=0), tokens(2000, at=1), peer="there")
        assert not lab.node.of(msg.JobBroken)
        lab.hear(tokens(1000 - weight, at=0), tokens(1, at=1), peer="there")
        (broken,) = lab.node.of(msg.JobBroken)
        assert "may send 5,000 bytes to site 'lab', and has sent more" in broken.error.message
        sent = lab.worker("lab").channel.of(msg.Tokens) + lab.worker("lab#heavy").channel.of(msg.Tokens)
        assert sum(len(token.payload) for token in sent) <= 5000 - weight
        lab.hear(fm.Unseat(1, 0, False), fm.Unseat(1, 1, False))
        await lab.seat(msgspec.structs.replace(seats[0], job=2))  # the same job runs again
        (refused,) = lab.node.of(fm.SeatRefused)
        assert refused.kind == "denied"
        assert lab.recorded("too much")[0]["allowed"] == 5000


async def test_a_cancellation_comes_through_whatever_was_sent(tmp_path: Path) -> None:
    async with Lab(tmp_path, max_job_bytes=1000) as lab:
        await lab.seat(seat())
        lab.hear(start(), tokens(1000), msg.CancelJob(1, 0))
        assert lab.worker().channel.of(msg.CancelJob)


async def test_what_a_net_brings_counts(tmp_path: Path) -> None:
    asked = Asked(5000)
    async with Lab(tmp_path, asked) as lab:
        large = calling("stats", literals=(b"x" * 6000,))
        small = calling("stats")
        await lab.seat(seat(1, large), seat(2, small, size=100), seat(3, small, size=5000))
        assert [request.bytes for request in asked.requests] == [len(large), len(small) + 100, len(small) + 5000]
        assert {found.job for found in lab.node.of(fm.SeatRefused)} == {1, 3}


async def test_heads_of_tokens_count_too(tmp_path: Path) -> None:
    async with Lab(tmp_path, max_job_bytes=10_000) as lab:
        await lab.seat(seat())
        lab.hear(msg.Tokens(1, 0, [(1, (number,), 1) for number in range(5000)], b""), peer="there")
        assert lab.node.of(msg.JobBroken)


# what is recorded


async def test_code_that_is_refused_is_recorded(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        lab.hear(fm.Offer(hashlib.sha256(b"code").hexdigest(), "lab", b"code", 1, 1, 1, fm.PYTHON))
        (line,) = lab.recorded("code refused")
        assert line["sha256"] == hashlib.sha256(b"code").hexdigest()
    async with Lab(tmp_path, brings_code=True) as lab:
        lab.hear(fm.Offer("another", "lab", b"code", 1, 1, 1, fm.PYTHON))
        assert len(lab.recorded("code refused")) == 2
        lab.hear(fm.Offer(hashlib.sha256(b"code").hexdigest(), "lab", b"code", 1, 1, 1, "2.7"))
        assert "from Python 2.7, and this site runs Python" in lab.recorded("code refused")[2]["reason"]
        assert not lab.recorded("code")


async def test_what_only_the_hub_may_say_is_recorded_once_for_each_site(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        for _ in range(3):
            lab.hear(seat(), start(), fm.Unseat(1, 0, True), peer="there")
        await settle()
        assert not lab.node.said
        assert [line["message"] for line in lab.recorded("not allowed")] == ["Seat", "StartJob", "Unseat"]


async def test_what_is_recorded_is_cut(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        net = calling(*(f"op{number}" for number in range(3000)))
        await lab.seat(seat(1, net, pipeline="p" * 100_000, job_id="j" * 100_000))
        (asked,) = lab.recorded("asked")
        assert len(asked["pipeline"]) < 1100
        assert len(asked["job"]) < 1100
        assert len(asked["operations"]) == 1001
        assert asked["operations"][-1] == "and 2000 more"


async def test_lost_seats_and_those_at_the_end_are_recorded(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat(1))
        lab.worker().die()
        await lab.seat(seat(2))
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


@pytest.mark.parametrize("event", ["asked", "seated"])
async def test_what_cannot_be_recorded_does_not_happen(tmp_path: Path, event: str) -> None:
    async with Lab(tmp_path) as lab:
        _Full(lab, event)
        await lab.seat(seat())
        (refused,) = lab.node.of(fm.SeatRefused)
        assert "No space left" in refused.reason
        assert not lab.node.of(fm.Seated)
        assert not any(crew.seats or crew.worker("lab", 0).seats for crew in FakeCrew.made)
        lab.hear(start())
        assert not any(crew.worker("lab", 0).channel.of(msg.StartJob) for crew in FakeCrew.made)


async def test_a_full_disk_keeps_no_seat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        _Full(lab, "left")
        lab.hear(fm.Unseat(1, 0, True))
        assert not lab.worker().seats
        assert FakeCrew.made[-1].seats == 0


# seats


async def test_a_worker_that_is_lost_as_it_is_seated_is_told_exactly_once(tmp_path: Path) -> None:
    for turns in range(6):
        FakeCrew.hold = True
        async with Lab(tmp_path) as lab:
            lab.hear(seat())
            await asyncio.sleep(0)
            worker = lab.worker()
            worker.ready.set_result(None)
            for _ in range(turns):
                await asyncio.sleep(0)
            FakeCrew.hold = False
            worker.die()
            await settle()
            told = [type(message) for _, message in lab.node.said]
            # Before it is seated, another worker is taken; after that, the loss is told.
            assert told in ([fm.Seated], [fm.Seated, fm.SeatLost]), turns
            seated_anew = any(lab.agent._seats)
            assert seated_anew == (told == [fm.Seated])


async def test_a_job_without_a_seat_is_answered(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        lab.hear(start(7), msg.OpenFrames(8, 0, 0, 1, b"", True), msg.CancelJob(9, 0), msg.Credit(10, 0, 1, 1))
        assert [(type(message), message.job) for _, message in lab.node.said] == [
            (fm.SeatLost, 7),
            (fm.SeatLost, 8),
            (msg.JobStopped, 9),
        ]


async def test_what_a_lost_worker_said_last_is_cleaned(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        lab.worker().die()
        (lost,) = lab.node.of(fm.SeatLost)
        assert lost.detail == "it died \\x1b[2J"
        assert lost.lines == ("last\\x07 words",)


async def test_a_job_that_was_never_started_is_withdrawn(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        lab.hear(fm.Unseat(1, 0, False))
        assert lab.worker().channel.of(msg.Withdraw) == [msg.Withdraw(1, 0)]
        assert not lab.worker().seats


async def test_a_worker_that_is_not_ready_is_told_nothing(tmp_path: Path) -> None:
    FakeCrew.hold = True
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        lab.hear(tokens(10), peer="there")
        lab.hear(start(), msg.CancelJob(1, 0), fm.Unseat(1, 0, False))
        await settle()
        assert not lab.worker().channel.sent
        assert not lab.worker().seats
        assert FakeCrew.made[-1].seats == 0


async def test_a_location_that_still_runs_is_stopped_before_its_worker_is_free(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        lab.hear(start(), fm.Unseat(1, 0, False))
        worker = lab.worker()
        assert worker.channel.of(msg.CancelJob) == [msg.CancelJob(1, 0)]
        assert worker.seats
        lab.hear(tokens(10), peer="there")  # nobody sends to it any more
        assert not worker.channel.of(msg.Tokens)
        before = list(lab.node.said)
        lab.from_worker(msg.CancelSeen(1, 0))
        lab.from_worker(msg.FramesDone(1, 0, [0]))
        lab.from_worker(msg.JobStopped(1, 0))
        assert lab.node.said == before  # the hub has forgotten it
        assert not worker.seats
        assert FakeCrew.made[-1].seats == 0
        assert worker.killed is None


async def test_a_location_that_has_stopped_leaves_at_once(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        lab.hear(start(), msg.CancelJob(1, 0))
        lab.from_worker(msg.JobStopped(1, 0))
        lab.hear(fm.Unseat(1, 0, False))
        assert not lab.worker().seats
        assert len(lab.worker().channel.of(msg.CancelJob)) == 1


@pytest.mark.parametrize("seen", [True, False])
async def test_a_location_that_does_not_stop_is_ended_by_force(tmp_path: Path, seen: bool) -> None:
    async with Lab(tmp_path, options=LocalOptions(start_method="spawn", cancel_grace=0.0)) as lab:
        await lab.seat(seat(1), seat(2))
        lab.hear(start(1), start(2))
        worker = lab.worker()
        lab.hear(fm.Unseat(1, 0, False))
        if seen:
            lab.from_worker(msg.CancelSeen(1, 0))
        await asyncio.sleep(0.001)
        await settle()
        if seen:  # only an operation does not return: the other job goes on there
            assert worker.retired
            assert worker.killed is None
            assert len(worker.seats) == 1
            assert not lab.node.of(fm.SeatLost)
        else:
            assert worker.killed is not None
            assert "job-1" in worker.killed
            assert [lost.job for lost in lab.node.of(fm.SeatLost)] == [2]
        assert not lab.agent._seats._leaving


async def test_addresses_come_from_the_site_itself(tmp_path: Path) -> None:
    locations = ("lab", "there", "lab#heavy")
    sites = ("lab", "there", "lab")
    async with Lab(tmp_path) as lab:
        for at in (0, 2):
            net = calling("heavy", at=at, locations=locations)
            await lab.seat(seat(1, net, at=at, location=locations[at], sites=sites))
        lab.hear(start(1, routes=("\0evil", "/etc/passwd", "home")))
        (started,) = lab.worker().channel.of(msg.StartJob)
        assert started.routes == ("\0own-lab", f"{ELSEWHERE}there", "\0own-lab#heavy")


# faults


async def test_a_message_that_cannot_be_dealt_with_is_an_error_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with Lab(tmp_path) as lab:
        await lab.seat(seat(1), seat(2))

        def fail(message: Any) -> None:
            if message.job == 1:
                raise RuntimeError("broken pipe")
            lab.worker().channel.sent.append(message)

        monkeypatch.setattr(lab.worker().channel, "send", fail)
        lab.hear(start(1), start(2))
        assert [broken.job for broken in lab.node.of(msg.JobBroken)] == [1]
        assert [started.job for started in lab.worker().channel.of(msg.StartJob)] == [2]
        lab.from_worker(msg.ElementDone(2, 99, 0, []))  # for a location that there is not
        lab.from_worker(msg.ElementDone(2, -1, 0, []))
        assert [(broken.job, broken.at) for broken in lab.node.of(msg.JobBroken)] == [(1, 0), (2, 0), (2, 0)]
        monkeypatch.setattr(lab.agent, "_take_seat", None)
        lab.hear(seat(5))
        assert [refused.job for refused in lab.node.of(fm.SeatRefused)] == [5]


async def test_workers_say_only_what_workers_say(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        await lab.seat(seat())
        before = len(lab.node.said)
        for message in (msg.CancelJob(1, 0), msg.SendNet("plan", 0, b""), start(), fm.PeerLost("there", "no")):
            lab.from_worker(message)
        assert len(lab.node.said) == before
        lab.from_worker(msg.FramesDone(1, 0, [0]))
        assert len(lab.node.said) == before + 1


async def test_a_question_is_answered_behind_the_log(tmp_path: Path) -> None:
    async with Lab(tmp_path) as lab:
        logger = logging.getLogger("dfm_async.site.lab")
        logger.warning("before the question")
        lab.hear(fm.Echo(5))
        assert [type(message) for _, message in lab.node.said] == [fm.LogLines, fm.Echoed]
        assert lab.node.of(fm.Echoed) == [fm.Echoed(5)]
        assert fm.decode_node(fm.encode(fm.Echoed(5))) == fm.Echoed(5)


# code


def offer(**changes: Any) -> fm.Offer:
    given = fm.Offer(hashlib.sha256(b"code").hexdigest(), "lab", b"code", None, 8, 1, fm.PYTHON)
    return msgspec.structs.replace(given, **changes)


async def test_when_a_crew_goes_nothing_is_left_of_its_reports(tmp_path: Path) -> None:
    async with Lab(tmp_path, brings_code=True) as lab:
        found = offer()
        lab.hear(found)
        await lab.seat(seat(1, offer=found.key))
        lab.hear(fm.Drop(found.key))
        assert not lab.node.of(fm.SiteReport)
        lab.hear(fm.Unseat(1, 0, True))
        assert lab.node.of(fm.SiteReport) == [fm.SiteReport(found.key, "lab", (), 0, (0, 0))]
        await settle()


async def test_the_settings_of_a_site_reach_its_crews(tmp_path: Path) -> None:
    async with Lab(tmp_path, environment={"LAB_DATA": "/data"}) as lab:
        await lab.seat(seat())
        assert FakeCrew.made[-1].args[-1] == {"LAB_DATA": "/data"}


async def test_there_is_a_limit_to_what_a_user_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.crews._MOST_OFFERS", 2)
    async with Lab(tmp_path, brings_code=True) as lab:
        for number in range(4):
            code = f"code {number}".encode()
            lab.hear(offer(key=hashlib.sha256(code).hexdigest(), shipped=code))
        assert len(lab.recorded("code")) == 2
        assert len(lab.recorded("code refused")) == 2


async def test_code_that_a_user_brings_has_the_locations_that_it_calls(tmp_path: Path) -> None:
    async with Lab(tmp_path, installed=Installed({}, None), brings_code=True) as lab:
        found = offer()
        lab.hear(found)
        for job, location in enumerate(["lab#own", "lab#other"]):
            net = calling("own", locations=(location, "there"))
            await lab.seat(seat(job, net, location=location, offer=found.key))
        assert [seated.job for seated in lab.node.of(fm.Seated)] == [0]
        assert [refused.job for refused in lab.node.of(fm.SeatRefused)] == [1]
