"""Programs as operations of pipelines, as real processes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, Program
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of

LATE = """
import time
from dfm_async.exchange import sync
sync.init()
task = sync.receive()
x = task.data["x"]
print("early", x, flush=True)
sync.send(x)
time.sleep(0.3)
print("late", x, flush=True)
"""


async def test_late_output_of_a_program_belongs_to_its_call(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    federation = Federation("numbers")

    @federation.site("lab").operation(program=Program(argv=[sys.executable, script], launch_once=False))
    def late(x: int) -> int:
        raise NotImplementedError

    pipeline = pipeline_of(late, "x")
    with caplog.at_level(logging.INFO, logger="dfm_async.site.lab"):
        async with connect(federation) as session:
            results = await (await session.execute(pipeline, [{"x": 0}, {"x": 1}])).collect()
    assert sorted(result.value for result in results) == [0, 1]
    found = {(record.getMessage(), record.frame) for record in caplog.records if hasattr(record, "frame")}
    assert found == {(f"{when} {x}", (x,)) for when in ("early", "late") for x in range(2)}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"argv": []}, "argv is empty"),
        ({"argv": ""}, "argv is empty"),
        ({"argv": [""]}, "argv is empty"),
        ({"argv": ["python", 3]}, "argv must consist of strings and paths, unlike 3"),
        ({"argv": [b"python"]}, "argv must consist of strings"),
        ({"argv": b"python"}, "argv must consist of strings"),
        ({"argv": {"python"}}, "argv must be a list"),
        ({"argv": None}, "argv must be a list"),
        ({"argv": "python 'x"}, "cannot parse argv .*No closing quotation"),
        ({"environment": {"EPOCHS": 3}}, "'EPOCHS' is 3"),
        ({"environment": {"A=B": "3"}}, "can have the name 'A=B'"),
        ({"environment": None}, "environment must be names and strings"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be"),
        ({"shutdown_timeout": "5"}, "shutdown_timeout must be"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout must be"),
        ({"launch_once": "no"}, "launch_once must be True or False"),
        ({"processes": True}, "processes must be a whole number, 1 or more"),
        ({"processes": 0}, "processes must be a whole number, 1 or more"),
        ({"cwd": 5}, "cwd must be the path"),
        ({"task": ""}, "task must be a name"),
        ({"transport": "udp"}, "transport must be one of"),
        ({"options": {}}, "options must be ExecutorOptions"),
        ({"site_name": ""}, "site_name must be a name"),
        ({"params_exchange_format": "torch", "transport": "nvflare-2.9"}, "params_exchange_format must be one of"),
        ({"params_transfer_type": "SOME", "transport": "nvflare-2.9"}, "params_transfer_type must be FULL or DIFF"),
        ({"params_exchange_format": "pytorch"}, "are for scripts that use nvflare.client"),
        ({"params_transfer_type": "DIFF", "transport": "tcp"}, "are for scripts that use nvflare.client"),
        ({"transport": "nvflare-2.8", "cwd": "/tmp", "processes": 2}, "only one of them at a time"),
    ],
)
def test_invalid_fields_of_a_program_are_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Program(**{"argv": ["python"], **fields})
