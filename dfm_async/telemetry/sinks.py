"""Where spans go."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from dfm_async.telemetry.spans import Span, encode_spans

__all__ = ["FileSink", "Sink", "sink_of"]

_log = logging.getLogger(__name__)

_BUFFER: Final = 64 * 1024
"""From how many bytes on a file is written without waiting for the end of a job."""


@runtime_checkable
class Sink(Protocol):
    """Takes the spans of a session. All methods are called on its loop, and must neither wait nor raise."""

    def open(self) -> None:
        """The session begins. What this raises, connecting raises."""
        ...

    def write(self, spans: list[Span]) -> None:
        """Takes spans that have ended."""
        ...

    def flush(self) -> None:
        """A job has ended: whoever looks now should see its spans."""
        ...

    def close(self) -> None:
        """The session has ended."""
        ...


class FileSink:
    """Appends spans to a file, one JSON object per line; ``read_trace`` reads them back.

    Several processes may write to one file: each writes whole lines. It is written in pieces of about 64 KiB, and at
    the end of each job; so it should be on a disk of this machine. Only its owner may read a file that it makes. If it
    cannot be written any more, that is logged once, and jobs go on untraced.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._buffer = bytearray()

    def open(self) -> None:
        """Opens the file.

        Raises:
            OSError: it cannot be written.
        """
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = file
        end = os.fstat(file).st_size
        if end and os.pread(file, 1, end - 1) != b"\n":
            self._buffer += b"\n"  # whoever wrote here before was killed in the middle of a line

    def write(self, spans: list[Span]) -> None:
        """Takes spans."""
        if self._file is None:
            return
        self._buffer += encode_spans(spans)
        if len(self._buffer) >= _BUFFER:
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered."""
        if self._file is None or not self._buffer:
            return
        buffer, self._buffer = self._buffer, bytearray()
        try:
            with memoryview(buffer) as left:
                done = 0
                while done < len(left):
                    done += os.write(self._file, left[done:])
        except OSError as error:
            _log.error("spans cannot be written to %s any more, and are lost from now on: %s", self.path, error)
            self._end()

    def close(self) -> None:
        """Writes what has gathered, and closes the file."""
        self.flush()
        self._end()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._buffer.clear()


def sink_of(trace: str | os.PathLike[str] | Sink | None) -> Sink | None:
    """The sink that somebody means: a path is a file.

    Raises:
        TypeError: it is neither.
    """
    if trace is None or (isinstance(trace, Sink) and not isinstance(trace, str)):
        return trace
    if isinstance(trace, (str, os.PathLike)):
        return FileSink(trace)
    raise TypeError(f"trace must be the path of a file, or a sink, not {trace!r}")
