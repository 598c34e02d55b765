"""Rows of a database as values. A database may be damaged, or untrusted: every value is checked before it is used.

A job whose row cannot be read is still listed, with what is wrong with it; other rows raise :class:`Damage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from dfm_async.base.text import shortened
from dfm_async.errors import StoreError
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.store.base import Entry, Owner, Position, Request, StoredJob

VERSION: Final = 2
"""The version of the format, in every database. A store of an older version is migrated when it is opened."""
LARGEST_NUMBER: Final = 1 << 53
"""The limit of offsets and counts."""
FENCES: Final = range(1, 1 << 62)
"""The valid fencing numbers: each can be the position of a byte in a file."""
LAST_TIME: Final = 253_370_764_800.0
"""The beginning of the year 9999: later times cannot be shown in every time zone."""
_STATES: Final = frozenset(status.value for status in JobStatus) - {JobStatus.UNKNOWN.value}
JOB: Final = """
    job_id, plan, fingerprint, options, created, finished, status, reason, "end", frames, stopped, errors, done,
    jobs.fence, pid, host
"""
"""The columns of a row that :func:`stored_job` takes."""


_SEARCHED: Final = "job_id || ' ' || coalesce(pipeline, '') || ' ' || coalesce(label, '')"
"""The text of a job in which words are searched, in SQL; the spaces keep words from matching across two columns."""
OPEN: Final = ", ".join(f"'{status.value}'" for status in JobStatus if not status.terminal)
"""The states of jobs that have not ended for good, in SQL."""


def conditions(
    wanted: JobFilter, before: Position | None, parameter: str, contains: str, job_id: str = "job_id"
) -> list[str]:
    """Return the conditions of jobs that fit, in SQL.

    Args:
        wanted: the jobs that fit.
        before: as in :meth:`Store.jobs`.
        parameter: how the database writes a parameter, with braces for its name.
        contains: how it writes that a ``{text}`` contains a ``{word}``; ASCII letters of the text in lower case.
        job_id: what orders jobs that were created at the same time.
    """
    found = [
        f"{name} = {parameter.format(name)}" for name in ("pipeline", "label") if getattr(wanted, name) is not None
    ]
    if wanted.status is not None:
        status = parameter.format("status")
        found.append(f"status = {status}" if wanted.status.terminal else f"status IN ({OPEN})")
        if wanted.status is not JobStatus.FINISHED:
            found.append("status <> 'finished'")  # as the index has it
    if wanted.since is not None:
        found.append(f"created >= {parameter.format('since')}")
    if wanted.until is not None:
        found.append(f"created < {parameter.format('until')}")
    found += [contains.format(text=_SEARCHED, word=parameter.format(name)) for name in _words(wanted)]
    if before is not None:
        found.append(f"(created, {job_id}) < ({parameter.format('created')}, {parameter.format('job_id')})")
    return found


def arguments(wanted: JobFilter, before: Position | None, limit: int | None) -> dict[str, Any]:
    """Return the parameters of these conditions."""
    created, job_id = before or (None, None)
    texts = {"pipeline": wanted.pipeline, "label": wanted.label, "job_id": job_id}
    found: dict[str, Any] = {name: storable(text) for name, text in (texts | _words(wanted)).items()}
    status = None if wanted.status is None else wanted.status.value
    return found | {
        "status": status,
        "since": wanted.since,
        "until": wanted.until,
        "created": created,
        "limit": limit,
    }


def _words(wanted: JobFilter) -> dict[str, str]:
    """Return the words to search for, by the names of their parameters."""
    return {f"word{number}": word for number, word in enumerate(wanted.words)}


def storable(text: str | None) -> str | None:
    """Return a text for people that any database can hold: without NUL and lone surrogates."""
    if text is None:
        return None
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode()


def newer_format(path: str, found: int, known: int) -> StoreError:
    """Return the error for a store that a newer version of the library has written."""
    return StoreError(path, f"its format has version {found}, this is for version {known}", "Use a newer dfm_async")


class Damage(Exception):
    """A row that no store has written; the message names it."""


def is_text(value: Any) -> bool:
    """Return whether a value is text without lone surrogates."""
    return isinstance(value, str) and (value.isascii() or value.encode("utf-8", "replace").decode() == value)


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < LAST_TIME


def is_number(value: Any) -> bool:
    """Return whether a value can be an offset or a count."""
    return isinstance(value, int) and 0 <= value < LARGEST_NUMBER


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_CHECKS: Final[tuple[tuple[str, Callable[[Any], bool], Any], ...]] = (
    ("job_id", lambda value: is_text(value) and bool(value), ""),
    ("plan", _is_bytes, b""),
    ("fingerprint", _or_null(is_text), None),
    ("options", _is_bytes, b""),
    ("created", _is_time, 0.0),
    ("finished", _or_null(_is_time), None),
    ("status", lambda value: isinstance(value, str) and value in _STATES, JobStatus.INTERRUPTED.value),
    ("reason", _or_null(is_text), None),
    ("end", is_number, 0),
    ("frames", is_number, 0),
    ("stopped", is_number, 0),
    ("errors", _or_null(is_number), None),
    ("done", _or_null(is_number), None),
    ("fence", lambda value: isinstance(value, int) and value in FENCES, 0),
)
"""The columns of a job: the check of each, and the value that replaces one that fails it."""


def stored_job(row: Sequence[Any], alive: bool, fence: int) -> StoredJob:
    """Return a job; ``fence``: the number of the store that reads it."""
    row = list(row)
    damage = None
    if not _CHECKS[0][1](row[0]):
        damage = f"column 'job_id' cannot be read ({shortened(row[0])})"
        raw = row[0] if isinstance(row[0], bytes) else str(row[0]).encode("utf-8", "surrogateescape")
        row[0] = raw.decode("utf-8", "backslashreplace")
    for at, (column, check, instead) in enumerate(_CHECKS[1:], 1):
        if not check(row[at]):
            damage = damage or f"column {column!r} cannot be read ({shortened(row[at])})"
            row[at] = instead
    *values, found_fence, pid, host = row
    status = values[6] = JobStatus(values[6])
    if not status.ended:
        values[5] = values[7] = None  # those of an interruption that is over
        if not alive:
            values[6] = JobStatus.INTERRUPTED
    values[10] = bool(values[10])
    owner = Owner(
        fence=found_fence,
        pid=pid if isinstance(pid, int) else 0,
        host=host if is_text(host) else "",
        alive=alive,
        mine=alive and found_fence == fence,
    )
    columns = {column: value for (column, _, _), value in zip(_CHECKS, values, strict=False)}
    return StoredJob(**columns, owner=owner, damage=damage)


def entry_of(job_id: str, expected: int | None, row: tuple[Any, ...]) -> Entry:
    """Return some events; ``expected``: the offset that they must begin with."""
    first, count, kind, head, payload = row
    whole = is_number(first) and is_number(count) and count and first + count < LARGEST_NUMBER
    if not whole or not is_number(kind) or not isinstance(head, bytes) or not isinstance(payload, bytes):
        raise Damage(f"job {job_id}: a row of its events cannot be read ({shortened(row)})")
    if expected is not None and first != expected:
        raise Damage(f"job {job_id}: its events {expected} to {first - 1} are missing")
    return Entry(first, count, kind, head, payload)


def page(job_id: str, found: Iterable[tuple[Any, ...]], start: int, max_bytes: int) -> list[Entry]:
    """Return the entry that holds an offset and those behind it, about ``max_bytes``, but at least one.

    ``found``: the rows of the entry that begins at the offset or before it, and of those behind it.
    """
    entries: list[Entry] = []
    size, expected = 0, None
    for row in found:
        item = entry_of(job_id, expected, row)
        expected = item.first + item.count
        if expected <= start:
            continue  # the last entry, or one before a gap
        if item.first > start and not entries:
            raise Damage(f"job {job_id}: its events {start} to {item.first - 1} are missing")
        size += len(item.head) + len(item.payload)
        if entries and size > max_bytes:
            break
        entries.append(item)
    return entries


def params_of(job_id: str, frame: int, data: Any) -> bytes:
    """Return a parameter set."""
    if not isinstance(data, bytes):
        raise Damage(f"job {job_id}: parameter set {frame} cannot be read ({shortened(data)})")
    return data


def request_of(row: Sequence[Any]) -> Request:
    """Return a request."""
    job_id, number, data = row
    if not is_text(job_id) or not is_number(number) or not isinstance(data, bytes):
        raise Damage(f"job {shortened(job_id)}: a request cannot be read ({shortened(row)})")
    return Request(job_id, number, data)
