"""Parameter sets from the command line: ``--param name=value``, and files of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from dfm_async.base.text import shortened
from dfm_async.cli.command_runner import BadInput
from dfm_async.cli.terminal import input_lines
from dfm_async.federation.federation import Federation
from dfm_async.language.functions import parameter_texts
from dfm_async.language.pipeline import Pipeline
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import parameter_names, parameter_types
from dfm_async.planning.types import type_text, validate

ParameterSet: TypeAlias = dict[str, Any]

_LINES: Final = (".jsonl", ".ndjson")
_BATCH: Final = 1024 * 1024
"""The approximate number of bytes that are read at once."""


def parse_params(given: Sequence[str], types: Mapping[str, Sequence[Any]]) -> ParameterSet:
    """Parse ``name=value`` arguments, given the types that the operations declare for each parameter.

    A value is JSON if the declared type of the parameter accepts that, and text otherwise.
    """
    found: ParameterSet = {}
    for argument in given:
        name, separator, text = argument.partition("=")
        if not separator or not name:
            raise BadInput(f"--param takes name=value, not {argument!r}")
        if name in found:
            raise BadInput(f"--param {name} is given twice. For several parameter sets, use --params FILE")
        found[name] = parse_value(text, types.get(name, ()))
    return found


def parameter_rows(plan: Plan, pipeline: Pipeline, federation: Federation) -> list[tuple[str, str, str, str]]:
    """Return a row for each parameter of a pipeline, below a head: name, type, default, and what it is."""
    types, texts = parameter_types(plan, federation), parameter_texts(pipeline.description)
    rows = [("parameter", "type", "default", "description")]
    for name in parameter_names(plan, pipeline):
        default = shortened(plan.defaults[name]) if name in plan.defaults else "(required)"
        rows.append((name, type_text(types[name][0]) if name in types else "any", default, texts.get(name, "")))
    return rows


def parse_value(text: str, types: Sequence[Any]) -> Any:
    """Return a value: what the text is as JSON if the declared types accept that, else the text."""
    try:
        data = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
    wanted = all(validate(hint, data)[1] is None for hint in types)
    return data if wanted else text


class ParameterFile:
    """The parameter sets of a file: one JSON object, a list of them, or one per line.

    Lines are read as the job needs them: a file may be larger than memory, and standard input need not end.

    Args:
        path: the file; ``-`` is standard input. One object per line if it ends with ``.jsonl`` or ``.ndjson``, and on
            standard input unless that begins with ``[``.
        common: parameters for every set that lacks them.
    """

    def __init__(self, path: str, common: Mapping[str, Any]) -> None:
        self._path = path
        self._common = dict(common)
        self._shown = "standard input" if path == "-" else path
        self.problem: BadInput | None = None
        """The problem with the file that was found while the job ran."""

    async def sets(self) -> list[ParameterSet] | AsyncIterator[ParameterSet]:
        """Return all parameter sets, or an iterator over those of lines."""
        if self._path == "-":
            lines = input_lines()
            first = await self._first(lines)
            if not first.lstrip().startswith(b"["):
                return self._checked(_chain(first, lines))
            return self._whole(b"\n".join([first] + [line async for line in lines]))
        if self._path.endswith(_LINES):
            await self._check_readable()
            return self._checked(self._file_lines())
        try:
            return self._whole(await anyio.Path(self._path).read_bytes())
        except OSError as error:
            raise BadInput(f"{self._path}: {error.strerror or error}") from error

    async def _first(self, lines: AsyncGenerator[bytes, None]) -> bytes:
        async for line in lines:
            if line.strip():
                return line
        return b""

    async def _check_readable(self) -> None:
        try:
            async with await anyio.open_file(self._path, "rb"):
                pass
        except OSError as error:
            raise BadInput(f"{self._path}: {error.strerror or error}") from error

    async def _file_lines(self) -> AsyncGenerator[bytes, None]:
        async with await anyio.open_file(self._path, "rb") as file:
            while lines := await anyio.to_thread.run_sync(file.wrapped.readlines, _BATCH):
                for line in lines:
                    yield line

    async def _checked(self, lines: AsyncGenerator[bytes, None]) -> AsyncIterator[ParameterSet]:
        number = 0
        async with aclosing(lines):
            try:
                async for line in lines:
                    number += 1
                    if line.strip():
                        yield self._one(self._decode(line, f"{self._shown}, line {number}"), f"line {number}")
            except BadInput as error:
                self.problem = error
                raise

    def _whole(self, data: bytes) -> list[ParameterSet]:
        found = self._decode(data, self._shown)
        if isinstance(found, list):
            return [self._one(item, f"item {number}") for number, item in enumerate(found)]
        return [self._one(found, "the document")]

    def _decode(self, data: bytes, where: str) -> Any:
        try:
            return msgspec.json.decode(data)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where} is not JSON: {error}") from error

    def _one(self, found: Any, where: str) -> ParameterSet:
        if not isinstance(found, dict):
            kind = "null" if found is None else type(found).__name__
            raise BadInput(f"{self._shown}: {where} is not an object of parameters, but a value of type {kind}")
        return {**self._common, **found}


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        if first:
            yield first
        async for line in rest:
            yield line
