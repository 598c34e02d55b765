"""The code of other libraries on the page for their users: it prints what the code of dfm_async next to it prints.

Blocks of the language ``py`` that begin with the name of a library are its code. All blocks of a library run one after
the other in one process; the expected output of a block is that of the next block of Python on the page. The standard
library always runs. The others run in ``nox -s peers``, which installs them; the ordinary test run only compiles them.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, FILE, Block, blocks, examples_of

PAGE = DOCS / "coming-from-ray-dask-prefect.md"
STANDARD = "concurrent.futures"
PEERS = {STANDARD: "concurrent", "Ray": "ray", "Dask": "dask", "Prefect": "prefect"}
"""How the first line of a block names each library, and its package."""

RUNNER = """
import contextlib, io, json, sys, threading

class Printed(io.StringIO):
    def write(self, text):
        main = threading.current_thread() is threading.main_thread()
        return super().write(text) if main else sys.stderr.write(text)

sources, outputs = json.load(sys.stdin), []
for source, line in sources:
    printed = Printed()
    with contextlib.redirect_stdout(printed):
        exec(compile("\\n" * (line - 1) + source, "page", "exec"), globals())
    outputs.append(printed.getvalue())
print(json.dumps(outputs))
"""
"""Runs the blocks in the main module of a process without a file, so that processes which it spawns do not run them.

What other threads print is not compared: Ray prints its notices about retries from one.
"""

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "RAY_DEDUP_LOGS": "0",  # otherwise it keeps some notices back, and prints them in the main thread on shutdown
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def peer_of(block: Block) -> str | None:
    """The library whose code a block is, if it is that of another one."""
    name = block.text.partition("\n")[0].removeprefix("# ")
    return name if block.language == "py" and name in PEERS else None


def code_of(peer: str) -> list[tuple[Block, str]]:
    """The blocks of a library, each with what it must print."""
    ours = [(block.line, shown.text if shown else "") for block, shown in examples_of(PAGE)]
    found = [block for block in blocks(PAGE.read_text(encoding="utf-8")) if peer_of(block) == peer]
    return [(block, next(text for line, text in ours if line > block.line)) for block in found]


def run(peer: str, folder: Path) -> None:
    """Run the code of a library in a folder, and compare what each block prints."""
    for block, _ in examples_of(PAGE):
        if file := FILE.match(block.text):
            (folder / file["name"]).write_text(block.text, encoding="utf-8")
    code = code_of(peer)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([(block.text, block.line) for block, _ in code]),
        env={**os.environ, **QUIET, "PREFECT_HOME": str(folder / "prefect")},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    found = {block.line: text for (block, _), text in zip(code, printed, strict=True)}
    assert found == {block.line: text for block, text in code}


def test_code_of_the_standard_library_prints_the_same_as_ours(tmp_path: Path) -> None:
    run(STANDARD, tmp_path)


@pytest.mark.peers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != STANDARD])
def test_code_of_a_peer_prints_the_same_as_ours(peer: str, tmp_path: Path) -> None:
    run(peer, tmp_path)


@pytest.mark.parametrize("peer", PEERS)
def test_code_of_a_peer_compiles_and_imports_only_what_its_session_installs(peer: str) -> None:
    imported: set[str] = set()
    code = code_of(peer)
    assert len(code) > 5
    for block, _ in code:
        for node in ast.walk(ast.parse(block.text, f"{PAGE.name}:{block.line}")):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    assert PEERS[peer] in imported
    assert imported <= {PEERS[peer], "work", *sys.stdlib_module_names}


def test_every_block_that_does_not_run_with_ours_names_its_library() -> None:
    others = [block for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "py"]
    assert [block.line for block in others if peer_of(block) is None] == []
