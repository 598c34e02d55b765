"""What the site of a job does for the code of its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dfm_async.errors import SecretError
from dfm_async.runtime.context import current_context
from dfm_async.site.secrets import NoSecret
from dfm_async.telemetry.user_spans import UserSpan

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob

__all__ = ["JobServices"]


class JobServices:
    """Serves the site object of one job."""

    def __init__(self, job: SiteJob) -> None:
        self._job = job

    def secret(self, key: str) -> Any:
        """Gives a secret; blocks.

        Raises:
            SecretError: there is none; or the vault is asynchronous, and this is the thread of the loop.
        """
        try:
            return self._job.runtime.secrets.read(key, lambda work: self._wait(key, work))
        except SecretError as error:
            raise NoSecret(error.site, error.key, error.reason) from None

    def _wait(self, key: str, work: Any) -> Any:
        if self._job.runtime.on_loop():
            work.close()
            reason = "its vault is asynchronous: bind it with from-secrets, or await context.secret(key)"
            raise SecretError(self._job.runtime.site, key, reason)
        return self._job.wait(work)

    def span(self, name: str, attributes: Mapping[str, Any]) -> UserSpan | None:
        """Gives a span of the call that runs; None if it is not traced, or none runs."""
        try:
            context = current_context()
        except LookupError:
            return None
        return None if context.trace is None else context.span(name, **attributes)

    async def send_to_place(self, place: str, value: Any, job: str) -> None:
        """Sends a value to a parameter of a job."""
        await current_context().send_to_place(place, value, job=job)
