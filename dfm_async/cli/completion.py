"""Completes the names of pipelines in the shell. Reads the file, and never runs it: a Tab must not start anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer

__all__ = ["complete_pipelines", "pipelines_in"]

_LARGEST: Final = 1024 * 1024
"""How many bytes a file may have that is read for a Tab."""


def complete_pipelines(context: typer.Context, incomplete: str) -> list[str]:
    """The pipelines of the federation's file that begin like this."""
    path = Path(str(context.params.get("federation") or "").partition(":")[0])
    try:
        if path.suffix != ".py" or path.stat().st_size > _LARGEST:
            return []
        found = pipelines_in(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return []
    return [name for name in found if name.startswith(incomplete)]


def pipelines_in(source: str) -> list[str]:
    """The names of the pipelines that a file makes on its top level: their own, else those of their variables."""
    found: dict[str, None] = {}
    for statement in ast.parse(source).body:
        for made, variable in _assigned(statement):
            name = _pipeline_name(made)
            if name is not None:
                found[name or variable] = None
    return list(found)


def _assigned(statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(statement, ast.With):
        for item in statement.items:
            if isinstance(item.optional_vars, ast.Name):
                yield item.context_expr, item.optional_vars.id
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        yield statement.value, statement.targets[0].id


def _pipeline_name(made: ast.expr) -> str | None:
    """The name that a call of ``Pipeline`` gives, empty if it gives none; None for anything else."""
    if not isinstance(made, ast.Call):
        return None
    called = made.func.attr if isinstance(made.func, ast.Attribute) else getattr(made.func, "id", None)
    if called != "Pipeline":
        return None
    first = made.args[0] if made.args else None
    name = first.value if isinstance(first, ast.Constant) else ""
    return name if isinstance(name, str) else ""
