"""What workers say reaches the application: records, prints, output of programs, last words."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import os
import secrets
import signal
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from dfm_async import JobAborted, LocalOptions, Pipeline, Session, WorkerLost
from dfm_async.base.redaction import LONGEST as LONGEST_SECRET
from dfm_async.base.redaction import note_secret
from dfm_async.wire.worker_output import LONGEST, LogRecord
from dfm_async.workers import output_reader, site_worker
from dfm_async.workers.output import OutputPipe, _LineStream, open_pipe
from dfm_async.workers.output_reader import OutputReader
from tests.local import talkers as t
from tests.support.pipelines import pipeline_of
from tests.support.processes import run_python
from tests.support.sessions import first_value

LOGGER = "dfm_async.site.talk"
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.enough = asyncio.Event()
        self.wanted = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)
        if len(self.found) >= self.wanted:
            self.enough.set()

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.found]

    def with_text(self, text: str) -> Any:
        (record,) = [record for record in self.found if record.getMessage() == text]
        return record


@pytest.fixture
def heard() -> Iterator[Records]:
    """Everything that the site says, from INFO on."""
    logger, handler = logging.getLogger(LOGGER), Records()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield handler
    logger.propagate = True
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def run(operation: Any, parameters: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """Runs an operation in a session of its own: when that is closed, everything has been read."""
    async with asyncio.timeout(60), Session(t.fed, options=LocalOptions(**options)) as session:
        job = await session.execute(pipeline_of(operation, *(parameters or {})), parameters or {})
        return [result.value async for result in job]


async def lost(operation: Any, parameters: dict[str, Any] | None = None, **options: Any) -> WorkerLost:
    """Runs an operation that ends its worker."""
    with pytest.raises(JobAborted) as caught:
        await run(operation, parameters, **options)
    assert isinstance(caught.value.__cause__, WorkerLost)
    assert str(caught.value.__cause__) in str(caught.value)
    return caught.value.__cause__


# where it belongs to


@METHODS
@pytest.mark.parametrize("operation", [t.awaits, t.blocks, t.generates, t.iterates], ids=lambda found: found.name)
async def test_output_and_log_records_have_job_frame_and_node(heard: Records, operation: Any, method: Any) -> None:
    sets = [{"text": "a"}, {"text": "b"}]
    async with asyncio.timeout(60), Session(t.fed, options=LocalOptions(start_method=method)) as session:
        pid = await first_value(session, pipeline_of(t.pid))
        job = await session.execute(pipeline_of(operation, "text"), sets)
        assert {result.value for result in await job.collect()} == {job.job_id}
    for index, text in enumerate("ab"):
        for kind, level, origin in [
            ("out", logging.INFO, "stdout"),
            ("err", logging.WARNING, "stderr"),
            ("log", logging.INFO, "some.library"),
        ]:
            record = heard.with_text(f"{kind} {text}")
            assert (record.name, record.levelno, record.origin) == (LOGGER, level, origin)
            assert (record.site, record.job, record.frame) == ("talk", job.job_id, (index,))
            assert (record.node, record.operation) == (f"{operation.name}#0", operation.name)
            assert (record.pid, record.process) == (pid, pid)
    record = heard.with_text("log a")
    assert Path(record.pathname).name == record.filename == "talkers.py"
    assert record.funcName == operation.name
    assert record.lineno > 0


async def test_records_carry_tracebacks_stacks_and_what_their_logger_adds(heard: Records) -> None:
    await run(t.logs)
    afar = heard.with_text("from afar")
    assert (afar.origin, afar.frame, afar.node, afar.operation) == (LOGGER, (0,), "logs#0", "logs")
    assert afar.threadName.startswith("Thread-")
    wrong = heard.with_text("it went wrong")
    assert wrong.levelno == logging.ERROR
    assert "broken inside" in wrong.exc_text
    assert wrong.exc_text in logging.Formatter().format(wrong)
    assert "Stack (most recent call last)" in heard.with_text("with the stack").stack_info
    assert "too quiet" not in heard.texts


@METHODS
async def test_output_that_python_does_not_see_arrives_too(heard: Records, method: Any) -> None:
    await run(t.in_c, start_method=method)
    assert heard.texts == [
        "before",
        "from descriptor 1",
        "from descriptor 2, unfinished",
        "after",
        "from a program",
        "and its errors",
        "from the buffer",
    ]
    record = heard.with_text("from a program")
    assert (record.origin, record.levelno, record.job) == ("output", logging.INFO, None)


async def test_invalid_text_in_output_arrives_escaped(heard: Records) -> None:
    (found,) = await run(t.odd)
    assert found == {"fileno": (1, 2), "isatty": False, "encoding": "utf-8", "writable": True}
    texts = heard.texts
    for text in [
        "half \\ud800 a character",
        "half \\udc80 too",
        "a text of its own",
        "--- Logging error ---",
        "no frame",
        "not json",
        "unfinished",
        "with\x1eseparator",
        "from a fork",
    ]:
        assert text in texts
    assert heard.with_text("no frame").frame is None
    assert heard.with_text("from a fork").job is not None
    start = texts.index("one")
    assert texts[start : start + 4] == ["one", "two", "", "four"]
    for letter in "xyz":
        (long,) = [text for text in texts if text.startswith(letter * 100)]
        assert long == letter * 65_536 + " [... cut: 34,464 more characters]"


async def test_unfinished_lines_of_different_calls_do_not_mix(heard: Records) -> None:
    async with Session(t.fed) as session:
        words = ["apple", "pear", "plum"]
        await (await session.execute(pipeline_of(t.interleaves, "text"), [{"text": word} for word in words]))
    assert sorted(heard.texts) == sorted(words)
    assert {record.frame: record.getMessage() for record in heard.found} == {(i,): w for i, w in enumerate(words)}


async def test_lines_that_are_never_ended_arrive_and_are_not_kept_for_ever(heard: Records) -> None:
    heard.wanted = 200 - 64
    async with asyncio.timeout(60), Session(t.fed) as session:
        await (await session.execute(pipeline_of(t.never_ends_its_lines, "n"), [{"n": n} for n in range(200)]))
        await heard.enough.wait()  # before the worker ends
    assert sorted(heard.texts) == sorted(f"({n})" for n in range(200))


async def test_a_flood_arrives_complete_and_in_order(heard: Records) -> None:
    await run(t.floods, {"lines": 20_000})
    assert heard.texts == [str(number) for number in range(20_000)]


# how much is wanted


async def test_the_levels_of_the_application_are_respected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, LOGGER):
        await run(t.logs)
        await run(t.awaits, {"text": "a"})
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == ["it went wrong"]


async def test_a_level_that_is_raised_later_counts_at_once(heard: Records) -> None:
    async with asyncio.timeout(60), Session(t.fed) as session:
        await (await session.execute(pipeline_of(t.pid)))
        logging.getLogger(LOGGER).setLevel(logging.WARNING)
        await (await session.execute(pipeline_of(t.awaits, "text"), {"text": "a"}))
    assert heard.texts == ["err a"]


async def test_a_handler_that_raises_costs_only_its_record(heard: Records) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))

    def refuse(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("out"):
            raise ZeroDivisionError
        return True

    heard.addFilter(refuse)
    await run(t.awaits, {"text": "a"})
    assert heard.texts == ["err a", "log a"]
    assert [type(problem) for problem in problems] == [ZeroDivisionError]


INHERIT = """
import asyncio, logging, os, sys
from dfm_async import Federation, LocalOptions, Pipeline, Session, Yield

