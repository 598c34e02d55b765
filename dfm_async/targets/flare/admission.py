"""Who may come to a site: what they want is read, the authorizer is asked, and all of it is recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from typing import Final

import msgspec

from dfm_async.errors import DfmError
from dfm_async.model.flare import SiteSettings
from dfm_async.site.authorizing import Authorizer, Denied, PipelineRequest
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.accounts import Account, Accounts
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.wanted import Wanted, read_request

__all__ = ["Admission", "User"]

_log = logging.getLogger(__name__)

_MOST_SEATS: Final = 256
"""How many locations one job may have at a site."""
_AUTHORIZER: Final = 60.0
"""For how many seconds an authorizer may think."""


class User(msgspec.Struct, frozen=True):
    """Whose jobs a carrier carries, as FLARE has authenticated them."""

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
        audit: where it is recorded what others did.
        authorizer: who decides about pipelines, beside FLARE.
    """

    def __init__(
        self,
        settings: SiteSettings,
        user: User,
        own_process: Container[str],
        audit: AuditLog,
        authorizer: Authorizer | None,
    ) -> None:
        self._site = settings.site
        self._most_bytes = settings.max_job_bytes
        self._user = user
        self._own_process = own_process
        self._audit = audit
        self._authorizer = authorizer
        self._accounts = Accounts()

    async def admit(self, request: fm.Seat, here: int) -> tuple[Wanted, Account]:
        """Lets a location in; ``here``: how many of its job are here, or about to be.

        Raises:
            Denied: it may not come, and why.
            DfmError: the authorizer has failed.
        """
        if here > _MOST_SEATS:
            raise Denied(f"a job may have {_MOST_SEATS} locations here")
        wanted = read_request(self._site, request, None if request.offer else self._own_process)
        pipeline = PipelineRequest(
            user=self._user.name,
            org=self._user.org,
            role=self._user.role,
            job_id=request.job_id,
            pipeline=request.pipeline,
            operations=wanted.operations,
            sites=tuple(dict.fromkeys(request.sites)),
            bytes=request.size + len(request.net),
            brings_code=bool(request.offer),
        )
        self._audit.write(
            "asked",
            user=pipeline.user,
            job=pipeline.job_id,
            location=request.location,
            pipeline=pipeline.pipeline,
            operations=pipeline.operations,
            providers=wanted.providers,
            bytes=pipeline.bytes,
            brings_code=pipeline.brings_code,
            sha256=wanted.digest,
        )
        account = self._accounts.of(request.job_id)
        account.limit(self._most_bytes)
        account.limit(await self._ask(pipeline))
        if not account.fits(pipeline.bytes):
            text = f"job {request.job_id} may send {account.allowed:,} bytes to site {self._site!r}; this would be"
            raise Denied(f"{text} {account.taken + pipeline.bytes:,}")
        account.taken += len(request.net)  # what it begins with is counted when it comes
        return wanted, account

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
