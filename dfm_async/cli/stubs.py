"""``dfm-async stubs``: the typed module of a federation file, written or compared."""

from __future__ import annotations

import difflib
import os
from pathlib import Path, PurePath

import typer

from dfm_async.cli.exits import BadInput, Exit
from dfm_async.cli.pictures import write_text
from dfm_async.cli.references import find_federation
from dfm_async.federation.stubs import stubs

__all__ = ["write_stubs"]


def write_stubs(federation: str, output: Path | None, *, check: bool, compat: bool) -> int:
    """Writes the typed module of a federation to a file or to standard output; or tells how the file differs from it.

    Raises:
        BadInput: this is no federation file, or there is nothing to compare with.
        FederationError: the federation file is wrong.
    """
    found, module = find_federation(federation, compat=compat)
    if module is not None:
        raise BadInput(f"{federation} is Python, which is typed already: stubs are for federation files (.yaml)")
    folder = Path.cwd() if output is None else output.resolve().parent
    text = stubs(found, PurePath(os.path.relpath(Path(federation).resolve(), folder)), compat=compat)
    if not check:
        write_text(text, output)
        return Exit.SUCCESS
    if output is None:
        raise BadInput("--check compares with a file: name it with --output")
    return _compare(text, output)


def _compare(text: str, output: Path) -> int:
    try:
        there = output.read_text(encoding="utf-8") if output.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{output}: {error}") from error
    lines = difflib.unified_diff(
        there.splitlines(keepends=True), text.splitlines(keepends=True), str(output), "what the federation says"
    )
    difference = "".join(lines)
    typer.echo(difference, nl=False)
    return Exit.FAILED if difference else Exit.SUCCESS
