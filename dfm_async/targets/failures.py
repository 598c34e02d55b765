"""The errors of one job as they come from its locations: each is told once."""

from __future__ import annotations

import pickle

from dfm_async.errors import DfmError, OperationFailed
from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.ids import Frame

__all__ = ["FailureBook", "Told", "rebuild"]

Told = dict[int, dict[tuple[str, Frame], DfmError]]
"""The errors that the log has, by parameter set, and there by node and frame."""


class FailureBook:
    """Knows the errors of the parameter sets that are under way.

    Args:
        told: what the log has of parameter sets that may run again; None if none may.
    """

    __slots__ = ("_by_id", "_told")

    def __init__(self, told: Told | None) -> None:
        self._by_id: dict[int, dict[str, DfmError]] = {}
        self._told = told

    def add(self, found: ErrorRecord) -> DfmError | None:
        """Takes an error; gives it if it is new. In an earlier run of its parameter set it may have been told."""
        root = found.frame[0] if found.frame else -1
        known = self._by_id.setdefault(root, {})
        if found.id in known:
            return None
        if self._told is not None:
            told = self._told.setdefault(root, {})
            earlier = told.get((found.node, found.frame))
            if earlier is not None:
                known[found.id] = earlier
                return None
        error = known[found.id] = rebuild(found)
        if self._told is not None:
            told[found.node, found.frame] = error
        return error

    def find(self, root: int, error_id: str) -> DfmError:
        """The error that was told before under this id."""
        found = self._by_id.get(root, {}).get(error_id) or self._by_id.get(-1, {}).get(error_id)
        return found or DfmError(f"error {error_id}")

    def forget(self, root: int) -> None:
        """A parameter set is done."""
        self._by_id.pop(root, None)
        if self._told is not None:
            self._told.pop(root, None)


def rebuild(found: ErrorRecord) -> OperationFailed:
    """Makes an exception of an error that has travelled, with its cause if that can be rebuilt."""
    error = OperationFailed(
        found.site,
        found.operation,
        found.node,
        found.frame,
        found.attempt,
        found.type_name,
        found.message,
        found.traceback,
    )
    if found.cause:
        try:
            cause = pickle.loads(found.cause)  # noqa: S301 - from a process of our own tree
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a class that is not known here, or raises: the text must do
            cause = None
        if isinstance(cause, BaseException):
            error.__cause__ = cause
    return error
