"""The application's end of the connector: FLARE's admin API as coroutines."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.base.installation import install_hint
from dfm_async.errors import FlareError
from dfm_async.targets.flare.gateway import Frames
from dfm_async.targets.flare.user_kit import UserKit

__all__ = ["Admin"]

_GRACE: Final = 5.0


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
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    @property
    def lost(self) -> bool:
        """Whether the process that speaks to the server is not there."""
        return self._frames is None or self._frames.lost

    async def open(self, timeout: float) -> None:  # noqa: ASYNC109 - FLARE wants to know it
        """Connects to the server.

        Raises:
            FlareError: the kit is not one, or the server cannot be reached, and what to do.
        """
        kit = UserKit.read(self._kit)
        if kit.user and kit.user != self._user:
            text = f"the startup kit {str(self._kit)!r} is that of {kit.user!r}, not of {self._user!r}"
            raise FlareError(text, "Name that user, or another kit")
        here, there = socket.socketpair()
        command = (sys.executable, "-m", "dfm_async.targets.flare.connector")
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
            raise FlareError("the connection to FLARE has ended", "Connect again")
        self._last += 1
        number = self._last
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._frames.send(msgspec.msgpack.encode({"id": number, "op": op, "args": args}))
        try:
            return await future
        finally:
            del self._answers[number]

    def _take(self, data: bytes) -> None:
        answer = msgspec.msgpack.decode(data)
        future = self._answers.get(answer["id"])
        if future is None or future.done():
            return
        if "error" in answer:
            future.set_exception(FlareError(answer["error"], _advice(answer["error"])))
        else:
            future.set_result(answer["result"])

    def _lost(self) -> None:
        for future in self._answers.values():
            if not future.done():
                future.set_exception(FlareError("the process that speaks to FLARE has ended", "Connect again"))

    async def heard(self) -> dict[str, float]:
        """When the server last heard of each client that is registered, by the server's clock."""
        return dict(await self._ask("heard"))

    async def carriers(self, name: str) -> dict[str, list[str]]:
        """The FLARE jobs with this name that have not ended, the oldest first, and the sites that refused each."""
        return dict(await self._ask("carriers", name))

    async def submit(self, folder: str | os.PathLike[str]) -> str:
        """Submits a FLARE job; gives its id."""
        return str(await self._ask("submit", str(folder)))

    async def status(self, job_id: str) -> str:
        """The status of a FLARE job."""
        return str(await self._ask("status", job_id))

    async def ended(self, job_id: str) -> str:
        """How and why a FLARE job has ended; empty if it has not."""
        return str(await self._ask("ended", job_id))

    async def abort(self, job_id: str) -> None:
        """Ends a FLARE job."""
        await self._ask("abort", job_id)

    async def command(self, job_id: str, data: dict[str, Any], timeout: float = 5.0) -> Any:  # noqa: ASYNC109 - as above
        """Asks the hub something."""
        return await self._ask("command", job_id, data, timeout)

    async def close(self) -> None:
        """Ends the connection, and the process."""
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


def _advice(error: str) -> str:
    if error.startswith("AuthorizationError"):
        return "FLARE's policy does not let this user do that: pipelines need the role lead or project_admin"
    if "nvflare" in error and "ModuleNotFound" in error:
        return f"Install it: {install_hint('flare')}"
    return "Look whether the server runs ('dfm-async flare doctor KIT' tells), and whether the kit is this user's"
