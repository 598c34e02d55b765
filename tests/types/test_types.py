"""The types of the package, as mypy and pyright see them in applications. Each checks everything in one run.

``accepted.py`` and the code of the guide must pass. In ``rejected.py``, both checkers must find the errors that are
ignored there: they report a comment that ignores nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import FILE, ROOT, blocks, pages

HERE: Final = Path(__file__).parent
CHECKED: Final = [str(HERE / name) for name in ("weather.py", "accepted.py", "rejected.py")]
STRICT: Final = {"README.md", "direct-calls.md", "pipelines.md", "quickstart.md", "sessions-and-jobs.md"}
"""The pages whose code has all annotations. On others, functions that only help the example may have none."""
RELAXED: Final = "no-untyped-call, no-untyped-def, no-any-return, type-arg"
"""What mypy does not demand of other pages."""
WRONG: Final = {'double("many")': "  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]"}
"""The lines of pages that show a wrong call, and how the checkers find them."""
UNDEMANDED: Final = (
    "reportMissingImports",
    "reportPossiblyUnboundVariable",
    "reportRedeclaration",
    "reportReturnType",
)
"""What pyright does not check on pages: they run, and declare functions without code."""


def modules(page: Path) -> dict[str, str]:
    """The Python code of a page, by modules: its files, and a function with all other blocks, for their ``await``."""
    prefix = "page_" + re.sub(r"\W", "_", page.stem.lower())
    found = [block.text for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
    files = "|".join(match["name"].removesuffix(".py") for text in found if (match := FILE.match(text)))
    ignored = "empty-body, import-not-found, no-redef" + ("" if page.name in STRICT else f", {RELAXED}")
    head = [f'# mypy: disable-error-code="{ignored}", allow-redefinition']
    written: dict[str, list[str]] = {}
    for text in found:
        match = FILE.match(text)
        if files:
            text = re.sub(rf"^from ({files})\b", rf"from {prefix}_\1", text, flags=re.MULTILINE)
            text = re.sub(rf"^import ({files})$", rf"import {prefix}_\1 as \1", text, flags=re.MULTILINE)
        lines = [line + WRONG.get(line.strip(), "") for line in text.splitlines()]
        if match:
            written.setdefault(f"{prefix}_{match['name'].removesuffix('.py')}", [*head]).extend(lines)
        else:  # its global variables are those of the function
            body = written.setdefault(prefix, [*head, "async def page() -> None:"])
            body.extend("    " + re.sub(r"^( +)global ", r"\1nonlocal ", line) for line in lines)
    return {name: "\n".join(lines) + "\n" for name, lines in written.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of all pages."""
    folder = tmp_path_factory.mktemp("pages")
    assert {page.name for page in pages()} >= STRICT
    for page in pages():
        for name, code in modules(page).items():
            (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return folder


def checked(*command: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_mypy_finds_all_errors_and_no_others(written: Path) -> None:
    found = map(str, sorted(written.glob("*.py")))
    assert (
        checked("mypy", "--no-error-summary", "--follow-imports=silent", *CHECKED, *found, MYPYPATH=str(written)) == ""
    )


def test_pyright_finds_all_errors_and_no_others(written: Path) -> None:
    """The pages are in the run of the other files, because most of its time is that of the package."""
    config = json.loads((HERE / "pyrightconfig.json").read_text(encoding="utf-8"))
    config |= {"include": [*CHECKED, str(written)], "strict": CHECKED, "typeCheckingMode": "standard"}
    config |= {"extraPaths": [str(ROOT), str(written)], **dict.fromkeys(UNDEMANDED, False)}
    (written / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    found = checked("basedpyright", "--pythonpath", sys.executable, "--project", str(written))
    assert found == "0 errors, 0 warnings, 0 notes\n"
