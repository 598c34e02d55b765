"""What all jobs at a site share: operations, codecs, secrets, the cache, threads, and the connections to others."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from dfm_async.model.call_limits import SiteCapacity
from dfm_async.model.resources import SiteConfig
from dfm_async.runtime.cache import CachedFiles, SiteCache
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.operation_errors import cancel_task
from dfm_async.runtime.permits import Permits, SitePermits, own_permits
from dfm_async.runtime.spread import CallSpread
from dfm_async.runtime.threads import Threads
from dfm_async.site import shim
from dfm_async.site.loading import Loader
from dfm_async.site.secrets import Secrets
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

if TYPE_CHECKING:
    from dfm_async.site.checkpoints import Checkpoints

_log = logging.getLogger(__name__)


class SiteResources:
    """The resources of one site in one process.

    Args:
        site: its name.
        table: its operations.
        codec: encodes and decodes values.
        call_codec: the same for calls that run in other workers of the site; by default ``codec``.
        report: sends a message to the application.
        send: sends a message to another location, by its address.
        threads: the number of synchronous calls that run at the same time.
        grace: the number of seconds to wait for tasks that ignore their cancellation.
        config: what the code at this site can use.
        on_abandoned: is called when abandoned calls do not return; see :class:`~dfm_async.runtime.threads.Threads`.
        enough_workers: with how many other workers this process does not compute itself; None: it always does.
        capacity: what the site has, if this process is the only one that runs its calls; else the process that started
            this one grants permits.
        on_limits: is called when calls begin or end to wait for the limits of such a site, at most every tenth of a
            second.
        checkpoints: the folder for the values of completed calls, if there is one, and how many bytes they may take.
    """

    def __init__(
        self,
        site: str,
        table: OperationTable,
        codec: Codec,
        *,
        report: Callable[[msg.Message], None],
        send: Callable[[str, msg.Message], None],
        threads: int,
        grace: float = 5.0,
        config: SiteConfig | None = None,
        call_codec: Codec | None = None,
        on_abandoned: Callable[[int, bool, str], None] | None = None,
        enough_workers: int | None = None,
        capacity: SiteCapacity | None = None,
        on_limits: Callable[[], None] | None = None,
        checkpoints: tuple[str | None, int] = (None, 0),
    ) -> None:
        self.site = site
        self.table = table
        self.codec = codec
        self.call_codec = call_codec or codec
        self.report = report
        self.send = send
        self.config = config = config or SiteConfig()
        self.loader = Loader(site, config)
        """Finds classes that are named by a path."""
        self.secrets = Secrets(site, config.vault, self.loader)
        """The secrets of the site."""
        stored = None if config.cache is None else CachedFiles(config.cache, config.federation, site)
        self.cache = SiteCache(codec.own, stored)
        self.checkpoints: Checkpoints | None = None
        """The values of completed calls, if they can be recorded."""
        folder, limit = checkpoints
        if folder is not None:
            from dfm_async.site.checkpoints import Checkpoints  # only sites of sessions with a store load the database

            self.checkpoints = Checkpoints(folder, site, limit)
        self.stored_codec = Codec.for_store()
        """Encodes results that are written to a store: without pickle."""
        self.address = ""
        """Where other workers of the site reach this one, if there can be any."""
        self.spread: CallSpread | None = None
        """Runs calls in them."""
        self.limits: SitePermits | None = None
        """The limits of the site, if this process is the only one that runs its calls."""
        self.permits = Permits(report)
        """Lets calls of operations with limits start."""
        if capacity is not None:
            self.limits = SitePermits(on_limits)
            self.limits.add_capacity(capacity)
            self.permits = own_permits(self.limits)
        self.useful = False
        """Whether a call was completed here."""
        self.coroutines = 0
        """The number of calls that run as coroutines."""
        self.tokens = 0
        """The number of values that were sent to other locations."""
        self.token_bytes = 0
        """The number of bytes in them."""
        self._thread_limit = threads
        self._threads: Threads | None = None
        self.grace = grace
        self._on_abandoned = on_abandoned
        self._enough_workers = enough_workers
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = 0

    async def open(self) -> None:
        """Open the vault, and prepare the threads."""
        self._thread = threading.get_ident()
        if self.config.compat:
            shim.install()
        await self.secrets.open()
        self._threads = Threads(self._thread_limit, self.site, on_abandoned=self._on_abandoned)
        if self.address:
            self._threads.spread = self.spread = CallSpread(
                self.site, self._threads, self.report, self.send, self.address, self._enough_workers
            )

    @property
    def running(self) -> int:
        """The number of calls that run in this process. Any thread may read it."""
        return self.coroutines + (0 if self._threads is None else len(self._threads.running))

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a thread, for another worker, or for a limit. Any thread may read it."""
        queued = 0 if self._threads is None else self._threads.queued
        return queued + (0 if self.spread is None else self.spread.queued) + self.permits.waiting

    def call_completed(self) -> None:
        """Report the first call that was completed to the process that started this one."""
        if not self.useful and self.address:
            self.report(msg.CallCompleted())
        self.useful = True

    def on_loop(self) -> bool:
        """Return whether this is the thread of the loop."""
        return threading.get_ident() == self._thread

    @property
    def threads(self) -> Threads:
        """The threads for synchronous operations."""
        assert self._threads is not None  # noqa: S101 - set by open
        return self._threads

    @property
    def exhausted(self) -> bool:
        """Whether the site serves no further synchronous calls, because too many do not return."""
        return self._threads is not None and self._threads.exhausted

    def spawn(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None, name: str
    ) -> asyncio.Task[None]:
        """Start a task that belongs to the site. ``work`` must handle its own errors."""
        task = asyncio.get_running_loop().create_task(work, name=name, context=context or contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # the end

    async def stop_tasks(self, tasks: set[asyncio.Task[None]] | None = None) -> None:
        """Cancel tasks, by default all of the site, and wait for them during the grace period."""
        tasks = self._tasks if tasks is None else tasks
        for task in tasks:
            cancel_task(task)
        # Threads that are inside an operation, and tasks that ignore their cancellation, cannot be stopped.
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=self.grace)
            for task in stubborn:
                _log.warning("%s at site %s ignores its cancellation and is abandoned", task.get_name(), self.site)

    async def close_vault(self) -> None:
        """Close the vault, within the grace period."""
        try:
            async with asyncio.timeout(self.grace):
                await self.secrets.aclose()
        except TimeoutError:
            _log.warning("the vault of site %s does not close, and is abandoned", self.site)
