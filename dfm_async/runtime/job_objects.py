"""The objects of classes, the site object among them: built once per job at a location, and closed at its end."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from typing import Any, Protocol, TypeVar

from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import in_thread
from dfm_async.errors import LoadingError, SecretError
from dfm_async.federation.operation import Adapter
from dfm_async.model.resources import ClassPath
from dfm_async.runtime.adapters import adapter_arguments, offered_to
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.context import current_context
from dfm_async.runtime.operation_errors import is_our_cancellation
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.threads import JobThreads
from dfm_async.site.building import build_site, load_classes
from dfm_async.site.loading import construct, lacks_body
from dfm_async.site.objects import DfmContext
from dfm_async.site.secrets import NoSecret
from dfm_async.telemetry.recorder import UserSpan

T = TypeVar("T")


class ObjectOwner(Protocol):
    """The job that objects belong to."""

    resources: SiteResources
    job_id: str

    @property
    def threads(self) -> JobThreads:
        """Its synchronous calls."""

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it in a thread."""


class JobObjects:
    """The objects of one job at one location. Those that have ``aclose`` or else ``close`` get it called, once.

    Args:
        job: the job.
        on_built: is called with the job when the first object is built that must be closed before the job has ended.
        on_closed: is called with the job when all objects are closed.
    """

    def __init__(self, job: ObjectOwner, on_built: Callable[[Any], None], on_closed: Callable[[Any], None]) -> None:
        self._job = job
        self._on_built = on_built
        self._on_closed = on_closed
        self._built: dict[int, Any] = {}
        self._adapters: dict[Hashable, Any] = {}
        self._programs: list[tuple[Adapter, Any]] = []
        self._pending: dict[Hashable, Outcome[Any]] = {}
        self._closable: list[Any] = []
        self._shared: list[Any] = []
        self._closing: asyncio.Task[None] | None = None
        self.ending = False
        """Whether the job has ended here except for the objects."""
        self.site_object: Any = None
        """The site object, once it was built."""

    @property
    def held(self) -> bool:
        """Whether there are objects that have to be closed."""
        return bool(self._closable or self._shared)

    @property
    def closing(self) -> bool:
        """Whether they are closed, or about to be."""
        return self._closing is not None

    def get(self, callee: Callee) -> Any:
        """Return the object of a class; it is built at the first call. Equal external programs share one."""
        key = id(callee)
        if key not in self._built:
            adapter = callee.adapter
            same = (
                built for known, built in self._programs if known.code is adapter.code and known.args == adapter.args
            )
            shared = next(same, None) if callee.external else None
            if shared is None:
                shared = callee.build(self)
                self._keep(self._closable, shared)
                if callee.external:
                    self._programs.append((adapter, shared))
            self._built[key] = shared
        return self._built[key]

    def keep(self, built: Any) -> None:
        """Close an object with those of the job."""
        self._keep(self._closable, built)

    def _keep(self, among: list[Any], built: Any) -> None:
        """Note an object that is to be closed, if it can be."""
        if callable(getattr(built, "aclose", None)) or callable(getattr(built, "close", None)):
            if not self.held:
                self._on_built(self._job)
            among.append(built)

    # adapters

    async def adapter(self, adapter: Adapter) -> Any:
        """Build the object of an adapter's class, once. The constructor runs on the loop, imports do not.

        Raises:
            LoadingError: the class cannot be used or built.
        """
        key = _key(adapter)
        if key not in self._adapters:
            self._adapters[key] = await self._once(key, lambda: self._build_adapter(adapter))
        return self._adapters[key]

    async def _build_adapter(self, adapter: Adapter) -> Any:
        resources, kind, role = self._job.resources, adapter.code, f"operation {adapter.operation!r}"
        if isinstance(kind, ClassPath):
            path, loader = kind.path, resources.loader
            kind = await self._load([path], lambda: loader.load(path, role, lacks_body))
        offered, arguments = offered_to(adapter, kind), adapter_arguments(adapter)
        site = await self.site() if offered else None
        if "site" in offered:
            arguments["site"] = site
        if "provider" in offered:
            arguments["provider"] = None if adapter.provider is None else getattr(site, adapter.provider)
        built = construct(kind, arguments, resources.site, role)
        self._keep(self._closable, built)
        return built

    async def site(self) -> Any:
        """Build the site object and its providers, once.

        Raises:
            LoadingError: a class cannot be used or built.
        """
        if self.site_object is None:
            self.site_object = await self._once(None, self._build_site)
        return self.site_object

    async def _build_site(self) -> Any:
        job, resources = self._job, self._job.resources
        config, loader = resources.config, resources.loader
        impls = [config.impl, *(provider.impl for provider in config.providers.values())]
        paths = [impl.path for impl in impls if isinstance(impl, ClassPath)]
        classes = await self._load(paths, lambda: load_classes(resources.site, config, loader))
        context = DfmContext(
            api_version=config.api_version,
            federation_name=config.federation,
            this_site=resources.site,
            homesite=config.homesite,
            job_id=job.job_id,
            services=_Services(job),
            compat=config.compat,
        )
        return build_site(config, context, classes, lambda built: self._keep(self._shared, built))

    async def _load(self, paths: list[str], load: Callable[[], T]) -> T:
        """Find classes; in a thread, unless all were found before."""
        resources = self._job.resources
        if all(resources.loader.known(path) for path in paths):
            return load()
        return await in_thread(load, f"load-{resources.site}")

    async def _once(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work, or wait for another call that does it. If that is cancelled, the next one does it."""
        while (pending := self._pending.get(key)) is not None:
            await asyncio.wait([pending])
            if not pending.cancelled():
                error = pending.exception()
                if isinstance(error, LoadingError):  # each gets its own: raising one adds to its traceback
                    raise LoadingError(*error.args) from error.__cause__
                return pending.result()  # type: ignore[no-any-return]
        pending = self._pending[key] = Outcome()
        try:
            found = await work()
        except Exception as error:
            pending.fail(error)
            raise
        except BaseException:
            pending.cancel()
            raise
        else:
            pending.settle(found)
            return found
        finally:
            del self._pending[key]

    async def secret(self, key: str) -> Any:
        """Return a secret of the site.

        Raises:
            SecretError: it is not available.
        """
        return await self._job.resources.secrets.get(key)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it in a thread."""
        return self._job.wait(work)

    def close(self) -> asyncio.Task[None]:
        """Close all of them at the same time. Every call returns the same task, which does not fail."""
        if self._closing is None:
            job = self._job
            self._closing = job.resources.spawn(self._close_all(), None, f"the end of the objects of job {job.job_id}")
        return self._closing

    async def _close_all(self) -> None:
        try:
            ours = asyncio.current_task()
            await asyncio.gather(*[self._close(found, ours) for found in self._closable])
            for found in reversed(self._shared):  # after those that use them: providers, and then the site
                await self._close(found, ours)
        finally:
            self._on_closed(self._job)

    async def _close(self, found: Any, ours: asyncio.Task[Any] | None) -> None:
        try:
            asynchronous = getattr(found, "aclose", None)
            if callable(asynchronous):
                done = asynchronous()
            elif inspect.iscoroutinefunction(found.close):
                done = found.close()
            else:
                done = await self._job.threads.run(type(found).__qualname__, found.close, closes=True)
            if inspect.isawaitable(done):
                await done
        except BaseException as error:
            if is_our_cancellation(error, ours):
                self._warn("closing %s of job %s did not end in time", found, None)
                raise
            # The results were sent: it is too late to fail the job.
            self._warn("closing %s of job %s raised", found, error)

    def _warn(self, text: str, found: Any, error: BaseException | None) -> None:
        job, site = self._job, self._job.resources.site
        logger = logging.getLogger(f"dfm_async.site.{site}")
        extra = {"job": job.job_id, "site": site}
        logger.warning(text, type(found).__qualname__, job.job_id, exc_info=error, extra=extra)


def _key(adapter: Adapter) -> Hashable:
    """Return the same key for operations with the same class and arguments: they share an object."""
    code = adapter.code
    if isinstance(code, ClassPath):
        return code.path, adapter.provider, repr(adapter_arguments(adapter))
    return code, adapter.operation, adapter.provider


class _Services:
    """What the site object of one job uses of its site."""

    def __init__(self, job: ObjectOwner) -> None:
        self._job = job

    def secret(self, key: str) -> Any:
        """Return a secret; blocks.

        Raises:
            SecretError: there is no such secret; or the vault is asynchronous, and this is the thread of the loop.
        """
        try:
            return self._job.resources.secrets.read(key, lambda work: self._wait(key, work))
        except SecretError as error:
            raise NoSecret(error.site, error.key, error.reason) from None

    def _wait(self, key: str, work: Any) -> Any:
        if self._job.resources.on_loop():
            work.close()
            reason = "its vault is asynchronous: bind it with from-secrets, or await context.secret(key)"
            raise SecretError(self._job.resources.site, key, reason)
        return self._job.wait(work)

    def span(self, name: str, attributes: Mapping[str, Any]) -> UserSpan | None:
        """Return a span of the call that runs; None if it is not traced, or none runs."""
        try:
            context = current_context()
        except LookupError:
            return None
        return None if context.trace is None else context.span(name, **attributes)

    async def send_to_place(self, place: str, value: Any, job: str) -> None:
        """Send a value to a parameter of a job."""
        await current_context().send_to_place(place, value, job=job)
