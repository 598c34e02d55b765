"""What a terminal shows while a job runs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from rich.console import Console

from dfm_async import Failure, OperationFailed, Progress, Result, StatusChanged
from dfm_async.cli.terminal import terminal
from dfm_async.cli.view import LineView, LiveView
from dfm_async.events import WorkerNotice
from dfm_async.model.events import Activity, NodeActivity
from dfm_async.model.status import JobStatus
from tests.cli.rig import STATIONS, command


def failure(number: int) -> Failure:
    error = OperationFailed("lab", "square", "square#0", (number,), 1, "ValueError", "wrong", "Traceback: here")
    return Failure(number, None, error, (number,), "lab", "square#0")


def test_a_terminal_shows_calls_and_results_and_is_clean_at_the_end() -> None:
    screen, other = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "COLUMNS")}
    environment |= {"TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        command("run", STATIONS, "anomalies", "-p", "day=mon", "--json"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=other,
        env=environment,
    )
    os.close(other)
    shown = b""
    try:
        while data := os.read(screen, 10_000):
            shown += data
    except OSError:
        pass  # that is how a terminal says that nobody writes to it any more
    finally:
        os.close(screen)
        results, _ = process.communicate(timeout=30)
    assert (process.returncode, results.count(b"\n")) == (0, 3)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert re.search(r"submitted .* 0/1", text)
    assert "finished: 3 results, 1 set done" in text
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h"), "the cursor is back"


def picture(view: LiveView) -> str:
    console = Console(width=80, file=sys.stdout, markup=False)
    with console.capture() as captured:
        console.print(view.picture())
    return captured.get()


def test_the_picture_adds_up_what_each_site_does() -> None:
    view = LiveView(terminal(stderr=True), 4)
    view.take(StatusChanged(0, JobStatus.RUNNING))
    view.take(Result(1, "place", 1, (0,), "lab", "square#0"))
    view.take(
        Progress(offset=2, frame=(1,), site="lab", node="square#0", done=3.0, total=10.0, note="[bold]half\x1b[2J")
    )
    view.take_activity(
        Activity((NodeActivity("square#0", "lab", 7, 3, 1), NodeActivity("cube#1", "lab", 2, 2, 0)), (), 0)
    )
    view.take_activity(Activity((NodeActivity("load#2", "archive", 1, 0, 0),), (), 0))
    shown = picture(view).splitlines()
    assert re.match(r"running .* 0/4", shown[0])
    assert [line.split() for line in shown[1:4]] == [
        ["site", "running", "done", "failed", "results"],
        ["archive", "1"],
        ["lab", "3", "5", "1", "1"],
    ]
    assert shown[4].startswith("lab square#0 [1] ")
    assert shown[4].rstrip().endswith("3/10 [bold]half\\x1b[2J"), (
        "what comes from elsewhere does not steer the terminal"
    )


def test_many_errors_are_shortened_and_then_only_counted() -> None:
    console = Console(width=200, highlight=False, markup=False, file=sys.stdout)
    view = LineView(console, None)
    with console.capture() as captured:
        for number in range(150):
            view.take(failure(number))
        view.take(WorkerNotice(150, "lab", "lost", 0.0, "killed"))
        view.summarize("job")
    text = captured.get()
    assert (text.count("raised ValueError: wrong"), text.count("Traceback: here")) == (100, 10)
    assert "lab: worker lost: killed" in text
    assert "150 errors" in text
