"""Jobs of a store file, looked at from another process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cli.rig import STATIONS, dfm, invoked, lines, started, until


def test_a_job_is_read_along_while_another_process_runs_it(tmp_path: Path) -> None:
    store = ["--store", f"sqlite:///{tmp_path / 'jobs.db'}"]
    run = ["run", STATIONS, "waiting", "-p", f"gate={tmp_path / 'gate'}", "--job-id", "here", *store]
    with started(*run) as owner:
        until(owner.stderr, "begun")
        assert [job["status"] for job in lines(invoked("jobs", *store, "--json").stdout)] == ["running"]
        assert invoked("logs", "here", *store).stdout.split() == ["0", "status", "running"]
        refused = invoked("cancel", "here", *store)
        assert refused.exit_code == 3
        assert (
            f"job here runs in process {owner.pid} on {os.uname().nodename}, which alone can cancel" in refused.stderr
        )
        with started("attach", "here", *store, "--json") as reader:
            owner.send_signal(signal.SIGINT)
            assert owner.wait(30) == 130
            _, said = reader.communicate(timeout=30)
        assert reader.returncode == 1
        assert "job here interrupted (the session was closed): 0 results" in said


def test_an_interrupted_job_can_be_ended_for_good(tmp_path: Path) -> None:
    store = ["--store", f"sqlite:///{tmp_path / 'jobs.db'}"]
    with started("run", STATIONS, "waiting", "-p", f"gate={tmp_path / 'gate'}", "--job-id", "left", *store) as owner:
        until(owner.stderr, "begun")
        owner.kill()
        owner.wait()
    assert invoked("cancel", "left", *store).stdout == "job left is aborted\n"


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


def test_a_result_that_cannot_be_read_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "towns.py").write_text(TOWNS, encoding="utf-8")
    store = ["--store", f"sqlite:///{tmp_path / 'jobs.db'}"]
    assert dfm("run", "towns.py", "--target", "inline", "--job-id", "ulm", *store, cwd=tmp_path).returncode == 0

    done = invoked("attach", "ulm", *store, "--quiet")
    assert (done.exit_code, done.stdout) == (1, "note [0] of all\n")
    assert "1 result cannot be read here: give the module of the class with --import" in done.stderr
    assert invoked("attach", "ulm", *store, "--quiet", "--place", "note").exit_code == 0, "nobody asked for the town"

    known = dfm("attach", "ulm", *store, "--quiet", "--import", "towns.py", "--place", "town", cwd=tmp_path)
    assert (known.returncode, known.stdout) == (0, "town [0] Town(name='Ulm')\n")


def test_what_is_no_store_is_3(tmp_path: Path) -> None:
    (tmp_path / "other.db").write_text("something else")
    for url, message in [
        (f"sqlite:///{tmp_path / 'none.db'}", "there is no store"),
        ("jobs.db", "this is no URL of a store"),
        (f"sqlite:///{tmp_path / 'other.db'}", "other.db"),
    ]:
        done = invoked("jobs", "--store", url)
        assert (done.exit_code, done.stdout) == (3, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "none.db").exists()
