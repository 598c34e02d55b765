"""Objects of classes that only the main script has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_objects_of_a_scripts_own_classes_arrive_as_what_they_were() -> None:
    script = Path(__file__).parent / "script_classes.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [line for line in lines if line[-1] != "right"] == [], done.stderr
    targets = [line[0] for line in lines]
    assert targets.count("inline") == targets.count("local") == 48, done.stderr
