"""``--reload``: the next job runs the code that the files have now."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dfm_async.cli.service_tokens import client_token
from tests.cli.rig import STATIONS, invoked, started, until
from tests.support import processes
from tests.support.processes import ROOT

FEDERATION = """\
import os, time
from dfm_async import Federation
from helping import add

fed = Federation("edited")
lab = fed.site("lab")

@lab.operation
def f(x: int) -> int:
    return add(x)

@lab.operation
def wait(gate: str) -> int:
    print("waiting", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.01)
    return add(0)

@fed.pipeline
def added(x: int) -> int:
    return f(x)

@fed.pipeline
def waited(gate: str) -> int:
    return wait(gate)
"""
FILE = str(ROOT / "examples" / "federation_file" / "rivers" / "federation.dfm.yaml")
HELPING = "def add(x):\n    return x + {}\n"


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str, str], None]:
    """Write a file of the federation, as editors do: a new one replaces it. All have the same time of change."""

    def write(name: str, text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.utime(tmp_path / "new", (1.7e9, 1.7e9))
        os.replace(tmp_path / "new", tmp_path / name)

    write("edited.py", FEDERATION)
    write("helping.py", HELPING.format(1))
    return write


def test_run_again_with_each_change(tmp_path: Path, save: Callable[[str, str], None]) -> None:
    command = ("run", str(tmp_path / "edited.py"), "added", "-p", "x=0", "--reload")
    with started(*command, cwd=tmp_path) as process:
        until(process.stdout, "result [0] 1")
        until(process.stderr, "waiting for changes")
        save("helping.py", HELPING.format(2))
        until(process.stdout, "result [0] 2")
        until(process.stderr, "waiting for changes")
        save("helping.py", "def add(x) return 3")
        until(process.stderr, "edited.py cannot be imported: SyntaxError")
        until(process.stderr, "The code from before the change is still in use")
        save("edited.py", FEDERATION.replace("return f(x)", "return g(f(x))"))
        save("helping.py", HELPING.format(4))
        until(process.stderr, "NameError: name 'g' is not defined")
        operation = "@fed.site('desk').operation\ndef g(x: int) -> int:\n    return 100 * x\n\n"
        save("edited.py", FEDERATION.replace("return f(x)", "return g(f(x))").replace("@fed", operation + "@fed", 1))
        until(process.stdout, "result [0] 400")
        until(process.stderr, "waiting for changes")
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in rest) == (130, False)


def test_service_runs_new_code_from_the_next_job_on(tmp_path: Path, save: Callable[[str, str], None]) -> None:
    with started("serve", str(tmp_path / "edited.py"), "--port", "0", "--reload", cwd=tmp_path) as process:
        url = processes.read_until(process.stdout, r"http://127\.0\.0\.1:\d+")[0]
        until(process.stdout, "watching")
        headers = {"authorization": f"Bearer {client_token(None, url)}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=30) as client:

            def submit(pipeline: str, job_id: str, params: dict[str, Any]) -> httpx2.Response:
                return client.post(f"/pipelines/{pipeline}/jobs", json={"params": params, "job_id": job_id})

            def value(job_id: str) -> Any:
                events = client.get(f"/jobs/{job_id}/stream").text.splitlines()
                (found,) = [line for line in events if line.startswith('data: {"event":"result"')]
                return json.loads(found.removeprefix("data: "))["value"]

            submit("waited", "old", {"gate": str(tmp_path / "gate")}).raise_for_status()
            until(process.stderr, "lab: waiting")
            save("helping.py", "def add(x) return 3")
            until(process.stderr, "The code from before the change is still in use")
            save("helping.py", HELPING.format(10))
            until(process.stderr, "reloaded (pipelines: added, waited)")
            submit("added", "new", {"x": 0}).raise_for_status()
            assert value("new") == 10
            (tmp_path / "gate").touch()
            assert value("old") == 1, "running jobs keep their code"
            save("edited.py", FEDERATION.replace("def added(x: int)", "def added(x: int, y: int = 5)"))
            until(process.stderr, "is not used")
            save("edited.py", FEDERATION.replace("def added(x: int)", "def more(x: int)"))
            until(process.stderr, "reloaded (pipelines: more, waited)")
            assert submit("added", "gone", {"x": 0}).status_code == 404
            submit("more", "more", {"x": 1}).raise_for_status()
            assert value("more") == 11
            assert "/pipelines/more/jobs" in client.get("/openapi.json").json()["paths"]
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=30)
        assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["run", STATIONS, "anomalies", "--params", "-"], "standard input can be read only once"),
        (["run", STATIONS, "anomalies", "--job-id", "mine"], "leave out --job-id"),
        (
            ["run", str(ROOT / "examples/federation_file/rivers/federation.dfm.yaml"), "p.json"],
            "is for federations in Python modules",
        ),
    ],
    ids=["stdin", "job id", "file"],
)
def test_reload_is_refused_where_it_cannot_work(arguments: list[str], problem: str) -> None:
    done = invoked(*arguments, "--reload")
    assert done.exit_code == 2
    assert problem in done.stderr
