"""A service of ``dfm-async serve``, and commands that inspect its jobs from another terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import mcp
import pytest
from mcp.client.streamable_http import streamable_http_client

from dfm_async.cli.service_tokens import client_token, shared_token
from tests.cli.rig import STATIONS, dfm, invoked, lines, started, statuses, until
from tests.support import processes

TOKEN = "a-token+for-the-tests"


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the stations; give the process, and the address of the service."""
    with started("serve", STATIONS, *arguments, "--port", "0") as process:
        yield process, processes.read_until(process.stdout, r"http://127\.0\.0\.1:\d+")[0]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--mcp") as (process, address):
        yield address
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert "Traceback" not in said


def submit(url: str, pipeline: str, job_id: str, params: Any) -> None:
    body = {"params": params, "job_id": job_id}
    headers = {"authorization": f"Bearer {client_token(None, url)}"}
    httpx2.post(f"{url}/pipelines/{pipeline}/jobs", json=body, headers=headers, timeout=30).raise_for_status()


def test_attach_writes_what_run_would_have_written(url: str) -> None:
    submit(url, "anomalies", "attached", [{"day": "mon"}, {"day": "fri"}])
    done = invoked("attach", "attached", "--url", url)
    assert done.exit_code == 1
    assert sorted(done.stdout.splitlines()) == ["raw [0] [14.0, 19.5, 16.0]", "warm [0.1] 4.5", "warm [0.2] 1.0"]
    assert "load#0 at site 'archive' (frame (1,)) raised KeyError: 'fri'" in done.stderr
    assert "job attached failed: 3 results, 2 sets done, 1 error" in done.stderr
    rest = invoked("attach", "attached", "--after", "1000", "--place", "warm", "--json", env={"DFM_URL": url})
    assert (rest.exit_code, rest.stdout) == (3, ""), "there is nothing behind the end"


def test_logs_show_every_event_and_jobs_every_job(url: str) -> None:
    submit(url, "squares", "logged", {"x": 3})
    assert invoked("attach", "logged", "--url", url, "-q").stdout == "yield [0] 9\n"
    reported = invoked("logs", "logged", "--url", url).stdout.splitlines()
    expected = ["status    running", "result    yield [0] 9", "frame     [0] done", "status    finished"]
    assert [line.split(None, 1)[1] for line in reported] == expected
    followed = invoked("logs", "logged", "--url", url, "--follow", "--json", "--after", "0")
    assert [line["event"] for line in lines(followed.stdout)] == ["result", "frame", "status"]
    found = {job["job_id"]: job["status"] for job in lines(invoked("jobs", "--url", url, "--json").stdout)}
    assert found["logged"] == "finished"
    table = invoked("jobs", "--url", url, "--status", "finished").stdout
    assert re.search(r"^logged +finished +squares ", table, re.MULTILINE)


@pytest.mark.parametrize("stored", [False, True])
def test_jobs_are_listed_by_pipeline_label_and_time(url: str, store: list[str], *, stored: bool) -> None:
    if stored:
        assert dfm("run", STATIONS, "squares", "-p", "x=3", *store, "--job-id", "found").returncode == 0
    else:
        submit(url, "squares", "found", {"x": 3})
        assert invoked("attach", "found", "--url", url, "-q").exit_code == 0
    source = store if stored else ["--url", url]

    def listed(*options: str) -> bool:
        return "found" in [job["job_id"] for job in lines(invoked("jobs", *source, "--json", *options).stdout)]

    assert listed("--pipeline", "squares", "--since", "2026-01-01", "--until", "2999-01-01T08:30:00")
    assert not listed("--pipeline", "waiting")
    assert not listed("--since", "2999-01-01")
    assert not listed("--until", "2026-01-01")
    assert not listed("--label", "nobody")
    empty = invoked("jobs", *source, "--pipeline", "none")
    assert (empty.exit_code, empty.stderr) == (0, "dfm-async: no jobs fit these options\n")
    assert invoked("jobs", *source, "--since", "yesterday").exit_code == 2


