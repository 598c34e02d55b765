"""Parameter sets of applications, checked and packed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any, Final, TypeGuard

from dfm_async.base.containers import BoundedDict
from dfm_async.engine.frames import Row
from dfm_async.engine.waits import check_event
from dfm_async.errors import EncodingError, ParameterError
from dfm_async.federation.federation import Federation
from dfm_async.model.constants import fresh
from dfm_async.model.json_data import write_json
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import parameter_types
from dfm_async.planning.types import validate
from dfm_async.wire.codec import Codec

_PLANS: Final = 128
_PROBLEMS: Final = 10
_TURN: Final = 500
"""The number of parameter sets after which other tasks of the loop run."""


class StoredRow(dict[str, Any]):
    """A parameter set of a durable job: packed for the sites, and encoded for the store."""

    __slots__ = ("data",)

    data: bytes


def stored_row(row: Row) -> bytes:
    """Return the bytes of a parameter set for the store."""
    assert isinstance(row, StoredRow)  # noqa: S101 - a session with a store creates no others
    return row.data


def is_stream(params: Any) -> TypeGuard[AsyncIterable[Mapping[str, Any]]]:
    """Return whether parameter sets come as a stream."""
    return type(params) is not dict and isinstance(params, AsyncIterable)


def _given(params: Any) -> list[Any]:
    if isinstance(params, Mapping):
        return [params]
    if isinstance(params, (list, tuple)):
        return list(params)
    wanted = "a dict is one parameter set, a list contains several, an async iterable is a stream of them"
    hint = ": write list(...)" if hasattr(params, "__next__") else ""
    raise ParameterError([f"{wanted}, not a value of type {type(params).__name__}{hint}"])


def event_json(plan: Plan, name: str, value: Any) -> str:
    """Return the value of an event as JSON, of the type that the pipeline declares.

    Raises:
        ParameterError: the pipeline does not wait for the event, or the value does not fit.
    """
    check_event(plan, name)
    found, wrong = validate(plan.event_types[name], value)
    text = ""
    if wrong is None:
        try:
            text = write_json(found)
        except (TypeError, ValueError, RecursionError) as error:
            wrong = f"it is not JSON data ({error})"
    if wrong is not None:
        raise ParameterError([f"event {name!r}: {wrong}"])
    return text


def _refused(problems: list[str]) -> ParameterError:
    more = len(problems) - _PROBLEMS
    return ParameterError(problems[:_PROBLEMS] + ([f"and {more} more"] if more > 0 else []))


class ParameterSets:
    """Check parameter sets against the types that the operations of a federation declare, and pack them.

    ``codec`` encodes values for the sites, ``stored`` for the store, if there is one.
    """

    def __init__(self, federation: Federation, codec: Codec, stored: Codec | None) -> None:
        self._federation = federation
        self._codec = codec
        self._stored = stored
        self._hints: BoundedDict[int, tuple[Plan, int, dict[str, list[Any]]]] = BoundedDict(_PLANS)

    def pack(self, plan: Plan, params: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Row]:
        """Check and pack one parameter set or several.

        Raises:
            ParameterError: with everything that is wrong.
        """
        problems: list[str] = []
        if type(params) is dict:
            rows = [self._row(plan, params, "", problems)]
        else:
            given = _given(params)
            rows = self._rows(plan, given, range(len(given)), problems)
        if problems:
            raise _refused(problems)
        return rows

    async def pack_in_turns(self, plan: Plan, params: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Row]:
        """Do the same as :meth:`pack`, and let other tasks of the loop run meanwhile if there are many sets."""
        if type(params) is dict:
            return self.pack(plan, params)
        given, problems, rows = _given(params), list[str](), list[Row]()
        for start in range(0, len(given), _TURN):
            if start:
                await asyncio.sleep(0)
            rows += self._rows(plan, given, range(start, min(start + _TURN, len(given))), problems)
        if problems:
            raise _refused(problems)
        return rows

    def _rows(self, plan: Plan, given: list[Any], numbers: range, problems: list[str]) -> list[Row]:
        if len(given) == 1:
            return [self._row(plan, given[0], "", problems)]
        return [self._row(plan, given[number], f"set {number}: ", problems) for number in numbers]

    def _row(self, plan: Plan, row: Any, where: str, problems: list[str]) -> Row:
        if type(row) is not dict and not isinstance(row, Mapping):
            problems.append(f"{where}a parameter set is a dict, not {type(row).__name__}")
            return {}
        packed: dict[str, Any] = {} if self._stored is None else StoredRow()
        stored: dict[str, Any] = {}
        names = plan.params
        if len(row) != len(names) or not all(map(row.__contains__, names)):
            missing = [name for name in names if name not in row and name not in plan.defaults]
            unknown = [name for name in row if name not in names]
            if missing:
                problems.append(f"{where}missing parameter {', '.join(map(repr, missing))}")
            if unknown:
                known = ", ".join(map(repr, names)) or "none"
                problems.append(f"{where}unknown parameter {', '.join(map(repr, unknown))} (the pipeline has: {known})")
            row = {**{name: fresh(value) for name, value in plan.defaults.items() if name not in row}, **row}
        hints = self._types_of(plan)
        for name in names:
            if name not in row:
                continue
            value = row[name]
            declared = hints.get(name)
            if declared is not None:
                own = name in plan.declared  # by the function of the pipeline: its type comes first, and converts
                for position, hint in enumerate(declared):
                    found, wrong = validate(hint, value)
                    if wrong is not None:
                        problems.append(f"{where}parameter {name!r}: {wrong}")
                        if own:
                            break
                    elif len(declared) == 1 or (own and not position):
                        value = found
            try:
                packed[name] = self._codec.pack(value)
                if self._stored is not None:
                    stored[name] = self._stored.pack(value)
            except EncodingError as error:
                problems.append(f"{where}parameter {name!r}: {error}")
        if self._stored is not None:
            assert isinstance(packed, StoredRow)  # noqa: S101 - made above
            packed.data = self._stored.dumps(stored)
        return packed

    def fingerprint(self, plan: Plan, params: Any) -> str:
        """Return a hash of what a job computes: its plan and, unless they are a stream, its parameter sets."""
        codec = (self._stored or Codec.for_processes()).for_keys()
        content = b"" if is_stream(params) else codec.encode(params)
        return hashlib.sha256(plan.hash.encode() + content).hexdigest()

    def _types_of(self, plan: Plan) -> dict[str, list[Any]]:
        known, revision = self._hints.get(id(plan)), self._federation.revision
        if known is None or known[0] is not plan or known[1] != revision:
            known = self._hints[id(plan)] = plan, revision, parameter_types(plan, self._federation)
        return known[2]
