"""The objects of classes, the site's own among them: built once per job at a location, and closed when it has ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from dfm_async.federation.operation import Adapter
from dfm_async.model.resources import ClassPath
from dfm_async.runtime import once
from dfm_async.runtime.adapters import adapter_arguments, offered_to
from dfm_async.runtime.faults import is_our_cancellation
from dfm_async.runtime.job_threads import in_thread
from dfm_async.runtime.operations import Callee
from dfm_async.runtime.services import JobServices
from dfm_async.site.building import build_site, load_classes
from dfm_async.site.construction import construct, lacks_body
from dfm_async.site.objects import DfmContext

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob

__all__ = ["JobObjects"]

T = TypeVar("T")


class JobObjects:
    """The objects of one job at one location. Those that have ``aclose`` or else ``close`` get it called, once."""

    __slots__ = ("_adapters", "_built", "_closable", "_closing", "_job", "_shared", "ending", "site_object")

    def __init__(self, job: SiteJob) -> None:
        self._job = job
        self._built: dict[int, Any] = {}
        self._adapters: dict[Hashable, Any] = {}
        self._closable: list[Any] = []
        self._shared: list[Any] = []
        self._closing: asyncio.Task[None] | None = None
        self.ending = False
        """Whether the job is done here, and waits for the objects."""
        self.site_object: Any = None
        """What adapters get as ``site``, once it was built."""

    @property
    def held(self) -> bool:
        """Whether there are objects that want to be closed."""
        return bool(self._closable or self._shared)

    @property
    def closing(self) -> bool:
        """Whether they are closed, or about to be."""
        return self._closing is not None

    def get(self, callee: Callee) -> Any:
        """The object of a class; it is built when it is first asked for."""
        key = id(callee)
        if key not in self._built:
            built = self._built[key] = callee.build(self)
            self._keep(self._closable, built)
        return self._built[key]

    def _keep(self, among: list[Any], built: Any) -> None:
        """Notes an object that is to be closed, if it can be."""
        if callable(getattr(built, "aclose", None)) or callable(getattr(built, "close", None)):
            if not self.held:
                self._job.runtime.hold(self._job, self)
            among.append(built)

    # adapters

    def found(self, adapter: Adapter) -> Any:
        """The object of an adapter's class, if it was built."""
        return self._adapters.get(_key(adapter))

    async def adapter(self, adapter: Adapter) -> Any:
        """Builds the object of an adapter's class, once. The constructor runs on the loop, importing does not.

        Raises:
            LoadingError: the class cannot be used, or not be built.
        """
        key, runtime, code = _key(adapter), self._job.runtime, adapter.code
        role = f"operation {adapter.operation!r}"
        if isinstance(code, ClassPath):
            path, loader = code.path, runtime.loader
            kind = loader.known(path)
            if kind is None or lacks_body(kind) is not None:
                kind = await once.in_thread(lambda: loader.load(path, role, lacks_body), f"load-{runtime.site}")
        else:
            kind = code
        offered = offered_to(adapter, kind)
        site = await self.site() if offered else None
        if key not in self._adapters:  # nothing is awaited from here on: it is built once
            arguments = adapter_arguments(adapter)
            if "site" in offered:
                arguments["site"] = site
            if "provider" in offered:
                arguments["provider"] = None if adapter.provider is None else getattr(site, adapter.provider, None)
            built = self._adapters[key] = construct(kind, arguments, runtime.site, role)
            self._keep(self._closable, built)
        return self._adapters[key]

    async def site(self) -> Any:
        """Builds the site object and its providers, once.

        Raises:
            LoadingError: a class cannot be used, or not be built.
        """
        if self.site_object is None:
            job, runtime = self._job, self._job.runtime
            config, loader = runtime.config, runtime.loader
            classes = await once.in_thread(lambda: load_classes(runtime.site, config, loader), f"load-{runtime.site}")
            if self.site_object is None:  # nothing is awaited from here on: it is built once
                context = DfmContext(
                    api_version=config.api_version,
                    federation_name=config.federation,
                    this_site=runtime.site,
                    homesite=config.homesite,
                    job_id=job.job_id,
                    services=JobServices(job),
                )
                self.site_object = build_site(config, context, classes, lambda built: self._keep(self._shared, built))
        return self.site_object

    async def secret(self, key: str) -> Any:
        """Asks for a secret of the site.

        Raises:
            SecretError: it cannot be had.
        """
        return await self._job.runtime.secrets.get(key)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something on the loop, and waits for it in a thread."""
        return self._job.wait(work)

    def close(self) -> asyncio.Task[None]:
        """Closes all of them at the same time; whoever asks again gets the same task. It does not fail."""
        if self._closing is None:
            job = self._job
            self._closing = job.runtime.spawn(self._close_all(), None, f"the end of the objects of job {job.job_id}")
        return self._closing

    async def _close_all(self) -> None:
        try:
            await asyncio.gather(*[self._close(found) for found in self._closable])
            for found in reversed(self._shared):  # after those that use them: providers, and then the site
                await self._close(found)
        finally:
            self._job.runtime.released(self._job)

    async def _close(self, found: Any) -> None:
        try:
            asynchronous = getattr(found, "aclose", None)
            if callable(asynchronous):
                done = asynchronous()
            elif inspect.iscoroutinefunction(found.close):
                done = found.close()
            else:
                done = await in_thread(self._job, found.close)
            if inspect.isawaitable(done):
                await done
        except BaseException as error:
            if is_our_cancellation(error):
                self._warn("closing %s of job %s did not end in time", found, None)
                raise
            # The results are there: it is too late to fail the job.
            self._warn("closing %s of job %s raised", found, error)

    def _warn(self, text: str, found: Any, error: BaseException | None) -> None:
        job, site = self._job, self._job.runtime.site
        logger = logging.getLogger(f"dfm_async.site.{site}")
        extra = {"job": job.job_id, "site": site}
        logger.warning(text, type(found).__qualname__, job.job_id, exc_info=error, extra=extra)


def _key(adapter: Adapter) -> Hashable:
    """Operations with the same class and arguments share an object."""
    code = adapter.code
    if isinstance(code, ClassPath):
        return code.path, adapter.provider, repr(adapter_arguments(adapter))
    return code, adapter.operation, adapter.provider
