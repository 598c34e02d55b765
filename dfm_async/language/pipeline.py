"""A pipeline: statements with a name. It is data: it can be written to JSON, read back, printed and drawn."""

from __future__ import annotations

import inspect
import itertools
import os
import re
from contextvars import Token
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic

import msgspec

from dfm_async.base.containers import is_deeper
from dfm_async.base.rendering import Shown, renderer
from dfm_async.errors import PipelineError, PlaceholderError, Problem
from dfm_async.language.builder import IN_OPERATION, Builder, Mode
from dfm_async.language.current_pipeline import CallRecorder, building, current_builder
from dfm_async.language.expressions import Constant, constant_data
from dfm_async.language.pipeline_text import pipeline_mermaid, pipeline_text
from dfm_async.language.statements import Statement, walk_statements

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import ParamSpec, TypeVar

    P, R_co = ParamSpec("P"), TypeVar("R_co", covariant=True)

RESULT: Final = "result"
"""The place of the value that a pipeline function returns."""
_DEEPEST: Final = 256
"""How deep the data of a pipeline may be nested: a hundred nested blocks fit, with their expressions."""
_NAMES_A_VALUE: Final = re.compile(r"\b(_Block|Repeat|Cache)?Value\b")
_MOST: Final = 100_000
"""How many statements may be read."""


class _PipelineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of a pipeline."""

    name: str | None = None
    api_version: str = ""
    mode: Mode = "execute"
    body: tuple[Statement, ...] = ()
    description: str = ""
    result: str | None = None


def _to_data(node: Any) -> Any:
    if isinstance(node, Constant):
        return constant_data(node)
    if isinstance(node, msgspec.Struct):
        tag = node.__struct_config__.tag
        fields = {name: _to_data(getattr(node, name)) for name in node.__struct_fields__}
        return fields if tag is None else {"kind": tag, **fields}
    if isinstance(node, (tuple, list)):
        return [_to_data(item) for item in node]
    if isinstance(node, dict):
        return {name: _to_data(item) for name, item in node.items()}
    return node


def _problem(error: Exception, where: str = "$") -> Problem:
    message, _, place = str(error).partition(" - at ")
    return Problem(where + place.strip("`").removeprefix("$"), message)


def _problems(data: Any, error: Exception) -> PipelineError:
    """Return everything that is wrong with the data of a pipeline: at most one thing per statement."""
    found: list[Problem] = []
    body = data.get("body") if isinstance(data, dict) else None
    if isinstance(body, list):
        for where, part, kind in [("$", {**data, "body": []}, _PipelineFile)] + [
            (f"$.body[{index}]", statement, Statement) for index, statement in enumerate(body)
        ]:
            try:
                msgspec.convert(part, kind)
            except (msgspec.ValidationError, RecursionError) as problem:
                found.append(_problem(problem, where))
    return PipelineError(None, found or [_problem(error)])


def is_dfm(data: Any) -> bool:
    """Return whether the data of a pipeline is DFM's, of either variant, rather than our own."""
    if not isinstance(data, dict):
        return False
    body = data.get("body")
    first = body[0] if isinstance(body, list) and body else None
    return "dfm_body" in data or "target" in data or (isinstance(first, dict) and "dfm_class_name" in first)


def _not_a_name(given: object) -> str:
    hint = "@federation.pipeline makes a pipeline of a function" if callable(given) else "it is only a name"
    return f"the name of a pipeline must be a string, not {given!r}: {hint}"


