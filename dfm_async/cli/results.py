"""Writes results: as text, as JSON lines, or as files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final, Protocol

import anyio.to_thread
import msgspec

from dfm_async.cli.exits import BadInput, Unwritable
from dfm_async.cli.program import safe, safe_json
from dfm_async.cli.streams import StandardOutput
from dfm_async.model.events import Result
from dfm_async.telemetry.spans import frame_text
from dfm_async.wire.json_values import JsonValues

__all__ = ["FileResults", "JsonResults", "ResultWriter", "TextResults", "json_values", "value_text"]

_SHOWN: Final = 2000
"""How many characters of a value are shown as text."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


def json_values() -> JsonValues:
    """The rules by which values are written as JSON: those of the web service, with room for larger ones."""
    return JsonValues(array_items=1_000_000, record_bytes=256 * 1024 * 1024, json_depth=64)


def value_text(value: Any) -> str:
    """Writes a value for people."""
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
        """Writes one result; waits while its reader is slow."""
        ...


class TextResults:
    """Writes one result per line, for people."""

    def __init__(self, output: StandardOutput) -> None:
        self._output = output

    async def write(self, result: Result) -> None:
        """Writes the place, the frame and the value."""
        text = value_text(result.value)
        separator = "\n" if "\n" in text else " "
        await self._output.line(f"{safe(result.place)} [{frame_text(result.frame)}]{separator}{text}")


class JsonResults:
    """Writes one JSON object per line, for programs."""

    def __init__(self, output: StandardOutput) -> None:
        self._output = output
        self._values = json_values()

    async def write(self, result: Result) -> None:
        """Writes everything about a result."""
        value = msgspec.Raw(self._values.encode(result.value))
        await self._output.line(_json_line(result, value=value))


class FileResults:
    """Writes every result to a file of its own, and its name to the standard output.

    Arrays are ``.npy``, bytes ``.bin``, text ``.txt``, and everything else ``.json``. A file is there as a whole or
    not at all. The same place and frame give the same name in every run.

    Args:
        folder: where; it is made if it is not there.
        output: where the names are written to.
        as_json: whether a JSON object is written for each file, instead of its name alone.
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
        """Writes the value to its file.

        Raises:
            Unwritable: that is not possible.
        """
        path = self._folder / self._name(result)
        try:
            await anyio.to_thread.run_sync(self._save, path, result.value)
        except OSError as error:
            raise Unwritable(f"{path}: {error.strerror or error}") from error
        line = _json_line(result, file=str(path)) if self._as_json else str(path)
        await self._output.line(line)

    def _name(self, result: Result) -> str:
        # A place may be called anything: what is not a letter, a digit, _ or - is written by its code.
        place = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", result.place)
        stem = "-".join(filter(None, [place, frame_text(result.frame)])) or "result"
        while True:
            count = self._counts[stem] = self._counts.get(stem, 0) + 1
            name = stem if count == 1 else f"{stem}-{count}"  # several yields to one place in one frame
            if name not in self._taken:  # else a place is called as others are when they are numbered
                self._taken.add(name)
                return name + _suffix(result.value)

    def _save(self, path: Path, value: Any) -> None:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                if path.suffix == ".npy":
                    import numpy as np

                    np.save(file, value, allow_pickle=False)
                elif path.suffix == ".bin":
                    file.write(value)
                elif path.suffix == ".txt":
                    file.write(value.encode("utf-8", "surrogatepass"))
                else:
                    file.write(self._values.encode_whole(value) + b"\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


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
