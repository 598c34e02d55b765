"""``dfm-async doctor``: looks whether pipelines can run on this machine, and says what to do if not."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Final, Literal

import msgspec
from rich.text import Text

from dfm_async.base.installation import install_hint
from dfm_async.cli.exits import BadInput, Exit
from dfm_async.cli.machine import CHECKS
from dfm_async.cli.streams import StandardOutput
from dfm_async.cli.terminal import terminal
from dfm_async.errors import DfmError
from dfm_async.model.findings import Finding
from dfm_async.session.session import Session

__all__ = ["examine", "tell"]

_PATIENCE: Final = 30.0
"""After how many seconds a job that does nothing should have ended anywhere."""
_STYLES: Final = {"ok": "green", "warn": "yellow", "bad": "bold red"}


async def examine(*, as_json: bool) -> int:
    """Tells everything that was found, as it is found. Gives the exit code: 1 if something is bad."""
    return await tell(_findings(), as_json=as_json)


async def tell(findings: AsyncIterator[Finding], *, as_json: bool) -> int:
    """Tells findings as they come. Gives the exit code: 1 if something is bad."""
    output, console = StandardOutput(), terminal()
    bad = False
    async for finding in findings:
        bad = bad or finding.state == "bad"
        if as_json:
            await output.line(msgspec.json.encode(asdict(finding)).decode())
        else:
            text = Text.assemble(
                (f"{finding.state:<5}", _STYLES[finding.state]), f"{finding.name:<16} {finding.detail}"
            )
            console.print(text)
            if finding.advice:
                console.print(Text(f"{'':<22}-> {finding.advice}", "bold"))
    return Exit.FAILED if bad else Exit.SUCCESS


async def _findings() -> AsyncIterator[Finding]:
    for check in CHECKS:
        for finding in check():
            yield finding
    for finding in await asyncio.to_thread(_packages):
        yield finding
    yield await _job("inline")
    yield await _job("local")


def _packages() -> list[Finding]:
    try:
        from dfm_async.cli.packages import package_findings
    except ImportError as error:
        raise BadInput(f"looking at packages needs packaging: {install_hint('cli')}") from error
    return list(package_findings())


async def _job(target: Literal["inline", "local"]) -> Finding:
    """Runs a job that does nothing."""
    from dfm_async.cli.probe import fed, pipeline

    name = "a job inline" if target == "inline" else "a worker"
    start = time.perf_counter()
    try:
        async with asyncio.timeout(_PATIENCE), Session(fed, target=target) as session:
            job = await session.execute(pipeline)
            process = (await job.first()).value
            await job
    except TimeoutError:
        advice = "look whether something keeps processes from starting or speaking to each other (a sandbox, seccomp)"
        return Finding(name, "bad", f"no answer within {_PATIENCE:g} s", advice)
    except (DfmError, OSError) as error:
        return Finding(name, "bad", f"{type(error).__name__}: {error}", "what stands above may be the reason")
    seconds = time.perf_counter() - start
    if target == "local" and process == os.getpid():
        return Finding(name, "bad", "it ran in this process", "please report this")
    return Finding(name, "ok", f"answered, and was ended, within {seconds:.2f} s")
