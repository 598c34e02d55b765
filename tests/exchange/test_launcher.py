"""The launcher of ordinary programs: what it starts, what it hears, and that it ends all of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dfm_async.exchange import Invitation, ProgramState, ProgramStatus, SubprocessLauncher, Task
from dfm_async.wire.worker_output import LogRecord, encode_output
from tests.exchange.processes import Heard, gone, survivors
from tests.exchange.processes import nothing_remains as nothing_remains
from tests.support.waiting import PROMPT

TASK = Task("train", round=1, total_rounds=1)
FOREVER = "import signal, sys\nprint('here', flush=True)\nwhile True: signal.pause()"


def python(code: str, *arguments: str) -> list[str]:
    """A program that starts fast, because it has nothing but the interpreter."""
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


class Launched:
    """A launcher with a program."""

    def __init__(self, argv: Sequence[str] | str, **options: Any) -> None:
        self.heard = Heard()
        self.launcher = SubprocessLauncher(argv, **{"on_output": self.heard, "shutdown_timeout": 10.0, **options})

    async def end(self) -> ProgramStatus:
        async with asyncio.timeout(20):
            return await self.launcher.ended()


@asynccontextmanager
async def launched(
    argv: Sequence[str] | str, invitation: Invitation | None = None, **options: Any
) -> AsyncIterator[Launched]:
    found = Launched(argv, **options)
    await found.launcher.initialize()
    try:
        await found.launcher.launch(TASK, invitation or Invitation())
        yield found
    finally:
        await found.launcher.finalize()


async def lines_of(argv: Sequence[str] | str, invitation: Invitation | None = None, **options: Any) -> list[str]:
    async with launched(argv, invitation, **options) as found:
        assert await found.end() == ProgramStatus(ProgramState.SUCCESS, 0, tuple(found.heard.lines[-50:]))
        return found.heard.lines


# what is started

SHOW_ARGUMENTS = "import sys\nfor each in sys.argv[1:]: print(each)"


async def test_arguments_of_a_list_arrive_as_they_are() -> None:
    arguments = ["two words", "$HOME", "; exit 1", "'"]
    assert await lines_of(python(SHOW_ARGUMENTS, *arguments)) == arguments


async def test_a_command_line_is_split_like_by_a_shell_but_none_runs_it(tmp_path: Path) -> None:
    script = tmp_path / "show arguments.py"
    script.write_text(SHOW_ARGUMENTS)
    found = await lines_of(f"{sys.executable} -S '{script}' \"two words\" $HOME ; exit 1 > {tmp_path}/out")
    assert found == ["two words", "$HOME", ";", "exit", "1", ">", f"{tmp_path}/out"]
    assert not (tmp_path / "out").exists()


async def test_the_folder_is_that_of_the_launcher_or_of_the_invitation(tmp_path: Path) -> None:
    show = python("import os; print(os.getcwd())")
    assert await lines_of(show, cwd=tmp_path) == [str(tmp_path)]
    assert await lines_of(show, Invitation(cwd=str(tmp_path))) == [str(tmp_path)]
    with pytest.raises(ValueError, match=r"must be started in .*, but cwd is /: give that folder to the transport"):
        await lines_of(show, Invitation(cwd=str(tmp_path)), cwd="/")


async def test_the_environment_is_ours_then_the_launchers_then_the_invitations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        monkeypatch.setenv(f"FROM_{name}", "ours")
    show = "import os; print(*(os.environ[f'FROM_{name}'] for name in 'abc'))"
    found = await lines_of(
        python(show),
        Invitation({"FROM_c": "invitation's"}),
        environment={"FROM_b": "launcher's", "FROM_c": "launcher's"},
    )
    assert found == ["ours launcher's invitation's"]


async def test_the_program_leads_a_group_of_its_own_and_nothing_waits_for_its_input() -> None:
    code = "import os, sys; print(os.getpid() == os.getpgid(0) == os.getsid(0), repr(sys.stdin.read()))"
    assert await lines_of(python(code)) == ["True ''"]


@pytest.mark.parametrize("problem", ["no such file", "no permission", "no such folder", "no program at all"])
async def test_a_program_that_cannot_be_started_raises_and_leaves_nothing(problem: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program")
    argv = {"no such file": [str(tmp_path / "none")], "no permission": [str(text)], "no program at all": [str(text)]}
    if problem == "no program at all":
        text.chmod(0o700)
    folder = tmp_path / "none" if problem == "no such folder" else None
    launcher = SubprocessLauncher(argv.get(problem, python("pass")), cwd=folder)
    await launcher.initialize()
    for _ in range(2):  # the second time, nothing of the first is in the way
        with pytest.raises(OSError, match=r"none|text"):
            await launcher.launch(TASK, Invitation())
        assert launcher.status() == ProgramStatus(ProgramState.NOT_RUNNING)
        await launcher.stop()
    await launcher.finalize()


# its state


async def test_the_state_follows_the_program(gate: Path) -> None:
    code = "import sys\nprint('here', flush=True)\nopen(sys.argv[1]).read()\nprint('last words')\nsys.exit(3)"
    found = Launched(python(code, str(gate)))
    assert found.launcher.status() == ProgramStatus(ProgramState.NOT_RUNNING)
    assert await found.launcher.ended() == ProgramStatus(ProgramState.NOT_RUNNING)
    await found.launcher.initialize()
    await found.launcher.launch(TASK, Invitation())
    await found.heard.said("here")
    assert found.launcher.status() == ProgramStatus(ProgramState.RUNNING, None, ("here",))
    gate.write_text("go on")
    failed = ProgramStatus(ProgramState.FAILED, 3, ("here", "last words"))
    assert await found.end() == failed
    assert found.launcher.status() == failed
    await found.launcher.stop()
    assert found.launcher.status() == failed  # how it ended is known also when nothing is left of it
    await found.launcher.finalize()
    assert found.launcher.status() == failed


async def test_a_program_that_runs_is_not_launched_again_and_one_that_has_ended_is() -> None:
    async with launched(python("import os; print(os.getpid())")) as found:
        with pytest.raises(RuntimeError, match="still runs"):
            await found.launcher.launch(TASK, Invitation())
        await found.end()
        await found.launcher.launch(TASK, Invitation())
        assert found.launcher.status().state is ProgramState.RUNNING
        await found.end()
        first, second = found.heard.lines
        assert first != second


async def test_the_exit_code_names_the_signal() -> None:
    async with launched(python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")) as found:
        assert await found.end() == ProgramStatus(ProgramState.FAILED, -signal.SIGSEGV, ())


async def test_the_last_fifty_lines_are_kept_and_all_are_handed_on() -> None:
    async with launched(python("for i in range(1000): print(i)")) as found:
        status = await found.end()
        assert status.lines == tuple(map(str, range(950, 1000)))
        assert found.heard.lines == list(map(str, range(1000)))


# its output


def written(*parts: bytes) -> list[str]:
    return python(
        "import os, sys\nfor part in sys.argv[1:]: os.write(1, bytes.fromhex(part))", *(p.hex() for p in parts)
    )


async def test_output_comes_line_by_line_however_it_was_written() -> None:
    assert await lines_of(written(b"one\ntw", b"o\r\n", b"\n", b"three")) == ["one", "two", "", "three"]


async def test_bytes_that_are_no_text_are_replaced_also_between_two_writes() -> None:
    found = await lines_of(written(b"caf\xe9\n", b"\xe2\x82", b"\xac\n", b"\xff"))
    assert found == ["caf\ufffd", "\N{EURO SIGN}", "\ufffd"]


async def test_each_line_names_its_stream() -> None:
    async with launched(python("import sys; print('out'); print('err', file=sys.stderr)")) as found:
        await found.end()
        assert {(record.message, record.origin) for record in found.heard.records} == {
            ("out", "stdout"),
            ("err", "stderr"),
        }


async def test_a_log_record_of_ours_passes_through_as_it_is() -> None:
    record = LogRecord(
        level=logging.ERROR, message="two\nlines", origin="some.logger", created=12.5, traceback="ValueError: no"
    )
    async with launched(written(b"before ", encode_output(record), b"after\n")) as found:
        status = await found.end()
        before, passed, after = found.heard.records
        assert passed == record
        assert (before.message, before.level, after.message) == ("before ", logging.INFO, "after")
        assert status.lines == ("before ", "two\nlines", "after")


async def test_lines_formatted_by_logging_keep_their_level() -> None:
    code = (
        "import logging\n"
        "logging.basicConfig(format='%(asctime)s - %(name)s - %(levelname)s - %(message)s', level=0)\n"
        "for level in (10, 20, 30, 40, 50): logging.log(level, 'hello')\n"
        "print('ERROR is only a word here')\n"
    )
    async with launched(python(code)) as found:
        await found.end()
        levels = {record.message.partition(" - ")[2]: record.level for record in found.heard.records}
        assert levels == {
            "root - DEBUG - hello": 10,
            "root - INFO - hello": 20,
            "root - WARNING - hello": 30,
            "root - ERROR - hello": 40,
            "root - CRITICAL - hello": 50,
            "": 20,
        }


async def test_output_goes_to_a_logger_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dfm_async.program")
    launcher = SubprocessLauncher(python("print('hello')"))
    await launcher.initialize()
    await launcher.launch(TASK, Invitation())
    await launcher.ended()
    await launcher.finalize()
    assert [(record.name, record.levelno, record.message) for record in caplog.records] == [
        ("dfm_async.program", logging.INFO, "hello")
    ]


async def test_100_mb_without_a_newline_neither_stall_the_program_nor_fill_the_memory() -> None:
    code = "import os\nfor _ in range(100): os.write(1, b'x' * 1_000_000)\nos.write(1, b'\\nend\\n')"
    async with launched(python(code)) as found:
        tracemalloc.start()
        try:
            await found.end()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        long, end = found.heard.lines
        assert end == "end"
        assert len(long) < 100_000
        assert "cut" in long
        assert peak < 20_000_000


async def test_a_receiver_of_output_that_raises_hides_neither_other_lines_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(record: LogRecord) -> None:
        raise ValueError(f"I do not want {record.message}")

    code = "import sys; print('one'); print('two', end=''); sys.exit(3)"
    async with launched(python(code), on_output=refuse) as found:
        assert await found.end() == ProgramStatus(ProgramState.FAILED, 3, ("one", "two"))
    # Both were told, and nothing of it fell through to the event loop.
    assert [record.name for record in caplog.records] == ["dfm_async.exchange.process"] * 2


async def test_a_program_that_closes_its_output_goes_on(gate: Path) -> None:
    code = "import os, sys\nos.close(1); os.close(2)\nopen(sys.argv[1]).read()\nos._exit(5)"
    async with launched(python(code, str(gate))) as found:
        # Opening the other end returns when the program has come so far, and its output is closed.
        await asyncio.to_thread(gate.write_text, "go on")
        assert await found.end() == ProgramStatus(ProgramState.FAILED, 5, ())


async def test_a_grandchild_with_the_pipe_holds_up_the_end_only_for_a_moment() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    async with launched(python(code)) as found:
        pid = int(await found.heard.said(""))
        begun = time.monotonic()
        assert (await found.end()).state is ProgramState.SUCCESS
        assert time.monotonic() - begun < PROMPT
        await found.launcher.stop()
        await gone(pid)


# its end


async def test_a_program_that_was_asked_gets_its_time_to_end(gate: Path) -> None:
    async with launched(python("import sys\nopen(sys.argv[1]).read()\nsys.exit(4)", str(gate))) as found:
        stopping = asyncio.create_task(found.launcher.stop())
        await asyncio.to_thread(gate.write_text, "go on")
        await stopping
        assert found.launcher.status().exit_code == 4


HANDLES_SIGTERM = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
child = os.fork()
if not child:
    print("here", flush=True)
signal.sigwait({signal.SIGTERM})
os.write(1, b"asked to end\\n")
if child:
    os.wait()
"""


