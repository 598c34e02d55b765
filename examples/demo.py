"""A tour in one run: three sites in processes of their own, a stream, a loop, a branch, progress and a drawing.

``archive`` keeps the readings of weather stations and streams them. ``lab`` cleans each reading and rates it. ``desk``
sums a month up. The pipeline is written once; every part runs at its site; results arrive while it runs.
"""

import asyncio
import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator

from dfm_async import (
    Federation,
    ForEach,
    FrameCompleted,
    If,
    Job,
    Pipeline,
    PlaceParam,
    Result,
    Session,
    Yield,
    collect,
)

fed = Federation("weather", api_version="1.0.0")
archive = fed.site("archive")
lab = fed.site("lab", workers=2)
desk = fed.site("desk")

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


@archive.operation
def readings(month: str, days: int = 200) -> Iterator[dict[str, float]]:
    """Streams the readings of one month."""
    noise = random.Random(month)
    base = 10 - 12 * math.cos(2 * math.pi * MONTHS.index(month) / 12)
    for day in range(days):
        yield {"day": day, "celsius": base + noise.gauss(0, 4)}


@lab.operation
async def clean(reading: dict[str, float]) -> float:
    """Rounds a reading as the instrument would."""
    return round(reading["celsius"], 1)


@lab.operation
def anomaly(celsius: float, usual: float = 10.0) -> float:
    """Returns how far a temperature lies from the usual one."""
    return round(celsius - usual, 1)


@desk.operation
def mean(values: list[float]) -> float:
    """Returns the mean of a month."""
    return round(sum(values) / len(values), 2)


with Pipeline("year") as pipeline:
    with ForEach(readings(PlaceParam("month"))) as reading:
        celsius = clean(reading)
        delta = anomaly(celsius)
        with If(delta > 15):
            Yield(delta, place="heat")
    Yield(mean(collect(celsius)), place="mean")


def show(text: str) -> None:
    """Rewrites the progress line on a terminal; elsewhere prints nothing until the end."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        print("\r" + text[: width - 1].ljust(width - 1), end="", flush=True)


async def watch(job: Job) -> tuple[dict[str, float], Counter[str]]:
    """Follows a job by its events: what arrives, from which site, and how far it is."""
    means: dict[str, float] = {}
    heat: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    done = 0
    async for event in job.events():
        if isinstance(event, Result):
            month = MONTHS[event.frame[0]]
            sites[event.site] += 1
            if event.place == "mean":
                means[month] = event.value
            else:
                heat[month] += 1
        elif isinstance(event, FrameCompleted):
            done += 1
        bar = "#" * done + "." * (len(MONTHS) - done)
        seen = ", ".join(f"{site}: {count} results" for site, count in sorted(sites.items()))
        show(f"[{bar}] {done}/{len(MONTHS)} months   {seen}")
    show("")
    return means, heat


def draw(means: dict[str, float], heat: Counter[str]) -> None:
    """Draws the year."""
    low = min(means.values())
    print("\nmonth   mean   " + "temperature".ljust(32) + "hot days")
    for month in MONTHS:
        bar = "█" * round((means[month] - low) + 1)
        print(f"{month:5} {means[month]:6.2f}   {bar:<32}{heat[month] or ''}")


async def main() -> None:
    start = time.perf_counter()
    async with Session(fed) as session:
        plan = await session.prepare(pipeline)
        print(plan.explain(), end="\n\n")
        job = await session.execute(plan, [{"month": month} for month in MONTHS])
        means, heat = await watch(job)
        status = await job
    seconds = time.perf_counter() - start
    draw(means, heat)
    readings_count = 200 * len(MONTHS)
    print(f"\n{status}: {readings_count:,} readings through three sites in {seconds:.2f} s, processes included")


if __name__ == "__main__":
    asyncio.run(main())
