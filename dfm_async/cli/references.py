"""Find federations and pipelines by reference: ``package.module:name``, ``file.py:name``, or a file."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from dfm_async.cli.command_runner import BadInput
from dfm_async.cli.interrupted import Interrupted
from dfm_async.errors import DfmError, PipelineError
from dfm_async.federation.federation import Federation
from dfm_async.federation.search_path import find_package, search_first
from dfm_async.language.pipeline import Pipeline

T = TypeVar("T", Federation, Pipeline)

_PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + os.sep
"""The folder of this package."""


def find_federation(reference: str, *, compat: bool = False) -> tuple[Federation, ModuleType | None]:
    """Find a federation and its module; a federation file has no module.

    With ``compat``, adapters of a federation file find the names of nv_dfm_core that they import.
    """
    if reference.endswith((".yaml", ".yml")):
        return _read_federation(reference, compat), None
    if compat:
        raise BadInput(f"--compat is for federation files (.yaml); {reference} imports what it needs itself")
    module, name = _split(reference)
    loaded = load_module(module)
    return _choose(loaded, module, name, Federation), loaded


def set_workers(federation: Federation, workers: str | None, idle_after: float | None = None) -> None:
    """Give all sites this number of workers, written as ``8`` or ``1-8``, and when idle ones end."""
    chosen = None if workers is None else _workers(workers)
    for site in federation.sites.values():
        site.workers = chosen or site.workers
        site.idle_after = site.idle_after if idle_after is None else idle_after


def _workers(text: str) -> int | tuple[int, int]:
    ends = [int(part) for part in text.split("-")] if re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?", text) else []
    if not ends or ends[0] < 1 or ends[0] > ends[-1]:
        raise BadInput(f"--workers {text}: write a number, 1 or more, or the smallest and the largest one, as in 1-8")
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])


def _read_federation(path: str, compat: bool) -> Federation:
    """Read a federation file; its adapters are found from here, and from the folder of its package."""
    try:
        found = Federation.from_yaml(path, compat=compat)
    except OSError as error:
        raise BadInput(str(error) if error.strerror is None else f"{path}: {error.strerror}") from error
    find_package(found, path)
    search_first(Path.cwd())
    return found


def find_pipeline(reference: str | None, module: ModuleType | None, federation: Federation | None = None) -> Pipeline:
    """Find a pipeline: in a JSON file, in a module, or by its name in the given module.

    Args:
        reference: what the user wrote; None for the only one of the module.
        module: where to look up a bare name.
        federation: the operations for DFM's JSON; without it, only our own JSON can be read.
    """
    if reference == "-" or (reference is not None and reference.endswith(".json")):
        return read_pipeline(reference, federation)
    if reference is None or not _is_path(reference):
        if module is None:
            what = "name a pipeline" if reference is None else f"{reference!r} is not a pipeline"
            raise BadInput(f"{what}: give file.py:name, package.module:name or a .json file")
        return _choose(module, _shown(module), reference, Pipeline, separator=" ")
    where, name = _split(reference)
    return _choose(load_module(where), where, name, Pipeline)


def read_pipeline(path: str, federation: Federation | None = None) -> Pipeline:
    """Read a pipeline from a JSON file, or from standard input if the path is ``-``."""
    if path == "-":
        content = sys.stdin.buffer.read()
        try:
            if federation is None:
                return Pipeline.model_validate_json(content)
            return federation.pipeline_from_dfm(content)
        except PipelineError as error:
            raise PipelineError("-", error.problems) from error
    try:
        return Pipeline.load_from_file(path) if federation is None else federation.load_pipeline(path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error


def named_pipelines(module: ModuleType) -> dict[str, Pipeline]:
    """Return the pipelines of a module by the names of their variables."""
    return _candidates(module, Pipeline)


def load_module(target: str) -> ModuleType:
    """Import a module, given by its name or its file.

    Worker processes import it again by its name, so the file must be importable by that name.
    """
    if target.endswith(".py") or target.startswith(".") or os.sep in target:
        return _load_file(target)
    search_first(Path.cwd())
    return _import(target, target)


def _load_file(target: str) -> ModuleType:
    path = Path(target).resolve()
    if not path.is_file():
        raise BadInput(f"there is no file {target}")
    if path.suffix != ".py":
        raise BadInput(f"{target} is not a Python file (.py)")
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():  # a file of a package is a module of that package
        parts.insert(0, folder.name)
        folder = folder.parent
    search_first(folder)
    name = ".".join(parts)
    loaded = _import(name, target)
    if not _same_file(loaded, path):
        raise BadInput(
            f"{target} cannot be imported as {name!r}: there is another module of that name, "
            f"{getattr(loaded, '__file__', None) or 'built into Python'}. Rename the file"
        )
    return loaded


def _same_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _import(name: str, target: str) -> ModuleType:
    try:
        with redirect_stdout(sys.stderr):  # its output is not a result
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadInput(
                f"there is no module {target!r} in the current folder or among the installed packages"
            ) from error
        raise BadInput(_import_problem(target, error)) from error
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise BadInput(_import_problem(target, error)) from error


def _import_problem(target: str, error: BaseException) -> str:
    """Return the error with its lines in the user's files, without frames of imports and of this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _PACKAGE)) and frame.filename != importlib.__file__
    ]
    text = str(error)
    if isinstance(error, DfmError):
        text = text.partition("\n\n")[0]  # without the traceback of a worker
    lines = [f"{target} cannot be imported: {type(error).__name__}: {text}"]
    lines += [f"  {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames[-5:]]
    return "\n".join(lines)


def _split(reference: str) -> tuple[str, str | None]:
    target, separator, name = reference.rpartition(":")
    if not separator:
        return reference, None
    if not target or not name:
        raise BadInput(f"{reference!r} is incomplete: write file.py:name or package.module:name")
    return target, name


def _is_path(reference: str) -> bool:
    return ":" in reference or reference.endswith(".py") or os.sep in reference


def _shown(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return module.__name__ if file is None else os.path.basename(file)


def _choose(module: ModuleType, target: str, name: str | None, kind: type[T], separator: str = ":") -> T:
    """Return the named object of a module, or the only one of its kind.

    Messages name the module as the user wrote it: ``target``, with a separator before the name of the object.
    """
    what = kind.__name__.lower()
    candidates = _candidates(module, kind)
    known = ", ".join(candidates)
    if name is None:
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        if not candidates:
            raise BadInput(f"{target} has no {what}")
        example = f"{target}{separator}{next(iter(candidates))}"
        raise BadInput(f"{target} has several {what}s ({known}): name one, as in '{example}'")
    found = _attribute(module, name)
    if isinstance(found, kind):
        return found
    called = [value for value in candidates.values() if value.name == name]
    if len(called) == 1:
        return called[0]
    if len(called) > 1:
        raise BadInput(f"{target} has several {what}s named {name!r}: use the name of the variable ({known})")
    if found is not None:
        problem = f"{name!r} of {target} is a value of type {type(found).__name__}, not a {kind.__name__}"
        if kind is Federation and isinstance(found, Pipeline):
            problem += f": give the pipeline after the federation, as in '{target} {name}'"
        raise BadInput(problem)
    raise BadInput(f"{target} has no {what} {name!r}; it has: {known or 'none'}")


def _candidates(module: ModuleType, kind: type[T]) -> dict[str, T]:
    """Return the objects of a type in a module; one with several names counts once."""
    found: dict[str, T] = {}
    for name, value in vars(module).items():
        if isinstance(value, kind) and not any(value is other for other in found.values()):
            found[name] = value
    return found


def _attribute(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
