"""``dfm-async trace``."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from dfm_async.cli.timeline import Figures, read_timeline
from dfm_async.cli.trace import duration, timeline_page
from tests.cli.rig import STATIONS, dfm, invoked, lines


def span(name: str, start: float, end: float, process: str = "lab", **more: Any) -> dict[str, Any]:
    """A span; its times are in milliseconds."""
    attributes = {
        f"dfm.{key}": value for key, value in more.items() if key not in ("status", "message", "id", "parent")
    }
    return {
        "name": name,
        "trace_id": "0" * 32,
        "span_id": more.get("id", "0" * 16),
        "parent_id": more.get("parent"),
        "start": 1_700_000_000_000_000_000 + int(start * 1e6),
        "end": 1_700_000_000_000_000_000 + int(end * 1e6),
        "process": process,
        "attributes": attributes,
        "status": more.get("status", "ok"),
        "message": more.get("message", ""),
        "unknown": "is ignored",
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    spans = [
        span("dfm.operation", 10, 20, node="load#0", job="a", id="1" * 16, parent="2" * 16),
        span("dfm.operation", 20, 60, node="load#0", job="a", status="error", message="</script><b>"),
        span("dfm.job", 0, 100, "application", pipeline="p", job="a", id="2" * 16),
        span("dfm.hop", 0, 5, "lab", **{"from": "application", "to": "lab", "job": "a"}),
        span("mine", 30, 31, "lab", job="b"),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, spans)) + '\n{"name": "torn', encoding="utf-8")
    return path


@pytest.mark.parametrize(("start", "end"), [(2**63, 2**63 + 5), (-1, 5), (0, 2**64), (0, 2**63), (0, 10**400)], ids=str)
def test_times_that_there_cannot_be_are_refused(tmp_path: Path, start: int, end: int) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**span("x", 0, 1), "start": start, "end": end}) + "\n")
    for form in [], ["--json"], ["--html", str(tmp_path / "page.html")]:
        done = invoked("trace", str(path), *form)
        assert done.exit_code == 2
        assert f"{path}, line 1" in done.stderr
        assert isinstance(done.exception, SystemExit)


def test_the_longest_times_that_there_can_be_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    long = {**span("x", 0, 1), "start": 0, "end": 2**63 - 1}
    back = {**span("x", 0, 1), "start": 2**63 - 1, "end": 0}
    path.write_text("".join(json.dumps(found) + "\n" for found in (long, long, long, back)))
    for form in [], ["--json"], ["--html", str(tmp_path / "page.html")]:
        assert invoked("trace", str(path), *form).exit_code == 0


def test_very_many_processes_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(span("x", 0, 1, f"p{number}")) + "\n" for number in range(5000)))
    found = read_timeline(path)
    assert len(found.lanes) == 101
    assert len(found.lanes["others"]["x"].figures.durations) == 4900


def test_the_trace_of_a_run_shows_every_process(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert dfm("run", STATIONS, "anomalies", "-p", "day=mon", "--trace", str(path), "-q").returncode == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "values and errors are not for everybody"
    done = invoked("trace", str(path))
    assert (done.exit_code, done.stderr) == (0, "")
    for row in (
        r"application +execute anomalies +[▁▂▃▄▅▆▇█]",
        r"archive +.*application → archive",
        r" +anomaly#2 .* 3 ",
    ):
        assert re.search(row, done.stdout)


def test_the_terminal_shows_lanes_and_what_went_wrong(file: Path) -> None:
    done = invoked("trace", str(file))
    assert done.exit_code == 0, done.output
    reported = done.stdout.splitlines()
    assert reported[0] == "5 spans in 100.0 ms; 1 failed; jobs a, b"
    job = next(line for line in reported if "job p" in line)
    assert job.startswith("application")
    assert "█" * 60 in job
    load = next(line for line in reported if "load#0" in line)
    assert re.search(r"█✗ +2 +50.0 ms +10.0 ms +40.0 ms +1", load)


def test_waiting_is_shown_apart_from_running(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    spans = [
        span("dfm.job", 0, 120, "application", job="a"),
        span("dfm.operation", 60, 80, node="load#0", job="a", waited=0.04),
        span("dfm.operation", 100, 120, node="huge#0", job="a", waited=1e300),
    ]
    path.write_text("".join(f"{json.dumps(found)}\n" for found in spans))
    done = invoked("trace", str(path), "--html", str(tmp_path / "page.html"), "--no-open")
    assert done.exit_code == 0, done.output
    assert re.search(r"load#0 +·{20}█{10} ", done.stdout)
    assert re.search(r"huge#0 +·{50}█{10} ", done.stdout)
    found = read_timeline(path, kept=10).longest
    assert [span.attributes.get("dfm.waited") for span in found] == [None, 0.04, 1e300]


def test_figures_steer_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(span("a\x9b31m\u202eb", 0, 1)) + "\n")
    done = invoked("trace", str(path), "--json")
    assert done.stdout.strip().isprintable()
    assert json.loads(done.stdout)["name"] == "a\x9b31m\u202eb"


def test_figures_are_json_lines_in_seconds(file: Path) -> None:
    done = invoked("trace", str(file), "--json", "--job", "a")
    assert done.exit_code == 0, done.output
    reported = {line.pop("name"): line for line in lines(done.stdout)}
    assert sorted(reported) == ["dfm.hop", "dfm.job", "dfm.operation"]
    expected = {"count": 2, "errors": 1, "total": 0.05, "p50": 0.01, "p95": 0.04, "max": 0.04, "waited": 0.0}
    assert reported["dfm.operation"] == expected


def test_the_page_holds_the_spans_and_nothing_in_them_is_markup(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = invoked("trace", str(file), "--html", str(page), "--no-open")
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert "</script><b>" not in text
    assert not re.search(r'(src|href)="(?!data:)', text), "it asks nobody for anything"
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    data = json.loads(found[1])
    labels = [(data["texts"][span[4]], span[6]) for span in data["spans"]]
    assert labels == [("job p", 0), ("application → lab", 0), ("load#0", 0), ("load#0", 1), ("mine", 0)]
    assert data["spans"][2][7] == 0, "the operation is a part of the job"
    assert data["spans"][3][8]["message"] == "</script><b>"
    rows = {data["texts"][lane]: rows for lane, rows in data["lanes"]}
    assert rows == {"application": 1, "lab": 2}, "what runs at the same time has rows of its own"


def test_of_too_many_spans_the_longest_and_the_failed_are_drawn(file: Path) -> None:
    found = read_timeline(file, kept=2)
    assert [(span.name, span.status) for span in found.longest] == [("dfm.job", "ok"), ("dfm.operation", "error")]
    assert "<!doctype html>" in timeline_page(found, "<title>")
    assert "<title>&lt;title&gt;</title>" in timeline_page(found, "<title>")


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has no spans"), ("hello\n", "not JSON"), ('{"a": 1}\n', "not a file of spans"), (None, "No such file")],
)
def test_a_file_that_is_not_a_trace_is_invalid_input(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content)
    done = invoked("trace", str(path))
    assert done.exit_code == 2
    assert message in done.output


def test_durations_are_written_as_people_do() -> None:
    times = (999, 1500, 2_500_000, 1_250_000_000, 125_000_000_000, 3_725_000_000_000)
    assert [duration(time) for time in times] == ["999 ns", "2 µs", "2.5 ms", "1.25 s", "2:05 min", "1:02:05 h"]


def test_percentiles_are_durations_that_there_are() -> None:
    figures = Figures()
    figures.durations.extend(range(1, 101))
    assert figures.percentiles(50, 95, 100) == [50, 95, 100]
