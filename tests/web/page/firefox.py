"""A real Firefox, steered by WebDriver BiDi: playwright steers only builds of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from websockets.asyncio.client import ClientConnection, connect

__all__ = ["Firefox", "firefox"]

SECONDS = 60
"""How long anything may take on a busy machine."""
UNTIL = """
    (found => new Promise(resolve => {
        const check = () => {
            if (!found()) return;
            observer.disconnect();
            resolve(true);
        };
        const observer = new MutationObserver(check);
        observer.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
        check();
    }))(() => %s)
"""
"""Waits for changes of the document after which an expression is true."""


def program() -> str:
    """Find Firefox. Tests that run without it would prove nothing: they fail."""
    for name in (os.environ.get("DFM_FIREFOX"), "firefox-esr", "firefox"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise RuntimeError(
        "tests of the live page need Firefox: run them with nox as root on Debian, which installs it, or install it "
        "yourself (apt-get install firefox-esr), or set DFM_FIREFOX to its path"
    )


class Firefox:
    """One tab; ``wrong`` has what went wrong in its pages."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._tab = ""
        self.wrong: list[str] = []

    async def begin(self) -> None:
        """Take the tab that is open, and listen to messages of pages."""
        await self._call("session.new", capabilities={})
        await self._call("session.subscribe", events=["log.entryAdded"])
        self._tab = (await self._call("browsingContext.getTree"))["contexts"][0]["context"]

    async def open(self, url: str, width: int = 1280) -> None:
        """Open a page."""
        await self._call("browsingContext.setViewport", context=self._tab, viewport={"width": width, "height": 900})
        await self._call("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        await self.evaluate(UNTIL % expression)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of its promise."""
        target = {"context": self._tab}
        found = await self._call("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert found["type"] == "success", found["exceptionDetails"]["text"]
        return found["result"].get("value")

    async def sound(self, rules: list[str]) -> None:
        """Check the accessibility of the page."""
        await self.evaluate(f"void (() => {{ {AXE_SCRIPT} }})()")
        options = json.dumps({"resultTypes": ["violations"], "runOnly": rules})
        found = await self.evaluate(
            f"axe.run({options}).then(({{ violations }}) => JSON.stringify(violations.map(({{ id, nodes }}) => "
            "[id, ...nodes.map(node => node.html)])))"
        )
        assert found == "[]", found

    async def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(SECONDS):
            while True:
                message = json.loads(await self._connection.recv())
                if message.get("method") == "log.entryAdded" and message["params"]["level"] in ("error", "warn"):
                    self.wrong.append(str(message["params"]["text"]))
                elif message.get("id") == number:
                    assert message["type"] == "success", message
                    return message["result"]


@asynccontextmanager
async def firefox(scheme: str = "light") -> AsyncIterator[Firefox]:
    """Start Firefox with a profile that has nothing but a colour scheme."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        number = ("dark", "light").index(scheme)
        setting = f'user_pref("layout.css.prefers-color-scheme.content-override", {number});\n'
        await asyncio.to_thread((Path(profile) / "user.js").write_text, setting)
        arguments = ("--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0")
        process = await asyncio.create_subprocess_exec(program(), *arguments, stdout=DEVNULL, stderr=PIPE)
        assert process.stderr is not None
        drained = None
        try:
            async with asyncio.timeout(SECONDS):
                address = None
                while address is None:
                    line = await process.stderr.readline()
                    assert line, "Firefox has ended"
                    address = re.search(rb"WebDriver BiDi listening on (ws://\S+)", line)
            drained = asyncio.create_task(process.stderr.read())
            async with connect(f"{address[1].decode()}/session", max_size=None) as connection:
                found = Firefox(connection)
                await found.begin()
                yield found
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            if drained is not None:
                await drained
