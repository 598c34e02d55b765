"""File systems that are soon full. They need root, to be mounted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(folder: Path, megabytes: int, owner: int | None = None) -> Iterator[None]:
    """Mount a file system of this size at a new folder, which belongs to a user."""
    folder.mkdir()
    options = f"size={megabytes}m" if owner is None else f"size={megabytes}m,uid={owner},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"tests of full disks need root, to mount a small one: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def grow(folder: Path, megabytes: int) -> None:
    """Make a mounted file system larger."""
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", folder], check=True)
