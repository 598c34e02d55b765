"""External programs as operations: what the class of a program gets, and when it is built and closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dfm_async import (
    Federation,
    ForEach,
    JobFailed,
    OperationContext,
    Pipeline,
    PipelineError,
    PlaceParam,
    RetryPolicy,
    Yield,
)
from dfm_async.events import Metrics
from tests.conftest import Connect
from tests.support.pipelines import yielding
from tests.support.sessions import first_value


class FakeBody:
    """Stands for a program: gives back what it got."""

    def __init__(self, program: FakeProgram) -> None:
        self.program = program
        self.calls = 0

    async def body(self, context: OperationContext, **arguments: Any) -> Any:
        self.calls += 1
        context.metrics({"calls": self.calls})
        if context.attempt <= self.program.failures:
            raise OSError("the program has crashed")
        return {"program": self.program.path, "operation": context.operation, "node": context.node, **arguments}

    async def aclose(self) -> None:
        with (Path(self.program.path) / "closed").open("a") as file:
            file.write(f"after {self.calls}\n")


@dataclass(frozen=True)
class FakeProgram:
    path: str
    failures: int = 0

    @property
    def body_class(self) -> type[FakeBody]:
        return FakeBody


def never() -> Any:
    raise AssertionError("the body of a declaration is never run")


class Federated:
    """A federation whose programs write to a folder."""

    def __init__(self, folder: Path) -> None:
        self.federation = Federation("programs")
        lab, desk = self.federation.site("lab"), self.federation.site("desk")
        program = FakeProgram(str(folder))

        @lab.operation(program=program)
        def train(weights: dict[str, Any], rate: float = 0.1, tags: list[str] = ["a"]) -> dict[str, Any]:  # noqa: B006 - passed, not changed
            return never()  # type: ignore[no-any-return]

        @lab.operation(program=program)
        def read(values: Iterator[int], more: Any = None, **rest: Any) -> dict[str, Any]:
            return never()  # type: ignore[no-any-return]

        @lab.operation(program=FakeProgram(str(folder), failures=2), retry=RetryPolicy(attempts=3, backoff=0.001))
        def unreliable(x: int, /) -> dict[str, Any]:
            return never()  # type: ignore[no-any-return]

        @desk.operation
        async def numbers(n: int) -> AsyncIterator[int]:
            for i in range(n):
                yield i

        @desk.operation
        def text() -> str:
            return "text"

        self.train, self.read, self.unreliable, self.numbers, self.text = train, read, unreliable, numbers, text


@pytest.fixture
def made(tmp_path: Path) -> Federated:
    return Federated(tmp_path)


async def test_a_program_gets_arguments_and_defaults_by_name(connect: Connect, made: Federated, tmp_path: Path) -> None:
    with Pipeline("p") as pipeline:
        Yield(made.train(PlaceParam("weights")), place="short")
        Yield(made.train({"b": 2}, tags=["x"]), place="full")
    async with connect(made.federation) as session:
        results = await (await session.execute(pipeline, {"weights": {"a": 1}})).collect()
    values = {result.place: result.value for result in results}
    same = {"program": str(tmp_path), "operation": "train"}
    assert values["short"] == {**same, "node": "train#0", "weights": {"a": 1}, "rate": 0.1, "tags": ["a"]}
    assert values["full"] == {**same, "node": "train#2", "weights": {"b": 2}, "rate": 0.1, "tags": ["x"]}


async def test_program_gets_streams_as_lists(connect: Connect, made: Federated) -> None:
    with Pipeline("p") as pipeline:
        stream = made.numbers(3)
        other = made.numbers(2)
        Yield(made.read(stream, {"inner": [stream, other], "n": 1}, extra=other))
        Yield(stream, place="elements")
    async with connect(made.federation) as session:
        results = await (await session.execute(pipeline)).collect()
    (value,) = [result.value for result in results if result.place == "yield"]
    assert value["values"] == [0, 1, 2]
    assert value["more"] == {"inner": [[0, 1, 2], [0, 1]], "n": 1}
    assert value["extra"] == [0, 1]
    assert [result.value for result in results if result.place == "elements"] == [0, 1, 2]


async def test_the_object_of_a_program_serves_its_job_and_is_closed_with_it(
    connect: Connect, made: Federated, tmp_path: Path
) -> None:
    with Pipeline("p") as pipeline, ForEach([1, 2, 3]) as x:
        Yield(made.train({"x": x}))
    async with connect(made.federation) as session:
        job = await session.execute(pipeline)
        assert sorted(r.value["weights"]["x"] for r in await job.collect()) == [1, 2, 3]
        assert (tmp_path / "closed").read_text() == "after 3\n"
        calls = [event.values["calls"] async for event in job.events() if isinstance(event, Metrics)]
        assert calls == [1, 2, 3]


async def test_operations_with_equal_programs_share_one_object_in_a_job(
    connect: Connect, made: Federated, tmp_path: Path
) -> None:
    with Pipeline("p") as pipeline:
        trained = made.train({"x": 1})
        Yield(made.read(made.numbers(2), trained))
        Yield(made.unreliable(7), place="another program")
    async with connect(made.federation) as session:
        job = await session.execute(pipeline)
        values = {result.place: result.value for result in await job.collect()}
    assert (values["yield"]["operation"], values["yield"]["more"]["operation"]) == ("read", "train")
    assert sorted((tmp_path / "closed").read_text().splitlines()) == ["after 2", "after 3"]


async def test_failed_program_is_retried(connect: Connect, made: Federated) -> None:
    pipeline = yielding(lambda: made.unreliable(7))
    async with connect(made.federation) as session:
        assert (await first_value(session, pipeline))["x"] == 7
        less = yielding(lambda: made.unreliable(7, retry=RetryPolicy(attempts=2, backoff=0.001)))
        with pytest.raises(JobFailed, match="the program has crashed"):
            await (await session.execute(less))


async def test_declared_types_are_checked_before_anything_runs(connect: Connect, made: Federated) -> None:
    with Pipeline("p") as pipeline:
        Yield(made.train(made.text()))  # type: ignore[call-overload] # the fault
        made.train({}, rate="fast")  # type: ignore[call-overload] # the fault
    async with connect(made.federation) as session:
        with pytest.raises(PipelineError) as caught:
            await session.execute(pipeline)
    assert "weights is declared dict[str, Any], but text#0 returns str" in str(caught.value)
    assert "rate" in str(caught.value)
