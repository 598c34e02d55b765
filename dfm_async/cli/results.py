"""Write results: as text, as JSON lines, or as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import anyio.to_thread
import msgspec

from dfm_async.base.files import replaced
from dfm_async.cli.command_options import Output
from dfm_async.cli.command_runner import BadInput, Unwritable, safe, safe_json
from dfm_async.cli.terminal import StandardOutput
from dfm_async.model.events import Result
from dfm_async.telemetry.spans import frame_text
from dfm_async.wire.json_values import JsonValues

_SHOWN: Final = 2000
"""The maximum number of characters of a value in text."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


def json_values() -> JsonValues:
    """Return the encoder of values as JSON: that of the web service, with higher limits."""
    return JsonValues(array_items=1_000_000, record_bytes=256 * 1024 * 1024, json_depth=64)


def value_text(value: Any) -> str:
    """Return a value as text for people."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001 - the user's code
            text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return safe(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)")


class ResultWriter(Protocol):
    """Writes results."""

    async def write(self, result: Result) -> None:
        """Write one result; wait while the reader is slow."""
        ...


class _TextResults:
    """Writes one result per line, for people."""

    def __init__(self, output: StandardOutput) -> None:
        self._output = output

    async def write(self, result: Result) -> None:
        """Write the place, the frame and the value."""
        text = value_text(result.value)
        separator = "\n" if "\n" in text else " "
        await self._output.line(f"{safe(result.place)} [{frame_text(result.frame)}]{separator}{text}")


class _JsonResults:
    """Writes one JSON object per line, for programs."""

    def __init__(self, output: StandardOutput) -> None:
        self._output = output
        self._values = json_values()

    async def write(self, result: Result) -> None:
        """Write all fields of a result."""
        value = msgspec.Raw(self._values.encode(result.value))
        await self._output.line(_json_line(result, value=value))


class _FileResults:
    """Writes every result to its own file, and the name of the file to standard output, or a JSON object about it.

    Arrays are ``.npy``, bytes ``.bin``, text ``.txt``, and everything else ``.json``. A file is
    written atomically. The same place and frame give the same name in every run.
    """

    def __init__(self, folder: Path, output: StandardOutput, *, as_json: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--output {folder}: {error.strerror or error}") from error
        self._folder = folder
        self._output = output
        self._as_json = as_json
        self._values = json_values()
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()

    async def write(self, result: Result) -> None:
        """Write the value to its file."""
        path = self._folder / self._name(result)
        try:
            await anyio.to_thread.run_sync(self._save, path, result.value)
        except OSError as error:
            raise Unwritable(f"{path}: {error.strerror or error}") from error
        line = _json_line(result, file=str(path)) if self._as_json else str(path)
        await self._output.line(line)

    def _name(self, result: Result) -> str:
        # A place can have any name: other characters than letters, digits, _ and - are written by their codes.
        place = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", result.place)
        stem = "-".join(filter(None, [place, frame_text(result.frame)])) or "result"
        while True:
            count = self._counts[stem] = self._counts.get(stem, 0) + 1
            name = stem if count == 1 else f"{stem}-{count}"  # several yields to one place in one frame
            if name not in self._taken:  # another place may have this name
                self._taken.add(name)
                return name + _suffix(result.value)

    def _save(self, path: Path, value: Any) -> None:
        with replaced(path) as file:
            if path.suffix == ".npy":
                import numpy as np

                np.save(file, value, allow_pickle=False)
            elif path.suffix == ".bin":
                file.write(value)
            elif path.suffix == ".txt":
                file.write(value.encode("utf-8", "surrogatepass"))
            else:
                file.write(self._values.encode_whole(value) + b"\n")


def writer_of(output: Output, stdout: StandardOutput) -> ResultWriter:
    """Return the writer of results."""
    if output.folder is not None:
        return _FileResults(output.folder, stdout, as_json=output.as_json)
    return _JsonResults(stdout) if output.as_json else _TextResults(stdout)


def check_places(output: Output, known: Sequence[str]) -> None:
    """Raise ``BadInput`` for places that the pipeline does not have."""
    for place in output.places or ():
        if place not in known:
            raise BadInput(f"the pipeline has no place {place!r}; it has: {', '.join(known) or 'none'}")


def _suffix(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ".bin"
    if isinstance(value, str):
        return ".txt"
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject:
        return ".npy"
    return ".json"


def _json_line(result: Result, **members: Any) -> str:
    where = {"place": result.place, "frame": result.frame, "site": result.site, "node": result.node}
    return safe_json(msgspec.json.encode({**where, "offset": result.offset, **members}))
