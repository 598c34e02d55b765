"""``dfm-async flare``, with a real federation on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from dfm_async.deploy.flare_process import marked
from tests.cli.rig import STATIONS, dfm, invoked, lines, started, until
from tests.flare.shared import KITS

KITS_OF_TESTS = ("--kits", str(KITS))
TIMEOUT = 120.0
"""A federation is up in seconds; beside much else it may take longer."""
ONE = "dfm: 1.0.0\ninfo: {api-version: 1.0.0, code-package: one}\noperations: {}\nsites: {lab: {}}\n"


def ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(300)
def test_a_federation_of_examples_comes_up_runs_a_pipeline_and_goes_without_a_trace(tmp_path: Path) -> None:
    here = ("--folder", str(tmp_path / "here"))
    home = ("--homesite", "desk")  # so there is one client less
    up = dfm("flare", "up", *here, *home, *KITS_OF_TESTS, "--json", cwd=tmp_path, timeout=TIMEOUT)
    assert up.returncode == 0, up.stderr
    *ready, reported = lines(up.stdout)
    try:
        assert {line["site"] for line in ready} == {"server", "archive", "lab", "desk"}
        assert reported["event"] == "up"
        kit = reported["startup_kit"]

        again = invoked("flare", "up", *here)
        assert (again.exit_code, again.stdout) == (2, "")
        assert "'weather' already runs in" in again.stderr
        assert "(up, process" in again.stderr

        doctor = invoked("flare", "doctor", kit, "--json")
        findings = {line["name"]: line for line in lines(doctor.stdout)}
        assert doctor.exit_code == 0, doctor.stdout
        assert findings["sites"]["detail"] == "connected: archive, desk, lab"

        program = ("run", "here/example/year.py", "-p", "month=jan", "--quiet")
        ran = dfm(*program, *home, "--flare", kit, cwd=tmp_path, timeout=TIMEOUT)
        assert (ran.returncode, ran.stdout) == (0, "mean [0] -1.95\n"), ran.stderr

        (status,) = lines(invoked("flare", "status", *here, "--json").stdout)
        assert {node["site"] for node in status["nodes"]} == {"server", "archive", "lab", "desk"}
        assert all(node["memory"] > 10_000_000 and node["since"] > 0 for node in status["nodes"])
        assert [host_job["user"] for host_job in status["host_jobs"]] == [reported["user"]]
        shown = invoked("flare", "status", *here).stdout
        assert f"host job {status['host_jobs'][0]['job_id']} of {reported['user']}" in shown
    finally:
        down = invoked("flare", "down", *here)
    assert (down.exit_code, down.stderr) == (0, "")
    assert "no process, socket or temporary file is left" in down.stdout
    assert marked(reported["mark"]) == []
    assert ended(reported["daemon"])
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [".gitignore", "daemon.log", "example"]
    assert "no federation runs" in invoked("flare", "down", *here).stdout
    assert invoked("flare", "status", *here).exit_code == 3


MINE = """
from dfm_async import Federation, Pipeline, Yield

fed = Federation("mine")

@fed.site("lab").operation
def one() -> int:
    return 1

with Pipeline("ones") as ones:
    Yield(one())
