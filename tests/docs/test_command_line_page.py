"""The page about the command line tells of every command; those that it shows run with its other blocks."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.pages import DOCS

PAGE = (DOCS / "command-line.md").read_text(encoding="utf-8")


def test_the_page_tells_of_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dfm_async", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    names = [name for name in listed if name.isalpha() and name.islower()]
    assert len(names) >= 11
    assert [name for name in names if f"| `dfm-async {name}` |" not in PAGE] == []
