"""Imports between the modules of the package."""

from __future__ import annotations

import ast
import graphlib
import pathlib

import dfm_async

ROOT = pathlib.Path(dfm_async.__file__).parent


def name_of(path: pathlib.Path) -> str:
    """Return the name of a module, or of the package that an ``__init__.py`` makes."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(module: pathlib.Path, known: set[str]) -> set[str]:
    """Return the names of modules that a module may import, wherever the import is."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
    return found & known


def test_modules_import_each_other_in_one_direction_only() -> None:
    modules = {name_of(path): path for path in ROOT.rglob("*.py")}
    graph = {name: imported_by(path, set(modules)) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
