"""Jobs of a store, read by another process."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cli.rig import STATIONS, dfm, invoked, started, statuses, until
from tests.store.helpers import sql
from tests.support.terminal import on_terminal


def test_a_job_is_read_along_while_another_process_runs_it(tmp_path: Path, store: list[str]) -> None:
    run = ["run", STATIONS, "waiting", "-p", f"gate={tmp_path / 'gate'}", "--job-id", "here", *store]
    with started(*run) as owner:
        until(owner.stderr, "begun")
        assert statuses(store) == ["running"]
        assert invoked("logs", "here", *store).stdout.split() == ["0", "status", "running"]
        with started("attach", "here", *store, "--json") as reader:
            owner.send_signal(signal.SIGINT)
            assert owner.wait(30) == 130
            _, said = reader.communicate(timeout=30)
        assert reader.returncode == 1
        assert "job here interrupted (the session was closed): 0 results" in said
    assert invoked("cancel", "here", *store).stdout == "job here is aborted\n", "no process runs it"


def test_a_job_is_cancelled_that_another_process_runs(tmp_path: Path, store: list[str]) -> None:
    run = ["run", STATIONS, "waiting", "-p", f"gate={tmp_path / 'gate'}", "--job-id", "here", *store]
    with started(*run) as owner:
        until(owner.stderr, "begun")
        assert invoked("cancel", "here", *store).stdout.startswith("job here is aborted\n")
        assert owner.wait(30) == 1


TOWNS = """
from dataclasses import dataclass
from dfm_async import Federation, Pipeline, Yield

fed = Federation("towns")

@dataclass
class Town:
    name: str

@fed.site("office").operation
def largest() -> Town:
    return Town("Ulm")

with Pipeline("largest") as pipeline:
    Yield(largest(), place="town")
    Yield("of all", place="note")
"""


def test_a_result_that_cannot_be_read_is_no_success(tmp_path: Path, store: list[str]) -> None:
    (tmp_path / "towns.py").write_text(TOWNS, encoding="utf-8")
    assert dfm("run", "towns.py", "--target", "inline", "--job-id", "ulm", *store, cwd=tmp_path).returncode == 0

    done = invoked("attach", "ulm", *store, "--quiet")
    assert (done.exit_code, done.stdout) == (1, "note [0] of all\n")
    assert "1 result cannot be decoded: name the module of their class with --import" in done.stderr
    assert invoked("attach", "ulm", *store, "--quiet", "--place", "note").exit_code == 0, "nobody asked for the town"

    known = dfm("attach", "ulm", *store, "--quiet", "--import", "towns.py", "--place", "town", cwd=tmp_path)
    assert (known.returncode, known.stdout) == (0, "town [0] Town(name='Ulm')\n")


BROKEN = """
from dfm_async import Federation, OperationContext, Pipeline, Yield

federation = Federation("towns")


@federation.site("home").operation
def found(context: OperationContext) -> str:
    context.progress(1, note="two\\nlines")
    raise ValueError("no town\\nhere")


with Pipeline("broken") as pipeline:
    Yield(found(), place="town")
"""


def test_logs_have_one_line_per_event(tmp_path: Path, store: list[str]) -> None:
    (tmp_path / "towns.py").write_text(BROKEN, encoding="utf-8")
    assert dfm("run", "towns.py", "--target", "inline", "--job-id", "ulm", *store, cwd=tmp_path).returncode == 1

    lines = invoked("logs", "ulm", *store).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4", "5"]
    texts = {line.split()[1]: line for line in lines}
    assert set(texts) == {"status", "progress", "failure", "frame"}
    assert texts["progress"].endswith(r"two\nlines")
    assert texts["failure"].endswith(r"raised ValueError: no town\nhere")
    assert "raise ValueError" in invoked("logs", "ulm", *store, "--json").stdout


def test_an_invalid_store_is_3(tmp_path: Path) -> None:
    (tmp_path / "other.db").write_text("something else")
    for url, message in [
        (f"sqlite:///{tmp_path / 'none.db'}", "there is no store"),
        ("jobs.db", "this is not a store URL"),
        (f"sqlite:///{tmp_path / 'other.db'}", "other.db"),
    ]:
        done = invoked("jobs", "--store", url)
        assert (done.exit_code, done.stdout) == (3, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "none.db").exists()


def test_checking_a_store_shows_progress_on_a_terminal(store: list[str]) -> None:
    assert invoked("run", STATIONS, "squares", "-p", "x=3", "--target", "inline", *store).exit_code == 0
    code = "from dfm_async.cli import main; main()"
    with on_terminal("-c", code, "store", "check", store[1]) as terminal:
        shown = terminal.until("no problems found\n")
    assert shown.startswith("\r\x1b[Kreading jobs: 1")
    assert shown.endswith("\r\x1b[K")


def test_a_store_is_checked_pruned_vacuumed_and_migrated(tmp_path: Path, store: list[str]) -> None:
    (tmp_path / "towns.py").write_text(TOWNS)
    run = ["run", str(tmp_path / "towns.py"), "--job-id"]
    for name in "a", "b":
        assert invoked(*run, name, *store).exit_code == 0
    url = store[1]
    assert invoked("store", "check", url).stdout == "no problems found\n"
    assert "give a number and a unit" in invoked("store", "prune", url, "--older-than", "soon").stderr
    assert "ended for good" in invoked("store", "prune", url, "--older-than", "1d", "--status", "running").stderr
    assert invoked("store", "prune", url, "--older-than", "1d").stdout == "deleted 0 jobs\n"
    assert invoked("store", "migrate", url).stdout == "the store has version 2 already\n"
    sql(tmp_path / "jobs.db", "DELETE FROM params")
    sql(tmp_path / "jobs.db", "UPDATE jobs SET frames = 1 WHERE job_id = 'a'")
    damaged = invoked("store", "check", url)
    assert damaged.exit_code == 1
    assert "job a is damaged: its parameter set 0 is missing" in damaged.stdout
    assert invoked("store", "prune", url, "--older-than", "0s", "--status", "finished").stdout == "deleted 2 jobs\n"
    assert invoked("store", "vacuum", url).stdout == "the space of deleted jobs was given back\n"
    for statement in "DROP TABLE requests", "DROP TABLE garbage", "UPDATE meta SET version = 1":
        sql(tmp_path / "jobs.db", statement)
    sql(tmp_path / "jobs.db", "DROP INDEX jobs_by_end")
    assert invoked("store", "migrate", url).stdout == "the store was migrated from version 1 to 2\n"
    missing = invoked("store", "check", f"sqlite:///{tmp_path}/none.db")
    assert missing.exit_code == 3
    assert "there is no store" in missing.stderr
