"""Forward the log records of a site's workers to the applications."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import pytest

from dfm_async.base.text import cleaned
from dfm_async.targets.flare import site_log
from dfm_async.targets.flare.protocol import LogLine, LogLines
from dfm_async.targets.flare.site_log import SiteLog, replay


def line(**changes: Any) -> LogLine:
    given: dict[str, Any] = {
        "level": logging.ERROR,
        "text": "text",
        "path": "file.py",
        "line": 1,
        "function": "f",
        "created": 1e9,
        "thread": "main",
        "traceback": None,
        "stack": None,
        "pid": 7,
        "origin": "lab",
        "job": "job",
        "frame": (0,),
        "node": "node",
        "operation": "operation",
    }
    return LogLine(**{**given, **changes})


@pytest.mark.parametrize("created", [math.nan, math.inf, -math.inf, 1e300, -1.0])
def test_a_time_that_no_clock_shows_is_not_taken(created: float, caplog: pytest.LogCaptureFixture) -> None:
    replay("lab", line(created=created))
    (record,) = caplog.records
    assert math.isfinite(record.created)
    assert logging.Formatter("%(asctime)s").format(record)


def test_control_characters_of_others_do_not_reach_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    evil = "a\x1b[2J\rb\x00\x9b\u202e"
    replay("lab", line(text=f"{evil}\n\tc", traceback=evil, stack=evil, path=evil, origin=evil, node=evil, job=evil))
    (record,) = caplog.records
    assert record.getMessage() == "a\\x1b[2J\\x0db\\x00\\x9b\\u202e\n\tc"
    shown = repr([value for value in vars(record).values() if isinstance(value, str)])
    for found in "\x1b\r\x00\x9b\u202e":
        assert found not in shown
        assert all(found not in value for value in vars(record).values() if isinstance(value, str))


def test_texts_are_cut() -> None:
    assert cleaned("ä" * 100, 50) == "ä" * 25 + "…"
    assert cleaned("plain", 5) == "plain"
    assert cleaned("", 5) == ""


async def test_one_turn_sends_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_log, "_MOST_BYTES", 100_000)
    sent: list[LogLines] = []
    log = SiteLog("bounded", sent.append)
    log.open()
    logger = logging.getLogger("dfm_async.site.bounded")
    for _ in range(20):
        logger.warning("x" * 1_000_000)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (lines,) = sent
    assert sum(len(found.text) for found in lines.lines) <= 200_000
    assert lines.left_out == 20 - len(lines.lines)
    logger.warning("again")
    log.close()
    assert [found.text for found in sent[1].lines] == ["again"]
