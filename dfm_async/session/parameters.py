"""Parameter sets as applications give them, checked and packed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any, Final

from dfm_async.errors import EncodingError, ParameterError
from dfm_async.federation.federation import Federation
from dfm_async.planner.plan import Plan, parameter_types
from dfm_async.planner.types import validate
from dfm_async.targets.frames import Row
from dfm_async.wire.codec import Codec

__all__ = ["ParameterSets", "StoredRow", "stored_row"]

_PLANS: Final = 128
_PROBLEMS: Final = 10
_TURN: Final = 500
"""After how many parameter sets others of the loop run."""


class StoredRow(dict[str, Any]):
    """A parameter set of a job that is written down: packed for the sites, and encoded for the store."""

    __slots__ = ("data",)

    data: bytes


def stored_row(row: Row) -> bytes:
    """What is written of a parameter set."""
    assert isinstance(row, StoredRow)  # noqa: S101 - a session with a store makes no others
    return row.data


class _Packing:
    """Parameter sets that are checked and packed, some at a time."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        self.rows: list[Row] = []
        self.problems: list[str] = []

    @property
    def done(self) -> bool:
        return len(self.rows) == len(self.given)

    def rows_or_raise(self) -> list[Row]:
        if self.problems:
            more = len(self.problems) - _PROBLEMS
            raise ParameterError(self.problems[:_PROBLEMS] + ([f"and {more} more"] if more > 0 else []))
        return self.rows


def _given(params: Any) -> list[Any]:
    if isinstance(params, Mapping):
        return [params]
    if isinstance(params, (list, tuple)):
        return list(params)
    wanted = "a dict is one parameter set, a list several, an async iterable a stream of them"
    hint = ": write list(...)" if hasattr(params, "__next__") else ""
    raise ParameterError([f"{wanted}, not a value of type {type(params).__name__}{hint}"])


class ParameterSets:
    """Checks parameter sets against the types that the operations of a federation declare, and packs them.

    Args:
        federation: what the operations are.
        codec: how values travel.
        stored: how they are written down, if they are.
    """

    def __init__(self, federation: Federation, codec: Codec, stored: Codec | None) -> None:
        self._federation = federation
        self._codec = codec
        self._stored = stored
        self._hints: OrderedDict[tuple[str, int], dict[str, list[Any]]] = OrderedDict()

    def pack(self, plan: Plan, params: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Row]:
        """Checks and packs one parameter set or several.

        Raises:
            ParameterError: with everything that is wrong.
        """
        packing = _Packing(_given(params))
        while not packing.done:
            self._pack_some(plan, packing)
        return packing.rows_or_raise()

    async def pack_in_turns(self, plan: Plan, params: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Row]:
        """Do the same as :meth:`pack`, and let others of the loop run meanwhile if there are many sets."""
        packing = _Packing(_given(params))
        self._pack_some(plan, packing)
        while not packing.done:
            await asyncio.sleep(0)
            self._pack_some(plan, packing)
        return packing.rows_or_raise()

    def _pack_some(self, plan: Plan, packing: _Packing) -> None:
        given, rows = packing.given, packing.rows
        for number in range(len(rows), min(len(rows) + _TURN, len(given))):
            where = "" if len(given) == 1 else f"set {number}: "
            rows.append(self._row(plan, given[number], where, packing.problems))

    def _row(self, plan: Plan, row: Any, where: str, problems: list[str]) -> Row:
        if not isinstance(row, Mapping):
            problems.append(f"{where}a parameter set is a dict, not {type(row).__name__}")
            return {}
        packed: dict[str, Any] = {} if self._stored is None else StoredRow()
        stored: dict[str, Any] = {}
        names = plan.params
        if len(row) != len(names) or any(name not in row for name in names):
            missing = [name for name in names if name not in row]
            unknown = [name for name in row if name not in names]
            if missing:
                problems.append(f"{where}missing parameter {', '.join(map(repr, missing))}")
            if unknown:
                known = ", ".join(map(repr, names)) or "none"
                problems.append(f"{where}unknown parameter {', '.join(map(repr, unknown))} (the pipeline has: {known})")
        hints = self._types_of(plan)
        for name in names:
            if name not in row:
                continue
            value = row[name]
            declared = hints.get(name)
            if declared is not None:
                for hint in declared:
                    found, wrong = validate(hint, value)
                    if wrong is not None:
                        problems.append(f"{where}parameter {name!r}: {wrong}")
                    elif len(declared) == 1:
                        value = found
            try:
                packed[name] = self._codec.pack(value)
                if self._stored is not None:
                    stored[name] = self._stored.pack(value)
            except EncodingError as error:
                problems.append(f"{where}parameter {name!r}: {error}")
        if self._stored is not None and isinstance(packed, StoredRow):
            packed.data = self._stored.dumps(stored)
        return packed

    def fingerprint(self, plan: Plan, params: Any) -> str:
        """What a job computes. A stream of parameters cannot be known beforehand: there the plan must do."""
        codec = Codec(trusted=self._stored is None, canonical=True, stored=self._stored is not None)
        content = b"" if isinstance(params, AsyncIterable) else codec.encode(params)
        return hashlib.sha256(plan.hash.encode() + content).hexdigest()

    def _types_of(self, plan: Plan) -> dict[str, list[Any]]:
        key = (plan.hash, self._federation.revision)
        hints = self._hints.get(key)
        if hints is None:
            hints = self._hints[key] = parameter_types(plan, self._federation)
            if len(self._hints) > _PLANS:
                self._hints.popitem(last=False)
        return hints
