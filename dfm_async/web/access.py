"""Who may do what: principals, authorizers, and the rule without one."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from dfm_async.model.info import JobInfo
from dfm_async.web.answers import Refusal

__all__ = ["Action", "Authorizer", "Guard", "Principal"]

Action: TypeAlias = Literal["list", "submit", "read", "send", "cancel", "forget", "debug", "metrics"]
"""What a client wants: see jobs and pipelines, submit a job, read one, send it inputs, cancel it, forget it when it has
ended, see the tracebacks of its errors, see the metrics and how workers are."""

_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip")


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who uses the service.

    Attributes:
        id: who it is; jobs are labelled with it.
        data: whatever the authorizer wants to remember until it is asked.
    """

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Authorizer(Protocol):
    """Says who a client is, and what it may do. Derive from it, and write ``__call__``."""

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        """Tells who makes a request; None if that is not known (the answer is 401)."""
        ...

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        """Tells whether somebody may do something; by default everything but ``"debug"``, with jobs of their own.

        Args:
            principal: who.
            action: what.
            job: with which job; None if it is about no particular one. Its ``label`` is the id of its principal.
        """
        return action != "debug" and (job is None or job.label == principal.id)


class _Loopback(Authorizer):
    """The rule of a service without an authorizer: whoever is on this machine may do everything, nobody else."""

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        host = None if request.client is None else request.client.host
        headers = request.headers
        if not _is_loopback(host):
            raise Refusal(403, "loopback", "without an authorizer only clients on this machine are served")
        if any(name in headers for name in _FORWARDED):
            raise Refusal(403, "loopback", "without an authorizer clients behind a proxy are not served")
        # A page of some other site, open in a browser on this machine, must not be able to use the service.
        if not _is_loopback(_host_of(f"//{headers.get('host', '')}")):
            raise Refusal(403, "host", "without an authorizer the service is only there under a name of this machine")
        origin = headers.get("origin")
        if origin is not None:
            ours = _is_loopback(_host_of(origin))
        else:  # so it is for images, frames and the like, but browsers tell what they are; links are fine
            ours = headers.get("sec-fetch-site") != "cross-site" or headers.get("sec-fetch-dest") == "document"
        if not ours:
            raise Refusal(403, "origin", "without an authorizer pages of other sites are not served")
        return Principal("local")

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        return True


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # brackets that do not fit, and the like
        return None


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_loopback if mapped is None else bool(mapped.is_loopback)


class Guard:
    """Asks the authorizer, and refuses what it does not allow."""

    def __init__(self, authorizer: Authorizer | None) -> None:
        self._authorizer = authorizer or _Loopback()
        self.open_probes = authorizer is not None
        """Whether anybody may ask if the service is alive and ready."""

    async def principal(self, request: HTTPConnection) -> Principal:
        """Tells who makes a request.

        Raises:
            Refusal: that is not known.
        """
        found = await self._authorizer(request)
        if found is None:
            raise Refusal(401, "unknown", "tell who you are")
        return found

    def check(self, principal: Principal, action: Action) -> None:
        """Refuses an action that is about no particular job."""
        if not self._authorizer.allows(principal, action, None):
            raise Refusal(403, "forbidden", f"you may not {action} here")

    def check_job(self, principal: Principal, action: Action, job: JobInfo) -> None:
        """Refuses an action with a job. Whoever may not read a job is told that there is none."""
        if not self.sees(principal, job):
            raise Refusal(404, "job", "there is no such job")
        if action != "read" and not self._authorizer.allows(principal, action, job):
            raise Refusal(403, "forbidden", f"you may not {action} this job")

    def allows(self, principal: Principal, action: Action, job: JobInfo | None = None) -> bool:
        """Tells whether somebody may do something."""
        return self._authorizer.allows(principal, action, job)

    def sees(self, principal: Principal, job: JobInfo) -> bool:
        """Tells whether somebody may know of a job."""
        return self._authorizer.allows(principal, "read", job)
