"""Runs every Python block of the documentation, and compares what it prints with the text block behind it.

All blocks of one page run one after the other in one namespace, as the cells of a notebook do. A block whose first line
is a comment that names a file, such as ``# square.py``, is that file: it is written to the folder of the page's run;
so are YAML blocks, such as ``# parts.yaml``.
Blocks with ``# square.py, continued`` are added to it; others can import it. Blocks of the language ``console`` hold
commands behind ``$`` and what they print.
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
import shutil
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from dfm_async import FlareOptions, LocalOptions, ResultLimits, RetryPolicy, errors
from dfm_async.exchange import AgentOptions, ExecutorOptions
from dfm_async.flare import SiteSettings
from dfm_async.web import WebLimits
from tests.docs.pages import FILE, ROOT, Block, blocks, examples, examples_of, pages
from tests.exchange.processes import MARK, family
from tests.support.processes import run_python


async def run_block(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Runs a block, which may use ``await`` on its top level, and gives what it printed; or writes the file it is."""
    file = FILE.match(block.text)
    if file is not None:
        with Path(file["name"]).open("a" if file["continued"] else "w", encoding="utf-8") as written:  # noqa: ASYNC230 - a small local file
            written.write(block.text)
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


async def run_console(block: Block) -> tuple[str, str]:
    """Runs the commands of a block; gives what they should print, and what they printed."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    assert len(parts) > 1, "there is no command"
    assert not parts[0], "something stands before the first command"
    env = {name: value for name, value in os.environ.items() if not name.startswith("DFM_")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    printed = []
    for command in parts[1::2]:
        process = await asyncio.create_subprocess_shell(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        )
        out, err = await process.communicate()
        assert (process.returncode, err.decode()) == (0, ""), command
        printed.append(out.decode())
    return "".join(parts[2::2]), "".join(printed)


def normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[types.ModuleType]:
    """The module that the blocks run in. What it defines travels to workers by value, as from a notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield module
    if Path(".dfm-flare").exists():  # nothing runs there any more, unless the page has failed in between
        subprocess.run([sys.executable, "-m", "dfm_async", "flare", "down"], check=True, capture_output=True)
    for name, imported in list(sys.modules.items()):
        if (getattr(imported, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def describe(error: BaseException, page: Path, block: Block) -> str:
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(page):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    where = f"{page.relative_to(ROOT)}:{lines[0] if lines else block.line}"
    return f"{where}: {type(error).__name__}: {error}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
async def test_page(page: Path, main_module: types.ModuleType) -> None:
    for block, shown in examples_of(page):
        expected = None if shown is None else shown.text
        try:
            async with asyncio.timeout(60):
                if block.language == "console":
                    expected, printed = await run_console(block)
                else:
                    printed = await run_block(block, page, main_module.__dict__)
        except Exception as error:
            raise AssertionError(describe(error, page, block)) from error
        if expected is not None and normal(printed) != normal(expected):
            difference = "\n".join(
                difflib.unified_diff(normal(expected), normal(printed), "the page", "printed", lineterm="")
            )
            where = f"{page.relative_to(ROOT)}:{(shown or block).line}"
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
    shown = [line for line in first.text.splitlines() if line]
    assert shown == [line for line in code.splitlines() if line]
    assert len(shown) <= 10, "the first example shows one idea"


def test_the_quickstart_example_runs_as_it_is() -> None:
    done = run_python(ROOT / "examples" / "quickstart.py")
    assert done.stderr == ""
    assert done.stdout == "2.0\n"


def test_the_example_of_a_federation_file_runs_from_any_folder(tmp_path: Path) -> None:
    done = run_python(ROOT / "examples" / "federation_file" / "main.py", cwd=tmp_path)
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if line.startswith(("highest: ", "warn: "))] == [
        "highest: Elbe: keep your feet dry (520 cm)",
        "highest: Rhine: all is well (240 cm)",
        "warn: Elbe: stay away from the water (520 cm)",
        "warn: Rhine: all is well (240 cm)",
    ]
    assert 'river: one of "Elbe", "Rhine"' in done.stdout
    assert "cheapest: model 0.05 s, office 5 s" in done.stdout


def test_the_command_of_the_example_of_a_federation_file_prints_its_results() -> None:
    folder = ROOT / "examples" / "federation_file"
    text = ast.get_docstring(ast.parse((folder / "main.py").read_text(encoding="utf-8"))) or ""
    (command,) = re.findall(r"RIVERS_TOKEN=demo dfm-async (.*)", text)
    environment = {**os.environ, "RIVERS_TOKEN": "demo"}
    done = run_python("-m", "dfm_async", *command.split(), "--quiet", cwd=folder, env=environment)
    assert (done.stdout, done.stderr) == ("warning [0] Elbe: stay away from the water (520 cm)\n", "")


KILLED = """
import os, signal, sys, time

sys.path.insert(0, {folder!r})
import federated_trainer as trainer

load, step, site, steps = trainer.load, trainer.step, "", 0

def load_of(name):
    global site
    site = name
    return load(name)

def counted(*args):
    global steps
    steps += 1
    if site == "west" and steps == 2 * trainer.EPOCHS + 2:  # in the midst of the third round
        os.kill(os.{victim}(), signal.SIGKILL)
        time.sleep(60)
    return step(*args)

trainer.load, trainer.step = load_of, counted
trainer.main()
"""


@pytest.mark.parametrize("victim", ["getpid", "getppid"], ids=["the program", "the worker"])
def test_federated_averaging_goes_on_without_a_clinic_that_is_killed(tmp_path: Path, victim: str) -> None:
    examples = ROOT / "examples"
    shutil.copy(examples / "federated_averaging.py", tmp_path)
    (tmp_path / "trainer").mkdir()
    shutil.copy(examples / "federated_trainer.py", tmp_path / "trainer")
    (tmp_path / "federated_trainer.py").write_text(KILLED.format(folder=str(tmp_path / "trainer"), victim=victim))
    mark = uuid.uuid4().hex
    done = run_python(tmp_path / "federated_averaging.py", env={**os.environ, MARK: mark})
    assert done.returncode == 0, done.stderr
    (lost,) = re.findall("without west in round 3: (.*)", done.stdout)
    assert lost.endswith("WorkerLost") is (victim == "getppid")
    assert done.stdout.count("without ") == 1
    assert "JobStatus.FINISHED" in done.stdout
    assert len(re.findall(r"after round \d", done.stdout)) == 6
    assert psutil.wait_procs(family(mark), 10)[1] == []


def test_federated_averaging_learns_and_leaves_no_process() -> None:
    mark = uuid.uuid4().hex
    done = run_python(ROOT / "examples" / "federated_averaging.py", env={**os.environ, MARK: mark})
    assert done.stderr == ""
    rounds = [float(found) for found in re.findall(r"after round \d +([\d.]+)%", done.stdout)]
    assert len(rounds) == 6
    assert rounds == sorted(rounds)
    assert rounds[0] < 60 < 80 < rounds[-1]
    assert f"JobStatus.FINISHED: final accuracy {rounds[-1]}%" in done.stdout
    drawn = re.findall(r"^(north|south|west) +([▁▂▃▄▅▆▇█]+) ", done.stdout, re.MULTILINE)
    assert [(site, len(marks)) for site, marks in drawn] == [("north", 20), ("south", 20), ("west", 20)]
    assert psutil.wait_procs(family(mark), 10)[1] == []


OPTIONS = [AgentOptions, ExecutorOptions, FlareOptions, LocalOptions, ResultLimits]
OPTIONS += [RetryPolicy, SiteSettings, WebLimits]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda found: found.__name__)
def test_the_guide_tells_of_every_option(options: type[msgspec.Struct]) -> None:
    guide = "".join(page.read_text(encoding="utf-8") for page in pages())
    rows = "".join(line for line in guide.splitlines() if line.startswith("|"))
    assert [name for name in options.__struct_fields__ if f"`{name}`" not in rows] == []


def test_the_guide_tells_of_every_error() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    names = [name for name in errors.__all__ if issubclass(getattr(errors, name), Exception)]
    assert [name for name in names if f"| `{name}` |" not in page] == []