fed = Federation("script")
site = fed.site("site")

@site.operation
def speak() -> None:
    print("printed", flush=True)
    os.write(2, b"written\\n")
    logging.getLogger("library").warning("logged")
    logging.getLogger("library").debug("unwanted")

with Pipeline("p") as pipeline:
    Yield(speak())

async def main():
    async with Session(fed, options=LocalOptions(output=sys.argv[1])) as session:
        await (await session.execute(pipeline))

logging.basicConfig(format="%(name)s %(levelname)s %(origin)s %(message)s", level=sys.argv[2])
asyncio.run(main())
"""


def test_output_can_go_where_that_of_the_application_goes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INHERIT))

    def speak(*options: str) -> tuple[str, list[str]]:
        done = run_python(script, *options)
        return done.stdout, sorted(done.stderr.splitlines())

    logged = "dfm_async.site.site WARNING library logged"
    assert speak("inherit", "WARNING") == ("printed\n", [logged, "written"])
    assert speak("log", "WARNING") == ("", [logged])
    lines = [
        "dfm_async.site.site INFO output written",
        "dfm_async.site.site INFO stdout printed",
        logged,
    ]
    assert speak("log", "INFO") == ("", sorted(lines))


CONFIGURED = {
    "": ["[site/speak] printed", "[site/speak] to stderr", "[site/speak] ***", "[site/PID] written"],
    "ours.setLevel(logging.WARNING)": ["[site/speak] to stderr"],
    "ours.setLevel(logging.NOTSET); ours.addHandler(logging.NullHandler())": [],
    "ours.handlers.clear(); logging.disable(logging.CRITICAL)": [],
    "logging.disable(logging.NOTSET); logging.basicConfig(format='%(message)s')": ["to stderr"],
    "logging.getLogger().setLevel(logging.INFO)": ["printed", "to stderr", "***", "written"],
}
"""What a program shows that configures logging step by step."""


def test_printed_lines_go_to_stderr_unless_logging_is_configured(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""\
        import asyncio, logging, os, sys
        from dfm_async import Federation, Session
        from dfm_async.base.redaction import note_secret

        ours = logging.getLogger("dfm_async")
        site = (fed := Federation("main")).site("site")

        @site.operation
        def speak() -> int:
            note_secret("hunter2-hunter2")
            print("printed")
            print("to stderr", file=sys.stderr)
            print("hunter2-hunter2")
            os.write(1, b"written\\n")
            return os.getpid()

        async def main() -> None:
            async with Session(fed):  # keeps the fork server
                for line in sys.argv[1:]:
                    exec(line)
                    async with Session(fed) as session:
                        pid = await session.call(speak)
                    print("then", pid, file=sys.stderr)

        asyncio.run(main())
        """)
    )
    *parts, rest = run_python(script, *CONFIGURED).stderr.split("then ")
    shown: list[list[str]] = []
    for part, after in zip(parts, [*parts[1:], rest], strict=True):
        pid, lines = after.splitlines()[0], part.splitlines()[bool(shown) :]
        shown.append(sorted(line.replace(pid, "PID") for line in lines))
    assert shown == [sorted(lines) for lines in CONFIGURED.values()]