async def test_agents_call_pipelines_at_mcp_with_the_token(url: str) -> None:
    async with httpx2.AsyncClient() as http:
        assert (await http.post(f"{url}/mcp", json={})).status_code == 401
        http.headers["authorization"] = f"Bearer {client_token(None, url)}"
        async with mcp.Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client:
            assert "squares" in [tool.name for tool in (await client.list_tools()).tools]
            assert (await client.call_tool("squares", {"x": 4})).structured_content == {"result": 16}


def test_top_shows_what_runs_and_why_jobs_wait(url: str, tmp_path: Path) -> None:
    submit(url, "waiting", "topped", {"gate": str(tmp_path / "gate")})
    with started("logs", "topped", "--follow", "--url", url) as process:
        until(process.stdout, "status    running")
        process.send_signal(signal.SIGINT)
    found = lines(invoked("top", "--url", url, "--once", "--json").stdout)
    assert [info["job_id"] for info in found[0]["jobs"]] == ["topped"]
    pid = found[0]["stats"]["sites"]["lab"]["workers"][0]["pid"]
    with started("top", "--url", url, "--json") as process:  # shows the state again after each change
        assert '"topped"' in until(process.stdout, '"jobs":[{')
        assert invoked("cancel", "topped", "--url", url).exit_code == 0
        until(process.stdout, '"jobs":[]')
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    table = invoked("top", "--url", url).stdout
    assert re.search(r"^0 running, 0 waiting for a slot", table)
    assert re.search(r"^site +worker +jobs +running +waiting +memory +lag +state", table, re.MULTILINE)
    assert re.search(rf"^ +{pid} +0 ", table, re.MULTILINE)


def test_cancel_ends_a_job_and_ctrl_c_only_the_command(url: str, tmp_path: Path) -> None:
    submit(url, "waiting", "long", {"gate": str(tmp_path / "gate")})
    with started("logs", "long", "--follow", "--url", url) as process:
        until(process.stdout, "status    running")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    done = invoked("cancel", "long", "--url", url, "--json", "--reason", "enough")
    assert lines(done.stdout) == [{"job_id": "long", "status": "aborted", "outcomes": {"lab": "stopped"}}]
    ended = invoked("attach", "long", "--url", url)
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "job long aborted (enough)" in ended.stderr


def test_retry_runs_the_failed_sets_of_a_job_again(url: str) -> None:
    submit(url, "anomalies", "partial", [{"day": "mon"}, {"day": "fri"}])
    assert invoked("attach", "partial", "--url", url).exit_code == 1
    done = invoked("retry", "partial", "--url", url)
    assert done.exit_code == 0
    assert re.fullmatch(r"job \w+ runs the failed parameter sets of partial again with 1 parameter set\n", done.stdout)
    (info,) = lines(invoked("retry", "partial", "--url", url, "--json").stdout)
    assert (info["retry_of"], info["sets"]) == ("partial", 1)
    assert "raised KeyError: 'fri'" in invoked("attach", info["job_id"], "--url", url).stderr
    submit(url, "squares", "good", {"x": 3})
    assert invoked("attach", "good", "--url", url).exit_code == 0
    refused = invoked("retry", "good", "--url", url)
    assert refused.exit_code != 0
    assert "job good has no failed parameter sets" in refused.stderr


def test_fork_needs_a_store_and_numbers(url: str) -> None:
    submit(url, "squares", "forked", {"x": 3})
    assert invoked("attach", "forked", "--url", url).exit_code == 0
    refused = invoked("fork", "forked", "--from-node", "square", "--url", url)
    assert refused.exit_code != 0
    assert "only sessions with a store record calls" in refused.stderr
    wrong = invoked("fork", "forked", "--from-node", "square", "--frame", "0,x", "--url", url)
    assert "--frame takes numbers, such as 0,57, not '0,x'" in wrong.stderr


def test_commands_that_need_a_service_offer_no_store() -> None:
    for arguments in ("top",), ("retry", "x"), ("fork", "x", "--from-node", "square"):
        refused = invoked(*arguments, "--store", "sqlite:///jobs.db")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "No such option: --store" in refused.stderr


