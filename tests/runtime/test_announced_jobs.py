"""Jobs that are announced to a site before they begin: what comes early is kept, and what comes late is not."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dfm_async import Federation
from dfm_async.discovery.advisors import DISCOVER
from dfm_async.model.ids import JobId, Location
from dfm_async.model.job_spec import JobSpec
from dfm_async.net import spec
from dfm_async.runtime import site_runtime as runtime_site
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.site_runtime import PROGRAMS_KEPT, SiteRuntime
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

codec = Codec.for_untrusted()
fed = Federation("announced")
here = fed.site("here")


@here.operation
def stats(x: Any = None) -> Any:
    return x


@here.operation
def secrets(x: Any = None) -> Any:
    return "secret"


@secrets.advisor("x")
def _advise(_value: Any, _context: Any) -> Any:
    return ["secret advice"]


def net(action: spec.Action, literals: tuple[Any, ...] = ()) -> bytes:
    """A location that waits for a token of another one, and does something with it."""
    return msgspec.msgpack.encode(
        spec.Net(
            location=0,
            locations=(Location("here"), Location("there")),
            scopes=(spec.Scope(0, None, None),),
            places=(spec.Place(0, 0, "token"), spec.Place(1, 0, "made")),
            loops=(),
            transitions=(
                spec.Transition("first", 0, (spec.Input(0),), action),
                spec.Transition("out", 0, (spec.Input(1),), spec.Emit(0, spec.Slot(0))),
            ),
            params=(),
            points=(spec.YieldPoint("out", "n"),),
            literals=literals,
        )
    )


def call(operation: str) -> bytes:
    return net(spec.Call(operation=operation, provider=None, args={"x": spec.Slot(0)}, output=1))


def start(job: int, plan: str = "plan") -> msg.StartJob:
    return msg.StartJob(
        job=job,
        at=0,
        spec=JobSpec(job_id=JobId(f"job {job}")),
        plan=plan,
        routes=("home", "home"),
        first=0,
        count=1,
        payload=b"",
        last=True,
    )


def token(job: int, value: Any) -> msg.Tokens:
    return msg.Tokens(job, 0, [(0, (0,), 0)], codec.dumps([value]))


class Site(SiteRuntime):
    def __init__(self, *, announced: bool = True) -> None:
        self.said: list[Any] = []
        self.changed = asyncio.Event()
        table = OperationTable("here", here.adapters.values())
        resources = SiteResources("here", table, codec, report=self._say, send=lambda *_: None, threads=1)
        super().__init__(resources, announced=announced)

    def _say(self, message: Any) -> None:
        self.said.append(message)
        self.changed.set()

    def take(self, *messages: Any) -> None:
        for message in messages:
            self.receive(message)

    async def answer(self, job: int, kind: type[Any]) -> Any:
        while True:
            for message in self.said:
                if type(message) is kind and message.job == job:
                    return message
            self.changed.clear()
            await self.changed.wait()

    async def result(self, job: int) -> Any:
        return codec.loads_batch((await self.answer(job, msg.ResultBatch)).payload)[0]


async def test_a_job_may_begin_after_one_with_a_larger_number() -> None:
    async with Site() as site:
        site.take(msg.SendNet("plan", 0, call("stats")))
        site.take(msg.Announce(1, 0, "plan", ["stats"]), msg.Announce(2, 0, "plan", ["stats"]))
        site.take(start(2), token(2, "two"))
        assert await site.result(2) == "two"
        site.take(token(1, "one"), start(1))  # another site was told before us
        assert await site.result(1) == "one"


async def test_the_net_of_an_announced_job_is_kept_however_many_come() -> None:
    async with Site() as site:
        site.take(msg.SendNet("plan", 0, call("stats")), msg.Announce(1, 0, "plan", ["stats"]))
        site.take(*(msg.SendNet(f"plan {number}", 0, call("stats")) for number in range(PROGRAMS_KEPT + 1)))
        site.take(start(1), token(1, "kept"))
        assert await site.result(1) == "kept"


async def test_what_comes_for_a_job_that_is_not_announced_is_late() -> None:
    async with Site() as site:
        site.take(msg.SendNet("plan", 0, call("stats")), token(5, "late"), msg.Announce(5, 0, "plan", ["stats"]))
        site.take(start(5), token(5, "in time"))
        assert await site.result(5) == "in time"
        site.take(msg.Announce(6, 0, "plan", ["stats"]), token(6, "early"), msg.Withdraw(6, 0), start(6))
        assert "was not announced" in (await site.answer(6, msg.JobBroken)).error.message
        assert not site._announced
        assert not site._early


async def test_a_cancelled_job_does_not_begin() -> None:
    async with Site() as site:
        site.take(msg.SendNet("plan", 0, call("stats")), msg.Announce(1, 0, "plan", ["stats"]), token(1, "early"))
        site.take(msg.CancelJob(1, 0))
        assert await site.answer(1, msg.JobStopped)
        site.take(start(1))
        assert await site.answer(1, msg.JobBroken)


async def test_what_comes_early_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_site, "_EARLY_BYTES", 10_000)
    async with Site() as site:
        site.take(msg.SendNet("plan", 0, call("stats")))
        site.take(msg.Announce(1, 0, "plan", ["stats"]), msg.Announce(2, 0, "plan", ["stats"]))
        site.take(*(token(1, "x" * 1000) for _ in range(50)))
        broken = [message for message in site.said if isinstance(message, msg.JobBroken)]
        assert len(broken) == 1
        assert "10,000 bytes to site 'here' before the job began" in broken[0].error.message
        site.take(token(2, "small"), start(2))
        assert await site.result(2) == "small"
        site.take(start(1))
        assert len([m for m in site.said if isinstance(m, msg.JobBroken) and m.job == 1]) == 2


async def test_a_job_calls_only_what_it_was_allowed_to() -> None:
    async with Site() as site:
        site.take(msg.SendNet("plan", 0, call("secrets")), msg.Announce(1, 0, "plan", ["stats"]))
        site.take(start(1), token(1, None))
        error = (await site.answer(1, msg.OperationError)).error
        assert error.type_name == "PermissionError"
        assert "not allowed to use operation 'secrets'" in error.message


@pytest.mark.parametrize("allowed", [True, False])
async def test_advice_is_given_only_about_what_a_job_may_use(allowed: bool) -> None:
    literals: tuple[Any, ...] = ("secrets", None, {}, ["x"], [])
    names = ("operation", "provider", "given", "asked", "closed")
    args: dict[str, spec.Formula] = {name: spec.NetLiteral(index) for index, name in enumerate(names)}
    async with Site() as site:
        action = spec.Call(operation=DISCOVER, provider=None, args=args, output=1)
        site.take(msg.SendNet("plan", 0, net(action, literals)))
        site.take(msg.Announce(1, 0, "plan", [DISCOVER, "secrets" if allowed else "stats"]))
        site.take(start(1), token(1, None))
        if allowed:
            assert "secret advice" in repr(await site.result(1))
        else:
            error = (await site.answer(1, msg.OperationError)).error
            assert "not allowed to use operation 'secrets'" in error.message


async def test_without_announcements_numbers_only_grow() -> None:
    async with Site(announced=False) as site:
        site.take(msg.SendNet("plan", 0, call("stats")), token(3, "early"), start(3))
        assert await site.result(3) == "early"
        site.take(token(2, "late"))
        assert not site._early


async def test_calls_of_others_run_only_where_workers_share_them(caplog: pytest.LogCaptureFixture) -> None:
    call_of_a_stranger = msg.RunCall(
        job=1,
        at=0,
        number=1,
        home="elsewhere",
        job_id="job",
        operation="secrets",
        provider=None,
        node="secrets#0",
        frame=(0,),
        attempt=1,
        payload=codec.dumps({}),
        retry=None,
        priority=0,
        trace=None,
        timed=False,
        computes=0.0,
    )
    async with Site() as site:
        sent: list[Any] = []
        site.resources.send = lambda *message: sent.append(message)
        site.take(call_of_a_stranger, msg.WorkerLent("elsewhere"))
    assert not sent  # leaving waits for threads
    assert caplog.text.count("ignores a message") == 2
