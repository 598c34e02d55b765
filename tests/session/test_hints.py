"""Wrong calls of sessions and jobs: the message says what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield, sync

fed = Federation("hints")
lab = fed.site("lab")


@lab.operation
def double(x: int) -> int:
    return 2 * x


@fed.pipeline
def report(x: int) -> int:
    return double(x)


with Pipeline("block") as block:
    Yield(double(PlaceParam("x")))


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with Session(fed, target="inline") as session:
        yield session


@pytest.fixture
def blocking() -> Iterator[sync.Session]:
    with sync.Session(fed, target="inline") as session:
        yield session


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameters of a block": (
        lambda session: session.execute(block, x=1, y=2),
        "session.execute() got an unexpected keyword argument 'x'; it takes: pipeline, input_params, ... Parameters of "
        "the pipeline are one dict: session.execute(pipeline, {'x': ..., 'y': ...})",
    ),
    "parameters of a function": (
        lambda session: session.execute(report, x=1),
        "session.execute() got an unexpected keyword argument 'x'; ... session.execute(pipeline, {'x': ...}), or "
        "session.run(pipeline, x=...) for its result",
    ),
    "parameters of a plan": (
        lambda session: session.prepare(report, x=1),
        "session.prepare() got an unexpected keyword argument 'x'; it takes: pipeline, restrict_to_sites, costs. "
        "Parameters are passed with the plan: session.execute(plan, {'x': ...})",
    ),
    "parameters of a discovery": (
        lambda session: session.discover(report, x=1),
        "session.discover() got an unexpected keyword argument 'x'; it takes: pipeline, restrict_to_sites",
    ),
    "a similar option": (
        lambda session: session.execute(block, {"x": 1}, prority=1),
        "session.execute() got an unexpected keyword argument 'prority' (did you mean 'priority'?); it takes: ...",
    ),
    "a timeout": (
        lambda session: session.execute(block, {"x": 1}, timeout=1),
        "session.execute() got an unexpected keyword argument 'timeout' (did you mean 'deadline'?); it takes: ...",
    ),
    "a resumed job": (
        lambda session: session.resume("job", accept_change=True),
        "session.resume() got an unexpected keyword argument 'accept_change' (did you mean 'accept_changes'?); ...",
    ),
    "two parameter sets": (
        lambda session: session.execute(block, {"x": 1}, {"x": 2}),
        "autostop must be True or False, not {'x': 2}; several parameter sets are one list: session.execute(pipeline, "
        "[{...}, {...}])",
    ),
    "a called pipeline": (
        lambda session: session.execute(report(1)),  # type: ignore[operator]
        "pipeline 'report' cannot be called: await session.run(report, ...) runs it",
    ),
    "an operation": (
        lambda session: session.execute(double),
        "expected a Pipeline or a Plan, not the operation 'double': use session.call for one call, or ...",
    ),
    "an operation of a site": (
        lambda session: session.prepare(lab.operations.double),
        "expected a Pipeline or a Plan, not the operation 'double': use session.call for one call, or ...",
    ),
    "an operation to discover": (
        lambda session: session.discover(double),
        "expected a Pipeline or a Plan, not the operation 'double': use session.call for one call, or ...",
    ),
    "the value of an operation": (
        lambda session: session.execute(double(1)),
        "expected a Pipeline or a Plan, not 2: an operation that is called outside a pipeline just runs. Use "
        "session.call(operation, ...) for one call, or call operations in a block 'with Pipeline() as pipeline:'",
    ),
    "a plain function": (
        lambda session: session.execute(double.code),
        "expected a Pipeline or a Plan, not <function double ...>: make the function a pipeline with "
        "@federation.pipeline, or write a block 'with Pipeline() as pipeline:'",
    ),
    "a file": (
        lambda session: session.execute("report.json"),
        "expected a Pipeline or a Plan, not 'report.json': Pipeline.load_from_file(path) reads one from a file",
    ),
    "a call of a pipeline": (
        lambda session: session.call(report, 1),
        "call takes an operation of the federation, not <Pipeline 'report': ...>: use session.run or session.execute "
        "for pipelines",
    ),
    "a call of a value": (
        lambda session: session.call(double(1)),
        "call takes an operation of the federation, not 2: pass the operation itself, then its arguments: "
        "session.call(operation, ...)",
    ),
    "an argument that does not exist": (
        lambda session: session.call(double, y=1),
        "double() got an unexpected keyword argument 'y'; it takes: x",
    ),
    "a run of a block": (
        lambda session: session.run(block, x=1),
        "run takes a function that @federation.pipeline made a pipeline, not <Pipeline 'block': ...>: use "
        "session.execute for other pipelines, and session.call for operations",
    ),
}


def pattern(text: str) -> str:
    """Return a pattern for a message in which dots stand for anything."""
    return "^" + re.escape(text).replace(r"\ \.\.\.\ ", r".*").replace(r"\.\.\.", ".*") + "$"


@pytest.mark.parametrize("case", CALLS)
async def test_a_wrong_call_names_what_to_write(session: Session, case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(TypeError, match=pattern(message)):
        await call(session)


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_of_a_blocking_session_gets_the_same_message(blocking: sync.Session, case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(TypeError, match=pattern(message)):
        call(blocking)


ATTRIBUTES = {
    "session": ("results", r"'Session' object has no attribute 'results': results belong to a job: session\.execute"),
    "job": ("result", r"'Job' object has no attribute 'result': job\.first\(\) returns the first result, job\.results"),
}


@pytest.mark.parametrize("owner", ATTRIBUTES)
async def test_results_are_found_although_they_are_sought_elsewhere(session: Session, owner: str) -> None:
    name, message = ATTRIBUTES[owner]
    found = session if owner == "session" else await session.execute(block, {"x": 1})
    with pytest.raises(AttributeError, match=message):
        getattr(found, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'resultz'$") as caught:
        found.resultz  # type: ignore[union-attr] # noqa: B018 - it raises
    assert (caught.value.name, caught.value.obj) == ("resultz", found)


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_results_are_found_in_blocking_sessions_and_jobs(blocking: sync.Session, owner: str) -> None:
    name, message = ATTRIBUTES[owner]
    found = blocking if owner == "session" else blocking.execute(block, {"x": 1})
    with pytest.raises(AttributeError, match=message):
        getattr(found, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'resultz'$"):
        found.resultz  # type: ignore[union-attr] # noqa: B018 - it raises


async def test_a_job_or_its_results_are_read_asynchronously(session: Session) -> None:
    job = await session.execute(block, {"x": 1})
    readers: list[tuple[Callable[[], Any], str]] = [
        (lambda: list(job), "a Job is asynchronous: write 'async for item in"),  # type: ignore[call-overload]
        (lambda: list(job.results()), "a ResultStream is asynchronous: write 'async for item in"),  # type: ignore[call-overload]
    ]
    for read, message in readers:
        with pytest.raises(TypeError, match=message):
            read()

    async def awaited(found: Awaitable[Any]) -> None:
        await found

    with pytest.raises(TypeError, match="a ResultStream is an iterator and cannot be awaited: write 'async for item"):
        await awaited(job.results())  # type: ignore[arg-type]


def test_the_name_of_a_pipeline_is_a_string() -> None:
    with pytest.raises(TypeError, match=r"must be a string, not <function .*@federation\.pipeline makes a pipeline of"):
        Pipeline(double.code)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a string, not 3: it is only a name"):
        Pipeline(3)  # type: ignore[arg-type]


def test_methods_that_explain_keywords_keep_their_signatures() -> None:
    for owner in (Session, sync.Session):
        for method in (owner.execute, owner.prepare, owner.discover, owner.resume):
            assert inspect.iscoroutinefunction(method) is (owner is Session)
            assert "pipeline" in inspect.signature(method).parameters or method.__name__ == "resume"
