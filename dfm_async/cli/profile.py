"""``dfm-async profile``: run a pipeline, and show where the time went."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dfm_async.cli.command_options import Output, RunOptions
from dfm_async.cli.command_runner import BadInput, Unwritable, print_message
from dfm_async.cli.run import run_pipeline
from dfm_async.session.session import Session
from dfm_async.telemetry.cpu_profile import CpuProfile, profile_suffix


def profile_pipeline(options: RunOptions, output: Output, path: Path) -> Coroutine[Any, Any, int]:
    """Find what to run, and return the coroutine that runs it as ``dfm-async run`` does, and writes the profile."""
    try:
        profile_suffix(path)
    except ValueError as error:
        raise BadInput(f"--flame {error}") from error
    if not path.absolute().parent.is_dir():
        raise BadInput(f"--flame {path}: there is no folder {path.parent}")

    @asynccontextmanager
    async def profiled(session: Session) -> AsyncIterator[None]:
        profile = None
        try:
            with session.profile(cpu=True) as profile:
                yield
        finally:  # also if the job has failed, or was cancelled
            if profile:
                _write(profile, path, quiet=output.quiet)

    return run_pipeline(options, output, profiled)


def _write(profile: CpuProfile, path: Path, *, quiet: bool) -> None:
    try:
        profile.save(path)
    except OSError as error:
        raise Unwritable(f"--flame {path}: {error.strerror or error}") from error
    if not quiet:
        print_message(f"where the time went:\n\n{profile}\n\nthe flame graph is in {path}")
