"""Who may run what at a site past one machine: the site's own decision, beside that of FLARE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import msgspec

__all__ = ["Authorizer", "Denied", "PipelineRequest", "RuleAuthorizer"]


class Denied(PermissionError):
    """An authorizer refuses a pipeline; the text says why, and is told to the user."""


class PipelineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants to run at a site.

    Attributes:
        user: who wants it, as FLARE has authenticated them.
        org: their organisation.
        role: their role.
        job_id: the job.
        pipeline: the name of its pipeline; the user chose it.
        operations: the operations that it would call at this site, read from what it would run.
        sites: all sites that take part.
        bytes: how many bytes it begins with at this site: its first parameters, and what is to run there.
        brings_code: whether the code of the operations comes from the user.
    """

    user: str
    org: str
    role: str
    job_id: str
    pipeline: str
    operations: tuple[str, ...]
    sites: tuple[str, ...]
    bytes: int
    brings_code: bool


@runtime_checkable
class Authorizer(Protocol):
    """Decides about pipelines at one site. Named in the site's settings by ``authorizer: {path: ..., args: ...}``."""

    async def authorize(self, request: PipelineRequest) -> int | None:
        """Allows a pipeline; gives how many bytes it may send to the site in all, or None for what the settings say.

        It is asked for every location that a job has at the site, and again when the job runs again. One that does not
        answer within a minute refuses.

        Raises:
            Denied: it is refused, and why.
        """
        ...


class RuleAuthorizer:
    """Allows what a list of rules allows: the first that fits the user decides.

    In the settings of a site:

    .. code-block:: yaml

        authorizer:
          path: dfm_async.site.authorizing.RuleAuthorizer
          args:
            rules:
              - {user: "*@lab.org", operations: ["stats.*"], max_bytes: 1000000}
              - {role: lead, operations: ["*"]}

    Args:
        rules: each has patterns for ``user``, ``org`` and ``role`` (all if left out), the ``operations`` that it
            allows (patterns), and ``max_bytes``, how many bytes a job may send to the site.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]]) -> None:
        self._rules = [msgspec.convert(dict(rule), _Rule) for rule in rules]

    async def authorize(self, request: PipelineRequest) -> int | None:
        """Looks for the first rule that fits the user.

        Raises:
            Denied: there is none, or it does not allow all operations, or not so many bytes.
        """
        for rule in self._rules:
            if rule.fits(request):
                rule.check(request)
                return rule.max_bytes
        raise Denied(f"no rule of this site is for {request.user} ({request.role}, {request.org})")


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str = "*"
    org: str = "*"
    role: str = "*"
    operations: tuple[str, ...] = ("*",)
    max_bytes: int | None = None

    def fits(self, request: PipelineRequest) -> bool:
        return (
            fnmatchcase(request.user, self.user)
            and fnmatchcase(request.org, self.org)
            and fnmatchcase(request.role, self.role)
        )

    def check(self, request: PipelineRequest) -> None:
        for operation in request.operations:
            if not any(fnmatchcase(operation, pattern) for pattern in self.operations):
                raise Denied(f"{request.user} may not call operation {operation!r} here")
        if self.max_bytes is not None and request.bytes > self.max_bytes:
            raise Denied(
                f"{request.user} may send {self.max_bytes:,} bytes here; the job begins with {request.bytes:,}"
            )
