"""Where an application found the gateway the last time: the next session need not ask the server."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

__all__ = ["GatewayMemory"]


class _Found(msgspec.Struct, frozen=True):
    host: str
    carrier: str
    address: str


class GatewayMemory:
    """A file in the user's startup kit, which has their private key, too: nobody else can read it.

    Args:
        kit: the startup kit.
        carrier: the name of the carrier.
    """

    def __init__(self, kit: Path, carrier: str) -> None:
        self._path = kit / "local" / f".{carrier}.gateway"
        self._carrier = carrier

    def address(self) -> str | None:
        """Where the gateway was, if it was on this machine."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_Found)
        except (OSError, msgspec.DecodeError):
            return None
        return found.address if (found.host, found.carrier) == (platform.node(), self._carrier) else None

    def keep(self, address: str) -> None:
        """Notes where the gateway is; a kit that cannot be written to is left as it is."""
        data = msgspec.json.encode(_Found(platform.node(), self._carrier, address))
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            new.parent.mkdir(exist_ok=True)
            new.touch(mode=0o600)
            new.write_bytes(data)
            new.replace(self._path)
        except OSError:
            return

    def forget(self) -> None:
        """The gateway is not there any more."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return