@pytest.mark.parametrize("options", [{"output": "file"}, {"unresponsive_after": 0}, {"unresponsive_after": -1.0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LocalOptions(**options)


# last words


@METHODS
@pytest.mark.parametrize(
    ("how", "code", "signal_name", "end"),
    [("exit", 3, None, "exited with code 3"), ("kill", -signal.SIGKILL, "SIGKILL", "was killed by SIGKILL")],
)
async def test_worker_that_ends_leaves_its_last_output(
    method: Any, how: str, code: int, signal_name: str | None, end: str
) -> None:
    error = await lost(t.says_and_ends, {"how": how}, start_method=method)
    assert error.lines == ("last printed", "WARNING some.library: last logged", "last written")
    assert (error.exit_code, error.signal_name, error.out_of_memory) == (code, signal_name, False)
    assert str(error) == (
        f"a worker of site 'talk' {end}. Its last output:\n"
        "  last printed\n  WARNING some.library: last logged\n  last written"
    )


@METHODS
async def test_output_in_the_pipe_is_read_before_the_end_is_reported(method: Any) -> None:
    error = await lost(t.says_much_and_ends, start_method=method)
    assert error.lines[-2:] == ("x", "last")


@METHODS
async def test_crashed_worker_leaves_its_traceback(heard: Records, method: Any) -> None:
    error = await lost(t.says_and_ends, {"how": "crash"}, start_method=method)
    assert error.signal_name == "SIGSEGV"
    assert error.lines[:2] == ("last printed", "WARNING some.library: last logged")
    assert any("in says_and_ends" in line for line in str(error).splitlines()[:12])
    crash = [record for record in heard.found if "in says_and_ends" in record.getMessage()]
    assert [(record.levelno, record.origin) for record in crash] == [(logging.ERROR, "output")]


@METHODS
async def test_program_that_outlives_its_worker_does_not_delay_the_report(method: Any) -> None:
    async with asyncio.timeout(45):  # the program runs for 60 s
        error = await lost(t.leaves_a_program, start_method=method)
    program = psutil.Process(int(error.lines[-1]))
    assert program.name() == "sleep"
    assert program.status() != psutil.STATUS_ZOMBIE
    program.kill()


async def test_only_the_last_lines_are_kept() -> None:
    with Pipeline("flood") as pipeline:
        flooded = t.floods(10_000)
        t.says_and_ends("exit", after=flooded)
    with pytest.raises(JobAborted) as caught:
        async with asyncio.timeout(60), Session(t.fed) as session:
            await (await session.execute(pipeline))
    assert isinstance(caught.value.__cause__, WorkerLost)
    lines = caught.value.__cause__.lines
    assert len(lines) == 50
    assert lines[-4:] == ("9999", "last printed", "WARNING some.library: last logged", "last written")
    assert str(caught.value.__cause__).count("\n") == 10


@pytest.mark.parametrize(("grown", "suspected"), [(0, False), (1, True)])
async def test_kill_by_the_kernel_is_suspected_after_an_oom_kill(
    monkeypatch: pytest.MonkeyPatch, grown: int, suspected: bool
) -> None:
    counts = [7, 7 + grown]
    monkeypatch.setattr(site_worker, "oom_kills", lambda: counts.pop(0))
    error = await lost(t.says_and_ends, {"how": "kill"})
    assert error.out_of_memory is suspected
    assert ("out of memory suspected" in str(error)) is suspected
    assert counts == []


async def test_worker_killed_by_us_reports_the_reason(heard: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = itertools.count()
    monkeypatch.setattr(site_worker, "oom_kills", lambda: next(counts))
    async with asyncio.timeout(60), Session(t.fed) as session:
        stuck = await session.execute(pipeline_of(t.blocks_the_loop, "seconds"), {"seconds": 60})
        bystander = await session.execute(pipeline_of(t.waits))
        async for _ in bystander.events():
            break
        await heard.enough.wait()  # it is blocked
        assert await stuck.cancel(grace=0.2) == {"talk": "killed"}
        with pytest.raises(JobAborted) as caught:
            await bystander
    error = caught.value.__cause__
    assert isinstance(error, WorkerLost)
    assert (error.exit_code, error.out_of_memory) == (-signal.SIGKILL, False)
    assert stuck.job_id in error.detail
    assert error.detail in str(error)


def test_a_signal_without_a_name_has_its_number() -> None:
    assert WorkerLost("s", -signal.SIGRTMIN - 1).signal_name == f"signal {signal.SIGRTMIN + 1}"
    assert WorkerLost("s", None).signal_name is None


LOUD = """
from dfm_async import Federation

print("hello from the import")
fed = Federation("loud")

@fed.site("talk").operation
async def quiet() -> int:
    return 3
"""


@METHODS
async def test_output_of_module_imports_arrives(
    heard: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    (tmp_path / f"loud_{method}.py").write_text(LOUD)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"loud_{method}")
    async with Session(module.fed, options=LocalOptions(start_method=method)) as session:
        await (await session.execute(pipeline_of(module.quiet)))
    assert heard.texts == ["hello from the import"]


# the pipe itself


async def test_a_full_pipe_makes_the_writer_wait_and_nothing_is_lost() -> None:
    """Also if a program that shares the descriptor has made it non-blocking."""
    here, pipe = open_pipe()
    os.set_blocking(pipe.descriptor, False)
    data = b"x" * 4 * 1024 * 1024

    def write() -> None:
        pipe.write(data)
        pipe.close()

    writer = threading.Thread(target=write)
    writer.start()
    found = b""
    os.set_blocking(here, True)
    while part := await asyncio.to_thread(os.read, here, 100_000):
        found += part
    writer.join()
    os.close(here)
    assert found == data


def test_writing_without_a_reader_is_silent() -> None:
    here, pipe = open_pipe()
    os.close(here)
    pipe.write(b"hello?")
    pipe.write(b"anybody?")
    pipe.close()


async def test_pipe_is_read_to_its_end_although_a_process_holds_it_open(
    heard: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_reader, "_AT_ONCE", 1000)
    here, pipe = open_pipe()
    reader = OutputReader("talk", lambda _: None, lambda _: None)
    reader.open(here)
    pipe.write(b"".join(b"line %d\n" % number for number in range(5_000)))
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reader.when_read(lambda: done.set_result(len(heard.found)))
    assert not done.done()
    assert await done == 5_000
    called: list[bool] = []
    reader.when_read(lambda: called.append(True))  # nothing is left: at once
    assert called == [True]
    pipe.write(b"unfinished")
    reader.when_read(reader.close)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard.texts[-1] == "unfinished"
    pipe.close()


async def test_one_turn_of_the_loop_reads_a_limited_amount(heard: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_reader, "_AT_ONCE", 1000)
    here, pipe = open_pipe()
    reader = OutputReader("talk", lambda _: None, lambda _: None)
    reader.open(here)
    pipe.write(b"x\n" * 10_000)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(heard.found) < 10_000
    pipe.close()
    done = asyncio.Event()
    reader.when_read(done.set)
    await done.wait()
    reader.close()
    assert len(heard.found) == 10_000


class Kept:
    """The end of a pipe that keeps what is sent."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []

    def send(self, *records: LogRecord) -> None:
        self.records += records


@pytest.mark.parametrize("ended", [True, False], ids=["one line", "in parts"])
def test_secret_at_the_end_of_a_long_line_is_hidden_before_the_line_is_cut(ended: bool) -> None:
    kept, secret = Kept(), secrets.token_hex(20)
    note_secret(secret)
    stream = _LineStream(cast("OutputPipe", kept), 1, logging.INFO, "stdout")
    for before in (LONGEST - 10, LONGEST + LONGEST_SECRET - 10):
        line = "x" * before + secret + "y" * 100
        if not ended:
            stream.write(line[:100])
            line = line[100:]
        stream.write(f"{line}\n")
    assert len(kept.records) == 2
    for record in kept.records:
        assert secret[:8] not in record.message
        assert "more characters]" in record.message


def test_bytes_written_to_the_buffer_hold_no_secret() -> None:
    kept, secret = Kept(), secrets.token_hex(20)
    note_secret(secret)
    stream = _LineStream(cast("OutputPipe", kept), 1, logging.INFO, "stdout")
    data = f"a {secret} käse\n".encode()
    for start in range(0, len(data), 7):  # also inside of a character
        stream.buffer.write(data[start : start + 7])
    assert [record.message for record in kept.records] == ["a *** käse"]
