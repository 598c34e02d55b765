"""A large data frame gets from one site to another at the speed of a copy in memory, and small ones by the thousand.

One job yields the same data frame of 800 MB (100 MB with ``--quick``) several times from a generator at one site to an
operation of another: numbers, integers and moments. The peer is two processes that do nothing else: one copies as many
bytes into shared memory and tells the other over a socket. ``ray`` passes the data frame from one actor to another as
often, all calls at once: pickled with protocol 5, through its store of objects in shared memory. Claimed: at least half
of the speed of the copy, and faster than Ray. Small data frames have ten rows of numbers, integers and text, and are
read in the application. Claimed: 100,000 in a minute.
"""

from __future__ import annotations

from typing import Any

from benchmarks import external, operations, workloads
from benchmarks.common import Figure, Options, Target, interleave, main
from benchmarks.raw import SharedCopy
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield

MB = 1_000_000
COPY, RAY = "shared copy", "ray"
COLUMNS = operations.COLUMNS


async def run(options: Options) -> list[Figure]:
    size, n = (100 if options.quick else 800) * MB, 3
    many = options.size(20_000)
    federation = Federation("frames")
    here, there = federation.site("a"), federation.site("b")
    make_large: Any = here.operation(operations.large_frames)
    make_small: Any = here.operation(operations.small_frames)
    count: Any = there.operation(operations.count_rows)
    with Pipeline("large") as large_frames:
        Yield(count(make_large(PlaceParam("n"), PlaceParam("size"))))
    with Pipeline("small") as small_frames:
        Yield(make_small(PlaceParam("n")))

    async with Session(federation) as session, SharedCopy(size) as copy:

        async def pass_on() -> None:
            rows = (await (await session.execute(large_frames, {"n": n, "size": size})).first()).value
            if rows != n * (size // COLUMNS // 8):
                raise RuntimeError(f"{rows} rows came")

        async def read() -> None:
            job = await session.execute(small_frames, {"n": many})
            found = 0
            async for result in job:
                found += len(result.value) // 10
            if found != many:
                raise RuntimeError(f"{found} of {many} data frames came")

        await pass_on()  # the data frame is made
        speed = n * size / 1e9
        found = await interleave(
            {
                "ours": lambda: _rate(speed, pass_on()),
                COPY: lambda: _rate(speed, copy.read(n, size, 1)),
                "small": lambda: _rate(many * 60, read()),
            },
            options.repeats,
        )
    mb, rate = size // MB, found["ours"]
    ray = external.measure(f"frames_{mb}", options.quick, peers=[RAY]).get("GB/s", {})
    return [
        Figure(f"{mb} MB, site to site", "GB/s", rate, {COPY: found[COPY]}, Target(0.5, COPY, at_least=True)),
        Figure(f"{mb} MB, site to site, beside Ray", "GB/s", rate, ray, Target(1, RAY, at_least=True)),
        Figure("small data frames, to the application", "1/min", found["small"], {}, Target(100_000, at_least=True)),
    ]


async def _rate(amount: float, work: Any) -> float:
    return amount / await workloads.elapsed(work)


if __name__ == "__main__":
    main("frames", __doc__, run)
