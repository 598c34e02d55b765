"""A site's own record of what others did there: one JSON object per line, appended and never changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, Any

import msgspec

__all__ = ["AuditLog"]


class AuditLog:
    """Writes lines as they come: each is handed to the system before the thing that it tells of goes on.

    Args:
        path: the file; None writes nothing.
        common: what every line has.
    """

    def __init__(self, path: Path | None, common: dict[str, str]) -> None:
        self._common = common
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            path.chmod(0o600)

    def write(self, event: str, **what: Any) -> None:
        """Adds a line.

        Raises:
            OSError: it cannot be written: what is not recorded must not happen.
        """
        if self._file is not None:
            line = {"time": time.time(), "event": event, **self._common, **what}
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Ends it."""
        if self._file is not None:
            self._file.close()
            self._file = None