class Pipeline(Shown, Generic[P, R_co]):
    """A list of statements that call the operations of a federation.

    ``with Pipeline("name") as pipeline:`` records the statements of its block. A pipeline is plain data, and pydantic
    models can have fields of this type. :meth:`Federation.pipeline` turns a function into a pipeline. For type
    checkers, ``Pipeline[P, R]`` has the parameters ``P`` and the result ``R``.

    Args:
        name: the name of the pipeline.
        api_version: the version of the federation that it was written for; empty means any.
        mode: "execute", or "discovery", where ``Advise()``, and parameters that a call leaves out, request the valid
            values.
        body: the statements, if they exist already.
        description: a text for users.
        result: the place of its result, for :meth:`Session.run`.
    """

    def __init__(
        self,
        name: str | None = None,
        /,
        *,
        api_version: str = "",
        mode: Mode = "execute",
        body: tuple[Statement, ...] = (),
        description: str = "",
        result: str | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(_not_a_name(name))
        self.name = name
        self.description = description
        self.result = result
        self.signature: inspect.Signature | None = None
        """The parameters of the function that it was made of, if it was."""
        self.types: dict[str, Any] = {}
        """The types that this function declares for them."""
        self.returns: Any = Any
        """The type that it declares for its result."""
        self.api_version = api_version
        if mode not in ("execute", "discovery"):
            raise ValueError(f"mode must be 'execute' or 'discovery', not {mode!r}")
        self.mode: Mode = mode
        self.body: tuple[Statement, ...] = tuple(body)
        self._builder: Builder | None = None
        self._token: Token[CallRecorder | None] | None = None

    def __enter__(self) -> Pipeline[P, R_co]:
        if self._builder is not None or self.body:
            raise PipelineError(self.name, [Problem("", "is already built; create a new Pipeline")])
        self._builder = Builder(self.name, self.mode)
        self._token = building.set(self._builder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        builder = self._builder
        assert builder is not None  # noqa: S101 - __enter__ set both
        assert self._token is not None  # noqa: S101
        building.reset(self._token)
        self._builder = self._token = None
        if kind is None:
            if builder.unentered:
                raise PipelineError(self.name, list(builder.unentered.values()))
            self.body = tuple(builder.blocks[0])
        elif kind is TypeError and (found := _NAMES_A_VALUE.search(str(error))):  # of code that does not ask the value
            raise PlaceholderError(
                self.name, [Problem(str(error), f"{found[0]} is a placeholder, {IN_OPERATION}")]
            ) from error

    if not TYPE_CHECKING:  # type checkers refuse a call themselves

        def __call__(self, *_args: Any, **_kwargs: Any) -> None:
            """Refuse the call, with a hint."""
            if current_builder() is not None:
                hint = "in another pipeline, call a plain function that both pipelines call with their values"
            else:
                hint = f"await session.run({self.name}, ...) runs it"
            raise TypeError(f"pipeline {self.name!r} cannot be called: {hint}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pipeline):
            return NotImplemented
        mine = (self.name, self.api_version, self.mode, self.body, self.result)
        return mine == (other.name, other.api_version, other.mode, other.body, other.result)

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        return pipeline_text(self.name, self.mode, self.body)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name!r}: {len(self.body)} statements>"

    def to_mermaid(self) -> str:
        """Draw the pipeline as a Mermaid flow chart."""
        return pipeline_mermaid(self.body)

    def to_svg(self) -> str:
        """Draw the pipeline as self-contained SVG: blocks are boxes, and sites that are fixed have colours."""
        return renderer().svg(self)

    # JSON

    def model_dump(self) -> dict[str, Any]:
        """Return the pipeline as data that JSON can represent.

        Raises:
            EncodingError: a constant could only be pickled.
        """
        found = _PipelineFile(self.name, self.api_version, self.mode, self.body, self.description, self.result)
        data: dict[str, Any] = _to_data(found)
        for name in ("description", "result"):  # most pipelines have none
            if not data[name]:
                del data[name]
        return data

    def model_dump_json(self, indent: int = 0) -> str:
        """Write the pipeline as JSON."""
        data = msgspec.json.encode(self.model_dump())
        return (msgspec.json.format(data, indent=indent) if indent else data).decode()

    @classmethod
    def model_validate(cls, data: Any) -> Pipeline:
        """Create a pipeline from parsed JSON.

        Raises:
            PipelineError: this is not a pipeline; with the place and the reason.
        """
        if isinstance(data, Pipeline):
            return data
        if is_dfm(data):
            message = (
                "is DFM's JSON, whose class names belong to a federation: use federation.load_pipeline(path), or name "
                "the federation before it on the command line"
            )
            raise PipelineError(None, [Problem("$", message)])
        if is_deeper(data, _DEEPEST):
            raise PipelineError(None, [Problem("$", f"is nested deeper than {_DEEPEST} levels")])
        try:
            found = msgspec.convert(data, _PipelineFile)
        except (msgspec.ValidationError, RecursionError) as error:
            raise _problems(data, error) from error
        if sum(1 for _ in itertools.islice(walk_statements(found.body), _MOST + 1)) > _MOST:
            raise PipelineError(found.name, [Problem("$.body", f"has more than {_MOST:,} statements")])
        return cls(
            found.name,
            api_version=found.api_version,
            mode=found.mode,
            body=found.body,
            description=found.description,
            result=found.result,
        )

    @classmethod
    def model_validate_json(cls, data: str | bytes) -> Pipeline:
        """Read a pipeline from JSON.

        Raises:
            PipelineError: this is not a pipeline; with the place and the reason.
        """
        try:
            found = msgspec.json.decode(data)
        except (ValueError, RecursionError) as error:
            raise PipelineError(None, [_problem(error)]) from error
        return cls.model_validate(found)

    def save_to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the pipeline to a file as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load_from_file(cls, path: str | os.PathLike[str]) -> Pipeline:
        """Read a pipeline from a JSON file.

        Raises:
            PipelineError: the file does not contain a pipeline; names the location and the reason.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except PipelineError as error:
            raise PipelineError(str(path), error.problems) from error

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema

        def validate(data: Any) -> Pipeline:
            try:
                return cls.model_validate(data)
            except PipelineError as error:
                raise ValueError(str(error)) from error

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(cls.model_dump)
        )
