"""``dfm-async run``: results, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest

from dfm_async import Pipeline, PlaceParam, RetryPolicy, Yield
from tests.cli.programs.stations import unsteady
from tests.cli.rig import STATIONS, dfm, invoked, lines, started, statuses, until
from tests.exchange.processes import MARK, family


def test_results_go_to_standard_output_and_everything_else_to_standard_error() -> None:
    done = dfm("run", STATIONS, "anomalies", "--param", "day=mon")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["raw [0] [14.0, 19.5, 16.0]", "warm [0.1] 4.5", "warm [0.2] 1.0"]
    assert "finished: 3 results, 1 set done" in done.stderr


def test_many_sets_come_from_standard_input_and_go_out_as_json_lines() -> None:
    given = '{"day": "mon"}\n\n{"day": "tue"}\n'
    done = dfm("run", STATIONS, "anomalies", "--params", "-", "--place", "raw", "--json", "-q", given=given)
    assert (done.returncode, done.stderr) == (0, "")
    found = sorted(lines(done.stdout), key=lambda line: line["frame"])
    assert [(line["place"], line["frame"], line["site"], line["value"]) for line in found] == [
        ("raw", [0], "archive", [14.0, 19.5, 16.0]),
        ("raw", [1], "archive", [9.5, 12.0]),
    ]


def test_a_failed_job_is_1_and_shows_the_remote_traceback() -> None:
    done = invoked("run", STATIONS, "anomalies", "-p", "day=fri", "--target", "inline")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "raised KeyError: 'fri'" in done.stderr
    assert 'stations.py", line' in done.stderr
    assert "failed: 0 results, 1 set done, 1 error" in done.stderr


def test_what_operations_and_modules_print_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text("print('imported')\nfrom stations import fed, waiting\n")
    env = {"PYTHONPATH": str(Path(STATIONS).parent)}
    done = dfm("run", "talking.py", "-p", f"gate={tmp_path}", "--target", "inline", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "yield [0] done\n")
    assert done.stderr.splitlines()[:2] == ["imported", "begun"]


def test_what_workers_print_is_shown_once_and_not_at_all_if_quiet(tmp_path: Path) -> None:
    wait = ("run", STATIONS, "waiting", "-p", f"gate={tmp_path}")
    assert dfm(*wait).stderr.splitlines()[0] == "lab: begun"
    assert dfm(*wait, "-q").stderr == ""


def test_a_bad_line_of_the_input_is_bad_input_although_the_job_had_begun() -> None:
    done = dfm("run", STATIONS, "squares", "--params", "-", given='{"x": 2}\n{"x": \n')
    assert done.returncode == 2
    assert "standard input, line 2 is not JSON" in done.stderr


def test_ctrl_c_cancels_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    gate = f"gate={tmp_path / 'gate'}"
    with started("run", STATIONS, "waiting", "-p", gate, env={MARK: mark}) as process:
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "cancelled: lab stopped" in said
        assert "Traceback" not in said
    assert psutil.wait_procs(family(mark), 10)[1] == []


@pytest.mark.parametrize("stored", [False, True])
def test_a_second_ctrl_c_ends_at_once(store: list[str], stored: bool) -> None:
    mark = uuid.uuid4().hex
    with started("run", STATIONS, "holding", *(store if stored else ()), "--job-id", "x", env={MARK: mark}) as process:
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        until(process.stderr, "interrupting job x" if stored else "cancelling the job")
        process.send_signal(signal.SIGINT)
        assert process.wait(4) == 130  # the first one alone would take the grace of 5 seconds
    assert psutil.wait_procs(family(mark), 20)[1] == []
    if stored:
        assert statuses(store) == ["interrupted"]


def test_ctrl_c_works_while_results_are_not_read() -> None:
    with started("run", STATIONS, "many", "-p", "count=1000") as process:  # more than a pipe holds
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_closed_output_ends_the_job() -> None:
    with started("run", STATIONS, "many", "-p", "count=1000") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("yield [0.0]")
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("name", ["run", "graph"])
def test_output_that_cannot_be_written_is_a_plain_error_and_ends_the_job(name: str) -> None:
    given = ["-p", "count=1000"] if name == "run" else []
    with open("/dev/full", "w") as full:
        done = dfm(name, STATIONS, "many", *given, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert ("cancelled: lab stopped" in done.stderr) == (name == "run")
    assert done.stderr.endswith("dfm-async: standard output: No space left on device\n")


def test_each_result_has_a_file_of_its_own_that_stays_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    done = invoked("run", STATIONS, "files", "--output", str(folder), "--json", "-q", "--target", "inline")
    assert (done.exit_code, done.stderr) == (0, "")
    assert sorted(os.listdir(folder)) == sorted(Path(line["file"]).name for line in lines(done.stdout))
    assert sorted(os.listdir(folder)) == [
        "%2E%2E%2F%2E%2E%2Fbytes-0.bin",
        "array-0.npy",
        "other-0.json",
        "text-0-2.txt",
        "text-0.txt",
    ]
    assert np.load(folder / "array-0.npy").tolist() == [0, 1, 2]
    assert (folder / "%2E%2E%2F%2E%2E%2Fbytes-0.bin").read_bytes() == b"\x00\xff"
    assert (folder / "text-0.txt").read_text(encoding="utf-8") == "grün"
    assert json.loads((folder / "other-0.json").read_bytes()) == {"a": [1, 2]}


def test_no_result_takes_the_file_of_another(tmp_path: Path) -> None:
    with Pipeline("alike") as alike:
        for x in (PlaceParam("a"), PlaceParam("b")):
            Yield(x, place="text", multiuse=True)
        Yield(PlaceParam("c"), place="text-0")
    alike.save_to_file(tmp_path / "alike.json")
    (tmp_path / "sets.json").write_text(json.dumps([{"a": f"a{n}", "b": f"b{n}", "c": f"c{n}"} for n in range(3)]))
    given = ["run", STATIONS, str(tmp_path / "alike.json"), "--params", str(tmp_path / "sets.json")]
    done = invoked(*given, "--output", str(tmp_path / "made"), "-q", "--target", "inline")
    assert (done.exit_code, done.stderr) == (0, "")
    made = sorted(file.read_text() for file in (tmp_path / "made").iterdir())
    assert made == [f"{name}{n}" for name in "abc" for n in range(3)]


def test_a_parameter_without_a_type_is_json_if_it_can_be() -> None:
    done = invoked("run", STATIONS, "echoes", "-p", "value=[1, null]", "--json", "-q", "--target", "inline")
    assert [line["value"] for line in lines(done.stdout)] == [[1, None]]


def test_a_handled_failure_is_shown_and_is_not_an_error(tmp_path: Path, store: list[str]) -> None:
    with Pipeline("handled") as pipeline:
        Yield(unsteady(retry=RetryPolicy(attempts=1), fallback=7))
    pipeline.save_to_file(tmp_path / "handled.json")
    done = invoked("run", STATIONS, str(tmp_path / "handled.json"), "--target", "inline", *store, "--job-id", "one")
    assert (done.exit_code, done.stdout) == (0, "yield [0] 7\n")
    assert "handled: unsteady#0 at lab [0]: ConnectionError: attempt 1" in done.stderr
    assert "handled   lab unsteady#0 [0] ConnectionError: attempt 1" in invoked("logs", "one", *store).stdout


def test_other_parameters_under_the_id_of_a_job_are_bad_input(store: list[str]) -> None:
    run = ["run", STATIONS, "echoes", "--target", "inline", *store, "--job-id", "a", "-q"]
    assert invoked(*run, "-p", "value=1").exit_code == 0
    refused = invoked(*run, "-p", "value=2")
    assert refused.exit_code == 2
    assert "a job 'a' already exists with different content; choose another id, or pass the same" in refused.stderr
    assert "description" not in refused.stderr, "the parameters are not wrong"


def test_a_parameter_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    with Pipeline("defaults") as pipeline:
        Yield([PlaceParam("x"), PlaceParam("y", default=5)])
    pipeline.save_to_file(tmp_path / "defaults.json")
    run = ["run", STATIONS, str(tmp_path / "defaults.json"), "--json", "-q", "--target", "inline"]
    for given, value in [(["-p", "x=1"], [1, 5]), (["-p", "x=1", "-p", "y=2"], [1, 2])]:
        assert [line["value"] for line in lines(invoked(*run, *given).stdout)] == [value]
    refused = invoked(*run, "-p", "y=2")
    assert (refused.exit_code, "missing parameter 'x'" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("number", "job_id"), [(signal.SIGINT, "mine"), (signal.SIGTERM, None), (signal.SIGKILL, "mine")]
)
def test_a_signal_interrupts_a_stored_job_and_the_command_resumes_it(
    tmp_path: Path, store: list[str], number: signal.Signals, job_id: str | None
) -> None:
    gate = tmp_path / "gate"
    run = ["run", STATIONS, "waiting", "-p", f"gate={gate}", "--target", "inline", *store]
    with started(*run, *(["--job-id", job_id] if job_id else [])) as process:
        until(process.stderr, "begun")
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode in (128 + number, -signal.SIGKILL)
        assert "Traceback" not in said
    found = re.search(r"the same command with --job-id (\S+) resumes it", said)
    assert (found is None) == (number is signal.SIGKILL)
    resumed = found[1] if found else "mine"
    assert job_id in (None, resumed)
    (info,) = lines(invoked("jobs", *store, "--json").stdout)
    assert (info["job_id"], info["status"]) == (resumed, "interrupted")
    gate.touch()
    done = dfm(*run, "--job-id", resumed, "--json")
    assert (done.returncode, [line["value"] for line in lines(done.stdout)]) == (0, ["done"])
    (info,) = lines(invoked("jobs", *store, "--json").stdout)
    assert (info["status"], info["reason"], info["done"]) == ("finished", None, 1)


def test_an_interrupted_job_with_a_file_of_lines_takes_the_rest_of_them(tmp_path: Path, store: list[str]) -> None:
    gate, sets = tmp_path / "gate", tmp_path / "sets.jsonl"
    sets.write_text("".join(f'{{"gate": "{gate}", "number": {number}}}\n' for number in range(700)))
    run = ["run", STATIONS, "numbered", "--params", str(sets), *store, "--job-id", "lines", "--target", "inline"]
    with started(*run) as process:
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    gate.touch()
    done = dfm(*run, "--json")
    assert done.returncode == 0, done.stderr
    assert sorted(line["value"] for line in lines(done.stdout)) == list(range(700))


def numbers(count: int) -> str:
    return "".join(f'{{"x": {x}}}\n' for x in range(count))


@pytest.mark.parametrize(("workers", "processes"), [("1", {1}), ("2", {2}), ("1-3", {2, 3})])
def test_workers_sets_the_number_of_processes_of_each_site(workers: str, processes: set[int]) -> None:
    options = ("--params", "-", "--workers", workers, "--json", "-q")
    for count in (50, 200, 800):  # a busy machine takes longer to start another worker
        done = dfm("run", STATIONS, "processes", *options, given=numbers(count), env={"DFM_SPREAD": "always"})
        assert (done.returncode, done.stderr) == (0, "")
        found = len({line["value"] for line in lines(done.stdout)})
        if found in processes:
            break
    assert found in processes


def test_concurrency_limits_the_parameter_sets_at_a_time() -> None:
    for options, together in ((("--concurrency", "1"), {1}), (("--concurrency", "3"), {1, 2, 3})):
        done = dfm("run", STATIONS, "overlaps", "--params", "-", "--json", "-q", *options, given=numbers(20))
        assert (done.returncode, done.stderr) == (0, "")
        assert {line["value"] for line in lines(done.stdout)} <= together


def test_retry_tries_failed_calls_again() -> None:
    assert (
        "ConnectionError: attempt 2" in invoked("run", STATIONS, "tried", "--retry", "2", "--target", "inline").stderr
    )
    done = invoked("run", STATIONS, "tried", "--retry", "3", "--target", "inline", "-q")
    assert (done.exit_code, done.stdout) == (0, "yield [0] 3\n")


def test_retry_runs_calls_again_that_lost_their_worker(tmp_path: Path) -> None:
    done = dfm("run", STATIONS, "dies", "-p", f"mark={tmp_path / 'mark'}", "--retry", "2", "-q")
    assert (done.returncode, done.stdout) == (0, "yield [0] alive\n")


def test_limit_stops_after_that_many_results(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    done = dfm("run", STATIONS, "many", "-p", "count=1000000", "--limit", "3", env={MARK: mark})
    assert done.returncode == 0
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["0", "1", "2"]
    assert re.search(r"job \w+ stopped after 3 results\n$", done.stderr)
    assert psutil.wait_procs(family(mark), 10)[1] == []


def test_limit_counts_the_results_that_are_written() -> None:
    done = dfm("run", STATIONS, "anomalies", "-p", "day=mon", "--place", "warm", "--limit", "1", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("warm [0.1] 4.5\n", "warm [0.2] 1.0\n")


def test_limit_above_the_number_of_results_changes_nothing() -> None:
    done = invoked("run", STATIONS, "anomalies", "-p", "day=fri", "--limit", "9", "--target", "inline")
    assert (done.exit_code, done.stdout) == (1, "")


def test_limit_ends_a_stored_job(tmp_path: Path) -> None:
    options = ("--store", f"sqlite:///{tmp_path}/jobs.db")
    done = dfm("run", STATIONS, "many", "-p", "count=1000000", "--limit", "3", "--job-id", "some", "-q", *options)
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = lines(dfm("jobs", *options, "--json").stdout)
    assert (found["status"], found["reason"]) == ("aborted", "stopped after 3 results")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--workers", "0"), "--workers 0: write a number, 1 or more"),
        (("--workers", "8-1"), "the smallest and the largest one, as in 1-8"),
        (("--workers", "many"), "--workers many: write"),
        (("--workers", "2", "--target", "inline"), "--workers cannot be used with --target inline"),
        (("--workers", "2", "--flare", "kit"), "--workers cannot be used with --flare: each site chooses"),
        (("--concurrency", "0"), "--concurrency"),
        (("--retry", "0"), "--retry"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_invalid_numbers_are_bad_input(options: tuple[str, ...], problem: str) -> None:
    done = invoked("run", STATIONS, "squares", "-p", "x=1", *options)
    assert done.exit_code == 2
    assert problem in done.stderr


def test_job_starts_at_the_time_of_the_command(store: list[str]) -> None:
    arguments = ("run", STATIONS, "anomalies", "-p", "day=mon", "--target", "inline", "-q")
    done = invoked(*arguments, "--start-at", "2020-01-01T00:00Z")
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 3)
    with started(*arguments, "--start-at", "4102444800", "--job-id", "later", *store) as process:
        while statuses(store) != ["submitted"]:
            assert process.poll() is None
        assert "starts at 2" in invoked("jobs", *store).stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert statuses(store) == ["interrupted"]


def test_all_calls_of_a_run_can_be_recorded(tmp_path: Path, store: list[str]) -> None:
    recorded = []
    for checkpoint in "marked", "calls":
        done = invoked(
            "run", STATIONS, "squares", "-p", "x=3", "--target", "inline", "-q", *store, "--checkpoint", checkpoint
        )
        assert done.exit_code == 0, done.stderr
        recorded.append([*tmp_path.glob("*-checkpoints/*")])
    assert recorded[0] == []
    assert recorded[1] != []
    refused = invoked("run", STATIONS, "squares", "-p", "x=3", "--checkpoint", "calls")
    assert refused.exit_code == 2
    assert "--checkpoint calls needs --store" in refused.stderr


@pytest.mark.parametrize(
    ("time", "problem"),
    [
        ("tomorrow", "is not a time such as 2026-11-20T03:00Z"),
        ("2026-11-20T03:00", "has no time zone: add Z for UTC, or an offset, as in 2026-11-20T03:00:00"),
        ("nan", "number from 0"),
        ("-5", "number from 0"),
        ("2020", "--start-at '2020' is not a plausible number of seconds since 1970"),
        ("202611200300", "Write a date and a time with a time zone, such as 2026-11-20T03:00Z"),
        ("1795144800000", "is now)"),
    ],
)
def test_invalid_times_are_refused(time: str, problem: str) -> None:
    done = invoked("run", STATIONS, "anomalies", "-p", "day=mon", "--target", "inline", f"--start-at={time}")
    assert done.exit_code == 2
    assert problem in " ".join(done.stderr.split())