async def test_sigterm_reaches_the_whole_group() -> None:
    async with launched(python(HANDLES_SIGTERM)) as found:
        await found.heard.said("here")
        await found.launcher.stop(asked=False)
        assert found.heard.lines.count("asked to end") == 2
        assert found.launcher.status().state is ProgramState.SUCCESS


IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER


@pytest.mark.parametrize(("asked", "grace", "expected"), [(True, 0.2, 0.4), (False, 0.2, 0.2), (True, 0, 0)])
async def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(
    asked: bool, grace: float, expected: float
) -> None:
    async with launched(python(IGNORES_SIGTERM), shutdown_timeout=grace) as found:
        await found.heard.said("here")
        begun = time.monotonic()
        await found.launcher.stop(asked=asked)
        took = time.monotonic() - begun
        assert found.launcher.status() == ProgramStatus(ProgramState.FAILED, -signal.SIGKILL, ("here",))
        assert expected <= took < expected + PROMPT


@pytest.mark.parametrize(("code", "by"), [(FOREVER, signal.SIGTERM), (IGNORES_SIGTERM, signal.SIGKILL)])
async def test_a_program_that_is_suspended_ends_like_any_other(code: str, by: signal.Signals) -> None:
    code = code.replace("'here'", "'here', __import__('os').getpid()")
    async with launched(python(code), shutdown_timeout=0.5) as found:
        pid = int((await found.heard.said("here")).split()[1])
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        await found.launcher.stop(asked=False)
        assert found.launcher.status().exit_code == -by


