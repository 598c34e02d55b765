"""The site dies, in every way, with a program at every moment of an exchange: nothing outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.exchange.processes import family, gone, program, seen_by_witness
from tests.exchange.processes import nothing_remains as nothing_remains

MOMENTS = ("before hello", "after hello", "receiving", "computing", "offering", "transferring", "settled")
GRACE = 2.0
"""What the reaper gives programs between SIGTERM and SIGKILL, in seconds."""


async def die(
    way: str, manner: str, folder: Path, mark: str, moments: Sequence[str] = MOMENTS
) -> tuple[int, float, str]:
    """Runs a site until it has died, and everything with it.

    Returns:
        Its exit code, how long its family took to end after it, and what it said.
    """
    site = await asyncio.create_subprocess_exec(
        *program("site", way, manner, folder, *moments),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        async with asyncio.timeout(30):
            out, err = await site.communicate()
    except TimeoutError:
        site.kill()
        raise
    begun = time.monotonic()
    assert out == b"dying\n", err.decode()
    assert site.returncode is not None
    for process in family(mark):
        await gone(process.pid)
    return site.returncode, time.monotonic() - begun, err.decode()


def reports(folder: Path, moments: Sequence[str] = MOMENTS) -> dict[str, dict[str, Any]]:
    return {moment: seen_by_witness(folder, moment) for moment in moments}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.stem not in MOMENTS)


@pytest.mark.parametrize(
    ("way", "code", "moments"),
    [
        ("SIGKILL", -signal.SIGKILL, MOMENTS),
        ("SIGTERM", -signal.SIGTERM, MOMENTS),
        ("os._exit", 5, MOMENTS),
        ("exec", 0, MOMENTS[:2]),
        ("the reaper first", -signal.SIGKILL, MOMENTS[:2]),
    ],
)
async def test_programs_are_notified_and_terminated_when_their_site_vanishes(
    way: str, code: int, moments: Sequence[str], tmp_path: Path, nothing_remains: str
) -> None:
    found, took, _ = await die(way, "polite", tmp_path, nothing_remains, moments)
    assert found == code
    assert took < GRACE  # nobody had to be killed, but the children, which ignore SIGTERM
    for moment, seen in reports(tmp_path, moments).items():
        assert seen["SIGTERM"], moment
        assert moment == "before hello" or seen["closed"] == "peer gone", moment
    # The invitation of the program that was not up yet. Its token is good for nothing: nobody listens any more.
    assert len(left_in(tmp_path)) == 1
    assert left_in(tmp_path)[0].startswith("dfm-async-")


async def test_programs_that_ignore_sigterm_are_killed_when_their_site_vanishes(
    tmp_path: Path, nothing_remains: str
) -> None:
    _, took, _ = await die("SIGKILL", "stubborn", tmp_path, nothing_remains)
    assert GRACE * 0.9 < took < GRACE + 2
    raised = {moment: seen.get("raised") for moment, seen in reports(tmp_path).items()}
    assert raised == {
        "before hello": None,
        "after hello": "AgentClosed",
        "receiving": "AgentClosed",
        "computing": None,
        "offering": "ResultNotDelivered",
        "transferring": "ResultNotDelivered",
        "settled": None,
    }


async def test_a_waiting_program_ends_without_site_and_reaper(tmp_path: Path, nothing_remains: str) -> None:
    _, took, _ = await die(
        "with its reaper", "natural", tmp_path, nothing_remains, ("after hello", "offering", "transferring")
    )
    assert took < GRACE


async def test_an_exception_that_nobody_handles_ends_the_programs_in_order(
    tmp_path: Path, nothing_remains: str
) -> None:
    code, _, said = await die("exception", "polite", tmp_path, nothing_remains)
    assert code == 1
    assert "Death" in said
    assert left_in(tmp_path) == []
