"""A site's own record of what others did there: one JSON object per line, appended and never changed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from dfm_async.base.text import cut

_log = logging.getLogger(__name__)

_LONGEST: Final = 1024
"""The largest number of bytes of a text that are recorded."""
_MOST: Final = 1000
"""The largest number of entries of a list that are recorded."""


class AuditLog:
    """Writes lines at once: each is passed to the system before what it records goes on.

    Texts are cut after a kilobyte, and lists after 1,000 entries: others choose how long they are.

    Args:
        path: the file; None writes nothing.
        common: what every line has.
    """

    def __init__(self, path: Path | None, common: dict[str, str]) -> None:
        self._common = common
        self._file: IO[bytes] | None = None
        self._torn = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(number, "ab", buffering=0)
            path.chmod(0o600)

    def write(self, event: str, **what: Any) -> None:
        """Add a line.

        Raises:
            OSError: it cannot be written: what is not recorded must not happen.
        """
        if self._file is None:
            return
        line = {"time": time.time(), "event": event, **self._common, **{key: _short(what[key]) for key in what}}
        # What was written in part is ended, so that it does not spoil this line.
        data = b"\n" * self._torn + msgspec.json.encode(line) + b"\n"
        self._torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes of a line could be written to the audit log")
        self._torn = False

    def note(self, event: str, **what: Any) -> None:
        """Add a line about what happens in any case: that it cannot be written does not stop it."""
        try:
            self.write(event, **what)
        except OSError:
            _log.exception("the audit log cannot be written: %s", event)

    def close(self) -> None:
        """End it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value.encode("utf-8", "backslashreplace").decode(), _LONGEST)
    if isinstance(value, (list, tuple)):
        listed = [_short(item) for item in value[:_MOST]]
        return listed if len(value) <= _MOST else [*listed, f"and {len(value) - _MOST} more"]
    return value
