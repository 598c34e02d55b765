"""The service of the quickstart: its commands are run as the page has them, but for the port."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from dfm_async.cli.service_tokens import client_token
from tests.docs.pages import DOCS, FILE, blocks
from tests.support.processes import read_until, started

BLOCKS = list(blocks((DOCS / "quickstart.md").read_text(encoding="utf-8")))


def command(program: str) -> list[str]:
    """The command of the page that starts with a word."""
    texts = [block.text.replace("\\\n", " ") for block in BLOCKS if block.language == "sh"]
    (found,) = [shlex.split(text) for text in texts if text.startswith(program)]
    return found


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Write the file of the page, and serve it; give the address."""
    for block in BLOCKS:
        file = FILE.match(block.text)
        if file is not None:
            with (folder / file["name"]).open("a", encoding="utf-8") as written:
                written.write(block.text)
    _, *arguments = command("dfm-async serve")
    serve = (sys.executable, "-m", "dfm_async", *arguments, "--port", "0")
    with started(*serve, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        yield read_until(server.stdout, r"http://[\w.:]+")[0]
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def test_the_service_of_the_quickstart_answers_as_the_page_says(tmp_path: Path) -> None:
    curl = argparse.ArgumentParser()
    curl.add_argument("url")
    curl.add_argument("-N", action="store_true")
    curl.add_argument("-H", action="append", dest="headers")
    curl.add_argument("-d", dest="data")
    given = curl.parse_args(command("curl")[1:])
    headers = dict(header.split(": ", 1) for header in given.headers)
    with serving(tmp_path) as address:
        headers["authorization"] = headers["authorization"].replace("TOKEN", client_token(None, address) or "")
        url = given.url.replace("http://127.0.0.1:8000", address)
        assert url.startswith(address), "the page names another address than the command has"
        answer = httpx2.post(url, content=given.data, headers=headers, timeout=30)
    found = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    results = [event for event in found if event["event"] == "result"]
    (shown,) = [block.text for block in BLOCKS if block.text.startswith("event: result")]
    expected = json.loads(shown.partition("data: ")[2])
    assert [event for event in results if {**event, "offset": 0} == {**expected, "offset": 0}], answer.text
    places = sorted((event["place"], event["frame"]) for event in results)
    assert places == [("raw", [0]), ("warm", [0, 1]), ("warm", [0, 2])]
    assert found[-1]["status"] == "finished"
