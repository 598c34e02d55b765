"""Permits of calls whose operations have limits: requested where a call runs, granted by the owner of the workers.

The owner is the process that starts the workers of the site: the application, or on FLARE the agent of the site. For a
site without workers it is the process itself.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import functools
import hashlib
import itertools
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final

from dfm_async.base.cores import usable_cores, usable_memory
from dfm_async.base.signals import Outcome, Throttle
from dfm_async.base.timers import Timer
from dfm_async.errors import DfmError
from dfm_async.federation.operation import Adapter
from dfm_async.model.call_limits import CallLimits, SiteCapacity
from dfm_async.model.ids import OperationKey
from dfm_async.model.stats import LimitStats
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.site_limits import AllowedCall, SiteLimits
from dfm_async.wire import messages as msg

_KEYS: Final = (str, bytes, int, float, type(None), enum.Enum, uuid.UUID, datetime.date, datetime.datetime)
"""The types of values that calls can be counted by: those of equal values have equal texts."""
_LONGEST_KEY: Final = 200
_CHANGES: Final = 0.1
"""The least number of seconds between two reports that something has changed."""


# where calls run


class Permit:
    """What a call holds while it runs."""

    __slots__ = ("_release", "gpus", "waited_for", "worker")

    def __init__(self, granted: msg.PermitGranted, release: Callable[[], None]) -> None:
        self.gpus = granted.gpus
        self.worker = granted.worker
        """The address of the worker that it has to run in; empty if any will do."""
        self.waited_for = granted.waited_for
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Return the permit; only the first call counts."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Permits:
    """Requests permits for the calls of this process.

    Args:
        send: sends a message to the owner of the site's workers.
    """

    def __init__(self, send: Callable[[msg.Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Outcome[msg.PermitGranted]] = {}

    async def acquire(
        self,
        callee: Callee,
        limits: CallLimits,
        args: Mapping[str, Any],
        job_id: str,
        priority: int,
        *,
        elsewhere: bool,
    ) -> Permit:
        """Wait until a call may start.

        Raises:
            TypeError: calls cannot be counted by the value of the parameter that the limits name.
            DfmError: the site does not have what it needs, or cannot run it.
        """
        number = next(self._numbers)
        key = "" if limits.key is None else _key(callee, limits.key, args)
        outcome = self._waiting[number] = Outcome()
        self._send(
            msg.PermitWanted(
                number=number,
                job_id=job_id,
                priority=priority,
                operation=callee.name,
                key=key,
                limits=limits,
                elsewhere=elsewhere,
            )
        )
        try:
            granted = await outcome
        except BaseException:
            self._send(msg.PermitReturned(number))
            raise
        finally:
            del self._waiting[number]
        if granted.error:
            self._send(msg.PermitReturned(number))  # it may hold GPUs whose worker does not start
            raise DfmError(granted.error)
        return Permit(granted, functools.partial(self._send, msg.PermitReturned(number)))

    @property
    def waiting(self) -> int:
        """The number of calls that wait. Any thread may read it."""
        return len(self._waiting)

    def granted(self, message: msg.PermitGranted) -> None:
        """Handle the answer of the owner."""
        outcome = self._waiting.get(message.number)
        if outcome is not None:
            outcome.settle(message)


def _key(callee: Callee, name: str, args: Mapping[str, Any]) -> str:
    """Return a text for the value of a parameter, the same for equal values."""
    value = args[name] if name in args else callee.default(name)
    parts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(part, _KEYS) for part in parts):
        raise TypeError(
            f"calls of operation {callee.adapter.operation!r} are limited per value of {name!r}, which must be text, a "
            f"number, a date, a UUID or a tuple of these, not {type(value).__name__}"
        )
    text = repr(value)
    return text if len(text) <= _LONGEST_KEY else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# the owner


def capacity_of(declared: SiteCapacity) -> SiteCapacity:
    """Return what a site has on this machine, where its declaration leaves that open."""
    cpus = usable_cores() if declared.cpus is None else declared.cpus
    return SiteCapacity(cpus, usable_memory() if declared.memory is None else declared.memory, declared.gpus)


def check_capacity(
    site: str,
    declared: SiteCapacity,
    adapters: Iterable[Adapter],
    left_out: dict[OperationKey, DfmError] | None = None,
) -> None:
    """Check that a site has on this machine what each of its operations needs.

    ``left_out`` gets the operations for which it does not; without it, the first of them is raised.

    Raises:
        DfmError: it does not.
    """
    limited = [(adapter, adapter.limits) for adapter in adapters if adapter.limits is not None]
    capacity = capacity_of(declared) if limited else declared
    for adapter, limits in limited:
        lacks = capacity.lacks(limits)
        if lacks is not None:
            error = DfmError(f"operation {adapter.operation!r} of site {site!r} {lacks}")
            if left_out is None:
                raise error
            left_out[site, adapter.operation, adapter.provider] = error


class SitePermits:
    """Grants permits to the calls of a site, over all its jobs and workers.

    Args:
        on_change: is called when something has changed, at most every tenth of a second.
    """

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self._limits: SiteLimits[tuple[Hashable, int]] = SiteLimits(SiteCapacity(0, 0, 0))
        self._clients: dict[Hashable, dict[int, Callable[[msg.PermitGranted], None]]] = {}
        """For each process, how its calls that wait or run are answered."""
        self._timer = Timer(self._tick)
        self._changes = None if on_change is None else Throttle(_CHANGES, on_change)
        self._closed = False
        self._declared = SiteCapacity()

    def add_capacity(self, declared: SiteCapacity) -> None:
        """Note what the site has by some version of its code: the largest that one states, else what is here."""
        known = self._declared
        self._declared = SiteCapacity(
            cpus=_larger(known.cpus, declared.cpus),
            memory=_larger(known.memory, declared.memory),
            gpus=max(known.gpus, declared.gpus),
        )
        capacity = capacity_of(self._declared)
        if self._clients:  # else there is nothing to decide, and maybe no loop
            self._carry_out(self._limits.resize(capacity, _now()))
        else:
            self._limits.resize(capacity, 0.0)

    def want(self, client: Hashable, message: msg.PermitWanted, answer: Callable[[msg.PermitGranted], None]) -> None:
        """Handle the request of a process for one of its calls."""
        call, now = (client, message.number), _now()
        self._clients.setdefault(client, {})[message.number] = answer
        try:
            granted = self._limits.request(
                call, message.job_id, message.priority, message.operation, message.key, message.limits, now
            )
        except ValueError as error:
            self._forget(client, message.number)
            answer(msg.PermitGranted(message.number, error=str(error)))
        else:
            self._carry_out(granted)

    def returned(self, client: Hashable, number: int) -> None:
        """Note that a call has ended, or waits no longer."""
        self._forget(client, number)
        self._carry_out(self._limits.leave((client, number), _now()))

    def gone(self, client: Hashable) -> None:
        """Note that a process has ended: its calls hold nothing and wait for nothing any longer."""
        for number in self._clients.pop(client, ()):
            self._carry_out(self._limits.leave((client, number), _now()))

    def _forget(self, client: Hashable, number: int) -> None:
        calls = self._clients.get(client)
        if calls is not None:
            calls.pop(number, None)
            if not calls:
                del self._clients[client]

    def _carry_out(self, granted: list[AllowedCall[tuple[Hashable, int]]]) -> None:
        for grant in granted:
            client, number = grant.call
            answer = self._clients.get(client, {}).get(number)
            if answer is not None:
                answer(msg.PermitGranted(number, grant.gpus, "", grant.waited_for))
        if self._closed:
            return
        if self._changes is not None:
            self._changes.request()
        self._timer.set(self._limits.due)

    def _tick(self) -> None:
        self._carry_out(self._limits.tick(_now()))

    def stats(self) -> tuple[LimitStats, ...]:
        """Return what is used and what waits."""
        return self._limits.stats()

    def close(self) -> None:
        """Grant nothing any longer."""
        self._closed = True
        self._clients.clear()
        if self._changes is not None:
            self._changes.cancel()
        self._timer.cancel()

    def receive(self, client: Permits, message: msg.Message) -> None:
        """Handle a message of the calls of this process."""
        if isinstance(message, msg.PermitWanted):
            self.want(client, message, client.granted)
        elif isinstance(message, msg.PermitReturned):
            self.returned(client, message.number)


def own_permits(owner: SitePermits) -> Permits:
    """Return the permits of a process that is the owner of the site itself."""
    permits = Permits(lambda message: owner.receive(permits, message))
    return permits


def _larger(one: int | None, other: int | None) -> int | None:
    stated = [value for value in (one, other) if value is not None]
    return max(stated, default=None)


def _now() -> float:
    return asyncio.get_running_loop().time()
