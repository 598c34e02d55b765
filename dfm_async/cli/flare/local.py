"""``dfm-async flare up``, ``status`` and ``down``: a real federation on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dfm_async.base.exits import process_exit
from dfm_async.cli.command_options import FLARE_FOLDER, UpOptions
from dfm_async.cli.command_runner import BadInput, Exit, Unreachable
from dfm_async.cli.references import find_federation
from dfm_async.cli.terminal import StandardOutput, terminal
from dfm_async.deploy.daemon import Daemon, DaemonStatus, read_status, request_end
from dfm_async.deploy.example import write_example
from dfm_async.deploy.local_flare import LocalFlare
from dfm_async.deploy.project import SERVER_SITE
from dfm_async.errors import FederationError
from dfm_async.errors.root import exit_text

_LOG: Final = "daemon.log"
_EXAMPLE: Final = "example"
_LONGEST: Final = 1024 * 1024
"""The maximum length of a line of the daemon, in bytes."""
_SHOWN: Final = 4000
"""The number of characters of its log that are shown if it does not start."""


async def start_federation(start: UpOptions, *, foreground: bool) -> int:
    """Start a federation in this process or in a background process, and show how to use it."""
    running = await read_status(start.folder)
    if running is not None:
        raise BadInput(
            f"federation {running.federation!r} already runs in {start.folder} ({running.state}, process "
            f"{running.daemon}): dfm-async flare status, dfm-async flare down, or another --folder"
        )
    return await (_keep(start) if foreground else _detach(start))


# in this process


async def _keep(start: UpOptions) -> int:
    folder = Path.cwd() / start.folder
    reference = start.federation
    if reference is None:
        file, _ = write_example(folder / _EXAMPLE)
        reference = str(file)
    federation, _ = find_federation(reference, compat=start.compat)
    console = None if start.as_json else terminal(stderr=True)
    up = LocalFlare.up(
        federation,
        folder,
        homesite=start.homesite,
        allow_code=start.allow_code,
        kits=start.kits,
        on_progress=lambda site: _show_progress(site, console),
    )

    def on_up(status: DaemonStatus) -> None:
        if start.as_json:
            _json_line({"event": "up", **msgspec.to_builtins(status)})
        else:
            _show_up(status, start, foreground=True)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("# Do not commit private keys.\n*\n")
    try:
        await Daemon(federation.name, folder, up).keep(on_up)
    except FederationError as error:
        if federation.files or start.allow_code:
            raise
        raise BadInput(f"{error}\nLet applications send their code instead: --allow-code") from error
    except TimeoutError:
        raise Unreachable(
            "the federation did not start within 60 s: is the machine busy, or short of memory?"
        ) from None
    return Exit.SUCCESS


def _json_line(data: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the program that started us has gone
        print(json.dumps(data), flush=True)  # noqa: T201 - for the program that started us


def _show_progress(site: str, console: Console | None) -> None:
    """Report that a site is ready, as a line of a terminal or as JSON."""
    if console is None:
        _json_line({"event": "ready", "site": site})
    else:
        console.print(Text("the server listens" if site == SERVER_SITE else f"{site} is registered"))


# in another process


async def _detach(start: UpOptions) -> int:
    """Start the daemon of the federation, and return when everything is up."""
    folder = Path.cwd() / start.folder
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / _LOG
    console = None if start.as_json else terminal(stderr=True)
    daemon = _spawn(_command(start, folder), log)
    try:
        with console.status("starting the federation") if console and console.is_terminal else contextlib.nullcontext():
            status = await _listen(daemon, console)
    except BaseException:
        daemon.terminate()
        await process_exit(daemon.pid)
        daemon.wait()
        raise
    if status is None:
        await process_exit(daemon.pid)
        code = daemon.wait()
        output = log.read_text(errors="replace")[-_SHOWN:].strip() or f"the daemon ended with {exit_text(code)}"
        sys.stderr.write(f"{output}\n")
        return code if code > 0 else Exit.FAILED
    daemon.returncode = 0  # it is left alone: 'down' ends it
    if start.as_json:
        await StandardOutput().line(msgspec.json.encode({"event": "up", **msgspec.to_builtins(status)}).decode())
    else:
        _show_up(status, start, foreground=False)
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


async def _listen(daemon: subprocess.Popen[bytes], console: Console | None) -> DaemonStatus | None:
    """Read the reports of the daemon until everything is up; None if it ends before."""
    reader = asyncio.StreamReader(limit=_LONGEST)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), daemon.stdout
    )
    try:
        async for line in reader:
            data = json.loads(line)
            if data.pop("event") == "up":
                return msgspec.convert(data, DaemonStatus)
            _show_progress(data["site"], console)
    finally:
        transport.close()
    return None


def _command(start: UpOptions, folder: Path) -> list[str]:
    given = [] if start.federation is None else [start.federation]
    flags = [
        *(["--allow-code"] if start.allow_code else []),
        *(["--compat"] if start.compat else []),
        *([] if start.kits is None else ["--kits", str(start.kits)]),
    ]
    where = ["--folder", str(folder), "--homesite", start.homesite]
    return [sys.executable, "-m", "dfm_async", "flare", "up", *given, *where, *flags, "--foreground", "--json"]


def _show_up(status: DaemonStatus, start: UpOptions, *, foreground: bool) -> None:
    console = terminal()
    kit = status.startup_kit
    sites = ", ".join(node.site for node in status.nodes)
    here = "" if start.folder == FLARE_FOLDER else f" --folder {start.folder}"
    federation, pipeline = start.federation, "PIPELINE"
    if federation is None:
        example = Path(os.path.relpath(Path(status.folder) / _EXAMPLE))
        federation, pipeline = str(example / "year.py"), "--param month=jan"
    brings = " --bring-code" if start.allow_code else ""
    lines = [
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
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _options(status: DaemonStatus) -> str:
    code = ', code="travels"' if status.allow_code else ""
    return f"FlareOptions(startup_kit={status.startup_kit!r}, user={status.user!r}{code})"


# looking, and ending


async def show_status(folder: Path, *, as_json: bool) -> int:
    """Show the federation of a folder."""
    status = await read_status(Path.cwd() / folder)
    if status is None:
        raise Unreachable(f"no federation runs in {folder}: dfm-async flare up starts one")
    if as_json:
        await StandardOutput().line(msgspec.json.encode(status).decode())
        return Exit.FAILED if status.missing else Exit.SUCCESS
    console = terminal()
    without = f", but lacks {', '.join(status.missing)}" if status.missing else ""
    text = f"federation {status.federation!r} is {status.state}{without}; run by process {status.daemon}"
    console.print(Text(text), soft_wrap=True)
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
    for host_job in status.host_jobs:
        console.print(Text(f"host job {host_job.job_id} of {host_job.user} ({host_job.name})"))
    if not status.host_jobs and status.state == "up" and SERVER_SITE not in status.missing:
        console.print(Text("no host job: no session is open, or was open recently"))
    if status.startup_kit:
        console.print(Text(_options(status)), soft_wrap=True)
    return Exit.FAILED if status.missing else Exit.SUCCESS


async def end_federation(folder: Path, *, as_json: bool) -> int:
    """End the federation of a folder, and show whether something is left."""
    ended = await request_end(Path.cwd() / folder)
    if ended is None:
        data: dict[str, Any] = {"ended": False, "left": []}
        text = f"no federation runs in {folder}"
    else:
        status, left = ended
        data = {"ended": True, "federation": status.federation, "left": left}
        rest = f"left: {', '.join(left)}" if left else "no process, socket or temporary file is left"
        text = f"federation {status.federation!r} has ended; {rest}"
    if as_json:
        await StandardOutput().line(msgspec.json.encode(data).decode())
    else:
        terminal().print(Text(text), soft_wrap=True)
    return Exit.FAILED if data["left"] else Exit.SUCCESS
