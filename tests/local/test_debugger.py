"""``breakpoint()`` and ``pdb`` in operations use the terminal of the application."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

from tests.support.processes import run_python
from tests.support.terminal import Terminal, on_terminal

HEAD = """\
import asyncio, itertools, os, pdb, sys, time
from dfm_async import Federation, LocalOptions, Session

fed = Federation("debugged")
lab, desk = fed.site("lab"), fed.site("desk")
"""
CALLS = """
@lab.operation(deadline=0.5)
def f(x: int) -> int:
    y = 2 * x
    breakpoint()
    y += 1
    return y

@lab.operation(deadline=0.5)
async def g(x: int) -> int:
    y = 3 * x
    pdb.set_trace()
    await asyncio.sleep(0)
    y += 1
    return y

@desk.operation
def h(x: int) -> int:
    y = 4 * x
    breakpoint()
    return y

@fed.pipeline
def runs(x: int) -> int:
    return f(x)

async def main() -> None:
    async with Session(fed, options=LocalOptions(unresponsive_after=0.5)) as session:
        for operation, x in itertools.product((f, g), (1, 2, 3)):
            try:
                print(operation.name, await session.call(operation, x))
            except Exception as error:
                print("failed", str(error).splitlines()[0])
        print(await asyncio.gather(session.call(f, 4), session.call(h, 5)))
        job = await session.execute(runs, {"x": 6}, deadline=0.5)
        print((await job.first()).value)
        sites = session.stats().sites
        print("workers lost:", sites["lab"].restarts + sites["desk"].restarts)

asyncio.run(main())
"""
WAIT = "!time.sleep(1.0)"
"""Lets time pass at the prompt: longer than all deadlines, and than a worker may be silent."""


def written(folder: Path, code: str) -> Path:
    script = folder / "debugged.py"
    script.write_text(HEAD + textwrap.dedent(code))
    return script


def test_debugger_has_the_terminal_and_deadlines_are_suspended(tmp_path: Path) -> None:
    with on_terminal(written(tmp_path, CALLS)) as terminal:
        # Steps that go beyond the end of the call end the debugger, and do not enter the code of this library.
        for name, value, steps in (("f", 2, ["r", "n"]), ("g", 3, ["r"])):
            assert re.search(rf"--- {name} in worker \d+ of site lab, job \w+", terminal.answer("p 'x', x"))
            assert terminal.answer("p y").endswith("('x', 1)\n")
            assert terminal.answer(WAIT).endswith(f"\n{value}\n")
            terminal.answer("n")
            for command in steps:
                terminal.answer(command)
            terminal.until(f"{name} {value + 1}")
            for quits in ("q\n", "\x03"):
                terminal.until("(Pdb) ")
                terminal.type(quits)
                terminal.until(f"failed {name}#0 at site 'lab'")
                assert "BdbQuit: the call was ended in the debugger" in terminal.until("\n")
        # two sites at once: one has to wait for the other
        shown = sorted(_step_over(terminal) for _ in "fh")
        assert shown == ["f", "h"]
        terminal.until("[9, 20]")
        terminal.answer(WAIT)
        terminal.answer("c")
        terminal.until("13")
        assert "responded" not in terminal.until("workers lost: 0")
        assert terminal.process.wait() == 0


def _step_over(terminal: Terminal) -> str:
    """Step through a call to its end; return its operation."""
    found = re.search(r"--- (\w) in worker", terminal.answer(WAIT))
    assert found is not None
    for _ in range(3):
        assert "---" not in terminal.answer("p 1"), "another debugger came between"
    terminal.answer("c")
    return found[1]


def test_debugger_works_for_calls_that_run_in_other_workers(tmp_path: Path) -> None:
    code = """
        @lab.operation
        async def home() -> int:
            return os.getpid()

        @lab.operation(deadline=0.5)
        def f(x: int, home: int, flag: str) -> bool:
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:
                pass
            if os.getpid() == home:
                return False
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            breakpoint()
            return True

        async def main() -> None:
            async with Session(fed, options=LocalOptions(lanes=1)) as session:
                pid = await session.call(home)
                async for elsewhere in session.map(f, itertools.count(), home=pid, flag=sys.argv[1]):
                    if elsewhere:
                        print("elsewhere", pid)
                        break

        lab.workers = 2
        asyncio.run(main())
        """
    with on_terminal(written(tmp_path, code), tmp_path / "flag") as terminal:
        found = re.search(r"worker (\d+)", terminal.answer(WAIT))
        assert found is not None
        terminal.answer("c")
        terminal.until("elsewhere")
        assert found[1] not in terminal.until("\n")


def test_terminal_is_taken_back_from_a_worker_that_dies(tmp_path: Path) -> None:
    code = """
        @lab.operation
        def f() -> None:
            breakpoint()
            print("not reached")

        async def main() -> None:
            async with Session(fed) as session:
                try:
                    await session.call(f)
                except Exception as error:
                    print("failed", str(error).splitlines()[0])
                print("hello", input("name: "))
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    with on_terminal(written(tmp_path, code)) as terminal:
        found = re.search(r"worker (\d+)", terminal.until("(Pdb) "))
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        terminal.until("failed")
        terminal.answer("Ada", "name: ")
        terminal.until("hello Ada")
        terminal.type("\x03")
        assert terminal.process.wait() == -signal.SIGINT


NO_TERMINAL = """
@lab.operation
def f() -> int:
    breakpoint()
    return 1

async def main() -> None:
    async with Session(fed) as session:
        print(await session.call(f))

try:
    asyncio.run(main())
except Exception as error:
    print(str(error).splitlines()[0])
"""
ADVICE = (
    'Run the program in the foreground of a terminal (pytest: with -s), or debug with Session(..., target="inline")'
)


def test_breakpoint_without_a_terminal_fails_the_call(tmp_path: Path) -> None:
    script = written(tmp_path, NO_TERMINAL)
    shown = run_python(script, stdin=subprocess.DEVNULL).stdout
    assert f"standard input of the application is not a terminal. {ADVICE}" in shown
    background = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}], process_group=0)"
    with on_terminal("-c", background) as terminal:
        shown = terminal.until("\n")
    assert f"the application runs in the background. {ADVICE}" in shown
    environment = {**os.environ, "PYTHONBREAKPOINT": "0"}
    assert run_python(script, stdin=subprocess.DEVNULL, env=environment).stdout == "1\n"


def test_progress_of_the_command_line_leaves_the_terminal_to_the_debugger(tmp_path: Path) -> None:
    code = """
        @lab.operation
        def f(x: int) -> int:
            breakpoint()
            return x

        @fed.pipeline
        def p(x: int) -> int:
            return f(x)
        """
    command = ("-m", "dfm_async", "run", written(tmp_path, code), "--param", "x=7")
    with on_terminal(*command) as terminal:
        terminal.until("---")
        assert "\x1b" not in terminal.answer(WAIT)
        assert "\x1b" not in terminal.answer("c")
        terminal.until("result [0] 7")
        terminal.until("finished: 1 result")
        assert terminal.process.wait() == 0
