"""The objects of classes, the site's own among them: built once per job at a location, and closed when it has ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from dfm_async.federation.operation import Adapter
from dfm_async.model.resources import ClassPath
from dfm_async.runtime import once
from dfm_async.runtime.adapters import adapter_arguments, offered_to
from dfm_async.runtime.faults import is_our_cancellation
from dfm_async.runtime.flights import Flights
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

    __slots__ = (
        "_adapters",
        "_built",
        "_closable",
        "_closing",
        "_flights",
        "_job",
        "_programs",
        "_shared",
        "ending",
        "site_object",
    )

    def __init__(self, job: SiteJob) -> None:
        self._job = job
        self._built: dict[int, Any] = {}
        self._adapters: dict[Hashable, Any] = {}
        self._programs: list[tuple[Adapter, Any]] = []
        self._flights = Flights()
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
        """The object of a class; it is built when it is first asked for. Equal external programs share one."""
        key = id(callee)
        if key not in self._built:
            shared = self._program_like(callee) if callee.external else None
            if shared is None:
                shared = callee.build(self)
                self._keep(self._closable, shared)
                if callee.external:
                    self._programs.append((callee.adapter, shared))
            self._built[key] = shared
        return self._built[key]

    def _program_like(self, callee: Callee) -> Any:
        """What was built for another operation with the same program; None if there is none."""
        wanted = callee.adapter
        for adapter, built in self._programs:
            if adapter.code is wanted.code and adapter.args == wanted.args:
                return built
        return None

    def _keep(self, among: list[Any], built: Any) -> None:
        """Notes an object that is to be closed, if it can be."""
        if callable(getattr(built, "aclose", None)) or callable(getattr(built, "close", None)):
            if not self.held:
                self._job.runtime.hold(self._job, self)
            among.append(built)

    # adapters

    async def adapter(self, adapter: Adapter) -> Any:
        """Builds the object of an adapter's class, once. The constructor runs on the loop, importing does not.

        Raises:
            LoadingError: the class cannot be used, or not be built.
        """
        key = _key(adapter)
        if key not in self._adapters:
            self._adapters[key] = await self._flights.join(key, lambda: self._build_adapter(adapter))
        return self._adapters[key]

    async def _build_adapter(self, adapter: Adapter) -> Any:
        runtime, kind, role = self._job.runtime, adapter.code, f"operation {adapter.operation!r}"
        if isinstance(kind, ClassPath):
            path, loader = kind.path, runtime.loader
            kind = await self._load([path], lambda: loader.load(path, role, lacks_body))
        offered, arguments = offered_to(adapter, kind), adapter_arguments(adapter)
        site = await self.site() if offered else None
        if "site" in offered:
            arguments["site"] = site
        if "provider" in offered:
            arguments["provider"] = None if adapter.provider is None else getattr(site, adapter.provider)
        built = construct(kind, arguments, runtime.site, role)
        self._keep(self._closable, built)
        return built

    async def site(self) -> Any:
        """Builds the site object and its providers, once.

        Raises:
            LoadingError: a class cannot be used, or not be built.
        """
        if self.site_object is None:
            self.site_object = await self._flights.join(None, self._build_site)
        return self.site_object

    async def _build_site(self) -> Any:
        job, runtime = self._job, self._job.runtime
        config, loader = runtime.config, runtime.loader
        impls = [config.impl, *(provider.impl for provider in config.providers.values())]
        paths = [impl.path for impl in impls if isinstance(impl, ClassPath)]
        classes = await self._load(paths, lambda: load_classes(runtime.site, config, loader))
        context = DfmContext(
            api_version=config.api_version,
            federation_name=config.federation,
            this_site=runtime.site,
            homesite=config.homesite,
            job_id=job.job_id,
            services=JobServices(job),
            compat=config.compat,
        )
        return build_site(config, context, classes, lambda built: self._keep(self._shared, built))

    async def _load(self, paths: list[str], load: Callable[[], T]) -> T:
        """Finds classes; in a thread, unless all were found before."""
        runtime = self._job.runtime
        if all(runtime.loader.known(path) for path in paths):
            return load()
        return await once.in_thread(load, f"load-{runtime.site}")

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
            ours = asyncio.current_task()
            await asyncio.gather(*[self._close(found, ours) for found in self._closable])
            for found in reversed(self._shared):  # after those that use them: providers, and then the site
                await self._close(found, ours)
        finally:
            self._job.runtime.released(self._job)

    async def _close(self, found: Any, ours: asyncio.Task[Any] | None) -> None:
        try:
            asynchronous = getattr(found, "aclose", None)
            if callable(asynchronous):
                done = asynchronous()
            elif inspect.iscoroutinefunction(found.close):
                done = found.close()
            else:
                done = await in_thread(self._job, type(found).__qualname__, found.close, closes=True)
            if inspect.isawaitable(done):
                await done
        except BaseException as error:
            if is_our_cancellation(error, ours):
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
