"""One contender of the tracing benchmark: ``MODE PATH``. Runs a workload for each line that it reads, name and size.

Prints how many seconds it took for each unit, and how many of all processors.

A script of its own that imports nothing of the benchmarks, so that it also runs with an earlier version of the package.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield, collect

fed = Federation("tracing")
lab = fed.site("lab")


@lab.operation
async def echo(x: int) -> int:
    return x


@lab.operation
async def span_of(n: int) -> list[int]:
    return list(range(n))


@lab.operation
async def busy(x: int) -> int:
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return x


with Pipeline("round trip") as round_trip:
    Yield(echo(PlaceParam("x")))

with Pipeline("calls") as calls:
    with ForEach(span_of(PlaceParam("n"))) as element:
        made = echo(element)
    Yield(collect(made))

with Pipeline("work") as work:
    with ForEach(span_of(PlaceParam("n")), concurrency=1) as element:
        made = busy(element)
    Yield(collect(made))


async def round_trips(session: Session, n: int) -> None:
    plan = await session.prepare(round_trip)
    for x in range(n):
        await (await session.execute(plan, {"x": x})).collect()


async def many_calls(session: Session, n: int) -> None:
    await (await session.execute(calls, {"n": n})).collect()


async def some_work(session: Session, n: int) -> None:
    await (await session.execute(work, {"n": n})).collect()


WORKLOADS: dict[str, Callable[[Session, int], Coroutine[Any, Any, None]]] = {
    "round trip": round_trips,
    "calls": many_calls,
    "work": some_work,
}


def set_up_sdk() -> None:
    """What a user does, with an exporter that does nothing."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=1 << 16))
    trace.set_tracer_provider(provider)


def processors(session: Any) -> float:
    """How many seconds of processors the application and its workers have used; on Linux, to the nanosecond."""
    total = time.process_time()
    if sys.platform.startswith("linux"):
        for worker in session.target.workers("lab"):
            if worker.pid is not None:
                total += time.clock_gettime((~worker.pid << 3) | 2)  # see clock_getcpuclockid(3)
    return total


async def main(mode: str, path: str) -> None:
    if mode == "sdk":
        set_up_sdk()
    options: dict[str, Any] = {"trace": path} if mode == "file" else {}
    loop = asyncio.get_running_loop()
    async with Session(fed, **options) as session:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            name, _, size = line.strip().rpartition(" ")
            start, used = time.perf_counter(), processors(session)
            await WORKLOADS[name](session, int(size))
            now, done = time.perf_counter(), processors(session)
            print((now - start) / int(size), (done - used) / int(size), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
