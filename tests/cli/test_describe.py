"""``dfm-async graph`` and ``explain``."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from xml.etree import ElementTree

from dfm_async.cli.references import find_federation, find_pipeline
from dfm_async.planning import Profile
from tests.cli.rig import STATIONS, invoked, lines

MODELS = """
from dfm_async import Federation

fed = Federation("models")
lab = fed.site("lab", gpus=2)


@lab.operation(gpus=1)
def predict(x: float) -> float:
    return x * 2


@fed.pipeline
def predictions(x: float) -> float:
    return predict(x)
"""


def say(*arguments: str) -> str:
    done = invoked(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_pipeline_is_printed_and_drawn_over_its_sites(tmp_path: Path) -> None:
    assert say("graph", STATIONS, "squares").startswith("with Pipeline('squares') as pipeline:\n    n0 = square(x=")
    drawn = say("graph", STATIONS, "anomalies", "--format", "mermaid")
    assert drawn.startswith("flowchart")
    assert '["archive"]' in drawn
    say("graph", STATIONS, "anomalies", "--format", "svg", "-o", str(tmp_path / "plan.svg"))
    drawn_nodes = ElementTree.parse(tmp_path / "plan.svg").getroot().findall(".//*[@data-node='load#0']")
    assert [node.get("data-site") for node in drawn_nodes] == ["archive"]


def test_what_a_drawing_is_written_to_stays_what_it_is(tmp_path: Path) -> None:
    private, link, pipe = tmp_path / "private.txt", tmp_path / "link.txt", tmp_path / "pipe"
    private.touch(mode=0o600)
    link.symlink_to(tmp_path / "target.txt")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # nothing to be replaced, as /dev/null is not
    try:
        for path in (private, link, pipe):
            assert say("graph", STATIONS, "squares", "-o", str(path)) == ""
        drawn = os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
    assert private.read_text() == (tmp_path / "target.txt").read_text() == drawn == say("graph", STATIONS, "squares")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert (link.is_symlink(), pipe.is_fifo()) == (True, True)
    assert sorted(os.listdir(tmp_path)) == ["link.txt", "pipe", "private.txt", "target.txt"]


def test_a_pipeline_in_a_json_file_needs_no_federation(tmp_path: Path) -> None:
    _, module = find_federation(STATIONS)
    squares = find_pipeline("squares", module)
    squares.save_to_file(tmp_path / "squares.json")
    assert say("graph", str(tmp_path / "squares.json")) == f"{squares}\n"
    assert say("graph", str(tmp_path / "squares.json"), "-f", "mermaid") == f"{squares.to_mermaid()}\n"
    assert 'data-node="square#0"' in say("graph", str(tmp_path / "squares.json"), "-f", "svg")
    assert say("explain", STATIONS, str(tmp_path / "squares.json")) == say("explain", STATIONS, "squares")


def test_an_explanation_shows_which_calls_use_all_cores() -> None:
    reported = say("explain", STATIONS, "anomalies", "--cores")
    assert re.search(r"load#0 +archive +\d+ +one process: it is an async def", reported)
    assert re.search(r"anomaly#2 +lab +\d+ +all workers\n", reported)
    found = lines(say("explain", STATIONS, "anomalies", "--cores", "--json"))
    assert [(node["node"], node["all_workers"], bool(node["why"])) for node in found] == [
        ("load#0", False, True),
        ("anomaly#2", True, False),
    ]


def test_an_explanation_of_cores_names_calls_that_need_gpus(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    reported = say("explain", str(tmp_path / "models.py"), "--cores")
    assert re.search(r"predict#0 +lab +\d+ +processes that see 1 GPU each: gpus=1\n", reported)
    (node,) = lines(say("explain", str(tmp_path / "models.py"), "--cores", "--json"))
    assert (node["all_workers"], node["why"]) == (False, "processes that see 1 GPU each: gpus=1")


def test_an_explanation_shows_where_each_node_runs() -> None:
    assert "load#0       archive  the only site that offers it" in say("explain", STATIONS, "anomalies")
    found = {
        node["node"]: (node["site"], node["inputs"]) for node in lines(say("explain", STATIONS, "squares", "--json"))
    }
    assert found == {"square#0": ("lab", []), "Yield#1": ("lab", ["square#0"])}


def test_an_explanation_lists_the_parameters(tmp_path: Path) -> None:
    (tmp_path / "days.py").write_text(DAYS)
    head, _, table = say("explain", str(tmp_path / "days.py")).partition("\n\n")
    assert head == "Shift a value."
    assert table.splitlines()[:4] == [
        "parameter  type                   default     description",
        "---------------------------------------------------------",
        "day        Literal['mon', 'tue']  (required)  the day of the week.",
        "by         int | None             None",
    ]
    refused = invoked("run", str(tmp_path / "days.py"), "--param", "day=sun", "--target", "inline")
    assert refused.exit_code == 2
    problem, _, shown = refused.stderr.partition("\n\n")
    assert problem == "dfm-async: parameter 'day': Input should be 'mon' or 'tue', not 'sun'"
    assert shown.splitlines() == table.splitlines()[:4]


DAYS = '''
from typing import Literal

from dfm_async import Federation

fed = Federation("days")
lab = fed.site("lab")


@lab.operation
async def shift(day, by):
    return day


@fed.pipeline
def shifted(day: Literal["mon", "tue"], by: int | None = None) -> str:
    """Shift a value.

    Args:
        day: the day of
            the week.
    """
    return shift(day, by)
'''


def test_an_explanation_shows_measured_costs(tmp_path: Path) -> None:
    profile = Profile()
    for _ in range(3):
        profile.add_call("lab", "square", None, 8, 2.5, 8)
    profile.save(tmp_path / "costs.json")
    reported = say("explain", STATIONS, "squares", "--costs", str(tmp_path / "costs.json"))
    assert "2.5 s *" in reported
    (found, *_) = lines(say("explain", STATIONS, "squares", "--json", "--costs", str(tmp_path / "costs.json")))
    assert found["cost"]["seconds"] == 2.5
    assert found["alternatives"] == []
    for wrong, message in (("nothing.json", "No such file"), (__file__, "not a profile")):
        done = invoked("explain", STATIONS, "squares", "--costs", str(tmp_path / wrong))
        assert done.exit_code == 2
        assert message in done.output
