"""Startup kits: made by FLARE's own provisioning, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from dfm_async.base.installation import install_hint
from dfm_async.deploy.certificates import forget_ending
from dfm_async.deploy.project import Project
from dfm_async.errors import DeploymentError

__all__ = ["INSTALL", "PROJECT_FILE", "cached_kits", "newest_kits", "provision", "require_nvflare", "state_file"]

INSTALL: Final = install_hint("flare")
PROJECT_FILE: Final = "project.yml"
_FRESH: Final = 300 * 24 * 3600.0
"""How old kits that are kept may be, in seconds: their certificates are valid for 360 days."""


def require_nvflare(name: str) -> None:
    """Raises DeploymentError if nvflare is not installed here; says how to install it."""
    if importlib.util.find_spec("nvflare") is None:
        raise DeploymentError(name, [f"nvflare is not installed in {sys.prefix}: {INSTALL}"])


async def provision(project: Project, folder: Path) -> Path:
    """Makes the startup kits of a project. What is in the folder already stays, with its certificates.

    Certificates that end soon are made anew, signed by the same federation. Only the owner can read what is written:
    the private key of the federation is part of it.

    Args:
        project: who takes part.
        folder: where the project file and the kits go.

    Returns:
        The folder with the kits, one per participant.

    Raises:
        DeploymentError: names are wrong, or FLARE refuses the project.
    """
    project.check()
    require_nvflare(project.name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    (folder / PROJECT_FILE).write_text(project.to_yaml())
    forget_ending(state_file(folder, project))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nvflare.cli", "provision", "-p", PROJECT_FILE, "-w", ".", "--force"),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        umask=0o077,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    _protect(folder / project.name)
    kits = newest_kits(folder / project.name)
    if process.returncode != 0 or kits is None:
        told = output.decode(errors="replace").strip() or f"it ended with exit code {process.returncode}"
        raise DeploymentError(project.name, [f"FLARE cannot provision {folder / PROJECT_FILE}: {told}"])
    return kits


def _protect(workspace: Path) -> None:
    """Takes all rights from others: also FLARE's own scripts are for those who have the kit."""
    for path in (workspace, *workspace.rglob("*")):
        if path.exists() and not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o077)


def state_file(folder: Path, project: Project) -> Path:
    """Where FLARE keeps the certificates and private keys of a project."""
    return folder / project.name / "state" / "cert.json"


def newest_kits(workspace: Path) -> Path | None:
    """The kits that were made last in the workspace of a project; None if there are none."""
    made = [path for path in workspace.glob("prod_*") if path.name[5:].isdigit()]
    return max(made, key=lambda path: int(path.name[5:]), default=None)


async def cached_kits(project: Project, cache: Path) -> Path:
    """Gives the kits of a project, and makes them if no earlier ones of the same project are there.

    Several processes may ask for the same at once.
    """
    digest = hashlib.sha256(project.to_yaml().encode()).hexdigest()[:16]
    home = cache / digest
    if (kits := newest_kits(home / project.name)) is not None and time.time() - kits.stat().st_mtime < _FRESH:
        return kits
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as making:
        await provision(project, Path(making) / digest)
        shutil.rmtree(home, ignore_errors=True)  # too old
        with contextlib.suppress(OSError):  # somebody else was faster
            os.rename(Path(making) / digest, home)
    kits = newest_kits(home / project.name)
    if kits is None:
        raise DeploymentError(project.name, [f"{home} cannot be written to"])
    return kits
