"""Operations that are defined, or defined again, while a session is open: the next job runs the new code."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Advise,
    Federation,
    JobStatus,
    LocalOptions,
    Operation,
    Pipeline,
    PipelineError,
    PlaceParam,
    RetryPolicy,
    Session,
    Site,
)
from dfm_async.discovery import AdvisedOneOf
from dfm_async.errors import DfmError, ShippingError
from dfm_async.federation import VaultConfig
from dfm_async.testing import Gate, override, returns
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of, yielding


@pytest.fixture
def fed() -> Federation:
    return Federation("redefined")


@pytest.fixture
def lab(fed: Federation) -> Site:
    return fed.site("lab")


def define(site: Site, added: int, **options: Any) -> Operation[..., Any]:
    """Defines an operation, or the same one again with other code, as a notebook cell that is run again does."""

    @site.operation(**options)
    def f(x: int) -> int:
        return x + added

    return f


def one(operation: Any, *args: Any, **options: Any) -> Pipeline:
    return yielding(lambda: operation(*(args or (PlaceParam("x"),)), **options))


async def value(session: Session, pipeline: Any, params: Any = None) -> Any:
    job = await session.execute(pipeline, {"x": 1} if params is None else params)
    return (await job.first()).value


@pytest.mark.parametrize("where", ["lab", "home"])
@pytest.mark.parametrize("options", [{}, {"in_process": True}], ids=["", "in a process"])
async def test_the_next_job_runs_the_code_of_a_redefined_operation(
    connect: Connect, where: str, options: dict[str, Any]
) -> None:
    fed = Federation("again")
    site = fed.site(where)
    pipeline = one(define(site, 1, **options))
    async with connect(fed) as session:
        assert await value(session, pipeline) == 2
        redefined = one(define(site, 100, **options))
        assert await value(session, redefined) == 101
        assert await value(session, pipeline) == 101, "pipelines name operations"
        assert await value(session, one(define(site, 1, **options))) == 2, "and back again"


async def test_operations_and_sites_that_are_added_can_be_used(connect: Connect, fed: Federation, lab: Site) -> None:
    first = define(lab, 1)
    async with connect(fed) as session:
        assert await value(session, one(first)) == 2

        @lab.operation
        def g(x: int) -> int:
            return x * 10

        desk = fed.site("desk")

        @desk.operation
        async def h(x: int) -> int:
            return x * 100

        pipeline = yielding(lambda: h(g(first(PlaceParam("x")))))
        assert await value(session, pipeline) == 2000


async def test_a_redefined_pipeline_function_has_new_steps(connect: Connect, fed: Federation, lab: Site) -> None:
    def record(times: int) -> Any:
        @fed.pipeline
        def repeated(x: int) -> int:
            for _ in range(times):
                x = f(x)
            return x

        return repeated

    f: Any = define(lab, 1)
    async with connect(fed) as session:
        assert await session.run(record(1), x=0) == 1
        assert await session.run(record(3), x=0) == 3
        f = define(lab, 100)
        assert await session.run(record(2), x=0) == 200
        assert await session.call(f, 1) == 101


async def test_a_job_keeps_the_code_that_it_began_with(connect: Connect, fed: Federation, lab: Site) -> None:
    @lab.operation
    async def wait(gate: Gate, x: int) -> int:
        await gate.arrive()
        return x

    define(lab, 1)
    pipeline = yielding(lambda: fed.operations["f"](wait(PlaceParam("gate"), PlaceParam("x"))))
    with Gate() as gate:
        async with connect(fed) as session:
            running = await session.execute(pipeline, {"gate": gate, "x": 1})
            await gate.arrived()
            define(lab, 100)
            assert await value(session, one(fed.operations["f"])) == 101
            gate.open()
            assert (await running.first()).value == 2
            await running
            assert await value(session, pipeline, {"gate": gate, "x": 1}) == 101


async def test_a_plan_that_was_made_before_runs_the_new_code_or_is_refused(
    connect: Connect, fed: Federation, lab: Site
) -> None:
    pipeline = one(define(lab, 1))
    async with connect(fed) as session:
        plan = await session.prepare(pipeline)
        assert await value(session, plan) == 2
        define(lab, 100)
        assert await value(session, plan) == 101

        def other(code: Callable[..., Any]) -> None:
            code.__qualname__ = "define.<locals>.f"
            lab.operation(code, name="f")

        other(lambda x, y=5: x + y)
        assert await value(session, plan) == 6
        other(lambda x, y: x + y)
        for what in (plan, pipeline):
            with pytest.raises(PipelineError, match="'y'"):
                await session.execute(what, {"x": 1})
        other(lambda z: z)
        with pytest.raises(
            PipelineError, match=r"f#0: operation 'f' has changed since .*: parameter 'z' of operation 'f' is missing"
        ):
            await session.execute(plan, {"x": 1})
        del lab.adapters["f", None]
        define(lab, 1, name="renamed")
        with pytest.raises(PipelineError, match="has no 'f' at site 'lab'"):
            await session.execute(plan, {"x": 1})
        assert await value(session, one(fed.operations["renamed"])) == 2


async def test_declared_types_are_those_of_the_new_definition(connect: Connect, fed: Federation, lab: Site) -> None:
    def act(hint: Any) -> None:
        def act(x):  # type: ignore[no-untyped-def]
            return repr(x)

        act.__annotations__ = {"x": hint, "return": str}
        lab.operation(act)

    act(float)
    pipeline = one(fed.operations["act"])
    async with connect(fed) as session:
        plan = await session.prepare(pipeline)
        assert await value(session, plan) == "1.0"
        act(list[int])
        assert await value(session, plan, {"x": (1, 2)}) == "[1, 2]"
        assert await value(session, pipeline, {"x": (1, 2)}) == "[1, 2]"


async def test_all_sites_that_offer_the_code_of_an_operation_run_what_it_is_now(connect: Connect) -> None:
    fed = Federation("shared")
    lab, desk, shop = fed.site("lab"), fed.site("desk"), fed.site("shop")
    f = define(lab, 1, deadline=60.0)
    desk.operation(f)
    desk.operation(f, provider="p", deadline=30.0)

    @shop.implements(f)
    def other(x: int) -> int:
        return -x

    sites: list[dict[str, Any]] = [{"site": "lab"}, {"site": "desk", "provider": None}, {"site": "shop"}]
    async with connect(fed) as session:
        assert [await value(session, one(f, **options)) for options in sites] == [2, 2, -1]
        again = define(lab, 100, retry=RetryPolicy(attempts=2))
        assert [await value(session, one(again, **options)) for options in sites] == [101, 101, -1]
        assert await value(session, one(again, site="desk", provider="p")) == 101
    assert desk.adapters["f", None].deadline is None
    assert desk.adapters["f", "p"].deadline == 30.0, "a site's own options stay"
    assert desk.adapters["f", None].retry == desk.adapters["f", "p"].retry == RetryPolicy(attempts=2)


async def test_a_redefined_class_is_built_from_its_new_code(connect: Connect, fed: Federation, lab: Site) -> None:
    def make(added: int) -> Any:
        class Adder:
            def body(self, x: int) -> int:
                return x + added

        return lab.operation(Adder)

    async with connect(fed) as session:
        assert [await value(session, one(make(added))) for added in (1, 10)] == [2, 11]


async def test_advisors_that_are_added_are_asked(connect: Connect, fed: Federation, lab: Site) -> None:
    f = define(lab, 1)
    with Pipeline("ask", mode="discovery") as pipeline:
        f(Advise())
    async with connect(fed) as session:
        assert await value(session, one(f)) == 2

        @f.advisor("x")
        def of_all(value: Any, context: Any) -> AdvisedOneOf:
            return AdvisedOneOf([1, 2])

        assert "1" in str(await session.discover(pipeline))

        @lab.advisor(f, "x")
        def of_lab(value: Any, context: Any) -> AdvisedOneOf:
            return AdvisedOneOf([77])

        assert "77" in str(await session.discover(pipeline))


async def test_fakes_replace_operations_that_are_defined_later(connect: Connect, fed: Federation, lab: Site) -> None:
    f = define(lab, 1)
    async with connect(fed) as session:
        assert await value(session, one(f)) == 2
        with override(fed, f, returns(7)):
            assert await value(session, one(f)) == 7
            f = define(lab, 100)
            assert await value(session, one(f)) == 7
            g = define(lab, 5, name="g")
            assert await value(session, one(g)) == 6
            with override(fed, g, returns(8)):
                assert await value(session, one(g)) == 8
        assert await value(session, one(f)) == 101
        assert await value(session, one(g)) == 6


async def test_code_that_cannot_be_sent_is_refused_when_it_is_needed(fed: Federation, lab: Site) -> None:
    f = define(lab, 1)
    async with Session(fed) as session:
        assert await value(session, one(f)) == 2
        lock = threading.Lock()

        @lab.operation
        def g(x: int) -> bool:
            return lock.locked()

        with pytest.raises(ShippingError, match="'g'"):
            await session.execute(one(g), {"x": 1})
        assert await value(session, one(define(lab, 100))) == 101
        assert [job.status.name for job in session.jobs()] == ["FINISHED", "FINISHED"]


def refers_to(lock: object, lab: Site) -> Operation[..., Any]:
    @lab.operation
    def bad(x: int) -> bool:
        return lock is None

    return bad


async def test_code_that_cannot_be_sent_fails_only_jobs_that_use_it(fed: Federation, lab: Site) -> None:
    f, other = define(lab, 1), define(fed.site("desk"), 5, name="other")
    async with Session(fed) as session:
        bad = refers_to(threading.Lock(), lab)
        assert await session.call(f, 1) == 2
        assert await session.call(other, 1) == 6
        for _ in range(2):
            with pytest.raises(ShippingError, match=r"'bad' of site 'lab'.* it refers to the variable 'lock': "):
                await session.call(bad, 1)
        with override(fed, f, returns(7)):
            assert await session.call(f, 1) == 7
        assert await session.call(define(lab, 100), 1) == 101
        assert await session.call(refers_to(None, lab), 1) is True


async def test_an_operation_without_capacity_fails_only_jobs_that_use_it(fed: Federation, lab: Site) -> None:
    f = define(lab, 1)
    async with Session(fed) as session:

        @lab.operation(memory="100TB")
        def huge(x: int) -> int:
            return x

        assert await session.call(f, 1) == 2
        with pytest.raises(DfmError, match="operation 'huge' of site 'lab'"):
            await session.call(huge, 1)


async def test_workers_are_kept_unless_their_code_changes() -> None:
    fed = Federation("kept")
    lab, desk = fed.site("lab"), fed.site("desk")

    def lab_pid() -> Pipeline:
        @lab.operation
        def pid(x: int) -> int:
            return os.getpid()

        return one(pid)

    @desk.operation
    def desk_pid(x: int) -> int:
        return os.getpid()

    async with Session(fed, options=LocalOptions(lanes=1)) as session:
        first, second = await value(session, lab_pid()), await value(session, one(desk_pid))
        assert await value(session, lab_pid()) == first, "the same code again"
        define(desk, 1)
        assert await value(session, lab_pid()) == first
        assert await value(session, one(desk_pid)) != second
        assert session.stats().sites["desk"].restarts == 0, "nothing was lost"


async def test_a_module_that_is_loaded_again_is_loaded_by_the_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fed: Federation, lab: Site
) -> None:
    file = tmp_path / "reloaded_cell.py"
    file.write_text("def f(x: int) -> int:\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = importlib.import_module("reloaded_cell")
    lab.operation(module.f)
    try:
        async with Session(fed) as session:
            assert await value(session, one(fed.operations["f"])) == 2
            file.write_text("def f(x: int) -> int:\n    return x + 10000\n")
            lab.operation(importlib.reload(module).f)
            assert await value(session, one(fed.operations["f"])) == 10001
    finally:
        del sys.modules["reloaded_cell"]


@pytest.mark.parametrize("again", ["execute", "resume"])
async def test_job_is_submitted_once_while_a_new_site_starts(tmp_path: Path, again: str) -> None:
    federation, gate = Federation("once"), asyncio.Event()
    runs: list[int] = []

    @federation.site("lab").operation
    async def count(x: int) -> int:
        runs.append(x)
        await gate.wait()
        return x

    pipeline = pipeline_of(count, "x")
    secrets = tmp_path / "secrets.json"
    secrets.write_text("{}")
    secrets.chmod(0o600)
    options = LocalOptions(shutdown_grace=0.5)
    store = f"sqlite:///{tmp_path}/jobs.db"
    if again == "resume":
        async with Session(federation, target="inline", store=store, options=options) as session:
            await session.execute(pipeline, {"x": 1}, job_id="same")
    runs.clear()
    gate.set()
    async with Session(federation, target="inline", store=store, options=options) as session:
        # Its vault opens in a thread.
        federation.site("new", vault=VaultConfig(path="file", args={"path": str(secrets)}))

        async def submit() -> JobStatus:
            if again == "resume":
                return await (await session.resume("same"))
            return await (await session.execute(pipeline, {"x": 1}, job_id="same"))

        assert await asyncio.gather(submit(), submit()) == [JobStatus.FINISHED] * 2
    assert runs == [1]


async def test_job_submitted_before_a_redefinition_runs_the_code_that_was_there(connect: Connect) -> None:
    federation = Federation("at once")
    lab = federation.site("lab")

    def added(number: int) -> Pipeline:
        operation = define(lab, number)
        return pipeline_of(operation, "x")

    async with connect(federation) as session:
        first = await session.execute(added(1), {"x": 0})
        second = await session.execute(added(100), {"x": 0})
        assert [(await job.first()).value for job in (first, second)] == [1, 100]