def test_send_sends_events_to_a_job(url: str) -> None:
    submit(url, "approvals", "approved", [{}, {}])
    refused = invoked("send", "approved", "approval", "true", "--url", url)
    assert refused.exit_code != 0
    assert "has 2 parameter sets" in refused.stderr
    for frame in ("0", "1"):
        done = invoked("send", "approved", "approval", "true", "--frame", frame, "--url", url)
        assert (done.exit_code, done.stdout) == (0, "event 'approval' was sent to job approved\n")
        (info,) = lines(
            invoked("send", "approved", "note", f"{frame}", "--frame", frame, "--url", url, "--json").stdout
        )
        assert info["job_id"] == "approved"
    written = invoked("attach", "approved", "--url", url, "-q").stdout.splitlines()
    assert sorted(written) == ["yield [0] [True, '0']", "yield [1] [True, '1']"]
    reported = invoked("logs", "approved", "--url", url).stdout
    assert re.search(r"waits +Wait#\d+ \[0\] for event 'approval'", reported)
    assert re.search(r"event +'note' \[1\] 1", reported)
    assert re.search(r"goes on +Wait#\d+ \[1\] by event", reported)


def test_what_does_not_exist_is_3(url: str) -> None:
    for name in ("attach", "logs", "cancel", "retry", "send"):
        done = invoked(name, "nothing", *(["go"] if name == "send" else []), "--url", url)
        assert (done.exit_code, done.stdout) == (3, "")
        assert f"no job 'nothing' is known to the service {url}" in done.stderr
    elsewhere = invoked("jobs", "--url", "http://127.0.0.1:9")
    assert elsewhere.exit_code == 3
    assert "service http://127.0.0.1:9: cannot be reached" in elsewhere.stderr


def test_a_service_with_a_token_refuses_clients_without_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o640)
    open_to_others = dfm("serve", STATIONS, "squares", "--port", "0", "--token-file", str(file))
    assert open_to_others.returncode == 2
    assert f"other users of this machine can read the token. Run: chmod 600 {file}" in open_to_others.stderr
    file.chmod(0o600)
    with serving("squares", "--token-file", str(file)) as (process, address):
        refused = invoked("jobs", "--url", address)
        assert refused.exit_code == 3
        assert "Give --token-file, or set DFM_TOKEN" in refused.stderr
        assert httpx2.get(f"{address}/jobs", headers={"authorization": "Bearer no"}).status_code == 401
        known = {"authorization": f"Bearer {TOKEN}"}
        found = httpx2.get(f"{address}/pipelines", headers=known).json()["pipelines"]
        assert [pipeline["name"] for pipeline in found] == ["squares"]
        assert invoked("jobs", "--url", address, "--token-file", str(file)).exit_code == 0
        assert invoked("jobs", "--url", address, env={"DFM_TOKEN": TOKEN}).exit_code == 0
        with httpx2.Client(base_url=address, follow_redirects=True) as browser:
            assert browser.get("/?token=another").status_code == 401
            page = browser.get(f"/?token={TOKEN}")
            assert (page.status_code, str(page.url)) == (200, f"{address}/")
            assert page.headers["content-type"].partition(";")[0] == "text/html"
            assert browser.get("/jobs").status_code == 200
            steering = f"{address}/pipelines/squares/jobs"
            for origin, status in ((address, 422), ("http://127.0.0.1:9", 403), ("null", 403)):
                assert browser.post(steering, headers={"origin": origin}).status_code == status
            for kind, status in (("document", 200), ("image", 403)):
                headers = {"sec-fetch-site": "same-site", "sec-fetch-dest": kind}
                assert browser.get("/", headers=headers).status_code == status
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_the_stored_jobs_of_a_service(
    tmp_path: Path, store: list[str], number: signal.Signals
) -> None:
    with serving(*store) as (process, address):
        assert f"{address}/?token={client_token(None, address)}" in until(process.stdout, "in a browser")
        submit(address, "waiting", "long", {"gate": str(tmp_path / "gate")})
        until(process.stderr, "begun")
        process.send_signal(number)
        assert process.wait(30) in (128 + number, -number)
    assert statuses(store) == ["interrupted"]
    assert client_token(None, address) is None, "it is removed at the end of the service"
    if number is signal.SIGTERM:
        (tmp_path / "gate").touch()
        with serving(*store, "--resume") as (process, address):
            until(process.stdout, "in a browser")
            assert invoked("attach", "long", "--url", address).exit_code == 0
            process.send_signal(number)
            process.wait(30)
        assert statuses(store) == ["finished"]


