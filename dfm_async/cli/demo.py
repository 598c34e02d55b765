"""``dfm-async demo``: three sites in processes of their own, a stream, a loop, a branch, progress and a drawing.

``archive`` keeps the readings of weather stations and streams them. ``lab`` cleans each reading and rates it. ``desk``
sums a month up. The pipeline is written once; every part runs at its site; results arrive while it runs.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Iterator

from dfm_async import Federation, ForEach, If, Job, JobStatus, Pipeline, PlaceParam, Result, Session, Yield, collect

fed = Federation("weather", api_version="1.0.0")
archive = fed.site("archive")
lab = fed.site("lab", workers=2)
desk = fed.site("desk")

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


@archive.operation
def readings(month: str, days: int = 200) -> Iterator[dict[str, float]]:
    """Stream the readings of one month."""
    noise = random.Random(month)  # noqa: S311 - weather is no secret
    base = 10 - 12 * math.cos(2 * math.pi * MONTHS.index(month) / 12)
    for day in range(days):
        yield {"day": day, "celsius": base + noise.gauss(0, 4)}


@lab.operation
async def clean(reading: dict[str, float]) -> float:
    """Round a reading as the instrument would."""
    return round(reading["celsius"], 1)


@lab.operation
def anomaly(celsius: float, usual: float = 10.0) -> float:
    """Return how far a temperature is from the usual one."""
    return round(celsius - usual, 1)


@desk.operation
def mean(values: list[float]) -> float:
    """Return the mean of a month."""
    return round(sum(values) / len(values), 2)


with Pipeline("year") as pipeline:
    with ForEach(readings(PlaceParam("month"))) as reading:
        celsius = clean(reading)
        delta = anomaly(celsius)
        with If(delta > 15):
            Yield(delta, place="heat")
    Yield(mean(collect(celsius)), place="mean")


class _Year:
    """Collects the results of all months, and draws them."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._heat: Counter[str] = Counter()

    async def write(self, result: Result) -> None:
        """Add a result."""
        month = MONTHS[result.frame[0]]
        if result.place == "mean":
            self._means[month] = result.value
        else:
            self._heat[month] += 1

    def drawing(self) -> Iterator[str]:
        """Yield the lines of the drawing."""
        low = min(self._means.values())
        yield "month   mean   " + "temperature".ljust(32) + "hot days"
        for month in MONTHS:
            bar = "█" * round((self._means[month] - low) + 1)
            yield f"{month:5} {self._means[month]:6.2f}   {bar:<32}{self._heat[month] or ''}"


async def demonstrate(*, quiet: bool = False) -> int:
    """Run the pipeline for a year, show its progress, and draw the results. Return the exit code."""
    # Here: worker processes import this module for its operations, and need nothing of the terminal.
    from dfm_async.cli.command_runner import exit_of_status
    from dfm_async.cli.terminal import StandardOutput
    from dfm_async.cli.view import LiveView, follow, logged, view_of, watched

    start = time.perf_counter()
    output, year = StandardOutput(), _Year()
    async with Session(fed) as session:
        plan = await session.prepare(pipeline)
        await output.line(f"{plan.explain()}\n")
        view = view_of(quiet=quiet, sets=len(MONTHS))
        with logged(view), view.shown(output):
            live = isinstance(view, LiveView)
            job: Job = await session.execute(plan, [{"month": month} for month in MONTHS], watch=live)
            try:
                async with watched(job, view), job.events() as events:
                    await follow(events, year, view, ())
            except asyncio.CancelledError:
                await job.cancel("cancelled from the command line")
                raise
    seconds = time.perf_counter() - start
    if job.status is JobStatus.FINISHED:
        for line in year.drawing():
            await output.line(line)
        count = 200 * len(MONTHS)
        await output.line(
            f"\n{job.status}: {count:,} readings through three sites in {seconds:.2f} s, processes included"
        )
    return exit_of_status(job.status)
