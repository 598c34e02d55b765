"""Operations that are traced, and what every trace must be."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, RetryPolicy, Yield, current_context
from dfm_async.telemetry import Span
from tests.support.pipelines import pipeline_of

TOLERANCE = 2_000_000
"""By how many nanoseconds clocks of processes on one machine may seem to differ."""

fed = Federation("traced")
lab, desk = fed.site("lab"), fed.site("desk")


@lab.operation
async def numbers(count: int) -> list[int]:
    context = current_context()
    with context.span("count", limit=count) as span:
        with context.span("inner"):
            await asyncio.sleep(0)
        span.set(found=count)
    return list(range(count))


@desk.operation
def double(value: int) -> int:
    context = current_context()
    with context.span("in thread"):
        return 2 * value


@lab.operation
async def counted(count: int) -> AsyncIterator[int]:
    context = current_context()
    with context.span("all"):
        for i in range(count):
            with context.span("one", i=i):
                yield i


@desk.operation
def counted_in_thread(count: int) -> Iterator[int]:
    context = current_context()
    with context.span("all"):
        for i in range(count):
            with context.span("one", i=i):
                yield i


@lab.operation
async def first(values: AsyncIterator[int]) -> int:
    async for value in values:
        return value
    return -1


@desk.operation
def by_hand() -> int:
    context = current_context()

    def work() -> None:
        with context.span("by hand"):
            pass

    with context.span("around"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return 1


@lab.operation(retry=RetryPolicy(attempts=3, backoff=0.0))
async def flaky(path: str) -> str:
    context = current_context()
    with open(path, "a") as file:  # noqa: ASYNC230 - one byte
        file.write("x")
    with context.span("look"):
        if os.path.getsize(path) < 3:  # noqa: ASYNC240
            raise OSError("not yet")
    return path


@desk.operation
def broken(value: int) -> int:
    context = current_context()
    with context.span("risky"):
        if value == 1:
            raise ValueError("one")
    return value


@lab.operation
async def forever() -> None:
    context = current_context()
    with context.span("waiting"):
        await asyncio.Event().wait()


@desk.operation(retry=RetryPolicy(on_worker_lost=1))
async def dies_once(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "alive"
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


@lab.operation
async def waits_first(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "done"
    await asyncio.Event().wait()
    return "never"


with Pipeline("doubles") as doubles:
    found = numbers(PlaceParam("count"))
    with ForEach(found) as number:
        Yield(double(number), place="doubled")

with Pipeline("generators") as generators:
    Yield(counted(PlaceParam("count", multiuse=True)), place="loop")
    Yield(counted_in_thread(PlaceParam("count", multiuse=True)), place="thread")

with Pipeline("streams") as streams:
    with ForEach(counted(PlaceParam("count"))) as element:
        Yield(double(element))

with Pipeline("impatient") as impatient:
    Yield(first(counted(PlaceParam("count", multiuse=True))), place="loop")
    Yield(first(counted_in_thread(PlaceParam("count", multiuse=True))), place="thread")

hands = pipeline_of(by_hand)
tries = pipeline_of(flaky, "path")
breaking = pipeline_of(broken, "value")
endless = pipeline_of(forever)
mortal = pipeline_of(dies_once, "path")
patient = pipeline_of(waits_first, "path")


class Gathered:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def write(self, spans: list[Span]) -> None:
        self.spans.extend(spans)

    def close(self) -> None:
        self.calls.append("close")

    @property
    def tree(self) -> Tree:
        return Tree(self.spans)


class Tree:
    """The spans of one whole trace: ids are unique, all parents are there, and began before their children."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = list(spans)
        self.by_id = {span.span_id: span for span in self.spans}
        assert len(self.by_id) == len(self.spans), "ids are not unique"
        assert len({span.trace_id for span in self.spans}) == 1, "there is more than one trace"
        self.children: dict[str | None, list[Span]] = defaultdict(list)
        for span in self.spans:
            assert span.start <= span.end + TOLERANCE, span
            self.children[span.parent_id].append(span)
            if span.parent_id is not None:
                assert span.parent_id in self.by_id, f"{span} has no parent"
                assert self.by_id[span.parent_id].start <= span.start + TOLERANCE, span
        assert len(self.children[None]) <= 1, "there is more than one beginning"

    @property
    def root(self) -> Span:
        (root,) = self.children[None]
        return root

    def of(self, name: str, **attributes: object) -> list[Span]:
        """The spans with a name, in the order that they began."""
        wanted = {f"dfm.{key}": value for key, value in attributes.items()}.items()
        found = [span for span in self.spans if span.name == name and wanted <= span.attributes.items()]
        return sorted(found, key=lambda span: span.start)

    def one(self, name: str, **attributes: object) -> Span:
        (span,) = self.of(name, **attributes)
        return span

    def parent(self, span: Span) -> Span:
        assert span.parent_id is not None
        return self.by_id[span.parent_id]

    def parents(self, name: str) -> Counter[str]:
        """The names of the parents of all spans with a name."""
        return Counter(self.parent(span).name for span in self.of(name))