"""


@pytest.mark.timeout(300)
def test_nothing_is_left_when_the_daemon_is_killed(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(ONE)
    here = ("--folder", str(tmp_path / "here"))
    up = dfm("flare", "up", "one.yaml", *here, "--homesite", "lab", *KITS_OF_TESTS, cwd=tmp_path, timeout=TIMEOUT)
    assert up.returncode == 0, up.stderr
    assert "FlareOptions(startup_kit=" in up.stdout
    assert "lab is registered" in up.stderr
    (status,) = lines(invoked("flare", "status", *here, "--json").stdout)
    processes = marked(status["mark"])
    assert len(processes) >= 2
    (tmp_path / "mine.py").write_text(MINE)
    kit = str(Path(status["startup_kit"]))
    refused = dfm("run", "mine.py", "--flare", kit, "--bring-code", "--homesite", "lab", cwd=tmp_path, timeout=30)
    assert refused.returncode != 0
    assert "BYOC not permitted" in refused.stderr, "and that at once: not when a time is over"
    (server,) = (node["pid"] for node in status["nodes"] if node["site"] == "server")
    os.kill(server, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], 10)
    shown = invoked("flare", "status", *here)
    assert shown.exit_code == 1
    assert "is up, but lacks server" in shown.stdout
    assert "it has ended" in shown.stdout
    os.kill(status["daemon"], signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, 10)
    assert [process for process in alive if not ended(process.pid)] == []
    assert invoked("flare", "down", *here).exit_code == 0


def test_a_federation_that_does_not_start_reports_the_reason(tmp_path: Path) -> None:
    done = dfm("flare", "up", "nowhere.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere.yaml: cannot be read: the file does not exist" in done.stderr


def test_a_federation_of_functions_needs_sites_that_take_its_code(tmp_path: Path) -> None:
    for command in (("up", "--foreground", "--folder", str(tmp_path)), ("provision", "--user", "ann@example.org")):
        done = invoked("flare", command[0], STATIONS, *command[1:])
        assert (done.exit_code, done.stdout) == (2, "")
        assert "is not a class" in done.stderr
        assert "--allow-code" in done.stderr


def free_ports() -> tuple[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return str(one.getsockname()[1]), str(two.getsockname()[1])


def test_a_provisioned_server_starts_answers_probes_and_ends_with_everything(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(ONE)
    port, admin_port = free_ports()
    made = dfm(
        *("flare", "provision", "one.yaml", "--out", "kits", "--user", "ann@example.org"),
        *("--port", port, "--admin-port", admin_port, "--scheme", "tcp", "--json"),
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    kits = {line["participant"]: line["kit"] for line in lines(made.stdout)}
    assert set(kits) == {"localhost", "home", "lab", "ann@example.org"}
    home = {"HOME": str(tmp_path)}
    with started("flare", "start", kits["localhost"], env=home) as server:
        until(server.stderr, "server localhost accepts clients")
        children = psutil.Process(server.pid).children(recursive=True)
        probed = invoked("flare", "probe", kits["localhost"])
        assert (probed.exit_code, probed.stdout) == (0, "the server answers, with TLSv1.3\n"), probed.stderr
        alone = invoked("flare", "probe", kits["lab"])
        assert (alone.exit_code, "client lab does not run on this machine" in alone.stderr) == (3, True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 143
    assert [process for process in children if not ended(process.pid)] == []
    assert invoked("flare", "probe", kits["localhost"]).exit_code == 3
    assert (tmp_path / "dfm-async" / "one").is_dir(), "jobs are kept in a place of this federation"


def test_provisioning_reports_all_mistakes_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(ONE)
    done = dfm("flare", "provision", "one.yaml", "--user", "ann", "--org-of", "x=y", "--port", "0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has 3 problems" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one.yaml"]


UNUSABLE = {"--flare": ("nowhere", "--flare nowhere: not a startup kit"), "--user": ("ann@x.org", "need --flare KIT")}


@pytest.mark.parametrize("option", UNUSABLE)
def test_a_kit_that_cannot_be_used_is_refused_before_anything_runs(option: str) -> None:
    value, reported = UNUSABLE[option]
    done = invoked("run", STATIONS, "squares", option, value)
    assert (done.exit_code, done.stdout) == (2, "")
    assert reported in done.stderr


def test_container_files_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    for kit, file in (("flare-server", "fed_server.json"), ("lab", "fed_client.json")):
        (tmp_path / "kits" / kit / "startup").mkdir(parents=True)
        (tmp_path / "kits" / kit / "local").mkdir()
        server = {"name": "weather", "service": {"target": "flare-server:8002"}, "admin_port": 8003}
        (tmp_path / "kits" / kit / "startup" / file).write_text(json.dumps({"servers": [server]}))
    done = dfm("flare", "deploy", "kits", "--package", "weather==1.0", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "deploy/compose.yaml" in [line["file"] for line in lines(done.stdout)]
    assert "weather==1.0" in (tmp_path / "deploy" / "requirements.txt").read_text().splitlines()
    done = dfm("flare", "deploy", "nowhere", cwd=tmp_path)
    assert (done.returncode, "has no startup kit" in done.stderr) == (2, True)
