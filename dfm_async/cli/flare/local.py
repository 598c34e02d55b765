"""``dfm-async flare up``, ``status`` and ``down``: a real federation on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table
from rich.text import Text

from dfm_async.cli.exits import BadInput, Exit, Unreachable
from dfm_async.cli.references import find_federation
from dfm_async.cli.streams import StandardOutput
from dfm_async.cli.terminal import terminal
from dfm_async.deploy.example import write_example
from dfm_async.deploy.keeping import Keeper, KeeperStatus, ask_status, tell_to_end
from dfm_async.deploy.project import SERVER_SITE
from dfm_async.errors import FederationError
from dfm_async.exchange.exits import process_exit

__all__ = ["Start", "end_federation", "show_status", "start_federation"]

_LOG: Final = "keeper.log"
_EXAMPLE: Final = "example"
_LONGEST: Final = 1024 * 1024
"""How many bytes a line of the keeper may have."""
_TOLD: Final = 4000
"""How much of its last words is shown if it does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is to be started, and how."""

    federation: str | None
    folder: Path
    homesite: str
    allow_code: bool
    kits: Path | None
    compat: bool
    as_json: bool


async def start_federation(start: Start, *, foreground: bool) -> int:
    """Starts a federation, and tells how to use it: from here, or in a process that stays behind.

    Raises:
        BadInput: one runs in the folder already.
        Unreachable: it does not start.
    """
    running = await ask_status(start.folder)
    if running is not None:
        raise BadInput(
            f"federation {running.federation!r} runs in {start.folder} already ({running.state}, process "
            f"{running.keeper}): dfm-async flare status, dfm-async flare down, or another --folder"
        )
    return await (_keep(start) if foreground else _detach(start))


# in this process


async def _keep(start: Start) -> int:
    folder = Path.cwd() / start.folder
    reference = start.federation
    if reference is None:
        file, _ = write_example(folder / _EXAMPLE)
        reference = str(file)
    federation, _ = find_federation(reference, compat=start.compat)
    reporter = _json_line if start.as_json else _text_line
    keeper = Keeper(
        federation,
        folder,
        homesite=start.homesite,
        allow_code=start.allow_code,
        kits=start.kits,
        on_progress=lambda site: reporter({"event": "ready", "site": site}),
    )

    def on_up(status: KeeperStatus) -> None:
        if start.as_json:
            _json_line({"event": "up", **msgspec.to_builtins(status)})
        else:
            _tell_up(status, start, foreground=True)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("# Private keys do not belong into a repository.\n*\n")
    try:
        await keeper.keep(on_up)
    except FederationError as error:
        if federation.files or start.allow_code:
            raise
        raise BadInput(f"{error}\nLet applications bring their code instead: --allow-code") from error
    except TimeoutError:
        raise Unreachable("it has not started within 60 s: is the machine busy, or short of memory?") from None
    return Exit.SUCCESS


def _json_line(data: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever started us has heard enough
        print(json.dumps(data), flush=True)  # noqa: T201 - for the program that has started us


def _text_line(data: dict[str, Any]) -> None:
    terminal(stderr=True).print(Text(_progress(data["site"])))


def _progress(site: str) -> str:
    return "the server listens" if site == "server" else f"{site} is registered"


# in another process


async def _detach(start: Start) -> int:
    """Starts the process that keeps the federation, and leaves it when everything is up."""
    folder = Path.cwd() / start.folder
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / _LOG
    keeper = _spawn(_command(start, folder), log)
    try:
        with _shown(start) as show:
            status = await _listen(keeper, show)
    except BaseException:
        keeper.terminate()
        await process_exit(keeper.pid)
        keeper.wait()
        raise
    if status is None:
        await process_exit(keeper.pid)
        code = keeper.wait()
        told = log.read_text(errors="replace")[-_TOLD:].strip() or f"the keeper ended with exit code {code}"
        sys.stderr.write(f"{told}\n")
        return code if code > 0 else Exit.FAILED
    keeper.returncode = 0  # it is left alone: 'down' ends it
    if start.as_json:
        await StandardOutput().line(msgspec.json.encode({"event": "up", **msgspec.to_builtins(status)}).decode())
    else:
        _tell_up(status, start, foreground=False)
    return Exit.SUCCESS


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as errors:
        return subprocess.Popen(  # noqa: S603 - ourselves
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # it stays when the shell goes
        )


async def _listen(keeper: subprocess.Popen[bytes], show: Callable[[str], None]) -> KeeperStatus | None:
    """Takes what the keeper says until everything is up; None if it ends before."""
    reader = asyncio.StreamReader(limit=_LONGEST)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), keeper.stdout
    )
    try:
        async for line in reader:
            data = json.loads(line)
            if data.pop("event") == "up":
                return msgspec.convert(data, KeeperStatus)
            show(data["site"])
    finally:
        transport.close()
    return None


def _command(start: Start, folder: Path) -> list[str]:
    given = [] if start.federation is None else [start.federation]
    flags = [
        *(["--allow-code"] if start.allow_code else []),
        *(["--compat"] if start.compat else []),
        *([] if start.kits is None else ["--kits", str(start.kits)]),
    ]
    where = ["--folder", str(folder), "--homesite", start.homesite]
    return [sys.executable, "-m", "dfm_async", "flare", "up", *given, *where, *flags, "--foreground", "--json"]


@contextlib.contextmanager
def _shown(start: Start) -> Iterator[Callable[[str], None]]:
    """Shows progress on standard error."""
    console = terminal(stderr=True)

    def show(site: str) -> None:
        if start.as_json:
            _json_line({"event": "ready", "site": site})
        else:
            console.print(Text(_progress(site)))

    if start.as_json or not console.is_terminal:
        yield show
        return
    with console.status("starting the federation"):
        yield show


def _tell_up(status: KeeperStatus, start: Start, *, foreground: bool) -> None:
    console = terminal()
    kit = status.startup_kit
    sites = ", ".join(node.site for node in status.nodes)
    here = "" if start.folder == Path(".dfm-flare") else f" --folder {start.folder}"
    federation, pipeline = start.federation, "PIPELINE"
    if federation is None:
        example = Path(os.path.relpath(Path(status.folder) / _EXAMPLE))
        federation, pipeline = str(example / "year.py"), "--param month=jan"
    brings = " --bring-code" if start.allow_code else ""
    told = [
        f"federation {status.federation!r} runs on this machine, on loopback only: {sites}",
        "",
        "in Python:",
        f"  options = {_options(status)}",
        '  async with Session(fed, target="flare", options=options) as session: ...',
        "in a shell:",
        f"  dfm-async run {federation} {pipeline} --flare {kit}{brings}",
        f"  dfm-async flare status{here}",
        "  Ctrl-C ends it" if foreground else f"  dfm-async flare down{here}",
    ]
    for line in told:
        console.print(Text(line), soft_wrap=True)


def _options(status: KeeperStatus) -> str:
    code = ', code="travels"' if status.allow_code else ""
    return f"FlareOptions(startup_kit={status.startup_kit!r}, user={status.user!r}{code})"


# looking, and ending


async def show_status(folder: Path, *, as_json: bool) -> int:
    """Shows what runs in a folder.

    Raises:
        Unreachable: nothing does.
    """
    status = await ask_status(Path.cwd() / folder)
    if status is None:
        raise Unreachable(f"no federation runs in {folder}: dfm-async flare up starts one")
    if as_json:
        await StandardOutput().line(msgspec.json.encode(status).decode())
        return Exit.FAILED if status.missing else Exit.SUCCESS
    console = terminal()
    without = f", but lacks {', '.join(status.missing)}" if status.missing else ""
    told = f"federation {status.federation!r} is {status.state}{without}; kept by process {status.keeper}"
    console.print(Text(told), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("site", "pid", "since", "memory", "processes"):
        table.add_column(name, justify="left" if name in ("site", "since") else "right")
    for node in status.nodes:
        since = datetime.datetime.fromtimestamp(node.since).astimezone()
        table.add_row(
            node.site, str(node.pid), f"{since:%H:%M:%S}", f"{node.memory / 2**20:.0f} MiB", str(node.processes)
        )
    for site in status.missing:
        ended = "it has ended" if site == SERVER_SITE else "its client has ended"
        table.add_row(Text(site, "red"), "", ended, "", "")
    console.print(table)
    for carrier in status.carriers:
        console.print(Text(f"carrier {carrier.job_id} of {carrier.user} ({carrier.name})"))
    if not status.carriers and status.state == "up" and SERVER_SITE not in status.missing:
        console.print(Text("no carrier: nobody has a session, or had one just now"))
    if status.startup_kit:
        console.print(Text(_options(status)), soft_wrap=True)
    return Exit.FAILED if status.missing else Exit.SUCCESS


async def end_federation(folder: Path, *, as_json: bool) -> int:
    """Ends what runs in a folder, and tells whether something is left."""
    ended = await tell_to_end(Path.cwd() / folder)
    if ended is None:
        told: dict[str, Any] = {"ended": False, "left": []}
        text = f"no federation runs in {folder}"
    else:
        status, left = ended
        told = {"ended": True, "federation": status.federation, "left": left}
        rest = f"left: {', '.join(left)}" if left else "no process, socket or temporary file is left"
        text = f"federation {status.federation!r} has ended; {rest}"
    if as_json:
        await StandardOutput().line(msgspec.json.encode(told).decode())
    else:
        terminal().print(Text(text), soft_wrap=True)
    return Exit.FAILED if told["left"] else Exit.SUCCESS
