"""What adapters can use of their site: the site object, its providers, and the job."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dfm_async.model.resources import CacheConfig, VaultConfig

if TYPE_CHECKING:
    from typing import Self

    from upath import UPath

    from dfm_async.telemetry.recorder import UserSpan


class Services(Protocol):
    """What the site does for the code that runs at it. All methods may be called from any thread."""

    def secret(self, key: str) -> Any:
        """Return a secret; blocks."""

    def span(self, name: str, attributes: Mapping[str, Any]) -> UserSpan | None:
        """Return a span of the call that runs; None if it is not traced."""

    async def send_to_place(self, place: str, value: Any, job: str) -> None:
        """Send a value to a parameter of a job."""


def _scalar(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


class Span:
    """A span of an adapter, while its block runs."""

    def __init__(self, span: UserSpan) -> None:
        self._span = span

    def set_attribute(self, name: str, value: Any) -> None:
        """Add an attribute; values other than numbers, strings and truth values are converted to strings."""
        self._span.set(**{name: _scalar(value)})

    def set_ok(self) -> None:
        """Set the status to ok."""
        self._span.set(status="ok")

    def set_error(self, message: str) -> None:
        """Set the status to error, although nothing is raised."""
        self._span.set(status="error", error=str(message))


class JobLogger(logging.Logger):
    """A logger of a job: it passes records to the logger of its name, with further fields.

    Adapters for DFM expect a logger, with ``getChild`` and ``setLevel``, which a ``LoggerAdapter`` lacks. It is not
    registered, so it ends with the job.
    """

    def __init__(self, name: str, about: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.parent = logging.getLogger(name)
        self._about = about

    def isEnabledFor(self, level: int) -> bool:
        """Return whether records of a level are created. Not cached, since the logger is not notified of changes."""
        return not self.disabled and self.manager.disable < level and level >= self.getEffectiveLevel()

    def getChild(self, suffix: str) -> JobLogger:
        """Return a logger with a longer name, of the same job."""
        return JobLogger(f"{self.name}.{suffix}", self._about)

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Return a record with the further fields."""
        record = super().makeRecord(*args, **kwargs)
        record.__dict__.update(self._about)
        return record


class DfmContext:
    """The job that adapters work for, and the site where they run.

    Attributes:
        api_version: the version of the federation's operations.
        federation_name: the name of the federation.
        this_site: the site.
        homesite: the application's own site.
        job_id: the job.
        logger: a logger that adds the job and the site to every record.
        compat: whether adapters of DFM run as they do there.
    """

    def __init__(
        self,
        *,
        api_version: str,
        federation_name: str,
        this_site: str,
        homesite: str,
        job_id: str,
        services: Services,
        compat: bool = False,
    ) -> None:
        self.api_version = api_version
        self.federation_name = federation_name
        self.this_site = this_site
        self.homesite = homesite
        self.job_id = job_id
        self.logger: logging.Logger = JobLogger(f"dfm_async.site.{this_site}", {"job": job_id, "site": this_site})
        self.services = services
        self.compat = compat

    async def send_to_place(
        self,
        to_job: str | None,
        to_site: str,
        to_place: str,
        is_yield: bool = False,
        frame: Any = None,
        data: Any = None,
        node_id: Any = None,
    ) -> None:
        """Send a value to a parameter of another job that is open for more; return when that job has accepted it.

        Args:
            to_job: the id of the other job; None means this one.
            to_site: not needed: a job's parameters are known to all its sites.
            to_place: the name of the parameter.
            is_yield: must be False: results come from ``Yield`` alone.
            frame: not needed: values of one call belong together.
            data: the value.
            node_id: not needed.

        Raises:
            ValueError: ``is_yield`` is True.
            RuntimeError: the other job does not run, takes no more, or has no such parameter.
        """
        if is_yield:
            raise ValueError("an adapter cannot yield by itself: return the value, or iterate, and yield it by Yield")
        await self.services.send_to_place(to_place, data, to_job or self.job_id)

    @property
    def telemetry_collector(self) -> DfmContext:
        """The object that opens spans, for sites that use it directly."""
        return self

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[Span | None]:
        """Open a span of the call that runs, for a block; yields None if the job is not traced."""
        found = self.services.span(name, {str(key): _scalar(value) for key, value in (attributes or {}).items()})
        if found is None:
            yield None
        else:
            with found:
                yield Span(found)

    def __repr__(self) -> str:
        return f"<DfmContext of job {self.job_id} at {self.this_site!r}>"


class Site:
    """The site object of adapters: they get it by a constructor argument named ``site``.

    Built once per job. Subclasses add what their adapters share: ``impl=`` of a site names one, and bindings read its
    attributes. They pass on the three arguments, and get the constant ones of their path in addition.

    Args:
        dfm_context: the job.
        cache_config: the location of cached files.
        secrets_vault_config: the vault; it has no arguments here.
    """

    def __init__(
        self,
        dfm_context: DfmContext,
        cache_config: CacheConfig | None = None,
        secrets_vault_config: VaultConfig | None = None,
    ) -> None:
        self._dfm_context = dfm_context
        self._cache_config = cache_config

    @property
    def dfm_context(self) -> DfmContext:
        """The job that the site object was built for."""
        return self._dfm_context

    @property
    def api_version(self) -> str:
        """The version of the federation's operations."""
        return self._dfm_context.api_version

    @property
    def federation_name(self) -> str:
        """The name of the federation."""
        return self._dfm_context.federation_name

    @property
    def site(self) -> Self:
        """The site itself."""
        return self

    def cache_storage(self, subpath: str | os.PathLike[str] | None = None) -> UPath:
        """Return a directory for cached files, on the file system of the site's configuration.

        Args:
            subpath: a directory in it.
        """
        from dfm_async.site.cache_storage import cache_storage  # loads fsspec

        context = self._dfm_context
        where = None if subpath is None else os.fspath(subpath)
        config = self._cache_config or CacheConfig()
        return cache_storage(config, context.federation_name, context.this_site, where, compat=context.compat)

    def secret_for_key(self, key: str) -> Any:
        """Return a secret of the site's vault. Blocks: in asynchronous code prefer a binding, or ``context.secret``.

        Raises:
            SecretError: there is no such secret.
        """
        return self._dfm_context.services.secret(key)

    def telemetry_span(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Span | None]:
        """Open a span of the call that runs, for a block; yields None if the job is not traced."""
        return self._dfm_context.span(name, attributes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._dfm_context.this_site!r}>"


class Provider:
    """The provider object of a group of adapters: they get it by a constructor argument named ``provider``.

    Args:
        site: the site.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    @property
    def site(self) -> Site:
        """The site."""
        return self._site

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._site!r}>"
