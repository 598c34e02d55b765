"""Fakes in the place of operations, on both targets."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import pytest

from dfm_async import (
    Federation,
    JobFailed,
    OperationContext,
    OperationFailed,
    Pipeline,
    PlaceParam,
    Program,
    RetryPolicy,
    Session,
    Yield,
)
from dfm_async.testing import Call, Fake, Gate, override, raises, returns
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of

fed = Federation("shop")
store, desk = fed.site("store"), fed.site("desk")


@store.operation
async def price(item: str, count: int = 1) -> float:
    return 1.0 * count


@desk.operation
def tax(amount: float) -> float:
    return amount / 10


@store.operation
def items(n: int) -> Iterator[int]:
    yield from range(n)


@store.operation
async def later_items(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


@desk.operation
def total(*amounts: float, start: float = 0.0) -> float:
    return sum(amounts, start)


@desk.operation
async def joined(numbers: AsyncIterator[int]) -> str:
    return ",".join([str(number) async for number in numbers])


@store.operation(retry=RetryPolicy(attempts=3, backoff=0.0))
async def flaky(x: int) -> int:
    return x


@desk.implements(price)
async def price_at_the_desk(item: str, count: int = 5) -> float:
    return 2.0


class Broken:
    """Cannot even be built."""

    def __init__(self) -> None:
        raise ConnectionError("no database here")

    async def body(self, x: int) -> int:
        return x


stored = store.operation(Broken, name="stored")


@store.operation(program=Program(argv=["/does/not/exist"]))
def trained(weights: list[float], rate: float = 0.1) -> list[float]: ...  # type: ignore[empty-body]


@store.operation
async def wait_there(gate: Gate) -> int:
    await gate.arrive()
    return os.getpid()


def one(operation: Any, **arguments: Any) -> Pipeline:
    with Pipeline("one") as pipeline:
        Yield(operation(**arguments))
    return pipeline


async def values(session: Session, pipeline: Pipeline, params: Any = {}) -> list[Any]:  # noqa: B006
    job = await session.execute(pipeline, params)
    return [result.value async for result in job.results(ordered=True)]


PRICE = one(price, item="tea", site="store")


@pytest.mark.parametrize("before", [True, False], ids=["connected before", "connected after"])
async def test_a_fake_runs_in_the_place_of_an_operation_and_is_undone(connect: Connect, before: bool) -> None:
    async def fake(item: str, count: int = 1) -> float:
        return 7.0

    if before:
        async with connect(fed) as session:
            assert await values(session, PRICE) == [1.0]
            with override(fed, "price", fake):
                assert await values(session, PRICE) == [7.0]
            assert await values(session, PRICE) == [1.0]
            with override(fed, price, returns(8.0)):
                assert await values(session, PRICE) == [8.0]
    else:
        with override(fed, "price", fake):
            async with connect(fed) as session:
                assert await values(session, PRICE) == [7.0]
        async with connect(fed) as session:
            assert await values(session, PRICE) == [1.0]
    assert all(adapter.callee is None for site in fed.sites.values() for adapter in site.adapters.values())


async def test_calls_are_recorded_with_names_site_and_frame(session: Session) -> None:
    with Pipeline("prices") as pipeline:
        Yield(price(PlaceParam("item"), site="store"))
    with override(fed, "price", returns(3.0)) as fake:
        assert await values(session, pipeline, [{"item": "tea"}, {"item": "milk"}]) == [3.0, 3.0]
    found = sorted(fake.calls, key=lambda call: call.frame)
    assert [(call.arguments, call.site, call.frame) for call in found] == [
        ({"item": "tea"}, "store", (0,)),
        ({"item": "milk"}, "store", (1,)),
    ]
    assert isinstance(found[0], Call)
    assert (found[0].operation, found[0].attempt, found[0].node) == ("price", 1, "price#0")
    assert repr(fake) == "<Fake fake: 2 calls>"


async def test_fake_can_use_variables_of_the_test(connect: Connect) -> None:
    seen: list[str] = []
    asked = asyncio.Event()

    def fake(item: str, **others: Any) -> float:
        seen.append(item)
        asked.set()
        return 5.0

    async with connect(fed) as session:
        with override(fed, "price", fake):
            job = await session.execute(PRICE)
            await asked.wait()
            assert (await job.first()).value == 5.0
    assert seen == ["tea"]


def _yield_some(n: int) -> Iterator[int]:
    yield from (n, n + 1)


async def _yield_later(n: int) -> AsyncIterator[int]:
    yield n
    yield n + 1


@pytest.mark.parametrize("operation", [items, later_items], ids=["generator", "async generator"])
@pytest.mark.parametrize("fake", [_yield_some, _yield_later, returns([4, 5])], ids=["sync", "async", "value"])
async def test_a_generator_can_be_faked(session: Session, operation: Any, fake: Any) -> None:
    with override(fed, operation, fake):
        assert await values(session, one(operation, n=4)) == [4, 5]
    assert await values(session, one(operation, n=2)) == [0, 1]


@pytest.mark.parametrize("fake", [_yield_some, _yield_later], ids=["sync", "async"])
@pytest.mark.parametrize("at", ["store", "desk"])
async def test_a_function_can_be_faked_by_a_generator(session: Session, fake: Any, at: str) -> None:
    operation = flaky if at == "store" else tax
    adapted: Any = (lambda x: fake(x)) if at == "store" else (lambda amount: fake(amount))
    with override(fed, operation, adapted):
        argument = {"x": 1} if at == "store" else {"amount": 1}
        assert await values(session, one(operation, **argument)) == [1, 2]


async def test_generator_faked_by_a_plain_value_raises(session: Session) -> None:
    with override(fed, items, returns(5)), pytest.raises(JobFailed, match="must yield, or return a list, not 5"):
        await values(session, one(items, n=1))


async def test_a_synchronous_operation_can_be_faked_by_any_function(session: Session) -> None:
    async def later(amount: float) -> float:
        await asyncio.sleep(0)
        return amount + 1

    for fake in (later, lambda amount: amount + 1, mock.Mock(return_value=4.0), mock.AsyncMock(return_value=4.0)):
        with override(fed, tax, fake):
            assert await values(session, one(tax, amount=3.0)) == [4.0]
    assert await values(session, one(tax, amount=3.0)) == [0.3]


async def test_error_of_a_fake_is_the_error_of_the_operation(session: Session) -> None:
    with override(fed, "tax", raises(KeyError("nowhere"))) as fake:
        with pytest.raises(JobFailed) as caught:
            await values(session, one(tax, amount=1.0))
    assert isinstance(caught.value.errors[0], OperationFailed)
    assert caught.value.errors[0].type_name == "KeyError"
    assert len(fake.calls) == 1


async def test_returns_gives_one_value_per_call_and_then_the_last(session: Session) -> None:
    with override(fed, "price", returns(1, 2)):
        assert [(await values(session, PRICE))[0] for _ in range(3)] == [1, 2, 2]
    with override(fed, "price", returns()):
        assert await values(session, PRICE) == [None]


async def test_a_retried_call_is_recorded_as_often_as_it_is_tried(session: Session) -> None:
    def fake(x: int, context: OperationContext) -> int:
        assert (context.operation, context.cancelled) == ("flaky", False)
        if context.attempt < 3:
            raise OSError("try again")
        return x

    with override(fed, flaky, fake) as made:
        assert await values(session, one(flaky, x=9)) == [9]
    assert [call.attempt for call in made.calls] == [1, 2, 3]


async def test_only_the_chosen_site_is_faked(session: Session) -> None:
    with override(fed, price, returns(9.0), site=desk):
        assert await values(session, PRICE) == [1.0]
        assert await values(session, one(price, item="tea", site="desk")) == [9.0]


async def test_the_innermost_override_counts(session: Session) -> None:
    with override(fed, price, returns(1)), override(fed, price, returns(2)) as inner:
        assert await values(session, PRICE) == [2]
    assert len(inner.calls) == 1


async def test_positional_arguments_arrive(session: Session) -> None:
    with Pipeline("sum") as pipeline:
        Yield(total(1.0, 2.0, start=3.0))
    with override(fed, total, lambda *amounts, start: [amounts, start]) as fake:
        assert await values(session, pipeline) == [[(1.0, 2.0), 3.0]]
    assert fake.calls[0].arguments == {"amounts": (1.0, 2.0), "start": 3.0}
    assert await values(session, pipeline) == [6.0]


async def test_a_fake_gets_the_defaults_of_the_code_that_it_replaces(session: Session) -> None:
    def fake(item: str, count: int) -> float:
        return float(count)

    def fake_total(*amounts: float, start: float) -> float:
        return sum(amounts) + start + 100

    with override(fed, price, fake) as found:
        assert await values(session, PRICE) == [1.0]
        assert await values(session, one(price, item="tea", site="desk")) == [5.0]
        assert await values(session, one(price, item="tea", count=3, site="desk")) == [3.0]
    assert dict(found.calls[0].arguments) == {"item": "tea"}, "what the pipeline passes"
    with override(fed, total, fake_total):
        with Pipeline("sum") as pipeline:
            Yield(total(1.0, 2.0))
        assert await values(session, pipeline) == [103.0]


async def test_streams_come_to_a_fake_as_lists_and_to_the_operation_as_streams(session: Session) -> None:
    with Pipeline("streams") as pipeline:
        Yield(joined(later_items(3)))
    with override(fed, joined, lambda numbers: numbers):
        assert await values(session, pipeline) == [[0, 1, 2]]
    with override(fed, price, returns(1.0)):
        assert await values(session, pipeline) == ["0,1,2"]


async def test_the_object_of_a_class_is_not_built_for_a_fake(session: Session) -> None:
    with override(fed, stored, returns(3)):
        assert await values(session, one(stored, x=1)) == [3]
    with override(fed, price, returns(0)), pytest.raises(JobFailed, match="no database here"):
        await values(session, one(stored, x=1))


async def test_a_program_that_is_faked_is_not_started(session: Session) -> None:
    with Pipeline("train") as pipeline:
        Yield(trained([1.0]))
    with override(fed, trained, lambda weights, rate=0.0: [rate, *weights]) as fake:
        assert await values(session, pipeline) == [[0.1, 1.0]]
    assert fake.calls[0].arguments == {"weights": [1.0], "rate": 0.1}


async def test_job_already_in_a_worker_continues_there(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = pipeline_of(wait_there, "gate")
    async with Session(fed) as session:
        with Gate() as gate:
            job = await session.execute(pipeline, {"gate": gate})
            await gate.arrived()
            (before,) = session.stats().sites["store"].workers
            with override(fed, price, returns(5.0)):
                assert await values(session, PRICE) == [5.0]
                after = session.stats().sites["store"].workers
                assert [worker.retired for worker in after if worker.pid == before.pid] == [True]
                gate.open()
                assert (await job.first()).value == before.pid
            await job
    assert "ended with" not in caplog.text


async def test_unsendable_value_of_a_fake_is_the_error_of_the_operation() -> None:
    async with Session(fed) as session:
        with override(fed, price, returns(threading.Lock())):
            with pytest.raises(JobFailed, match=r"cannot be sent .*cannot pickle"):
                await values(session, PRICE)
        with override(fed, price, returns(2.0)):
            assert await values(session, PRICE) == [2.0]


async def test_a_job_that_is_cancelled_does_not_wait_for_its_fake(session: Session) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def fake(item: str, count: int = 1) -> float:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 0.0

    with override(fed, price, fake):
        job = await session.execute(PRICE)
        await begun.wait()
        await job.cancel()
        await ended.wait()


async def test_abandoned_generator_is_closed(session: Session) -> None:
    ended = asyncio.Event()

    async def fake(n: int) -> AsyncIterator[int]:
        try:
            while True:
                yield n
        finally:
            ended.set()

    with override(fed, later_items, fake):
        job = await session.execute(one(later_items, n=1))
        await job.first()
        await job.cancel()
        await ended.wait()


def wrong(item: str) -> float:
    return 0.0


def greedy(item: str, count: int, colour: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (wrong, "wrong(item: str) -> float' cannot replace price"),
        (wrong, "it does not take 'count'"),
        (greedy, "it needs 'colour', which the operation does not have"),
        (lambda: 0, "it does not take 'item'; it does not take 'count'"),
    ],
)
def test_a_fake_whose_parameters_do_not_fit_is_refused(fake: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught, override(fed, "price", fake):
        pass
    assert message.replace("'", "") in str(caught.value).replace("'", "")


def test_value_as_a_fake_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write returns\(3\)"):
        Fake(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes an exception"):
        raises("no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "where", "message"),
    [
        ("prize", {}, "has no operation 'prize'.*price"),
        ("tax", {"site": "store"}, "is not offered at site 'store' .it is at: desk"),
        ("tax", {"provider": "fast"}, "is not offered of provider 'fast'"),
    ],
)
def test_unknown_operation_cannot_be_faked(operation: str, where: Any, message: str) -> None:
    with pytest.raises(LookupError, match=message), override(fed, operation, returns(1), **where):
        pass
