"""Retries and costs of operations: policies that users set and sites need."""

from __future__ import annotations

import math
import random
from typing import Any, Final

import msgspec

from dfm_async.base.backoff import delay_after
from dfm_async.model.checks import FINITE, Options, check_number, is_number, whole

_MOST: Final = 1_000_000_000
"""How often anything may be tried."""
_LONGEST_REQUEST: Final = 3600.0
"""The longest pause that an exception can request, in seconds."""


def retry_after(error: BaseException) -> float:
    """Return the number of seconds that an exception asks to wait before the next attempt; 0 if it does not."""
    found = getattr(error, "retry_after", None)
    if isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found):
        return min(max(float(found), 0.0), _LONGEST_REQUEST)
    return 0.0


class RetryPolicy(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of attempts of an operation, the delays between them, and the exceptions to retry.

    Attributes:
        attempts: the total number of attempts; 1 means no retry. By default three, or one for a policy with
            ``on_worker_lost``.
        backoff: seconds before the second attempt; doubles with every further one.
        max_backoff: the maximum delay. An exception with an attribute ``retry_after``, a number of seconds, delays the
            next attempt by at least that long, even beyond this maximum, but by at most an hour.
        on: the exceptions to retry: exception types, or their names (``"TimeoutError"``, ``"httpx2.HTTPError"``),
            matched against the class of the exception and its base classes. Empty means every exception.
        on_worker_lost: the number of times that a parameter set runs again, from its beginning and at all sites, after
            a worker process was lost; 0 means that the job is aborted. It applies only if every operation of the
            pipeline allows it, or if it is passed to ``execute``.
        jitter: the maximum fraction by which a delay is shortened, at random, so that calls that failed together are
            not retried together; 0 for none.
    """

    attempts: int | None = None
    backoff: float = 0.1
    max_backoff: float = 30.0
    on: tuple[Any, ...] = ()
    on_worker_lost: int = 0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        if self.attempts is None:
            msgspec.structs.force_setattr(self, "attempts", 1 if self.on_worker_lost else 3)
        whole("attempts", self.attempts, most=_MOST)
        whole("on_worker_lost", self.on_worker_lost, least=0, most=_MOST)
        check_number("backoff", self.backoff)
        check_number("max_backoff", self.max_backoff)
        check_number("jitter", self.jitter, most=1)
        if not isinstance(self.on, tuple) or not all(isinstance(found, (str, type)) for found in self.on):
            raise TypeError(f"on must be a tuple of exception types or names, not {self.on!r}")
        names = tuple(o if isinstance(o, str) else f"{o.__module__}.{o.__qualname__}" for o in self.on)
        msgspec.structs.force_setattr(self, "on", names)  # names travel, classes do not

    def allows(self, error: BaseException, attempt: int) -> bool:
        """Return whether this error in this attempt (counted from 1) is retried."""
        if attempt >= (self.attempts or 1) or not isinstance(error, Exception):
            return False
        if not self.on:
            return True
        names = {name for cls in type(error).__mro__ for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}
        return not names.isdisjoint(self.on)

    @property
    def tries_again(self) -> bool:
        """Whether an operation that raised may be retried; false if the policy applies only to lost workers."""
        return self.attempts != 1 or not self.on_worker_lost

    def pause(self, attempt: int, asked: float = 0.0) -> float:
        """Return the number of seconds to wait after this attempt (counted from 1).

        ``asked``: the number of seconds that its exception asks for.
        """
        longest = delay_after(attempt, self.backoff, self.max_backoff)
        saved = longest * self.jitter * random.random()  # noqa: S311 - nothing to keep secret
        return max(longest - saved, asked + saved if asked else 0.0)


class Cost(Options, frozen=True, kw_only=True):
    """What an operation costs at a site.

    Compute time is ``fixed_time + input_bytes / throughput``; output size is
    ``fixed_size + output_factor * input_bytes``.

    Attributes:
        fixed_time: seconds for each call.
        throughput: bytes of input per second; None means that the size does not matter.
        fixed_size: bytes of output, whatever the input.
        output_factor: bytes of output for each byte of input.
    """

    fixed_time: float = 0.0
    throughput: float | None = None
    fixed_size: float = 0.0
    output_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.throughput is not None:
            check_number("throughput", self.throughput, positive=True)
        for name in ("fixed_time", "fixed_size", "output_factor"):
            check_number(name, getattr(self, name), most=FINITE)


def call_problem(retry: object, deadline: object) -> str | None:
    """Return what is wrong with the policy or the deadline of a call; None if nothing is."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        return f"retry= takes a RetryPolicy, not {retry!r}"
    if deadline is not None and not is_number(deadline, positive=True, most=FINITE):
        return f"deadline= takes a positive number of seconds, not {deadline!r}"
    return None
