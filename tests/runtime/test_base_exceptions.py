"""Whatever the user's code raises, wherever it runs: it fails its call, and ends neither a worker nor the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dfm_async import Federation, Job, JobFailed, JobStatus, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.discovery import AdviceContext, ErrorFieldAdvice
from dfm_async.site import Site
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import first_value


class Odd(BaseException):
    """Not an Exception."""


ENDS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration, StopAsyncIteration)
KINDS: dict[str, type[BaseException]] = {kind.__name__: kind for kind in (ValueError, *ENDS, Odd)}


def fail(kind: str) -> Any:
    raise KINDS[kind]("on purpose")


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


class Unsendable:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return fail(self.kind)


class Unreadable(Unsendable):
    def __reduce__(self) -> Any:
        return fail, (self.kind,)


class Elements:
    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self.where = where

    def __iter__(self) -> Elements:
        return fail(self.kind) if self.where == "iter" else self

    def __next__(self) -> int:
        return fail(self.kind)  # type: ignore[no-any-return]


class AsyncElements:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __aiter__(self) -> AsyncElements:
        return self

    async def __anext__(self) -> int:
        return fail(self.kind)  # type: ignore[no-any-return]


class BadReason(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __reduce__(self) -> Any:
        return fail(self.kind)


class Vault:
    def secret_for_key(self, key: str) -> Any:
        return fail(key)


class AsyncVault:
    async def secret_for_key(self, key: str) -> Any:
        return fail(key)


_current = [""]
"""What constructors of site objects raise, which have no arguments of the pipeline; only in this process."""

fed = Federation("odd")
lab = fed.site("lab", vault=Vault())
desk = fed.site("desk", vault=AsyncVault())


@lab.operation
def sync(kind: str) -> Any:
    fail(kind)


@lab.operation(deadline=60.0)
def limited(kind: str) -> Any:
    fail(kind)


@lab.operation(retry=RetryPolicy(attempts=2, backoff=0.0))
async def tried(kind: str) -> Any:
    fail(kind)


@lab.operation
async def asynchronous(kind: str) -> Any:
    fail(kind)


@lab.operation
def generator(kind: str) -> Iterator[int]:
    yield 1
    fail(kind)


@lab.operation
async def async_generator(kind: str) -> AsyncIterator[int]:
    yield 1
    fail(kind)


@lab.operation
def iterator(kind: str) -> Any:
    return Elements(kind, "next")


@lab.operation
def bad_iter(kind: str) -> Any:
    return Elements(kind, "iter")


@lab.operation
async def async_iterator(kind: str) -> Any:
    return AsyncElements(kind)


@lab.operation
def unsendable(kind: str) -> Any:
    return Unsendable(kind)


@lab.operation
def unsendable_elements(kind: str) -> Iterator[Any]:
    yield Unsendable(kind)


@lab.operation
def bad_reason(kind: str) -> Any:
    raise BadReason(kind)


@lab.operation
def secret(kind: str, context: Any) -> Any:
    return context.wait(context.secret(kind))


@desk.operation
async def async_secret(kind: str, context: Any) -> Any:
    return await context.secret(kind)


@lab.operation(name="Body")
class Body:
    def body(self, kind: str) -> Any:
        fail(kind)


def _constructed(kind: str) -> type[Any]:
    class Constructed:
        def __init__(self) -> None:
            fail(kind)

        def body(self, kind: str) -> Any:
            return kind

    return Constructed


def _constructed_async(kind: str) -> type[Any]:
    class Constructed(_constructed(kind)):  # type: ignore[misc]
        async def body(self, kind: str) -> Any:
            return kind

    return Constructed


@lab.operation
def good(x: int) -> int:
    return x


CONSTRUCTED = {kind: lab.operation(_constructed(kind), name=f"built{kind}") for kind in KINDS}
CONSTRUCTED_ASYNC = {kind: lab.operation(_constructed_async(kind), name=f"awaited{kind}") for kind in KINDS}
CONSTRUCTED_LATE = {kind: lab.operation(_constructed(kind), name=f"limited{kind}", deadline=60.0) for kind in KINDS}

OPERATIONS: list[Any] = [
    *(sync, limited, tried, asynchronous, generator, async_generator, iterator, bad_iter, async_iterator),
    *(unsendable, unsendable_elements, bad_reason, secret, async_secret, Body),
]

ENDS_AN_ITERATOR = {("iterator", "StopIteration"), ("async_iterator", "StopAsyncIteration")}

works = pipeline_of(good, "x")


async def ended(job: Job) -> JobStatus:
    async with asyncio.timeout(30):
        try:
            return await job
        except JobFailed:
            return job.status


async def test_an_operation_that_raises_anything_fails_its_call(session: Session) -> None:
    wrong = []
    for operation in OPERATIONS:
        place = operation.name
        pipeline = pipeline_of(operation, "kind")
        jobs = {kind: await session.execute(pipeline, {"kind": kind}) for kind in KINDS}
        for kind, job in jobs.items():
            fine = JobStatus.FINISHED if (place, kind) in ENDS_AN_ITERATOR else JobStatus.FAILED
            status = await ended(job)
            if status is not fine:
                wrong.append((place, kind, status, job.info().reason))
    for kinds in (CONSTRUCTED, CONSTRUCTED_ASYNC, CONSTRUCTED_LATE):
        for kind, operation in kinds.items():
            status = await ended(await session.execute(pipeline_of(operation, "kind"), {"kind": kind}))
            if status is not JobStatus.FAILED:
                wrong.append((operation.name, kind, status, None))
    assert not wrong
    assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED
    assert all(site.restarts == 0 for site in session.stats().sites.values())


async def test_a_value_that_cannot_be_rebuilt_in_the_application_fails_its_reader() -> None:
    pipeline = pipeline_of(unreadable, "kind")
    async with Session(fed) as session:
        for kind in KINDS:
            job = await session.execute(pipeline, {"kind": kind})
            async with asyncio.timeout(30):
                found = [item async for item in job.results(errors="yield")]
            assert len(found) >= 1
        assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


@lab.operation
def unreadable(kind: str) -> Any:
    return Unreadable(kind)


@pytest.mark.parametrize("asynchronously", [False, True], ids=["sync", "async"])
async def test_a_callback_that_raises_anything_is_reported_and_others_run(
    session: Session, asynchronously: bool
) -> None:
    called: list[str] = []

    def callback(_site: str, _node: str, frame: Any, _place: str, value: int) -> Any:
        called.append(str(value))
        if value < len(KINDS):
            fail(list(KINDS)[value])

    async def async_callback(*args: Any) -> None:
        callback(*args)

    chosen: Any = async_callback if asynchronously else callback
    count = len(KINDS) + 1
    job = await session.execute(works, [{"x": x} for x in range(count)], default_callback=chosen)
    await job
    assert sorted(called) == [str(x) for x in range(count)]
    assert len(job.callback_errors) == len(KINDS)


async def _inputs(kind: str) -> AsyncIterator[int]:
    yield 0
    if kind == "cancels itself":
        cancel_own_task()
        await asyncio.sleep(0)
    fail(kind)


def _sync_inputs(kind: str) -> Iterator[int]:
    yield 0
    fail(kind)


@pytest.mark.parametrize("kind", [*KINDS, "cancels itself"])
async def test_a_stream_of_parameters_that_raises_anything_fails_its_job(session: Session, kind: str) -> None:
    async def sets() -> AsyncIterator[dict[str, int]]:
        async for number in _inputs(kind):
            yield {"x": number}

    job = await session.execute(works, sets())
    assert await ended(job) is JobStatus.FAILED
    assert not job.info().accepts
    assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


@pytest.mark.parametrize("kind", [*KINDS, "cancels itself"])
@pytest.mark.parametrize("inputs", [_inputs, _sync_inputs], ids=["async", "sync"])
async def test_inputs_of_a_map_that_raise_anything_end_it_with_an_error(
    session: Session, inputs: Any, kind: str
) -> None:
    if inputs is _sync_inputs and kind == "cancels itself":
        kind = "CancelledError"
    found: list[int] = []
    async with asyncio.timeout(30):
        with pytest.raises((ValueError, RuntimeError)):
            async for value in session.map(good, inputs(kind), site="lab"):
                found.append(value)
    assert found == [0]
    assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


@pytest.mark.parametrize("closing", [False, True], ids=["job", "session"])
async def test_a_stream_of_parameters_that_waits_ends_with_its_job(connect: Connect, closing: bool) -> None:
    async def sets() -> AsyncIterator[dict[str, int]]:
        try:
            yield {"x": 1}
            await asyncio.sleep(1000)
        finally:
            fail("Odd")

    async with connect(fed) as session:
        job = await session.execute(works, sets())
        assert (await job.first()).value == 1
        if not closing:
            await job.cancel()
            assert job.info().status is JobStatus.ABORTED
            assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


class RaisingSite(Site):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fail(_current[0])


class UsesSite:
    def __init__(self, site: Any) -> None:
        self.site = site

    async def body(self, x: int) -> int:
        return x


@pytest.mark.parametrize("kind", list(KINDS))
async def test_a_site_object_that_cannot_be_built_fails_the_call(kind: str) -> None:
    _current[0] = kind
    built = Federation("built")
    site = built.site("lab", impl=RaisingSite)
    operation = site.operation(UsesSite, name="uses")
    pipeline = pipeline_of(operation, "x")
    async with Session(built, target="inline") as session:
        with pytest.raises(JobFailed, match="cannot be built"):
            async with asyncio.timeout(30):
                await (await session.execute(pipeline, {"x": 1}))


# cancelling one's own task


@lab.operation
async def cancels_itself(mode: str) -> str:
    task = asyncio.current_task()
    assert task is not None
    if mode == "child":

        async def cancel() -> None:
            task.cancel()

        other = asyncio.create_task(cancel())
        await asyncio.sleep(100)
        await other
    task.cancel()
    if mode == "now":
        await asyncio.sleep(0)
    if mode == "raise":
        raise ValueError(mode)
    return mode


@lab.operation(retry=RetryPolicy(attempts=3, backoff=0.0))
async def cancels_and_raises(context: Any) -> int:
    if context.attempt < 3:
        cancel_own_task()
        raise ValueError(context.attempt)
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
    return int(context.attempt)


@lab.operation(deadline=60.0)
async def cancels_with_deadline() -> None:
    cancel_own_task()
    await asyncio.sleep(0)


@lab.operation
async def stream_that_cancels(awaits: bool) -> AsyncIterator[int]:
    yield 1
    cancel_own_task()
    if awaits:
        await asyncio.sleep(0)
    yield 2


@lab.operation
async def add(numbers: Any) -> int:
    return sum([number async for number in numbers])


@desk.operation
async def add_elsewhere(numbers: list[int]) -> int:
    return sum(numbers)


@lab.operation
async def closes_badly() -> AsyncIterator[int]:
    try:
        for number in range(1000):
            yield number
    finally:
        cancel_own_task()
        await asyncio.sleep(0)


@lab.operation
async def takes_one(numbers: Any) -> int:
    return int(await anext(numbers))


@pytest.mark.parametrize("mode", ["now", "child", "raise"])
async def test_an_operation_that_cancels_its_own_task_fails(session: Session, mode: str) -> None:
    pipeline = pipeline_of(cancels_itself, "mode")
    assert await ended(await session.execute(pipeline, {"mode": mode})) is JobStatus.FAILED
    assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


async def test_a_retry_does_not_inherit_the_cancellation_of_the_try_before(session: Session) -> None:
    pipeline = pipeline_of(cancels_and_raises)
    assert await first_value(session, pipeline, {}) == 3


async def test_an_operation_with_a_deadline_that_cancels_itself_fails(session: Session) -> None:
    pipeline = pipeline_of(cancels_with_deadline)
    assert await ended(await session.execute(pipeline, {})) is JobStatus.FAILED


@pytest.mark.parametrize("awaits", [True, False], ids=["awaits", "goes on"])
@pytest.mark.parametrize("reader", [None, add, add_elsewhere], ids=["result", "here", "elsewhere"])
async def test_a_generator_that_cancels_its_task_fails_its_job(session: Session, reader: Any, awaits: bool) -> None:
    with Pipeline("stream") as pipeline:
        found = stream_that_cancels(PlaceParam("awaits"))
        Yield(found if reader is None else reader(found))
    status = await ended(await session.execute(pipeline, {"awaits": awaits}))
    # Without an await after it, the reader may have all elements before anything is cancelled.
    assert status is JobStatus.FAILED or (reader is not None and not awaits)
    assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


async def test_generator_that_cancels_its_task_on_close_affects_no_other(session: Session) -> None:
    pipeline = yielding(lambda: takes_one(closes_badly()))
    assert await ended(await session.execute(pipeline, {})) is JobStatus.FINISHED
    assert await ended(await session.execute(works, {"x": 1})) is JobStatus.FINISHED


async def test_a_callback_that_cancels_its_own_task_is_reported(session: Session) -> None:
    seen: list[int] = []

    async def callback(_site: str, _node: str, _frame: Any, _place: str, value: int) -> None:
        seen.append(value)
        cancel_own_task()
        await asyncio.sleep(0)

    job = await session.execute(works, [{"x": x} for x in range(3)], default_callback=callback)
    await job
    assert sorted(seen) == [0, 1, 2]
    assert [type(error) for error in job.callback_errors] == [asyncio.CancelledError] * 3


# advisors, and the ends of objects


@pytest.mark.parametrize("mode", ["sync", "async", "cancels itself"])
async def test_an_advisor_that_raises_anything_is_an_error_of_its_node(connect: Connect, mode: str) -> None:
    advised = Federation("advised")
    here = advised.site("here")
    raised = list(KINDS) if mode != "cancels itself" else ["CancelledError"]
    for kind in raised:

        def operation(x: int) -> int:
            return x

        made = here.operation(operation, name=f"advised{kind}")
        if mode == "sync":

            @made.advisor("x")
            def advise(value: Any, context: AdviceContext, kind: str = kind) -> Any:
                return fail(kind)

        else:

            @made.advisor("x")
            async def advise_later(value: Any, context: AdviceContext, kind: str = kind) -> Any:
                if mode == "async":
                    fail(kind)
                cancel_own_task()
                await asyncio.sleep(0)

    with Pipeline(mode="discovery") as pipeline:
        for kind in raised:
            getattr(advised.operations, f"advised{kind}")()
    async with connect(advised) as session, asyncio.timeout(30):
        nodes = (await session.discover(pipeline)).sites["here"]
        assert all(isinstance(getattr(advice, "edge", None), ErrorFieldAdvice) for advice in nodes.values()), nodes
        assert len(nodes) == len(raised)
        assert all(site.restarts == 0 for site in session.stats().sites.values())


def _closed(kind: str, *, asynchronous: bool) -> type[Any]:
    class Closed:
        def body(self, kind: str) -> Any:
            return kind

        def close(self) -> None:
            fail(kind)

    class AsyncClosed(Closed):
        async def aclose(self) -> None:
            fail(kind)

    return AsyncClosed if asynchronous else Closed


CLOSED: list[Any] = [
    lab.operation(_closed(kind, asynchronous=asynchronous), name=f"{'a' * asynchronous}closed{kind}")
    for kind in KINDS
    for asynchronous in (False, True)
]


async def test_an_object_whose_end_raises_anything_does_not_change_its_job(session: Session) -> None:
    for operation in CLOSED:
        job = await session.execute(pipeline_of(operation, "kind"), {"kind": operation.name})
        assert await ended(job) is JobStatus.FINISHED
    assert all(site.restarts == 0 for site in session.stats().sites.values())
