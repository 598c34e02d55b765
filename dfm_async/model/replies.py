"""What a pipeline gets from several calls of which some may fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dfm_async.model.info import FailureInfo

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Reply(Generic[R]):
    """The value of one call of a ``gather``.

    Attributes:
        site: the site that the call ran at.
        value: what it returned.
    """

    site: str
    value: R


class Replies(list[Reply[R]]):
    """The value of a ``gather``: a list of replies, in the order of the calls.

    Attributes:
        failures: the calls that failed, or were too late.
    """

    def __init__(self, replies: Iterable[Reply[R]] = (), failures: Iterable[FailureInfo] = ()) -> None:
        super().__init__(replies)
        self.failures: list[FailureInfo] = list(failures)
