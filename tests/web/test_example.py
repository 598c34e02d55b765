"""The example service, as it is started from a shell."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "service.py"


def test_the_example_serves_until_it_is_asked_to_end() -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLE), "--port", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        address = None
        while address is None:
            line = process.stderr.readline()
            assert line, "it has ended"
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
        with httpx.Client(base_url=address[0], timeout=30) as client:
            assert client.get("/lines").json() == ["mon: -2.5 to +4.5", "tue: -5.5 to +6.5", "wed: -4.0 to +3.5"]
            headers = {"accept": "text/event-stream"}
            found = client.post("/dfm/pipelines/report/jobs", json={"params": {"day": "tue"}}, headers=headers)
            data = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: ")]
            assert [event["value"] for event in data if event.get("place") == "line"] == ["tue: -5.5 to +6.5"]
            assert "progress" in {event["event"] for event in data}
            assert data[-1]["status"] == "finished"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(20) in (0, -signal.SIGINT)  # the server passes the signal on when it has ended
        assert "Application shutdown complete" in said
        assert "Traceback" not in said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
