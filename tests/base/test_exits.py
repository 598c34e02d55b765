"""The end of a process, also where the system has neither descriptors of processes nor ``waitid``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from dfm_async.base.exits import process_exit


@pytest.mark.parametrize("missing", [(), ("pidfd_open",), ("pidfd_open", "waitid")])
@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("input()", -signal.SIGKILL)])
async def test_the_exit_code_of_a_process_is_returned(
    missing: tuple[str, ...], code: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", code]
    child = await asyncio.to_thread(subprocess.Popen, command, stdin=subprocess.PIPE)
    with monkeypatch.context() as system:
        for name in missing:
            system.delattr(os, name)
        waiting = asyncio.create_task(process_exit(child.pid))
        await asyncio.sleep(0)
        if expected < 0:
            child.kill()
        async with asyncio.timeout(30):
            assert await waiting == expected
    child.communicate()


async def test_the_exit_code_of_a_process_that_was_reaped_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise ChildProcessError

    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(os, "waitid", refuse)
    async with asyncio.timeout(30):
        assert await process_exit(os.getpid()) == 0
