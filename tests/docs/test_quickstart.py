"""The service of the quickstart: its commands are run as the page has them, but for the port."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from dfm_async.cli.tokens import client_token
from tests.docs.pages import DOCS, FILE, blocks

PAGE = DOCS / "quickstart.md"


def command(program: str) -> list[str]:
    """The command of the page that starts with a word."""
    texts = [
        block.text.replace("\\\n", " ") for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "sh"
    ]
    (found,) = [shlex.split(text) for text in texts if text.startswith(program)]
    return found


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """Writes the file of the page, and serves it; gives the address."""
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        file = FILE.match(block.text)
        if file is not None:
            with (folder / file["name"]).open("a", encoding="utf-8") as written:
                written.write(block.text)
    _, *arguments = command("dfm-async serve")
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dfm_async", *arguments, "--port", "0", cwd=folder,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        line = (await server.stdout.readline()).decode()
        address = re.search(r"http://[\w.:]+", line)
        assert address is not None, line
        yield address[0]
    finally:
        server.send_signal(signal.SIGINT)
        await server.communicate()


async def test_the_service_of_the_quickstart_answers_as_the_page_says(tmp_path: Path) -> None:
    curl = argparse.ArgumentParser()
    curl.add_argument("url")
    curl.add_argument("-N", action="store_true")
    curl.add_argument("-H", action="append", dest="headers")
    curl.add_argument("-d", dest="data")
    given = curl.parse_args(command("curl")[1:])
    headers = dict(header.split(": ", 1) for header in given.headers)
    async with asyncio.timeout(60), serving(tmp_path) as address, httpx.AsyncClient(timeout=30) as client:
        headers["authorization"] = headers["authorization"].replace("TOKEN", client_token(None, address) or "")
        url = given.url.replace("http://127.0.0.1:8000", address)
        assert url.startswith(address), "the page names another address than the command has"
        answer = await client.post(url, content=given.data, headers=headers)
    found = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    results = [event for event in found if event["event"] == "result"]
    (shown,) = [
        block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if block.text.startswith("event: result")
    ]
    expected = json.loads(shown.partition("data: ")[2])
    assert [event for event in results if {**event, "offset": 0} == {**expected, "offset": 0}], answer.text
    assert sorted((event["place"], event["frame"]) for event in results) == [
        ("raw", [0]),
        ("warm", [0, 1]),
        ("warm", [0, 2]),
    ]
    assert found[-1]["status"] == "finished"
