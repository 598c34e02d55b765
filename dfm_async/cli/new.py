"""``dfm-async new``: a project to begin with."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from dfm_async.cli.command_runner import BadInput

_FILES: Final = ("newproject.py", "tests/test_newproject.py", "pyproject.toml", "README.md")
_MODULE, _NAME = "newproject", "new-project"
"""What the templates have in place of the module and of the project's name."""
_VALID: Final = re.compile(r"(?=.{1,50}\Z)[A-Za-z][A-Za-z0-9]*([-_]+[A-Za-z0-9]+)*")


def create_project(name: str) -> None:
    """Create a folder with a federation, a pipeline, and their tests."""
    module, folder = _module_of(name), Path(name)
    templates = files("dfm_async.cli") / "project"
    try:
        folder.mkdir()
        for path in _FILES:
            text = (templates / path).read_text(encoding="utf-8").replace(_MODULE, module).replace(_NAME, name)
            target = folder / path.replace(_MODULE, module)
            target.parent.mkdir(exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise BadInput(f"{error.filename} exists already: choose another name, or remove it first") from error
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    typer.echo(f"created {name}/ with {', '.join(path.replace(_MODULE, module) for path in _FILES)}; next:")
    typer.echo(f"  cd {name}\n  dfm-async run {module}.py --param day=mon")


def _module_of(name: str) -> str:
    """Return the name of the project's module: Python must be able to import it, and nothing else by that name."""
    if not _VALID.fullmatch(name):
        raise BadInput(
            f"{name!r} is not a valid project name: use at most 50 letters, digits, hyphens and underscores, beginning "
            "with a letter and not ending with - or _, as in my-project"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module):
        raise BadInput(f"{module!r} is a keyword of Python, and cannot be the name of a module: choose another name")
    if module == "tests" or (not Path(name).exists() and find_spec(module) is not None):
        raise BadInput(f"there is another module {module!r}, which the project would hide: choose another name")
    return module
