"""Which jobs a list has."""

from __future__ import annotations

import string
from typing import Final

import msgspec

from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus, check_status

MOST_WORDS: Final = 16
"""The most words of a search."""
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that fit everything that is given.

    Attributes:
        status: their state.
        pipeline: the name of their pipeline.
        label: what ``execute(label=...)`` was given.
        since: when they were created, or later; in seconds since 1970.
        until: before when they were created.
        search: words that must all occur in their id, the name of their pipeline or their label, also within others.

    Raises:
        ValueError: ``status`` is no status, or ``search`` has too many words.
    """

    status: JobStatus | None = None
    pipeline: str | None = None
    label: str | None = None
    since: float | None = None
    until: float | None = None
    search: str | None = None

    def __post_init__(self) -> None:
        if self.status is not None:
            check_status("status", self.status)
        if len(self.words) > MOST_WORDS:
            raise ValueError(f"search must have at most {MOST_WORDS} words, not {len(self.words)}")

    @property
    def words(self) -> list[str]:
        """The words to search for. Upper and lower case are alike for ASCII letters: all databases can do that."""
        return [] if self.search is None else lowered(self.search).split()

    def fits(self, info: JobInfo) -> bool:
        """Return whether a job fits."""
        return (
            self.status in (None, info.status)
            and self.pipeline in (None, info.pipeline)
            and self.label in (None, info.label)
            and (self.since is None or info.created >= self.since)
            and (self.until is None or info.created < self.until)
            and (self.search is None or self._is_found(info))
        )

    def _is_found(self, info: JobInfo) -> bool:
        text = lowered(" ".join([info.job_id, info.pipeline or "", info.label or ""]))
        return all(word in text for word in self.words)


def lowered(text: str) -> str:
    """Return a text with lower case ASCII letters."""
    return text.translate(_LOWER)


ALL_JOBS: Final = JobFilter()
