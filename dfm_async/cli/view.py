"""Show the progress of a job on standard error: live on a terminal, as lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dfm_async.base.suspension import suspension
from dfm_async.cli.command_runner import safe
from dfm_async.cli.results import ResultWriter
from dfm_async.cli.terminal import StandardOutput, terminal
from dfm_async.errors import DecodingError
from dfm_async.model.events import (
    Activity,
    Event,
    Failure,
    FailureHandled,
    FrameCompleted,
    Metrics,
    NodeActivity,
    Progress,
    Result,
    StatusChanged,
    WorkerNotice,
)
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job
from dfm_async.telemetry.spans import frame_text

_FULL_ERRORS: Final = 10
"""The number of errors shown with tracebacks; of further ones one line is shown, and finally only their number."""
_SHORT_ERRORS: Final = 100
_PAUSE: Final = 0.1
"""The shortest interval between two drawings of the screen, in seconds."""
_NOTES: Final = 12
"""The number of nodes whose last progress report is shown."""
_BAR: Final = 24

STATUS_STYLES: Final = {
    JobStatus.FINISHED: "bold green",
    JobStatus.FAILED: "bold red",
    JobStatus.ABORTED: "bold red",
    JobStatus.INTERRUPTED: "bold yellow",
}
"""The styles of final statuses."""


class LineView:
    """Counts the events of a job, and shows as lines what users need to know at once, for logs and pipes."""

    def __init__(self, console: Console, sets: int | None, *, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        """Whether only errors are shown."""
        self.sets = sets
        """The number of parameter sets, if it is known."""
        self.status = JobStatus.SUBMITTED
        self.done = 0
        self.failures = 0
        self.unread: Counter[str | None] = Counter()
        """The number of results of each place that cannot be decoded here."""
        self.results: Counter[str] = Counter()
        self.progress: dict[tuple[str, str], Progress] = {}
        self.calls: dict[str, NodeActivity] = {}
        self._began = time.monotonic()

    @contextmanager
    def shown(self, output: StandardOutput) -> Iterator[None]:
        """Show the job while the block runs. What the application prints goes to standard error, too."""
        with redirect_stdout(sys.stderr):
            yield

    def renewed(self) -> Self:
        """Return a view for another job."""
        return type(self)(self.console, None, quiet=self.quiet)

    def touch(self) -> None:
        """Show soon what has changed."""

    def take(self, event: Event) -> None:
        """Process the next event of the job."""
        self.touch()
        match event:
            case Result():
                self.results[event.site] += 1
            case FrameCompleted():
                self.done += 1
            case Failure():
                self._fail(event)
            case StatusChanged():
                self.status = event.status
            case WorkerNotice():
                about = "" if event.kind == "bound" else f"{event.site}: worker {event.kind}: "
                self.print(f"{about}{event.detail}", "yellow")
            case Progress():
                key = (event.site, event.node)
                self.progress.pop(key, None)  # the newest are last
                self.progress[key] = event
            case FailureHandled():
                failed = f"{event.node} at {event.site} [{frame_text(event.frame)}]"
                self.print(f"handled: {failed}: {event.type_name}: {event.message}", "yellow")
            case Metrics():
                pass

    def take_activity(self, activity: Activity) -> None:
        """Process what operations have done since the last call."""
        self.touch()
        for node in activity.nodes:
            self.calls[node.node] = node

    def print(self, text: str, style: str = "") -> None:
        """Write lines that stay; only errors if quiet."""
        if self.quiet and "red" not in style:
            return
        self.console.print(Text(safe(text), style), soft_wrap=True)

    def _fail(self, failure: Failure) -> None:
        # A result that will not come repeats the error that caused this, which was shown already.
        if isinstance(failure.error, DecodingError):
            self.unread[failure.place] += 1
        elif failure.place is not None:
            return
        self.failures += 1
        text = str(failure.error)
        if self.failures > _FULL_ERRORS:
            if self.failures > _SHORT_ERRORS:
                return
            text = text.split("\n", 1)[0]
        self.print(f"error: {text.rstrip()}", "red")

    def summarize(self, job_id: str, reason: str | None = None) -> None:
        """Show how the job ended."""
        counts = [counted(sum(self.results.values()), "result"), counted(self.done, "set") + " done"]
        if self.failures:
            counts.append(counted(self.failures, "error"))
        why = f" ({reason})" if reason else ""
        seconds = time.monotonic() - self._began
        text = f"job {job_id} {self.status.value}{why}: {', '.join(counts)}, {seconds:.2f} s"
        self.print(text, STATUS_STYLES.get(self.status, ""))


class LiveView(LineView):
    """Keeps a picture of the job at the bottom of the terminal; printed lines go above it."""

    def __init__(self, console: Console, sets: int | None, *, quiet: bool = False) -> None:
        super().__init__(console, sets, quiet=quiet)
        self._live: Live | None = None
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def shown(self, output: StandardOutput) -> Iterator[None]:
        """Show the job while the block runs."""
        live = Live(self.picture(), console=self.console, auto_refresh=False, transient=True)
        if output.terminal:  # results go above the picture
            output.divert = self._above
        suspended = suspension()
        with live:
            self._live = live
            suspended.subscribe(self._suspend)
            try:
                yield
            finally:
                suspended.unsubscribe(self._suspend)
                output.divert = None
                self._live = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def touch(self) -> None:
        """Schedule a redraw: many events cost one drawing."""
        if self._timer is None and self._live is not None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._draw)

    def _suspend(self, suspended: bool) -> None:
        """Leave the terminal to a debugger."""
        if self._live is not None and suspended:
            self._live.stop()
        elif self._live is not None:
            self._live.start(refresh=True)

    def _draw(self) -> None:
        self._timer = None
        if self._live is not None and self._live.is_started:
            self._live.update(self.picture(), refresh=True)

    def _above(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def picture(self) -> Group:
        """Return the current picture."""
        head = Text.assemble(
            (self.status.value, STATUS_STYLES.get(self.status, "bold cyan")),
            f"  {_bar(self.done, self.sets)}",
            (f"  {counted(self.failures, 'error')}" if self.failures else "", "red"),
        )
        return Group(head, self._sites(), *self._notes())

    def _sites(self) -> Table:
        known = bool(self.calls or self.results)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=known)
        table.add_column("site", style="bold")
        for name in ("running", "done", "failed", "results"):
            table.add_column(name, justify="right")
        counts: dict[str, list[int]] = {}
        for node in self.calls.values():
            row = counts.setdefault(node.site, [0, 0, 0])
            for at, number in enumerate((node.running, node.done, node.failed)):
                row[at] += number
        for site in sorted({*counts, *self.results}):
            running, done, failed = counts.get(site, (0, 0, 0))
            table.add_row(safe(site), *(f"{n:,}" if n else "" for n in (running, done, failed, self.results[site])))
        return table

    def _notes(self) -> Iterator[Text]:
        for (site, node), progress in list(self.progress.items())[-_NOTES:]:
            done = f"{progress.done:g}" if progress.total is None else _bar(progress.done, progress.total)
            frame = f"[{frame_text(progress.frame)}]"
            yield Text(safe(f"{site} {node} {frame} {done} {progress.note}"), "dim", no_wrap=True, overflow="ellipsis")


def view_of(*, quiet: bool, sets: int | None) -> LineView:
    """Return the view for a terminal, or for other outputs."""
    console = terminal(stderr=True)
    live = console.file.isatty() and not console.is_dumb_terminal and not quiet
    return (LiveView if live else LineView)(console, sets, quiet=quiet)


class _SiteLines(logging.Handler):
    """Shows what the processes of sites log."""

    def __init__(self, view: LineView) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        site = getattr(record, "site", None)
        self._view.print(f"{site or record.name}: {record.getMessage()}", "yellow" if record.levelno > 20 else "dim")


@contextmanager
def logged(view: LineView) -> Iterator[None]:
    """Show log records while the block runs; what sites print has the level INFO."""
    logger, handler = logging.getLogger("dfm_async"), _SiteLines(view)
    sites = logging.getLogger("dfm_async.site")
    logger.addHandler(handler)
    before = sites.level
    sites.setLevel(logging.WARNING if view.quiet else logging.INFO)
    try:
        yield
    finally:
        sites.setLevel(before)
        logger.removeHandler(handler)


def _bar(done: float, total: float | None) -> str:
    if not total:
        return f"{done:g} done"
    part = max(0.0, min(1.0, done / total))
    full = round(part * _BAR)
    marks = ("━" * full + "╌" * (_BAR - full)) if _unicode() else ("#" * full + "." * (_BAR - full))
    return f"{marks} {done:g}/{total:g}"


def _unicode() -> bool:
    return (sys.stderr.encoding or "").lower().startswith("utf")


def counted(number: int, what: str) -> str:
    """Return a number with its noun: ``1 result``, ``2 results``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


async def follow(
    events: AsyncIterator[Event | Activity],
    writer: ResultWriter,
    view: LineView,
    places: Collection[str],
    limit: int | None = None,
) -> StatusChanged | None:
    """Read a job to its end: show its events, write its results (of all places or of some), return its last status.

    ``limit``: end after this many results instead.
    """
    last: StatusChanged | None = None
    written = 0
    async for event in events:
        if isinstance(event, Activity):
            view.take_activity(event)
            continue
        view.take(event)
        if isinstance(event, Result):
            if not places or event.place in places:
                await writer.write(event)
                written += 1
                if written == limit:
                    break
        elif isinstance(event, StatusChanged):
            last = event
    return last


@asynccontextmanager
async def watched(job: Job, view: LineView) -> AsyncIterator[None]:
    """Show what the operations of a job do while the block runs, if the job is watched."""
    if not job.watched:
        yield
        return
    task = asyncio.create_task(_look(job, view), name="dfm_async view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def _look(job: Job, view: LineView) -> None:
    async with job.activity() as reader:
        async for activity in reader:
            view.take_activity(activity)
