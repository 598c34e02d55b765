"""Interpreters with the real NVFLARE and the real nv_dfm_core."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import NV_DFM_CORE, NVFLARE_2_8, NVFLARE_2_9, environment

PROGRAMS = Path(__file__).parent / "programs"


def output_of(python: Path, *arguments: object, **options: Any) -> str:
    """Run a program with one of the interpreters; return what it printed."""
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, **{"timeout": 120, **options}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    output: str = done.stdout
    return output


def found_by(python: Path, *arguments: object) -> dict[str, Any]:
    """Run a program with one of the interpreters; return what it found, beside the output of NVFLARE."""
    output = output_of(python, *arguments, timeout=150)
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def _python(wanted: tuple[str, ...]) -> Path:
    found = environment(*wanted)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def nvflare_2_8() -> Path:
    """The interpreter of an environment with NVFLARE 2.8.3, and without us."""
    return _python(NVFLARE_2_8)


@pytest.fixture(scope="session")
def nvflare_2_9() -> Path:
    """The interpreter of an environment with NVFLARE 2.9, and us with the extra ``flare``."""
    return _python(NVFLARE_2_9)


@pytest.fixture(scope="session")
def nv_dfm_core() -> Path:
    """The interpreter of an environment with nv_dfm_core 3.1.31, and us."""
    return _python(NV_DFM_CORE)
