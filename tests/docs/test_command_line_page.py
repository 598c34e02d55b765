"""Runs the commands of the page about the command line, and compares what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import DOCS, FILE, blocks

PAGE = (DOCS / "command-line.md").read_text(encoding="utf-8")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with the output that is shown behind it."""
    for part in f"\n{text}".split("\n$ ")[1:]:
        command, _, output = part.partition("\n")
        yield command, output.rstrip("\n")


def test_every_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DFM_")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    count = 0
    for block in blocks(PAGE):
        file = FILE.match(block.text)
        if file is not None:
            (tmp_path / file["name"]).write_text(block.text, encoding="utf-8")
        for command, shown in commands(block.text) if block.language == "console" else ():
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
            )
            assert (done.stdout.rstrip("\n"), done.stderr) == (shown, ""), command
            count += 1
    assert count > 5
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_page_tells_of_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dfm_async", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    names = [name for name in listed if name.isalpha() and name.islower()]
    assert len(names) >= 11
    assert [name for name in names if f"| `dfm-async {name}` |" not in PAGE] == []
