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

from dfm_async import Pipeline, PlaceParam, Yield
from tests.cli.rig import STATIONS, command, dfm, invoked, lines, started, until
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


def test_a_second_ctrl_c_ends_at_once() -> None:
    mark = uuid.uuid4().hex
    with started("run", STATIONS, "holding", env={MARK: mark}) as process:
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        until(process.stderr, "cancelling the job")
        process.send_signal(signal.SIGINT)
        assert process.wait(4) == 130  # the first one alone would take the grace of 5 seconds
    assert psutil.wait_procs(family(mark), 20)[1] == []


def test_ctrl_c_is_heard_while_nobody_takes_the_results() -> None:
    with started("run", STATIONS, "many", "-p", "count=1000") as process:  # more than a pipe holds
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_results_that_nobody_wants_end_the_job() -> None:
    with started("run", STATIONS, "many", "-p", "count=1000") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("yield [0.0]")
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_results_that_cannot_be_written_fail_and_end_the_job() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("run", STATIONS, "many", "-p", "count=1000"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "cancelled: lab stopped" in done.stderr
    assert done.stderr.endswith("dfm-async: standard output: No space left on device\n")


def test_a_drawing_that_cannot_be_written_is_told_in_plain_words() -> None:
    with open("/dev/full", "w") as full:
        drawing = command("graph", STATIONS, "many")
        done = subprocess.run(drawing, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "dfm-async: standard output: No space left on device\n")


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


@pytest.mark.parametrize(("number", "job_id"), [(signal.SIGINT, "mine"), (signal.SIGTERM, None)])
def test_a_signal_interrupts_a_stored_job_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals, job_id: str | None
) -> None:
    gate = tmp_path / "gate"
    run = ["run", STATIONS, "waiting", "-p", f"gate={gate}", "--store", "sqlite:///jobs.db", "--target", "inline"]
    named = ["--job-id", job_id] if job_id else []
    with started(*run, *named, cwd=tmp_path) as process:
        until(process.stderr, "begun")
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 128 + number
        assert "Traceback" not in said
        found = re.search(r"the same command with --job-id (\S+) goes on with it", said)
        assert found is not None
        assert job_id in (None, found[1])
    store = ["--store", f"sqlite:///{tmp_path / 'jobs.db'}", "--json"]
    assert [(job["job_id"], job["status"]) for job in lines(invoked("jobs", *store).stdout)] == [
        (found[1], "interrupted")
    ]
    gate.touch()
    done = dfm(*run, "--job-id", found[1], "--json", cwd=tmp_path)
    assert (done.returncode, [line["value"] for line in lines(done.stdout)]) == (0, ["done"])
    (info,) = lines(invoked("jobs", *store).stdout)
    assert (info["status"], info["reason"], info["done"]) == ("finished", None, 1)


def test_an_interrupted_job_with_a_file_of_lines_takes_the_rest_of_them(tmp_path: Path) -> None:
    gate, sets = tmp_path / "gate", tmp_path / "sets.jsonl"
    sets.write_text("".join(f'{{"gate": "{gate}", "number": {number}}}\n' for number in range(700)))
    run = ["run", STATIONS, "numbered", "--params", str(sets), "--store", "sqlite:///jobs.db", "--job-id", "lines"]
    with started(*run, "--target", "inline", cwd=tmp_path) as process:
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    gate.touch()
    done = dfm(*run, "--target", "inline", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line["value"] for line in lines(done.stdout)) == list(range(700))


def test_a_second_signal_ends_a_stored_job_at_once(tmp_path: Path) -> None:
    with started("run", STATIONS, "holding", "--store", "sqlite:///jobs.db", "--job-id", "x", cwd=tmp_path) as process:
        until(process.stderr, "begun")
        process.send_signal(signal.SIGINT)
        until(process.stderr, "interrupting job x")
        process.send_signal(signal.SIGINT)
        assert process.wait(4) == 130  # the first one alone would take the grace of 5 seconds
    store = ["--store", f"sqlite:///{tmp_path / 'jobs.db'}", "--json"]
    assert [job["status"] for job in lines(invoked("jobs", *store).stdout)] == ["interrupted"]


def test_the_same_again_goes_on_with_a_job_that_was_interrupted(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    run = [
        "run",
        STATIONS,
        "waiting",
        "-p",
        f"gate={gate}",
        "--store",
        "sqlite:///jobs.db",
        "--job-id",
        "one",
        "--json",
    ]
    with started(*run, cwd=tmp_path) as process:
        until(process.stderr, "begun")
        process.kill()
        process.wait()
    store = ["--store", f"sqlite:///{tmp_path / 'jobs.db'}", "--json"]
    assert [job["status"] for job in lines(dfm("jobs", *store).stdout)] == ["interrupted"]
    gate.touch()
    done = dfm(*run, cwd=tmp_path)
    assert done.returncode == 0
    assert [line["value"] for line in lines(done.stdout)] == ["done"]
