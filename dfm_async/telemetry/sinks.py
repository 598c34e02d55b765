"""Where spans go."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from dfm_async.telemetry.spans import Span, encode_spans

__all__ = ["FileSink", "Sink", "sink_of"]

_log = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """Takes the spans of a session. All methods are called on its loop, and must neither wait nor raise."""

    def open(self) -> None:
        """The session begins. What this raises, connecting raises."""
        ...

    def write(self, spans: list[Span]) -> None:
        """Takes spans that have ended, some at a time."""
        ...

    def close(self) -> None:
        """The session has ended."""
        ...


class FileSink:
    """Appends spans to a file, one JSON object per line; ``read_trace`` reads them back.

    Several processes may write to one file: each writes whole lines. The loop waits for the file, a few hundred lines
    at a time; so it should be on a disk of this machine. Only its owner may read a file that it makes. If it cannot be
    written any more, that is logged once, and jobs go on without it.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None

    def open(self) -> None:
        """Opens the file.

        Raises:
            OSError: it cannot be written.
            RuntimeError: it is open already.
        """
        if self._file is not None:
            raise RuntimeError(f"the sink for {self.path} is open already; give each session its own, or the path")
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = file
        end = os.fstat(file).st_size
        if end and os.pread(file, 1, end - 1) != b"\n":
            self._append(b"\n")  # whoever wrote here before was killed in the middle of a line

    def write(self, spans: list[Span]) -> None:
        """Writes spans."""
        if self._file is not None:
            self._append(encode_spans(spans))

    def _append(self, data: bytes) -> None:
        assert self._file is not None  # noqa: S101 - the callers have seen it
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _log.error("spans cannot be written to %s any more, and are lost from now on: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


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
