"""What ``after=`` means for generators, and that generators run also where nobody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    If,
    JobStatus,
    Pipeline,
    PlaceParam,
    Session,
    TryFromCache,
    Yield,
    collect,
)
from tests.support.sessions import first_value
from tests.support.waiting import file_created

fed = Federation("order")
archive, lab, desk = (fed.site(name) for name in ("archive", "lab", "desk"))


def write(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@lab.operation
def steps(path: str, n: int) -> Iterator[int]:
    for i in range(n):
        write(path, f"step {i}")
        yield i


@lab.operation
async def async_steps(path: str, n: int) -> AsyncIterator[int]:
    for i in range(n):
        write(path, f"step {i}")
        yield i
        await asyncio.sleep(0)


@lab.operation
def mapped_steps(path: str, n: int) -> Any:
    """A plain function whose result is an iterator."""

    def step(i: int) -> int:
        write(path, f"step {i}")
        return i

    return map(step, range(n))


@lab.operation
def endless(path: str) -> Iterator[int]:
    i = 0
    try:
        while True:
            yield i
            i += 1
    finally:
        write(path, "closed")


@lab.operation
def torn(path: str, n: int) -> Iterator[int]:
    yield from steps.code(path, n)
    raise OSError("the tape is torn")


def note(path: str, text: str) -> str:
    write(path, text)
    return text


for site in (archive, lab, desk):
    note_at = site.operation(note)


@desk.operation
def doubled(values: Iterator[int]) -> Iterator[int]:
    for value in values:
        yield 2 * value


@archive.operation
async def total(values: list[int], what: str = "") -> int:
    return sum(values)


@archive.operation
def first(values: Iterator[int]) -> int:
    return next(values)


@lab.operation
def sets(n: int) -> Iterator[set[int]]:
    for i in range(n):
        yield {i}


@lab.operation
async def async_sets(n: int) -> AsyncIterator[set[int]]:
    for i in range(n):
        yield {i}


@desk.operation
async def types_around_a_skip(values: AsyncIterator[Any], path: str) -> list[str]:
    """Reads a few elements, waits until another reader was skipped, and reads on."""
    found = set()
    count = 0
    async for value in values:
        found.add(type(value).__name__)
        count += 1
        if count == 10:
            write(f"{path}-begun", "")
            await file_created(path)
    return [*sorted(found), str(count)]


@lab.operation
async def begun(path: str) -> str:
    await file_created(f"{path}-begun")
    return "begun"


@lab.operation
async def read_here(values: AsyncIterator[Any]) -> int:
    return len([value async for value in values])


def path_param() -> Any:
    return PlaceParam("path", multiuse=True)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


async def run(session: Session, pipeline: Pipeline, path: Path) -> tuple[list[str], list[Any]]:
    """What the operations wrote, in order; and the results."""
    async with asyncio.timeout(60):
        job = await session.execute(pipeline, {"path": str(path)})
        found = [item async for item in job.results(errors="yield")]
    return lines(path), [item if isinstance(item, Failure) else item.value for item in found]


async def test_a_generator_that_is_only_waited_for_runs_to_its_end_first(session: Session, tmp_path: Path) -> None:
    for source in (steps, async_steps, mapped_steps):
        for site in ("lab", "archive"):
            with Pipeline() as pipeline:
                Yield(note_at(path_param(), "behind", site=site, after=source(path_param(), 3)))
            written, results = await run(session, pipeline, tmp_path / f"{source.name}-{site}")
            assert written == ["step 0", "step 1", "step 2", "behind"]
            assert results == ["behind"]


async def test_after_a_generator_runs_after_its_last_element(session: Session, tmp_path: Path) -> None:
    for source in (steps, async_steps):
        with Pipeline() as pipeline:
            values = source(path_param(), 40)
            note_at(path_param(), "behind", site="desk", after=values)
            Yield(values)
            Yield(total(doubled(values)), place="total")
        written, results = await run(session, pipeline, tmp_path / source.name)
        assert written == [*(f"step {i}" for i in range(40)), "behind"]
        assert sorted(results) == sorted([*range(40), 2 * sum(range(40))])


async def test_after_a_generator_runs_when_its_readers_stop_early(session: Session, tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        values = endless(path_param())
        Yield(first(doubled(values)))
        Yield(note_at(path_param(), "behind", site="archive", after=values), place="note")
    written, results = await run(session, pipeline, tmp_path / "log")
    assert "behind" in written
    assert sorted(results, key=str) == [0, "behind"]


async def test_a_generator_whose_readers_are_skipped_runs_as_any_operation_does(
    session: Session, tmp_path: Path
) -> None:
    for reads in ("total", "loop", "yield"):
        with Pipeline() as pipeline:
            values = steps(path_param(), 3)
            with If(note_at(path_param(), "begin", site="desk") == "other"):
                if reads == "total":
                    Yield(total(doubled(values)))
                elif reads == "yield":
                    Yield(values)
                else:
                    with ForEach(values) as value:
                        Yield(value)
            note_at(path_param(), "behind", site="archive", after=values)
        written, results = await run(session, pipeline, tmp_path / reads)
        assert written == ["begin", "step 0", "step 1", "step 2", "behind"]
        assert results == []


def unread(form: str) -> Pipeline:
    """A generator that fails, and that nobody reads."""
    with Pipeline() as pipeline:
        values = torn(path_param(), 2)
        if form == "after":
            note_at(path_param(), "behind", site="archive", after=values)
        elif form == "failed reader":
            total(values, note_at("/no/such/file", "", site="desk"))
        elif form == "empty loop":
            with ForEach([]):
                total(values)
        elif form != "alone":
            with If(note_at(path_param(), "begin", site="desk") == "other"):
                if form == "skipped here":
                    Yield(values)
                else:
                    total(values)
    return pipeline


async def test_a_generator_that_fails_unread_fails_its_job(session: Session, tmp_path: Path) -> None:
    for form in ("alone", "after", "skipped here", "skipped elsewhere", "empty loop", "failed reader"):
        async with asyncio.timeout(60):
            job = await session.execute(unread(form), {"path": str(tmp_path / form)})
            failures = [item async for item in job.results(errors="yield") if isinstance(item, Failure)]
            assert job.status is JobStatus.FAILED
        own = [(f.place, f.frame) for f in failures if f.node == "torn#0"]
        assert own == [(None, (0,))], form
        assert len(failures) == 1 + (form == "failed reader"), form
        assert lines(tmp_path / form)[-1] == ("behind" if form == "after" else "step 1"), form


def joined(values: Any) -> Any:
    return total(values, note_at(path_param(), "behind", site="desk", after=values))


def joined_with_a_mapper(values: Any) -> Any:
    return total(doubled(values), note_at(path_param(), "behind", site="desk", after=values))


def looped(values: Any) -> Any:
    behind = note_at(path_param(), "behind", site="desk", after=values)
    with ForEach(values, concurrency=2) as value:
        item = total([value], behind)
    return total(collect(item))


def cached(values: Any) -> Any:
    with TryFromCache(key=path_param()) as found:
        behind = note_at(path_param(), "behind", site="desk", after=values)
        found.store(total(values, behind))
    return found


def conditional(values: Any) -> Any:
    with If(note_at(path_param(), "behind", site="desk", after=values) == "behind"):
        Yield(total(values), place="inside")
    return 0


async def test_reader_may_need_an_operation_after_its_stream(session: Session, tmp_path: Path) -> None:
    """The generator runs ahead, and its elements are kept: the two would wait for each other otherwise."""
    for form in (joined, joined_with_a_mapper, looped, cached, conditional):
        with Pipeline() as pipeline:
            Yield(form(steps(path_param(), 300)))
        written, results = await run(session, pipeline, tmp_path / form.__name__)
        assert written == [*(f"step {i}" for i in range(300)), "behind"], form
        assert max(results) == sum(range(300)) * (1 + (form is joined_with_a_mapper)), form


def crossed(path: Any) -> list[Any]:
    values = [steps(path, 300), async_steps(path, 300)]
    return [total(values[0], after=values[1]), total(doubled(values[1]), after=values[0])]


def crossed_behind_mappers(path: Any) -> list[Any]:
    values = [steps(path, 300), steps(path, 300)]
    return [total(doubled(values[0]), after=values[1]), total(doubled(values[1]), after=values[0])]


def crossed_in_a_ring(path: Any) -> list[Any]:
    values = [steps(path, 300) for _ in range(3)]
    return [total(values[i], after=values[i - 1]) for i in range(3)]


async def test_readers_of_streams_may_wait_for_the_ends_of_each_others_streams(
    session: Session, tmp_path: Path
) -> None:
    for form, factors in ((crossed, [1, 2]), (crossed_behind_mappers, [2, 2]), (crossed_in_a_ring, [1, 1, 1])):
        with Pipeline() as pipeline:
            for number, value in enumerate(form(path_param())):
                Yield(value, place=f"total {number}")
        _, results = await run(session, pipeline, tmp_path / form.__name__)
        assert sorted(results) == [factor * sum(range(300)) for factor in factors], form


async def test_yields_of_streams_may_wait_for_each_others_streams(session: Session, tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        first_values, second_values = steps(path_param(), 300), async_steps(path_param(), 300)
        Yield(first_values, place="first", after=second_values)
        Yield(second_values, place="second", after=first_values)
    _, results = await run(session, pipeline, tmp_path / "log")
    assert sorted(results) == sorted([*range(300)] * 2)


async def test_sent_elements_are_unchanged_if_a_local_reader_is_skipped(session: Session, tmp_path: Path) -> None:
    for source in (sets, async_sets):
        with Pipeline() as pipeline:
            values = source(2000)
            Yield(types_around_a_skip(values, path_param()))
            with If(begun(path_param()) == "other") as branch:
                read_here(values)
            with branch.otherwise():
                note_at(path_param(), "skipped", site="lab")
        path = str(tmp_path / source.name)
        assert await first_value(session, pipeline, {"path": path}) == ["set", "2000"], source.name
