"""Environments with the real NVFLARE or nv_dfm_core.

They are made when they are first needed, and kept beside nox's own."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".nox" / "interop"

NVFLARE_2_8 = ("nvflare-2.8.3", "nvflare==2.8.3", "numpy")
"""NVFLARE 2.8.3, without us."""
NVFLARE_2_9 = ("nvflare-2.9", "-e", ".[flare]")
"""NVFLARE 2.9, and us with the extra ``flare``."""

NV_DFM_CORE = ("nv-dfm-core-3.1.31", "nv-dfm-core==3.1.31", "numpy", "-e", ".")
"""nv_dfm_core 3.1.31, and us."""


def environment(name: str, *packages: str, make: bool = True) -> Path | None:
    """Makes a virtual environment, unless it is there; gives its interpreter.

    With ``make=False``: None if it is not there.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run beside each other want the same ones
        return _environment(name, packages, make)


def _environment(name: str, packages: tuple[str, ...], make: bool) -> Path | None:
    home = HOME / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    ready = home / "ready"
    wanted = "\n".join((*packages, str(ROOT)) if "-e" in packages else packages)  # another checkout may be gone
    if not ready.exists() or ready.read_text() != wanted:
        if not make:
            return None
        shutil.rmtree(home, ignore_errors=True)
        uv = [sys.executable, "-m", "uv", "--quiet"]
        subprocess.run([*uv, "venv", "--python", sys.executable, str(home)], check=True)
        subprocess.run([*uv, "pip", "install", "--python", str(python), *packages], check=True, cwd=ROOT)
        ready.write_text(wanted)
    return python
