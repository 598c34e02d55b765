"""The types of the package, as mypy and pyright see them in applications. Each checks everything in one run.

``accepted.py`` must pass. In ``rejected.py``, both checkers must find the errors that are ignored there: they report a
comment that ignores nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.docs.pages import FILE, ROOT, blocks, pages

HERE: Final = Path(__file__).parent
CHECKED: Final = [str(HERE / name) for name in ("weather.py", "accepted.py", "rejected.py")]
STRICT: Final = {"README.md", "direct-calls.md", "pipelines.md", "quickstart.md", "sessions-and-jobs.md"}
"""The pages whose code has all annotations. On others, functions that only help the example may have none."""
UNCHECKED: Final = {
    "coming-from-dfm.md": "its application imports modules that exist only while it runs",
    "coming-from-ray-dask-prefect.md": "it has code of other libraries",
    "discovery.md": "it reads advice without a look at its kind, and leaves arguments out",
    "errors.md": "it reads the fields of errors without a look at their class, and shows a wrong call",
    "external-programs.md": "it reads the fields of errors without a look at their class",
    "federated-training.md": "it reads the metrics of tasks that may have none",
    "recipes.md": "it defines a function and then operations of the same name",
    "running-jobs.md": "its operations change global variables of the page",
    "testing.md": "its tests import a module of the reader",
    "use-all-cores.md": "it uses one name for two things",
    "web.md": "it returns a value of JSON",
    "when-things-fail.md": "it reads the fields of errors without a look at their class",
}
"""The pages whose code does not pass, and why."""


def modules(page: Path) -> dict[str, str]:
    """The Python code of a page, by modules: its files, and a function with all other blocks, for their ``await``."""
    prefix = "page_" + re.sub(r"\W", "_", page.stem.lower())
    found = [block.text for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
    files = "|".join(match["name"].removesuffix(".py") for text in found if (match := FILE.match(text)))
    head = ['# mypy: disable-error-code="empty-body, no-redef", allow-redefinition']
    if page.name not in STRICT:
        head += ['# mypy: disable-error-code="empty-body, no-redef, no-untyped-call, no-untyped-def, type-arg"']
    written: dict[str, list[str]] = {}
    for text in found:
        match = FILE.match(text)
        lines = (re.sub(rf"\b(from|import) ({files})\b", rf"\1 {prefix}_\2", text) if files else text).splitlines()
        if match:
            written.setdefault(f"{prefix}_{match['name'].removesuffix('.py')}", [*head]).extend(lines)
        else:
            body = written.setdefault(prefix, [*head, "async def page() -> None:"])
            body.extend(f"    {line}" for line in lines)
    return {name: "\n".join(lines) + "\n" for name, lines in written.items()}


def checked(*command: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_mypy_finds_all_errors_and_no_others(tmp_path: Path) -> None:
    listed = [page for page in pages() if page.name not in UNCHECKED]
    assert {page.name for page in listed} >= STRICT
    for page in listed:
        for name, code in modules(page).items():
            (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    written = map(str, sorted(tmp_path.glob("*.py")))
    assert checked("mypy", "--no-error-summary", *CHECKED, *written, MYPYPATH=str(tmp_path)) == ""


def test_pyright_finds_all_errors_and_no_others() -> None:
    found = checked("basedpyright", "--pythonpath", sys.executable, "--project", str(HERE))
    assert found == "0 errors, 0 warnings, 0 notes\n"
