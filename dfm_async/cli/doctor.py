"""``dfm-async doctor``: check whether pipelines can run on this machine, and suggest fixes."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from rich.text import Text

from dfm_async.base.cores import usable_cores
from dfm_async.base.text import install_hint, size_text
from dfm_async.cli.command_runner import BadInput, Exit
from dfm_async.cli.terminal import StandardOutput, terminal
from dfm_async.errors import DfmError
from dfm_async.federation.federation import Federation
from dfm_async.language.builder import Yield
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.findings import Finding, State
from dfm_async.session.session import Session
from dfm_async.workers.start import choose_method

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_TIMEOUT: Final = 30.0
"""The time limit of a job that does nothing, in seconds."""
_STYLES: Final = {"ok": "green", "warn": "yellow", "bad": "bold red"}
_MIB: Final = 1024 * 1024
_FILES: Final = (256, 1024)
"""The number of open files that small pipelines need, and the one that is enough for most."""
_SOCKET_PATH: Final = 104
"""The longest path of a socket in characters, on the strictest system."""
_SOCKET_NAME: Final = len("/pymp-12345678/listener-12345678")


async def show_findings(findings: AsyncIterator[Finding], *, as_json: bool) -> int:
    """Show findings as they arrive. Return the exit code: 1 if something is bad."""
    output, console = StandardOutput(), terminal()
    bad = False
    async for finding in findings:
        bad = bad or finding.state == "bad"
        if as_json:
            await output.line(msgspec.json.encode(asdict(finding)).decode())
        else:
            text = Text.assemble(
                (f"{finding.state:<5}", _STYLES[finding.state]), f"{finding.name:<16} {finding.detail}"
            )
            console.print(text)
            if finding.advice:
                console.print(Text(f"{'':<22}-> {finding.advice}", "bold"))
    return Exit.FAILED if bad else Exit.SUCCESS


async def machine_findings() -> AsyncIterator[Finding]:
    """Check the machine, and yield each finding at once."""
    for check in _CHECKS:
        for finding in check():
            yield finding
    for finding in await asyncio.to_thread(list, package_findings()):
        yield finding
    yield await _job("inline")
    yield await _job("local")


async def _job(target: Literal["inline", "local"]) -> Finding:
    """Run a job that only returns the id of its process."""
    federation = Federation("doctor")
    process_id = federation.site("probe").operation(os.getpid)
    with Pipeline("probe") as pipeline:
        Yield(process_id())
    name = "a job inline" if target == "inline" else "a worker"
    start = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT), Session(federation, target=target) as session:
            job = await session.execute(pipeline)
            process = (await job.first()).value
            await job
    except TimeoutError:
        advice = "check whether something prevents processes from starting or communicating (a sandbox, seccomp)"
        return Finding(name, "bad", f"no answer within {_TIMEOUT:g} s", advice)
    except (DfmError, OSError) as error:
        return Finding(name, "bad", f"{type(error).__name__}: {error}", "a finding above may be the reason")
    seconds = time.perf_counter() - start
    if target == "local" and process == os.getpid():
        return Finding(name, "bad", "it ran in this process", "please report this")
    return Finding(name, "ok", f"answered, and was ended, within {seconds:.2f} s")


# the machine


def _finding(name: str, detail: str, *problems: tuple[bool, State, str]) -> Finding:
    """Return a finding, with the first of the problems that applies: whether it does, how bad it is, and the advice."""
    for applies, state, advice in problems:
        if applies:
            return Finding(name, state, detail, advice)
    return Finding(name, "ok", detail)


def _python() -> Iterator[Finding]:
    implementation = platform.python_implementation()
    detail = f"{platform.python_version()} ({implementation}, {sys.executable})"
    yield _finding("Python", detail, (implementation != "CPython", "warn", "only CPython is tested"))


def _system() -> Iterator[Finding]:
    system = platform.system()
    yield _finding(
        "system",
        f"{system} {platform.release()} on {platform.machine()}",
        (system == "Darwin", "warn", "only Linux is tested; federations on FLARE need it"),
        (system != "Linux", "bad", "worker processes need Linux; macOS is not tested"),
    )


def _start_method() -> Iterator[Finding]:
    method = choose_method(None)
    slow = "processes start more slowly than with a fork server"
    yield _finding("start method", method, (method != "forkserver", "warn", slow))


def _open_files() -> Iterator[Finding]:
    soft, hard = map(_unlimited, resource.getrlimit(resource.RLIMIT_NOFILE))
    most = int(min(4096, hard))
    advice = f"ulimit -n {most}" if most >= _FILES[0] else "have the hard limit raised: each worker needs a few"
    detail = _limit(soft) if soft >= _FILES[1] else f"{_limit(soft)} (hard limit {_limit(hard)})"
    yield _finding("open files", detail, (soft < _FILES[0], "bad", advice), (soft < _FILES[1], "warn", advice))


def _processes() -> Iterator[Finding]:
    soft = _unlimited(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    few = "ulimit -u 4096: every site has worker processes"
    yield _finding("processes", _limit(soft), (soft < 256, "warn", few))


def _unlimited(number: int) -> float:
    return math.inf if number == resource.RLIM_INFINITY else number


def _limit(number: float) -> str:
    return "no limit" if number == math.inf else f"{number:,}"


def _shared_memory() -> Iterator[Finding]:
    detail, works = "memfd works", True
    try:
        os.close(os.memfd_create("dfm-doctor"))
    except AttributeError:
        detail, works = "this system has no memfd", False
    except OSError as error:
        detail, works = f"memfd: {error.strerror}", False
    yield _finding("shared memory", detail, (not works, "warn", "large values go through sockets, which is slower"))
    folder = Path("/dev/shm")  # noqa: S108 - only examined
    if folder.is_dir():
        usage = shutil.disk_usage(folder)
        detail = f"{size_text(usage.free)} of {size_text(usage.total)} free; only operations of your own may need it"
        yield _finding(str(folder), detail, (usage.free < 16 * _MIB, "warn", "if they do: docker run --shm-size=1g"))


def _inotify() -> Iterator[Finding]:
    folder = Path("/proc/sys/fs/inotify")
    try:
        watches = int((folder / "max_user_watches").read_text())
        instances = int((folder / "max_user_instances").read_text())
    except (OSError, ValueError):
        return  # another system
    advice = "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536 (for file pipes)"
    detail = f"{instances:,} instances, {watches:,} watches"
    yield _finding("inotify", detail, (instances < 64 or watches < 1024, "warn", advice))


def _processors() -> Iterator[Finding]:
    usable = usable_cores()
    quota = _cgroup("cpu.max").split()
    limited = f", limited to {int(quota[0]) / int(quota[1]):g}" if len(quota) == 2 and quota[0].isdigit() else ""
    detail = f"{usable} usable of {os.cpu_count()}{limited}: up to {usable} calls of a site compute at the same time"
    single = "all calls compute on one core: allow the process more, by its affinity or the CPU quota of its container"
    yield _finding("processors", detail, (usable < 2, "warn", single))


def _memory() -> Iterator[Finding]:
    found = _meminfo()
    if not found:
        return  # another system
    total, free = found["MemTotal"], found.get("MemAvailable", 0)
    detail = f"{size_text(free)} of {size_text(total)} available"
    limit = _cgroup("memory.max")
    if limit.isdigit():
        used = _cgroup("memory.current")
        free = min(free, int(limit) - int(used)) if used.isdigit() else min(free, int(limit))
        detail += f"; limited to {size_text(int(limit))}"
    little = "a worker process needs about 30 MiB, and the memory of your operations"
    yield _finding("memory", detail, (free < 256 * _MIB, "warn", little))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts if len(words) == 3}


def _cgroup(name: str) -> str:
    try:
        return (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return ""


def _temporary() -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix="dfm-doctor-") as made:
            (Path(made) / "file").write_bytes(b"x")
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding("temporary files", "bad", str(error), "set TMPDIR to a folder that you can write to")
        return
    long = platform.system() != "Linux" and len(folder) + _SOCKET_NAME > _SOCKET_PATH  # on Linux, sockets have no path
    shorter = "set TMPDIR to a shorter path: sockets of worker processes have names of at most 104 characters"
    room = "make room, or set TMPDIR to another folder"
    detail = f"{folder}, {size_text(free)} free"
    yield _finding("temporary files", detail, (long, "bad", shorter), (free < 64 * _MIB, "warn", room))


def _sqlite() -> Iterator[Finding]:
    unsafe = sqlite3.threadsafety == 0
    yield _finding(
        "SQLite",
        sqlite3.sqlite_version + ", not safe for threads" * unsafe,
        (
            sqlite3.sqlite_version_info < (3, 24),
            "bad",
            "stores need SQLite 3.24 or newer: use a newer Python or library",
        ),
        (unsafe, "bad", "stores need a build that is safe for threads"),
    )


_CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    *(_python, _system, _start_method, _open_files, _processes, _shared_memory),
    *(_inotify, _processors, _memory, _temporary, _sqlite),
)


# packages

_NAME: Final = "dfm-async"


def package_findings() -> Iterator[Finding]:
    """Yield which packages are installed, and whether their versions fit."""
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        raise BadInput(f"checking packages needs packaging: {install_hint('cli')}") from error
    try:
        ours = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        yield Finding("packages", "bad", f"{_NAME} is not installed", "pip install . in a checkout of dfm_async")
        return
    needed = [Requirement(text) for text in ours.requires or ()]
    fit, unfit, missing = _examine(needed, "")
    if missing or unfit:
        advice = "pip install --upgrade . in a checkout of dfm_async"
        yield Finding("packages", "bad", ", ".join([*missing, *unfit]), advice)
    else:
        yield Finding("packages", "ok", ", ".join([f"{_NAME} {ours.version}", *fit]))
    for extra in sorted(ours.metadata.get_all("Provides-Extra") or ()):
        if extra == "all":
            continue
        fit, unfit, missing = _examine(needed, extra)
        install = install_hint(extra)
        detail = ", ".join(unfit) or (f"not installed; to install it: {install}" if missing else ", ".join(fit))
        yield _finding(f"extra {extra}", detail, (bool(unfit), "warn", f"{install} --upgrade"))


def _examine(needed: list[Requirement], extra: str) -> tuple[list[str], list[str], list[str]]:
    """Return the packages of an extra, or the required ones: those that fit, that do not, and that are missing."""
    fit, unfit, missing = [], [], []
    for requirement in needed:
        if requirement.name == _NAME or not _applies(requirement, extra):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            fit.append(f"{requirement.name} {version}")
        else:
            unfit.append(f"{requirement.name} is {version}, but must be {requirement.specifier}")
    return fit, unfit, missing


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if marker is None:
        return not extra
    if extra and marker.evaluate({"extra": ""}):
        return False  # always required
    return marker.evaluate({"extra": extra})
