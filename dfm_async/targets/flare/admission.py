"""Which jobs a site admits: their nets are read, the authorizer decides, and all of it is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Container
from typing import Final

import msgspec

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.errors import DfmError
from dfm_async.model.flare import SiteSettings
from dfm_async.net import spec
from dfm_async.net.checking import check_net
from dfm_async.site.authorizing import Denied, PipelineAuthorizer, PipelineRequest
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.audit import AuditLog

_log = logging.getLogger(__name__)

_ACCOUNTS: Final = 10_000
"""The number of accounts that are kept of jobs that have left: a job that comes again continues its own."""
_MOST_LOCATIONS: Final = 10_000
"""The largest number of locations of a job."""
_MOST_LOCATIONS_PER_JOB: Final = 256
"""The largest number of them at one site."""
_AUTHORIZER: Final = 60.0
"""The timeout of an authorizer, in seconds."""

_net: Final = msgspec.msgpack.Decoder(spec.Net)


class HostJobUser(msgspec.Struct, frozen=True):
    """The user of a host job, as FLARE has authenticated them."""

    name: str
    org: str
    role: str
    brings_code: bool
    """Whether FLARE has allowed them to bring code to this site."""


class Admission:
    """Decides about the locations of one user's jobs.

    Args:
        settings: what the site decides for itself.
        user: whose jobs come.
        own_process: the operations of the site that have a process of their own.
        audit: the site's record of what others did there.
        authorizer: decides about pipelines, beside FLARE.
    """

    def __init__(
        self,
        settings: SiteSettings,
        user: HostJobUser,
        own_process: Container[str],
        audit: AuditLog,
        authorizer: PipelineAuthorizer | None,
    ) -> None:
        self._site = settings.site
        self._most_bytes = settings.max_job_bytes
        self._user = user
        self._own_process = own_process
        self._audit = audit
        self._authorizer = authorizer
        self._accounts: OrderedDict[str, JobTraffic] = OrderedDict()
        """The accounts of jobs, by their ids."""

    async def admit(self, request: fm.Assign, present: int) -> tuple[RequestedUse, JobTraffic]:
        """Admit a location; ``present``: the number of locations of its job at this site, or about to be.

        Raises:
            Denied: it may not come, and why.
            DfmError: the authorizer has failed.
        """
        if present > _MOST_LOCATIONS_PER_JOB:
            raise Denied(f"a job may have at most {_MOST_LOCATIONS_PER_JOB} locations at a site, not {present}")
        use = read_request(self._site, request, None if request.offer else self._own_process)
        pipeline = PipelineRequest(
            user=self._user.name,
            org=self._user.org,
            role=self._user.role,
            job_id=request.job_id,
            pipeline=request.pipeline,
            operations=use.operations,
            sites=tuple(dict.fromkeys(request.sites)),
            bytes=request.size + len(request.net),
            brings_code=bool(request.offer),
        )
        self._audit.write(
            "asked",
            user=pipeline.user,
            job=pipeline.job_id,
            location=str(request.location),
            pipeline=pipeline.pipeline,
            operations=pipeline.operations,
            providers=use.providers,
            bytes=pipeline.bytes,
            brings_code=pipeline.brings_code,
            sha256=use.digest,
        )
        account = self._account(request.job_id)
        account.limit(self._most_bytes)
        account.limit(await self._ask(pipeline))
        if not account.fits(pipeline.bytes):
            text = f"job {request.job_id} may send {account.allowed:,} bytes to site {self._site!r}; this would be"
            raise Denied(f"{text} {account.taken + pipeline.bytes:,}")
        account.taken += len(request.net)  # what it begins with is counted when it comes
        return use, account

    def _account(self, job_id: str) -> JobTraffic:
        """Return the account of a job; a new one if it had none yet."""
        account = self._accounts.get(job_id)
        if account is None:
            surplus = max(0, len(self._accounts) + 1 - _ACCOUNTS)
            idle = (other for other, known in self._accounts.items() if not known.locations)
            for oldest in list(itertools.islice(idle, surplus)):
                del self._accounts[oldest]
            account = self._accounts[job_id] = JobTraffic()
        self._accounts.move_to_end(job_id)
        return account

    async def _ask(self, pipeline: PipelineRequest) -> int | None:
        if self._authorizer is None:
            return None
        try:
            async with asyncio.timeout(_AUTHORIZER):
                return await self._authorizer.authorize(pipeline)
        except Denied:
            raise
        except Exception as error:
            # What went wrong inside is for the site, not for those whom it has not let in.
            _log.exception("the authorizer of site %s has failed", self._site)
            self._audit.note("authorizer failed", job=pipeline.job_id, error=f"{type(error).__name__}: {error}")
            raise DfmError(f"the authorizer of site {self._site!r} has failed") from error


class JobTraffic:
    """The number of bytes that a job has sent to this site, in all its runs."""

    __slots__ = ("allowed", "locations", "reported", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.allowed: int | None = None
        """The least that was allowed for one of its locations; None means any number."""
        self.locations = 0
        """The number of its locations at this site."""
        self.reported = -1
        """The last run whose excess was reported."""

    def limit(self, allowed: int | None) -> None:
        """Lower what is allowed."""
        if allowed is not None:
            self.allowed = allowed if self.allowed is None else min(self.allowed, allowed)

    def fits(self, size: int) -> bool:
        """Return whether this number of further bytes is allowed."""
        return self.allowed is None or self.taken + size <= self.allowed


class RequestedUse(msgspec.Struct, frozen=True):
    """What one location of a job does.

    Attributes:
        digest: the hash of its net: what is authorized is what runs.
        operations: the operations that it uses: those that it calls, and those whose advisors it asks.
        providers: their providers, as far as it names them.
        calls: what it may look up in the site's table: the operations, and ``#discover`` if it uses advisors.
    """

    digest: str
    operations: tuple[str, ...]
    providers: tuple[str, ...]
    calls: tuple[str, ...]


def read_request(site: str, request: fm.Assign, own_process: Container[str] | None) -> RequestedUse:
    """Read what a location would do. Nothing of it is trusted.

    Args:
        site: the site.
        request: what the hub asks for.
        own_process: the operations of the site that have a process of their own; None if its code is not known,
            because the user brings it.

    Raises:
        Denied: it is not a net, not one for this site, or one that cannot be judged.
    """
    try:
        net = _net.decode(request.net)
        check_net(net)
    except (ValueError, RecursionError) as error:
        raise Denied(f"its net cannot be read: {error}") from error
    _check_locations(site, request, net)
    operations: dict[str, None] = {}
    providers: dict[str, None] = {}
    calls: dict[str, None] = {}
    for transition in net.transitions:
        action = transition.action
        if isinstance(action, spec.Call):
            calls[action.operation] = None
            if action.operation == DISCOVER:
                operation, provider = _asked_about(action, net)
                calls[operation] = None
            else:
                operation, provider = action.operation, action.provider
            operations[operation] = None
            if provider is not None:
                providers[provider] = None
    own = request.location.operation
    if own and own not in (operations if own_process is None else own_process):
        raise Denied(f"site {site!r} has no location '{request.location}'")
    digest = hashlib.sha256(request.net).hexdigest()
    return RequestedUse(digest, tuple(operations), tuple(providers), tuple(calls))


def _check_locations(site: str, request: fm.Assign, net: spec.Net) -> None:
    if not len(request.sites) == len(net.locations) <= _MOST_LOCATIONS:
        raise Denied(f"it has {len(net.locations):,} locations at {len(request.sites):,} sites")
    if net.location != request.at or net.locations[request.at] != request.location:
        raise Denied("its net is for another location")
    if any(location.site != at for location, at in zip(net.locations, request.sites, strict=True)):
        raise Denied("its locations are not at the sites that it names")
    if request.sites[request.at] != site:
        raise Denied(f"it is for another site ({request.sites[request.at]!r})")


def _asked_about(action: spec.Call, net: spec.Net) -> tuple[str, str | None]:
    """Return the operation whose advisors are asked, and its provider. The planner writes both as literals.

    Raises:
        Denied: it is not known before it runs, so that nobody can decide about it.
    """
    found = []
    for name in ("operation", "provider"):
        formula = action.args.get(name)
        found.append(net.literals[formula.literal] if isinstance(formula, spec.NetLiteral) else formula)
    operation, provider = found
    if not isinstance(operation, str) or not isinstance(provider, (str, type(None))):
        raise Denied("its net requests advice about an operation that it does not name as a literal")
    return operation, provider