def test_resume_without_a_store_is_invalid_input() -> None:
    done = invoked("serve", STATIONS, "--resume", "--port", "0")
    assert done.exit_code == 2
    assert "--resume needs a store" in done.stderr


def test_a_second_ctrl_c_ends_a_service_at_once(store: list[str]) -> None:
    with serving(*store) as (process, address):
        submit(address, "holding", "long", {})
        until(process.stderr, "begun")
        headers = {"authorization": f"Bearer {client_token(None, address)}"}
        with httpx2.stream("GET", f"{address}/jobs/long/stream", headers=headers, timeout=None) as response:
            reported = response.iter_lines()
            next(reported)
            process.send_signal(signal.SIGINT)
            for _ in reported:
                pass  # until the service ends the stream, because it has heard the signal
            process.send_signal(signal.SIGINT)
            process.wait(4)  # the first one alone would take the grace of 5 seconds
    assert statuses(store) == ["interrupted"]


def test_a_service_without_a_token_generates_a_private_one(url: str) -> None:
    assert httpx2.get(f"{url}/jobs").status_code == 401
    token = client_token(None, url)
    assert token is not None
    assert httpx2.get(f"{url}/jobs", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert invoked("jobs", "--url", url).exit_code == 0
    port = url.rpartition(":")[2]
    home = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(home) / "dfm_async" if home else Path(tempfile.gettempdir()) / f"dfm_async-{os.getuid()}"
    (file,) = folder.glob(f"serve-*-{port}.token")
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0
    file.parent.chmod(0o755)
    try:
        assert client_token(None, url) is None, "somebody else may have put it there"
    finally:
        file.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("localhost", "shown"), [(["127.0.0.1"], True), (["::1", "127.0.0.1"], False), (["::1"], False), ([], False)]
)
def test_the_token_of_a_service_is_sent_only_to_its_address(
    localhost: list[str], shown: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DFM_TOKEN", raising=False)
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *_args, **_more: [(0, 0, 0, "", (name, 8000)) for name in localhost]
    )
    with shared_token("127.0.0.1", 8000, "the-token-of-ada"):
        assert client_token(None, "http://127.0.0.1:8000") == "the-token-of-ada"
        assert client_token(None, "http://localhost:8000") == ("the-token-of-ada" if shown else None)
        for other in ("http://[::1]:8000", "http://127.0.0.2:8000", "http://127.0.0.1:8001", "http://example.org:8000"):
            assert client_token(None, other) is None
        with shared_token("::1", 8000, "the-token-of-ada"):
            assert client_token(None, "http://[0::1]:8000") == "the-token-of-ada"
            assert (client_token(None, "http://localhost:8000") is None) == (not localhost)
    assert client_token(None, "http://127.0.0.1:8000") is None


def test_a_port_in_use_is_invalid_input(url: str) -> None:
    done = dfm("serve", STATIONS, "--port", url.rpartition(":")[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert "Address already in use" in done.stderr


def test_json_has_no_characters_that_control_a_terminal(url: str) -> None:
    text = "a\x9b31mb\u202ec\x7fd\u2066e\x1bf"
    submit(url, "echoes", "controls", {"value": text})
    invoked("attach", "controls", "--url", url, "-q")
    for arguments in (["attach", "controls", "--json"], ["logs", "controls", "--json"], ["jobs", "--json"]):
        done = invoked(*arguments, "--url", url)
        assert not [found for found in done.stdout if not found.isprintable() and found != "\n"]
    (result,) = lines(invoked("attach", "controls", "--json", "--url", url).stdout)
    assert result["value"] == text
