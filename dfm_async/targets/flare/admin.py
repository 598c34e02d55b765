"""FLARE's admin API as coroutines, the startup kit of a user, and the folder of a host job."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dfm_async.base.signals import Outcome
from dfm_async.base.text import install_hint
from dfm_async.errors import FlareError
from dfm_async.model.flare import FlareOptions
from dfm_async.targets.flare.gateway import Frames

_GRACE: Final = 5.0


class AdminError(FlareError):
    """FLARE's admin API has raised an exception; ``kind``: the name of its class."""

    def __init__(self, problem: str, advice: str, kind: str) -> None:
        super().__init__(problem, advice)
        self.args = (problem, advice, kind)
        self.kind = kind


class Admin:
    """One user's connection to the server of a federation, in a process of its own.

    Args:
        startup_kit: the user's startup kit.
        user: the user's name.
    """

    def __init__(self, startup_kit: str | os.PathLike[str], user: str) -> None:
        self._kit = Path(startup_kit)
        self._user = user
        self._process: asyncio.subprocess.Process | None = None
        self._frames: Frames | None = None
        self._answers: dict[int, Outcome[Any]] = {}
        self._last = 0

    @property
    def lost(self) -> bool:
        """Whether the admin process has ended, or was not started."""
        return self._frames is None or self._frames.lost

    async def open(self, timeout: float) -> None:  # noqa: ASYNC109 - FLARE wants to know it
        """Connect to the server.

        Raises:
            FlareError: the kit is not one, or the server cannot be reached, and what to do.
        """
        kit = UserKit.read(self._kit)
        if kit.user and kit.user != self._user:
            text = f"the startup kit {str(self._kit)!r} is that of {kit.user!r}, not of {self._user!r}"
            raise FlareError(text, "Name that user, or another kit")
        here, there = socket.socketpair()
        command = (sys.executable, "-m", "dfm_async.targets.flare.admin_process")
        try:
            self._process = await asyncio.create_subprocess_exec(*command, stdin=there.fileno())
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        frames = self._frames = Frames(self._take, self._lost)
        here.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: frames, sock=here)
        await self._ask("open", str(self._kit), self._user, timeout)

    async def _ask(self, op: str, *args: Any) -> Any:
        if self._frames is None or self._frames.lost:
            raise FlareError("the connection to FLARE has ended", "Open a new session")
        self._last += 1
        number = self._last
        answer: Outcome[Any] = Outcome()
        self._answers[number] = answer
        self._frames.send(msgspec.msgpack.encode({"id": number, "op": op, "args": args}))
        try:
            return await answer
        finally:
            del self._answers[number]

    def _take(self, data: bytes) -> None:
        message = msgspec.msgpack.decode(data)
        answer = self._answers.get(message["id"])
        if answer is not None and "error" in message:
            answer.fail(AdminError(message["error"], _advice(message["kind"], message["error"]), message["kind"]))
        elif answer is not None:
            answer.settle(message["result"])

    def _lost(self) -> None:
        for answer in self._answers.values():
            answer.fail(FlareError("the process of FLARE's admin API has ended", "Open a new session"))

    async def last_seen(self) -> dict[str, float]:
        """Return when the server last received something from each registered client, by the server's clock."""
        return dict(await self._ask("last_seen"))

    async def host_jobs(self, name: str) -> dict[str, list[str]]:
        """Return the FLARE jobs of this name that have not ended, oldest first, and the sites that refused each."""
        return dict(await self._ask("host_jobs", name))

    async def submit(self, folder: str | os.PathLike[str]) -> str:
        """Submit a FLARE job; return its id."""
        return str(await self._ask("submit", str(folder)))

    async def ended(self, job_id: str) -> str:
        """How and why a FLARE job has ended; empty if it has not."""
        return str(await self._ask("ended", job_id))

    async def abort(self, job_id: str) -> None:
        """End a FLARE job."""
        await self._ask("abort", job_id)

    async def command(self, job_id: str, data: dict[str, Any], timeout: float = 5.0) -> Any:  # noqa: ASYNC109 - as above
        """Send an app command to the hub; return its answer."""
        return await self._ask("command", job_id, data, timeout)

    async def close(self) -> None:
        """End the connection, and the process."""
        process, self._process = self._process, None
        frames, self._frames = self._frames, None
        if frames is not None:
            frames.send(msgspec.msgpack.encode({"id": 0, "op": "close"}))
            frames.close()
        if process is not None:
            try:
                async with asyncio.timeout(_GRACE):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _advice(kind: str, error: str) -> str:
    if kind == "AuthorizationError":
        return "FLARE's policy does not let this user do that: pipelines need the role lead or project_admin"
    if kind == "ModuleNotFoundError" and "nvflare" in error:
        return f"Install it: {install_hint('flare')}"
    return "Run 'dfm-async flare doctor KIT': it checks that the server runs and that the kit is this user's"


