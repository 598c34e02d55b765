"""Runs every Python block of the documentation, and compares what it prints with the text block behind it.

All blocks of one page run one after the other in one namespace, as the cells of a notebook do. A block whose first line
is a comment that names a file, such as ``# square.py``, is that file: it is written to the folder of the page's run.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import inspect
import io
import os
import re
import subprocess
import sys
import types
import uuid
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import dfm_async
from dfm_async import LocalOptions, ResultLimits, RetryPolicy, drawing, errors, exchange, testing, web
from dfm_async.exchange import AgentOptions, ExecutorOptions, sync
from dfm_async.exchange.filepipe import gate
from dfm_async.targets import local
from dfm_async.web import WebLimits
from tests.docs.pages import FILE, ROOT, Block, blocks, examples, examples_of, pages


async def run_block(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Runs a block, which may use ``await`` on its top level, and gives what it printed; or writes the file it is."""
    file = FILE.match(block.text)
    if file is not None:
        Path(file["name"]).write_text(block.text, encoding="utf-8")  # noqa: ASYNC240 - a small local file
        return ""
    text = block.text.replace("asyncio.run(main())", "await main()")  # a loop runs already
    source = "\n" * (block.line - 1) + text  # so that tracebacks name the page's own lines
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            await found
    return printed.getvalue()


def normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """The module that the blocks run in. What it defines travels to workers by value, as from a notebook."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def describe(error: BaseException, page: Path) -> str:
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(page):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    where = f"{page.relative_to(ROOT)}:{lines[0]}" if lines else str(page.relative_to(ROOT))
    return f"{where}: {type(error).__name__}: {error}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
async def test_page(page: Path, main_module: types.ModuleType) -> None:
    for block, shown in examples_of(page):
        try:
            async with asyncio.timeout(60):
                printed = await run_block(block, page, main_module.__dict__)
        except Exception as error:
            raise AssertionError(describe(error, page)) from error
        if shown is not None and normal(printed) != normal(shown.text):
            difference = "\n".join(
                difflib.unified_diff(normal(shown.text), normal(printed), "the page", "printed", lineterm="")
            )
            where = f"{page.relative_to(ROOT)}:{shown.line}"
            pytest.fail(f"{where}: the output differs\n{difference}", pytrace=False)


def test_there_are_pages_with_examples() -> None:
    counts = {page.name: len(examples_of(page)) for page in pages()}
    assert counts
    assert not [name for name, count in counts.items() if not count]


def test_a_text_block_belongs_to_the_python_block_directly_before_it() -> None:
    text = "```python\na\n```\n\n```text\nb\n```\n\n```python\nc\n```\nwords\n```text\nd\n```\n"
    found = [(block.text, block.line, shown and shown.text) for block, shown in examples(text)]
    assert found == [("a\n", 2, "b\n"), ("c\n", 10, None)]


async def test_a_block_that_names_a_file_is_that_file(main_module: types.ModuleType) -> None:
    shown, hidden = (Block("python", 1, text, False) for text in ("# made.py\nx = 1\n", "# made.py is a file\ny = 2\n"))
    assert await run_block(shown, ROOT, main_module.__dict__) == ""
    await run_block(hidden, ROOT, main_module.__dict__)
    assert Path("made.py").read_text() == "# made.py\nx = 1\n"  # noqa: ASYNC240 - a small local file
    assert ("x" in main_module.__dict__, main_module.__dict__["y"]) == (False, 2)


def test_a_block_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2 never ends"):
        list(blocks("words\n```python\na\n"))


def test_the_first_block_of_the_readme_is_the_quickstart_example() -> None:
    example = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    code = example.split('"""', 2)[2].strip()
    first, _ = examples_of(ROOT / "README.md")[0]
    assert [line for line in first.text.splitlines() if line] == [line for line in code.splitlines() if line]


@pytest.mark.parametrize("name", ["quickstart.py"])
def test_an_example_runs_as_it_stands(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "JobStatus.FINISHED" in done.stdout


def test_federated_averaging_learns_and_leaves_no_process() -> None:
    mark = uuid.uuid4().hex  # every process inherits it, also those that belong to nobody any more
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "federated_averaging.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "DFM_TEST_MARK": mark},
    )
    assert (done.returncode, done.stderr) == (0, "")
    rounds = [float(found) for found in re.findall(r"after round \d +([\d.]+)%", done.stdout)]
    assert len(rounds) == 6
    assert rounds == sorted(rounds)
    assert rounds[0] < 60 < 80 < rounds[-1]
    assert f"JobStatus.FINISHED: final accuracy {rounds[-1]}%" in done.stdout
    drawn = re.findall(r"^(north|south|west) +([▁▂▃▄▅▆▇█]+) ", done.stdout, re.MULTILINE)
    assert [(site, len(marks)) for site, marks in drawn] == [("north", 20), ("south", 20), ("west", 20)]
    _, alive = psutil.wait_procs(marked(mark), 10)
    assert alive == []


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DFM_TEST_MARK") == mark:
                found.append(process)
    return found


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    homes = {
        "dfm_async": dfm_async.__all__,
        "dfm_async.exchange": [name for name in exchange.__all__ if name not in dfm_async.__all__],
        "dfm_async.exchange.sync": sync.__all__,
        "dfm_async.exchange.filepipe.gate": gate.__all__,
        "dfm_async.targets.local": local.__all__,
        "dfm_async.testing": testing.__all__,
        "dfm_async.web": web.__all__,
        "dfm_async.drawing": drawing.__all__,
    }
    names = [f"{home}.{name}" for home, found in homes.items() for name in found]
    assert [name for name in names if not re.search(rf":: {re.escape(name)}\b", page)] == []


OPTIONS = [AgentOptions, ExecutorOptions, LocalOptions, ResultLimits, RetryPolicy, WebLimits]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda found: found.__name__)
def test_the_guide_tells_of_every_option(options: type[msgspec.Struct]) -> None:
    guide = "".join(page.read_text(encoding="utf-8") for page in pages())
    rows = "".join(line for line in guide.splitlines() if line.startswith("|"))
    assert [name for name in options.__struct_fields__ if f"`{name}`" not in rows] == []


def test_the_guide_tells_of_every_error() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    names = [name for name in errors.__all__ if issubclass(getattr(errors, name), Exception)]
    assert [name for name in names if f"| `{name}` |" not in page] == []