async def test_stopping_is_idempotent_and_many_may_wait_for_it(nothing_remains: str) -> None:
    async with launched(python(FOREVER)) as found:
        await found.heard.said("here")
        await asyncio.gather(*(found.launcher.stop(asked=False) for _ in range(5)))
        assert found.launcher.status().exit_code == -signal.SIGTERM
        assert await survivors(nothing_remains) == []
        await found.launcher.stop()
        await found.launcher.finalize()
        await found.launcher.finalize()


async def test_the_most_impatient_one_counts() -> None:
    async with launched(python(FOREVER), shutdown_timeout=60) as found:
        await found.heard.said("here")
        patient = asyncio.create_task(found.launcher.stop())
        await asyncio.sleep(0)  # it has begun to wait
        begun = time.monotonic()
        await found.launcher.stop(asked=False)
        await patient
        assert time.monotonic() - begun < PROMPT


async def test_a_stop_that_was_cancelled_goes_on_and_finalizing_waits_for_it() -> None:
    async with launched(python(IGNORES_SIGTERM), shutdown_timeout=0.2) as found:
        await found.heard.said("here")
        stopping = asyncio.create_task(found.launcher.stop(asked=False))
        await asyncio.sleep(0)  # it has begun
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert found.launcher.status().state is ProgramState.RUNNING
        await found.launcher.finalize()
        assert found.launcher.status().exit_code == -signal.SIGKILL


async def test_what_the_program_started_ends_with_it_even_if_it_ignores_sigterm() -> None:
    code = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]])\n" + FOREVER
    async with launched(python(code, IGNORES_SIGTERM.replace("'here'", "'child', __import__('os').getpid()"))) as found:
        pid = int((await found.heard.said("child")).split()[1])
        await found.launcher.stop(asked=False)
        await gone(pid)


async def test_stopping_what_never_ran_does_nothing() -> None:
    launcher = SubprocessLauncher(python("pass"))
    await launcher.stop()
    await launcher.initialize()
    await launcher.initialize()
    await launcher.stop()
    await launcher.finalize()
    assert launcher.status() == ProgramStatus(ProgramState.NOT_RUNNING)


@pytest.mark.parametrize(("argv", "options"), [([], {}), ("", {}), (["true"], {"shutdown_timeout": -1})])
def test_arguments_that_make_no_sense_are_refused(argv: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"argv|shutdown_timeout"):
        SubprocessLauncher(argv, **options)