# the startup kit of the user

_USER: Final = "fed_admin.json"
_OTHERS: Final = {"fed_client.json": "a client", "fed_server.json": "the server"}
_PROBE_TIMEOUT: Final = 2.0


class UserKit(NamedTuple):
    """The contents of a user's startup kit."""

    user: str
    host: str
    port: int

    @classmethod
    def read(cls, folder: Path) -> UserKit:
        """Read a kit.

        Raises:
            FlareError: the folder is not a startup kit, or not that of a user.
        """
        startup, advice = folder / "startup", "Name the folder of the user's startup kit"
        if not startup.is_dir():
            raise FlareError(f"{str(folder)!r} is not a startup kit: it has no folder 'startup'", advice)
        for name, whose in _OTHERS.items():
            if (startup / name).is_file():
                raise FlareError(f"{str(folder)!r} is the startup kit of {whose}, not of a user", advice)
        try:
            found = json.loads((startup / _USER).read_text())["admin"]
            return cls(str(found.get("username", "")), str(found["host"]), int(found["port"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"{str(startup / _USER)!r} cannot be read: {type(error).__name__}: {error}"
            raise FlareError(text, "Provision the kit again") from error

    async def why_not(self) -> str:
        """Return why the server cannot be connected to, as far as it is known; empty if it can."""
        where = f"{self.host}, port {self.port}"
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                _, writer = await asyncio.open_connection(self.host, self.port)
        except TimeoutError:
            return f"{where} does not answer"
        except OSError as error:
            return f"{where}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}"
        writer.close()
        return ""


# the folder of a host job

BRINGS_CODE: Final = "dfm_async_carries_code.txt"
"""A file that makes FLARE ask each site whether this user may bring code."""
_TASK: Final = "dfm_async"


def host_job_name(options: FlareOptions) -> str:
    """Return the name of the host job of a user. It carries the jobs of all their federations."""
    user = "".join(letter if letter.isalnum() or letter in "-_.@" else "-" for letter in options.user)
    return f"dfm-async-{options.code}-{user}"


def write_job(folder: Path, name: str, sites: Sequence[str], options: FlareOptions) -> None:
    """Write the folder of a host job for these sites."""
    app = folder / "app"
    (app / "config").mkdir(parents=True)
    meta: dict[str, Any] = {
        "name": name,
        "resource_spec": {},
        "min_clients": 1 if sites else 0,
        "mandatory_clients": [],
        "deploy_map": {"app": ["server", *sites]},
    }
    args = {"timeout": options.delivery_timeout, "linger": options.linger}
    common = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    hub = {"id": "hub", "path": "dfm_async.targets.flare.components.HubController", "args": args}
    site = {
        "path": "dfm_async.targets.flare.components.SiteExecutor",
        "args": {"timeout": options.delivery_timeout},
    }
    _write(folder / "meta.json", meta)
    _write(app / "config" / "config_fed_server.json", {**common, "workflows": [hub]})
    _write(app / "config" / "config_fed_client.json", {**common, "executors": [{"tasks": [_TASK], "executor": site}]})
    if options.code == "travels":
        (app / "custom").mkdir()
        (app / "custom" / BRINGS_CODE).write_text("The applications of this job bring the code of their operations.\n")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
