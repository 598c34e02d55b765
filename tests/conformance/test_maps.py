"""Maps of one operation over many inputs: ``session.map``."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, JobAborted, JobStatus, OperationFailed, ParameterError, RetryPolicy
from tests.conftest import Connect
from tests.support.sessions import LIMIT, SHORT
from tests.support.waiting import file_created, until

fed = Federation("mapped")
lab = fed.site("lab")
desk = fed.site("desk")


@lab.operation
@desk.operation
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


@lab.operation
def untyped(value, base):  # type: ignore[no-untyped-def]
    return value


@lab.operation
def picky(x: int) -> int:
    if x % 3 == 2:
        raise ValueError(f"no {x}")
    return x


@lab.operation
async def gated(folder: str, name: str) -> str:
    path = Path(folder) / name
    path.with_suffix(".began").touch()
    await file_created(path)
    return name


@lab.operation
def several(n: int) -> Iterator[int]:
    yield from range(n)


@lab.operation
def pairs(n: int) -> Any:
    return zip(range(n), range(n), strict=True)


@lab.operation
def total(*values: int) -> int:
    return sum(values)


@lab.operation
def fatal(folder: str, x: int) -> int:
    marker = Path(folder) / "died"
    if x == 50 and not marker.exists():
        marker.touch()
        os._exit(3)
    return x


@dataclass
class Point:
    x: int
    y: int


@lab.operation
def length(point: Point) -> int:
    return point.x + point.y


class Source:
    """An endless input, which counts how far it was pulled and notes when it is closed."""

    def __init__(self) -> None:
        self.pulled = 0
        self.closed = False

    def plain(self) -> Iterator[int]:
        try:
            for self.pulled in itertools.count(1):
                yield self.pulled
        finally:
            self.closed = True

    async def later(self) -> AsyncIterator[int]:
        try:
            for self.pulled in itertools.count(1):
                yield self.pulled
        finally:
            self.closed = True

    async def stuck(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.closed = True


async def numbers(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


async def test_a_map_yields_values_in_the_order_of_its_inputs(connect: Connect) -> None:
    async with connect(fed) as session:
        expected = [n - 15.0 for n in range(300)]
        assert [value async for value in session.map(anomaly, range(300), site=lab)] == expected
        assert [value async for value in session.map(anomaly, numbers(300), site="desk")] == expected
        assert [value async for value in session.map(lab.operations.anomaly, [], concurrency=1)] == []
        one_by_one = session.map(anomaly, range(10), concurrency=1, site=lab)
        assert [value async for value in one_by_one] == expected[:10]
        unordered = session.map(anomaly, range(300), ordered=False, site=lab)
        assert sorted([value async for value in unordered]) == expected


async def test_a_map_takes_several_iterables_and_constants(connect: Connect) -> None:
    async with connect(fed) as session:
        assert [v async for v in session.map(anomaly, [1, 2, 3], numbers(2), site=lab)] == [1.0, 1.0]
        assert [v async for v in session.map(anomaly, [1, 2], base=1.0, site=lab)] == [0.0, 1.0]
        assert [v async for v in session.map(total, [1, 2], [10, 20], [100, 200])] == [111, 222]
        points: list[Any] = [{"x": 1, "y": 2}, Point(3, 4)]
        assert [v async for v in session.map(length, points)] == [3, 7]


async def test_a_map_of_generators_yields_lists(connect: Connect) -> None:
    async with connect(fed) as session:
        assert [v async for v in session.map(several, [1, 0, 3])] == [[0], [], [0, 1, 2]]
        assert [v async for v in session.map(pairs, [1, 0, 2])] == [[(0, 0)], [], [(0, 0), (1, 1)]]


async def test_a_map_raises_the_error_of_the_first_call_in_order(connect: Connect) -> None:
    async with connect(fed) as session:
        found = []
        with pytest.raises(OperationFailed, match="no 2") as caught:
            async for value in session.map(picky, itertools.count()):
                found.append(value)
        assert found == [0, 1]
        assert caught.value.__notes__ == ["input 2 of session.map"]
        (job,) = session.jobs()
        assert job.status is JobStatus.ABORTED


async def test_a_map_can_yield_errors_and_go_on(connect: Connect) -> None:
    async with connect(fed) as session:
        inputs = [0, "one", 2, *range(3, 90)]
        items = [item async for item in session.map(picky, inputs, errors="yield")]
        assert [item.index for item in items] == list(range(90))
        assert [item.value for item in items if item.error is None] == [n for n in range(90) if n % 3 != 2 and n != 1]
        assert isinstance(items[1].error, ParameterError)
        assert "input 1: parameter 'x': " in str(items[1].error)
        with pytest.raises(OperationFailed, match="no 2"):
            _ = items[2].value
        assert items[71].error is not None
        assert items[71].error.__notes__ == ["input 71 of session.map"]


async def test_a_map_yields_what_is_complete_first(connect: Connect, tmp_path: Path) -> None:
    folder = str(tmp_path)
    async with connect(fed, options=SHORT) as session, asyncio.timeout(LIMIT):
        async with session.map(gated, itertools.repeat(folder), ["a", "b"], ordered=False, errors="yield") as values:
            (tmp_path / "b").touch()
            first = await anext(values)
            assert (first.index, first.value) == (1, "b")
            (tmp_path / "a").touch()
            assert [item.index async for item in values] == [0]


@pytest.mark.parametrize("kind", ["plain", "later"])
async def test_a_map_pulls_an_endless_input_as_it_is_read(connect: Connect, kind: str) -> None:
    source = Source()
    async with connect(fed) as session:
        async with session.map(picky, getattr(source, kind)(), concurrency=8, errors="yield") as items:
            async for item in items:
                if item.index == 100:
                    break
            assert 100 < source.pulled <= 101 + 4 * 8
            await asyncio.sleep(0.1)  # nobody reads
            assert source.pulled <= 101 + 4 * 8
        assert source.closed
        (job,) = session.jobs()
        assert job.status is JobStatus.ABORTED


async def test_a_map_keeps_to_its_concurrency(connect: Connect, tmp_path: Path) -> None:
    names = [str(n) for n in range(6)]
    async with connect(fed, options=SHORT) as session, asyncio.timeout(LIMIT):
        async with session.map(gated, itertools.repeat(str(tmp_path)), names, concurrency=2) as values:
            first = asyncio.ensure_future(anext(values))
            await file_created(tmp_path / "0.began")
            await file_created(tmp_path / "1.began")
            await asyncio.sleep(0.1)
            assert sorted(os.listdir(tmp_path)) == ["0.began", "1.began"]
            for name in names:
                (tmp_path / name).touch()
            assert [await first, *[value async for value in values]] == names


@pytest.mark.parametrize("kind", ["plain", "later", "stuck"])
async def test_leaving_the_loop_of_a_map_cancels_its_job_and_closes_its_input(connect: Connect, kind: str) -> None:
    source = Source()
    async with connect(fed) as session:
        async for _ in session.map(anomaly, getattr(source, kind)(), site=lab):
            break
        await until(lambda: source.closed)
        (job,) = session.jobs()
        with pytest.raises(Exception, match="the map was left"):
            await job


async def test_a_cancelled_map_in_a_block_leaves_nothing_running(connect: Connect, tmp_path: Path) -> None:
    source = Source()
    async with connect(fed, options=SHORT) as session:

        async def consume() -> None:
            async with session.map(gated, [str(tmp_path)], map(str, source.plain())) as values:
                async for _ in values:
                    pass

        task = asyncio.create_task(consume())
        await file_created(tmp_path / "1.began")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (job,) = session.jobs()
        assert job.status is JobStatus.ABORTED


async def test_an_input_that_raises_ends_the_map_after_the_values_before(connect: Connect) -> None:
    def failing() -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    async def later() -> AsyncIterator[int]:
        for number in failing():
            yield number

    async with connect(fed) as session:
        for inputs in (failing(), later()):
            found = []
            with pytest.raises(OSError, match="the disk is gone"):
                async for value in session.map(anomaly, inputs, site=lab):
                    found.append(value)
            assert found == [n - 15.0 for n in range(5)]


async def test_a_map_can_be_the_input_of_a_map(connect: Connect) -> None:
    async with connect(fed) as session:
        inner = session.map(anomaly, range(100), base=0.0, site=lab)
        outer = session.map(anomaly, inner, base=1.0, site=desk)
        assert [value async for value in outer] == [n - 1.0 for n in range(100)]


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_tasks_that_iterate_over_one_map_share_its_values(connect: Connect, store_url: str) -> None:
    async def some(values: AsyncIterator[Any]) -> list[Any]:
        found = []
        async for value in values:
            found.append(value)
            await asyncio.sleep(0)
        return found

    async with asyncio.timeout(LIMIT):
        async with connect(fed, store=store_url) as session:
            values = session.map(anomaly, range(200), base=0.0, site=lab)
            parts = await asyncio.gather(*(some(values) for _ in range(3)))
            assert sorted(itertools.chain(*parts)) == [float(n) for n in range(200)]
            assert all(parts), "each task gets some of them"
            assert len(session.jobs()) == 1
        async with connect(fed, store=store_url) as session:
            (job,) = await session.refresh_jobs()
            for ordered in (True, False):
                results = job.results(ordered=ordered)
                shared = await asyncio.gather(*(some(results) for _ in range(3)))
                assert sorted(found.value for found in itertools.chain(*shared)) == [float(n) for n in range(200)]


async def test_tasks_that_iterate_over_one_map_end_with_its_error(connect: Connect) -> None:
    async with connect(fed) as session, asyncio.timeout(LIMIT):
        values = session.map(picky, itertools.count())

        async def all_of_them() -> list[int]:
            return [value async for value in values]

        ends = await asyncio.gather(all_of_them(), all_of_them(), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["OperationFailed", "list"]


async def test_a_map_refuses_wrong_arguments(connect: Connect) -> None:
    async with connect(fed) as session:
        with pytest.raises(TypeError, match="at least one iterable"):
            session.map(anomaly)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="did you mean 'base'"):
            session.map(anomaly, [1.0], bas=2.0)
        with pytest.raises(TypeError, match="map of operation 'anomaly': after= is an option of calls in pipelines"):
            session.map(anomaly, [1.0], after=None)
        with pytest.raises(ParameterError, match=r"parameter 'base': .* not 'x'"):
            session.map(anomaly, [1.0], base="x")
        with pytest.raises(ParameterError, match=r"parameter 'base': .* cannot be sent"):
            session.map(untyped, [1.0], base=lambda: 1)
        with pytest.raises(TypeError, match=r"takes iterables of inputs, not 5: use session\.call"):
            session.map(anomaly, 5)  # type: ignore[call-overload]
        for stream in (session.map(anomaly, [1.0]), session.each(anomaly, 1.0)):
            with pytest.raises(TypeError, match=r"is asynchronous: write 'async for item in \.\.\.'"):
                list(stream)  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"cannot be awaited: write 'async for item in \.\.\.'"):
                await stream  # type: ignore[misc]
        with pytest.raises(ValueError, match="errors must be"):
            session.map(anomaly, [1.0], errors="skip")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="concurrency must be"):
            session.map(anomaly, [1.0], concurrency=0)
        assert [job for job in session.jobs() if job.status is JobStatus.RUNNING] == []


async def test_constants_of_a_map_are_converted_as_arguments_of_a_call(connect: Connect) -> None:
    constants: dict[str, Any] = {"base": "10"}
    async with connect(fed) as session:
        assert await session.call(anomaly, 17.0, **constants) == 7.0
        assert [value async for value in session.map(anomaly, [17.0], **constants)] == [7.0]


async def test_an_input_that_cannot_be_sent_is_an_error_of_its_own(connect: Connect) -> None:
    async with connect(fed) as session:
        inputs: list[Any] = [1, lambda: 1, 2]
        with pytest.raises(ParameterError, match=r"input 0: .* cannot be sent"):
            async for _ in session.map(total, inputs[1:]):
                pass
        items = [item async for item in session.map(total, inputs, errors="yield")]
        assert [item.error is None for item in items] == [True, False, True]
        assert (items[0].value, items[2].value) == (1, 2)


@pytest.mark.parametrize("target", ["local"])
async def test_a_map_survives_the_loss_of_a_worker_if_it_may(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed) as session:
        folders, again = itertools.repeat(str(tmp_path)), RetryPolicy(attempts=1, on_worker_lost=2)
        assert [v async for v in session.map(fatal, folders, range(200), retry=again)] == list(range(200))
        (tmp_path / "died").unlink()
        with pytest.raises(JobAborted, match="exited with code 3") as caught:
            async for _ in session.map(fatal, folders, range(200), errors="yield"):
                pass
        advice = "The worker ran 'fatal'. retry=RetryPolicy(on_worker_lost=...) runs lost calls again"
        assert str(caught.value).splitlines()[-1] == advice


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_a_map_raises_when_its_session_is_closed(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:
        values = session.map(gated, [str(tmp_path)], ["never"])
        task = asyncio.ensure_future(anext(values))
        await file_created(tmp_path / "never.began")
    with pytest.raises(Exception, match="the session was closed"):
        await task
    with pytest.raises(StopAsyncIteration):
        await anext(values)


@pytest.mark.parametrize("target", ["inline", "local"])
async def test_values_of_a_map_are_in_its_store(connect: Connect, store_url: str) -> None:
    async with connect(fed, store=store_url) as session:
        assert [value async for value in session.map(anomaly, range(100), site=lab)] == [n - 15.0 for n in range(100)]
    async with connect(fed, store=store_url) as session:
        (job,) = await session.refresh_jobs()
        assert len(await job.collect()) == 100
