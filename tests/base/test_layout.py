"""Imports between the modules of a package."""

from __future__ import annotations

import ast
import graphlib
import pathlib

import pytest

import dfm_async

ROOT = pathlib.Path(dfm_async.__file__).parent
ACYCLIC = ["base", "runtime", "session", "site", "store"]
"""The packages whose modules import each other in one direction only, also for types and inside functions."""


def imported_by(module: pathlib.Path) -> set[str]:
    """Return the names of modules that a module may import, wherever the import is."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found.update(f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
    return found


@pytest.mark.parametrize("package", ACYCLIC)
def test_package_has_no_import_cycle(package: str) -> None:
    modules = {f"dfm_async.{package}.{path.stem}": path for path in ROOT.glob(f"{package}/*.py")}
    assert len(modules) > 1
    graph = {name: imported_by(path) & modules.keys() - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
