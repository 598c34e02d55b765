"""Authorization of pipelines at a site on NVIDIA FLARE: the site's own decision, in addition to that of FLARE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import msgspec


class Denied(PermissionError):
    """An authorizer refuses a pipeline; the user gets the text."""


class PipelineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user requests to run at a site.

    Attributes:
        user: the user, as FLARE has authenticated them.
        org: their organisation.
        role: their role.
        job_id: the job.
        pipeline: the name of its pipeline; the user chose it.
        operations: the operations that it would call at this site, read from what it would run.
        sites: all sites that take part.
        bytes: the number of bytes that it begins with at this site: its first parameters, and its net.
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
class PipelineAuthorizer(Protocol):
    """Authorizes pipelines at one site. Named in the site's settings by ``authorizer: {path: ..., args: ...}``."""

    async def authorize(self, request: PipelineRequest) -> int | None:
        """Allow a pipeline. Return the number of bytes that it may send to the site in all; None for the settings.

        It is called for every location that a job has at the site, and again when the job runs again. The job is
        refused if it does not return within a minute.

        Raises:
            Denied: the pipeline is refused.
        """


class RuleAuthorizer:
    """Allow what a list of rules allows: the first that matches the user decides.

    In the settings of a site:

    .. code-block:: yaml

        authorizer:
          path: dfm_async.site.RuleAuthorizer
          args:
            rules:
              - {user: "*@lab.org", operations: ["stats.*"], max_bytes: 1000000}
              - {role: lead, operations: ["*"]}

    Args:
        rules: each has patterns for ``user``, ``org`` and ``role`` (all if left out), the ``operations`` that it
            allows (patterns), and ``max_bytes``, the number of bytes that a job may send to the site.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]]) -> None:
        self._rules = [msgspec.convert(dict(rule), _Rule) for rule in rules]

    async def authorize(self, request: PipelineRequest) -> int | None:
        """Apply the first rule that matches the user.

        Raises:
            Denied: there is no such rule, or it does not allow all operations, or allows fewer bytes.
        """
        for rule in self._rules:
            if rule.matches(request):
                rule.check(request)
                return rule.max_bytes
        raise Denied(f"no rule of this site is for {request.user} ({request.role}, {request.org})")


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str = "*"
    org: str = "*"
    role: str = "*"
    operations: tuple[str, ...] = ("*",)
    max_bytes: int | None = None

    def matches(self, request: PipelineRequest) -> bool:
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
