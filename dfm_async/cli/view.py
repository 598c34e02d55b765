"""Shows how a job is getting on, on standard error: live on a terminal, as lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dfm_async.cli.program import safe
from dfm_async.cli.streams import StandardOutput
from dfm_async.cli.terminal import terminal
from dfm_async.errors import DecodingError
from dfm_async.model.activity import Activity, NodeActivity
from dfm_async.model.events import (
    Event,
    Failure,
    FrameCompleted,
    Metrics,
    Progress,
    Result,
    StatusChanged,
    WorkerNotice,
)
from dfm_async.model.status import JobStatus
from dfm_async.telemetry.spans import frame_text

__all__ = ["STATUS_STYLES", "JobView", "LineView", "LiveView", "counted", "logged", "view_of"]

_FULL_ERRORS: Final = 10
"""How many errors are shown with their tracebacks; of further ones one line is shown, and at last only their number."""
_SHORT_ERRORS: Final = 100
_PAUSE: Final = 0.1
"""At most so often is the screen drawn again, in seconds."""
_NOTES: Final = 12
"""Of how many nodes the last progress report is shown."""
_BAR: Final = 24

STATUS_STYLES: Final = {
    JobStatus.FINISHED: "bold green",
    JobStatus.FAILED: "bold red",
    JobStatus.ABORTED: "bold red",
    JobStatus.INTERRUPTED: "bold yellow",
}
"""How a status is shown, if it is a special one."""


class JobView:
    """Counts what happens to a job, and says what a user should know at once."""

    def __init__(self, console: Console, sets: int | None, *, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        """Whether only errors are told."""
        self.sets = sets
        """How many parameter sets there are, if that is known."""
        self.status = JobStatus.SUBMITTED
        self.done = 0
        self.failures = 0
        self.unread: Counter[str | None] = Counter()
        """How many results of each place came as values that cannot be rebuilt here."""
        self.results: Counter[str] = Counter()
        self.progress: dict[tuple[str, str], Progress] = {}
        self.calls: dict[str, NodeActivity] = {}
        self._began = time.monotonic()

    def take(self, event: Event) -> None:
        """Takes the next event of the job."""
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
                self.say(f"{event.site}: worker {event.kind}: {event.detail}", "yellow")
            case Progress():
                key = (event.site, event.node)
                self.progress.pop(key, None)  # the newest are last
                self.progress[key] = event
            case Metrics():
                pass

    def look(self, activity: Activity) -> None:
        """Takes what operations have done since the last time."""
        for node in activity.nodes:
            self.calls[node.node] = node

    def say(self, text: str, style: str = "") -> None:
        """Writes lines that stay; if quiet is wanted, only errors."""
        if self.quiet and "red" not in style:
            return
        self.console.print(Text(safe(text), style), soft_wrap=True)

    def _fail(self, failure: Failure) -> None:
        # A yield that will not come repeats the error that is its reason, which was told already.
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
        self.say(f"error: {text.rstrip()}", "red")

    def sum_up(self, job_id: str, reason: str | None = None) -> None:
        """Says how the job ended."""
        counts = [counted(sum(self.results.values()), "result"), counted(self.done, "set") + " done"]
        if self.failures:
            counts.append(counted(self.failures, "error"))
        why = f" ({reason})" if reason else ""
        seconds = time.monotonic() - self._began
        text = f"job {job_id} {self.status.value}{why}: {', '.join(counts)}, {seconds:.2f} s"
        self.say(text, STATUS_STYLES.get(self.status, ""))


class LineView(JobView):
    """Says what matters in lines; for logs and pipes. What is printed meanwhile is no result, and goes there, too."""

    @contextmanager
    def shown(self, output: StandardOutput) -> Iterator[None]:
        """Shows the job while the block runs."""
        with logged(self), redirect_stdout(sys.stderr):
            yield


class LiveView(JobView):
    """Keeps a picture of the job at the bottom of the terminal. What is printed meanwhile goes above it."""

    def __init__(self, console: Console, sets: int | None, *, quiet: bool = False) -> None:
        super().__init__(console, sets, quiet=quiet)
        self._live: Live | None = None
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def shown(self, output: StandardOutput) -> Iterator[None]:
        """Shows the job while the block runs."""
        live = Live(
            self.picture(),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        if output.terminal:  # both are on one screen: what is written there has to go above the picture
            output.divert = self._above
        with logged(self), live:
            self._live = live
            try:
                yield
            finally:
                output.divert = None
                self._live = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def take(self, event: Event) -> None:
        """Takes the next event of the job, and draws it soon."""
        super().take(event)
        self.touch()

    def look(self, activity: Activity) -> None:
        """Takes what operations have done since the last time, and draws it soon."""
        super().look(activity)
        self.touch()

    def touch(self) -> None:
        """Has the picture drawn again: not at once, so that many events cost one drawing."""
        if self._timer is None and self._live is not None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._draw)

    def _draw(self) -> None:
        self._timer = None
        if self._live is not None:
            self._live.update(self.picture(), refresh=True)

    def _above(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def picture(self) -> Group:
        """What is to be seen now."""
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


def view_of(*, quiet: bool, sets: int | None) -> LineView | LiveView:
    """The view that suits where standard error goes."""
    console = terminal(stderr=True)
    live = console.file.isatty() and not console.is_dumb_terminal and not quiet
    kind = LiveView if live else LineView
    return kind(console, sets, quiet=quiet)


class _SiteLines(logging.Handler):
    """Shows what the processes of sites say."""

    def __init__(self, view: JobView) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        site = getattr(record, "site", None)
        self._view.say(f"{site or record.name}: {record.getMessage()}", "yellow" if record.levelno > 20 else "dim")


@contextmanager
def logged(view: JobView) -> Iterator[None]:
    """Shows what is logged; what sites print counts as information."""
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
    """Tells how many there are: ``1 result``, ``2 results``."""
    return f"{number:,} {what}{'s' * (number != 1)}"
