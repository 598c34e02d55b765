"""The startup kit of a user: who it is for, and where the server is."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Final, NamedTuple

from dfm_async.errors import FlareError

__all__ = ["UserKit"]

_USER: Final = "fed_admin.json"
_OTHERS: Final = {"fed_client.json": "a client", "fed_server.json": "the server"}
_PATIENCE: Final = 2.0


class UserKit(NamedTuple):
    """What a user's kit says."""

    user: str
    host: str
    port: int

    @classmethod
    def read(cls, folder: Path) -> UserKit:
        """Reads a kit.

        Raises:
            FlareError: it is none, or not that of a user.
        """
        startup, advice = folder / "startup", "Name the folder of the user's startup kit"
        if not startup.is_dir():
            raise FlareError(f"{str(folder)!r} is no startup kit: it has no folder 'startup'", advice)
        for name, whose in _OTHERS.items():
            if (startup / name).is_file():
                raise FlareError(f"{str(folder)!r} is the startup kit of {whose}, not of a user", advice)
        try:
            found = json.loads((startup / _USER).read_text())["admin"]
            return cls(str(found.get("username", "")), str(found["host"]), int(found["port"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"{str(startup / _USER)!r} cannot be read: {type(error).__name__}: {error}"
            raise FlareError(text, "Have the federation provision the kit anew") from error

    async def why_not(self) -> str:
        """Why the server does not answer, as far as it can be seen from here; empty if it can be connected to."""
        where = f"{self.host}, port {self.port}"
        try:
            async with asyncio.timeout(_PATIENCE):
                _, writer = await asyncio.open_connection(self.host, self.port)
        except TimeoutError:
            return f"{where} does not answer"
        except OSError as error:
            return f"{where}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}"
        writer.close()
        return ""
