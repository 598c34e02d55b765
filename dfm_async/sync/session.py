"""Sessions whose methods block."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack, overload

from dfm_async.base.loop_thread import LoopThread
from dfm_async.base.tasks import in_thread
from dfm_async.engine.target import Target
from dfm_async.errors import SessionClosed, StoreError
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Operation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.flare import FlareOptions
from dfm_async.model.info import JobInfo, ScheduleInfo
from dfm_async.model.options import LocalOptions, ResultLimits
from dfm_async.model.policies import RetryPolicy
from dfm_async.model.stats import SessionStats, SiteStats
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.planning.profile import Profile
from dfm_async.session.broadcast import SiteReply
from dfm_async.session.callbacks import Callback, CallbackDispatcher, LoopDispatcher
from dfm_async.session.direct_calls import A, B, C, P, R, SiteChoice, V
from dfm_async.session.hints import IN_SESSIONS, keywords_explained, no_attribute
from dfm_async.session.mapping import MapItem
from dfm_async.session.schedule import ScheduleOptions, TickParams
from dfm_async.session.session import Session as AsyncSession
from dfm_async.sync.blocking import Blocking
from dfm_async.sync.inputs import Params, pulled, streamed
from dfm_async.sync.iterators import Managed, Stream
from dfm_async.sync.job import Job, MapStream, Schedule
from dfm_async.telemetry.cpu_profile import CpuProfile
from dfm_async.telemetry.sinks import Sink

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from dfm_async.discovery.advice import Discovery
    from dfm_async.federation.call_types import Takes
    from dfm_async.store.base import Store


class _ThreadDispatcher(LoopDispatcher):
    """Run callbacks in threads, one after the other, so that they may block and use the session."""

    async def dispatch(self, callback: Callback, *args: Any) -> None:
        """Run a callback, and wait for it. One that is asynchronous runs on the loop of the session."""
        found = await in_thread(lambda: callback(*args), "callback")
        if inspect.isawaitable(found):
            await found


class Session(Blocking[AsyncSession]):
    """Connect an application without asyncio to a federation.

    ``with Session(federation) as session``, or ``session.connect()`` and ``session.close()``. It has the methods of
    :class:`dfm_async.Session`, which block, and return iterators instead of asynchronous ones. They may be called from
    any thread. Ctrl-C in the main thread cancels what a method waits for, and raises ``KeyboardInterrupt`` when that
    has ended.

    The session runs in a thread of its own; so do callbacks, and iterators that are passed to ``map`` or ``execute``. A
    session that is not closed does not keep the interpreter from exiting; its processes end then.

    Args:
        federation: the sites and their operations; or the path of their file, ``federation.dfm.yaml``.
        homesite: as for :class:`dfm_async.Session`.
        target: as for :class:`dfm_async.Session`.
        options: as for :class:`dfm_async.Session`.
        callback_dispatcher: runs callbacks; by default one after the other, in threads.
        store: as for :class:`dfm_async.Session`.
        trace: as for :class:`dfm_async.Session`.

    Attributes:
        federation: the sites and their operations.
        homesite: the name of the application's own site.
        options: how the sites run.
    """

    def __init__(
        self,
        federation: Federation | str | os.PathLike[str],
        homesite: str = "home",
        target: Literal["local", "inline", "flare"] | Target = "local",
        options: LocalOptions | FlareOptions | None = None,
        callback_dispatcher: CallbackDispatcher | None = None,
        store: str | Store | None = None,
        trace: str | os.PathLike[str] | Sink | None = None,
    ) -> None:
        dispatcher = callback_dispatcher or _ThreadDispatcher()
        wrapped = AsyncSession(federation, homesite, target, options, dispatcher, store, trace)
        super().__init__(LoopThread("dfm-session"), wrapped)
        self.federation: Federation = wrapped.federation
        self.homesite: str = wrapped.homesite
        self.options: LocalOptions = wrapped.options

    def connect(self) -> None:
        """Start the target, and open the store, as :meth:`dfm_async.Session.connect` does."""
        if not self._loop.start():
            raise SessionClosed("the session is connected already, or was closed; make a new one")
        try:
            self._wait(self._async.connect())
        except BaseException:
            self._loop.stop()
            raise

    def close(self) -> None:
        """End running jobs, the target, and the thread of the session. Safe to call more than once, from any thread.

        Ctrl-C skips the grace period of what still runs: it is then killed, before ``KeyboardInterrupt`` is raised.
        """
        try:
            with contextlib.suppress(SessionClosed):  # it was not connected, or another thread closes it
                self._wait(self._async.close())
        finally:
            self._loop.stop()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # type checkers refuse unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name, IN_SESSIONS)

    # Written by python -m tests.sync.methods, from the methods of dfm_async.Session

    @property
    def connected(self) -> bool:
        """Whether the session can be used: it is connected, and closing has not begun."""
        return self._call(lambda: self._async.connected)

    @property
    def target(self) -> Target:
        """The target that runs the jobs."""
        return self._call(lambda: self._async.target)

    @keywords_explained
    def prepare(
        self,
        pipeline: Pipeline[..., R],
        restrict_to_sites: Iterable[str] | str | None = None,
        costs: Literal["configured", "measured"] | Profile = "configured",
    ) -> Plan[R]:
        """Check a pipeline, and return its plan, which can be executed many times.

        See :meth:`dfm_async.Session.prepare`.
        """
        return self._wait(self._async.prepare(pipeline, restrict_to_sites, costs))

    @overload
    def profile(self, *, cpu: Literal[False] = False) -> Managed[Profile]: ...

    @overload
    def profile(self, *, cpu: Literal[True]) -> Managed[CpuProfile]: ...

    @overload
    def profile(self, *, cpu: bool) -> Managed[Any]: ...

    def profile(self, *, cpu: bool = False) -> Managed[Any]:
        """Measure the jobs that are executed while the profile is open: ``with session.profile() as profile``.

        See :meth:`dfm_async.Session.profile`.
        """
        return Managed(self._loop, self._call(lambda: self._async.profile(cpu=cpu)))

    @keywords_explained
    def discover(self, pipeline: Pipeline, restrict_to_sites: Iterable[str] | str | None = None) -> Discovery:
        """Query the sites for the valid values of the parameters of operations.

        See :meth:`dfm_async.Session.discover`.
        """
        return self._wait(self._async.discover(pipeline, restrict_to_sites))

    def debug_show_nets(self, plan: Plan) -> dict[str, str]:
        """Return each location's net in readable form.

        See :meth:`dfm_async.Session.debug_show_nets`.
        """
        return self._call(lambda: self._async.debug_show_nets(plan))

    @keywords_explained
    def execute(
        self,
        pipeline: Pipeline[..., R] | Plan[R],
        input_params: Params = {},  # noqa: B006 - never changed
        autostop: bool = True,
        job_id: str | None = None,
        default_callback: Callback | None = None,
        place_callbacks: Mapping[str, Callback] | None = None,
        on_error: Literal["continue", "stop"] = "continue",
        deadline: float | None = None,
        options: ResultLimits | None = None,
        priority: int = 0,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        label: str | None = None,
        watch: bool = False,
        checkpoint: Literal["marked", "calls"] = "marked",
        start_at: float | datetime | None = None,
    ) -> Job[R]:
        """Submit a job, and return when it runs, or waits in the queue or for its time to start.

        See :meth:`dfm_async.Session.execute`.
        """
        return Job(
            self._loop,
            self._wait(
                self._async.execute(
                    pipeline,
                    streamed(input_params),
                    autostop,
                    job_id,
                    default_callback,
                    place_callbacks,
                    on_error,
                    deadline,
                    options,
                    priority,
                    concurrency,
                    retry,
                    label,
                    watch,
                    checkpoint,
                    start_at,
                )
            ),
        )

    def schedule(
        self,
        name: str,
        pipeline: Pipeline[..., R] | Plan[R],
        params: TickParams = None,
        *,
        cron: str | None = None,
        every: int | None = None,
        tz: str = "UTC",
        missed: Literal["skip", "once", "all"] = "skip",
        overlap: Literal["allow", "skip"] = "allow",
        **options: Unpack[ScheduleOptions],
    ) -> Schedule[R]:
        """Return a schedule, which starts a job at every tick while it is open: ``with session.schedule(...)``.

        See :meth:`dfm_async.Session.schedule`.
        """
        return Schedule(
            self._loop,
            self._call(
                lambda: self._async.schedule(
                    name, pipeline, params, cron=cron, every=every, tz=tz, missed=missed, overlap=overlap, **options
                )
            ),
        )

    def schedules(self) -> list[ScheduleInfo]:
        """Return the schedules that are open in this session, by name.

        See :meth:`dfm_async.Session.schedules`.
        """
        return self._call(lambda: self._async.schedules())

    @keywords_explained
    def resume(
        self,
        job_id: str,
        priority: int = 0,
        input_params: Params = None,
        watch: bool = False,
        accept_changes: bool = False,
    ) -> Job:
        """Resume an interrupted job: its incomplete parameter sets run again.

        See :meth:`dfm_async.Session.resume`.
        """
        return Job(
            self._loop, self._wait(self._async.resume(job_id, priority, streamed(input_params), watch, accept_changes))
        )

    def refresh_jobs(self) -> list[Job]:
        """Read the store again, and return all jobs, including those that other processes have started or ended.

        See :meth:`dfm_async.Session.refresh_jobs`.
        """
        return [Job(self._loop, job) for job in self._wait(self._async.refresh_jobs())]

    def reattach(
        self,
        job_id: str,
        after: int | None = None,
        default_callback: Callback | None = None,
        place_callbacks: Mapping[str, Callback] | None = None,
    ) -> Job:
        """Return a job by its id, such as one of an earlier session or of another process.

        See :meth:`dfm_async.Session.reattach`.
        """
        return Job(self._loop, self._wait(self._async.reattach(job_id, after, default_callback, place_callbacks)))

    def jobs(self) -> list[Job]:
        """Return the jobs that the session knows, in the order of their submission.

        See :meth:`dfm_async.Session.jobs`.
        """
        return [Job(self._loop, job) for job in self._call(lambda: self._async.jobs())]

    def infos(self) -> list[JobInfo]:
        """Return the states of all jobs that the session knows; cheaper than ``info()`` of each of :meth:`jobs`.

        See :meth:`dfm_async.Session.infos`.
        """
        return self._call(lambda: self._async.infos())

    def find_jobs(
        self,
        *,
        status: JobStatus | None = None,
        pipeline: str | None = None,
        label: str | None = None,
        since: float | datetime | None = None,
        until: float | datetime | None = None,
        search: str | None = None,
        before: JobInfo | tuple[float, str] | None = None,
    ) -> Stream[JobInfo]:
        """Yield the states of the jobs that match all conditions, the newest first.

        See :meth:`dfm_async.Session.find_jobs`.
        """
        return Stream(
            self._loop,
            self._call(
                lambda: self._async.find_jobs(
                    status=status,
                    pipeline=pipeline,
                    label=label,
                    since=since,
                    until=until,
                    search=search,
                    before=before,
                )
            ),
        )

    def changes(self, interval: float = 0.1, *, active: bool = False) -> Stream[JobInfo]:
        """Return an iterator over the states of all jobs: first one item for each known job, then one for each change.

        See :meth:`dfm_async.Session.changes`.
        """
        return Stream(self._loop, self._call(lambda: self._async.changes(interval, active=active)))

    def health(self, interval: float = 1.0) -> Stream[dict[str, SiteStats]]:
        """Return an iterator over the state of the workers of all sites: first the current state, then each change.

        See :meth:`dfm_async.Session.health`.
        """
        return Stream(self._loop, self._call(lambda: self._async.health(interval)))

    def forget(self, job_id: str) -> None:
        """Delete an ended job with its log, in the store as well.

        See :meth:`dfm_async.Session.forget`.
        """
        return self._wait(self._async.forget(job_id))

    def prune(self, older_than: float | timedelta, status: JobStatus | None = None) -> int:
        """Delete the jobs of the store that ended some time ago, with their logs and checkpoints.

        See :meth:`dfm_async.Session.prune`.
        """
        return self._wait(self._async.prune(older_than, status))

    def check_store(self, progress: Callable[[int, int | None], object] | None = None) -> Stream[StoreError]:
        """Yield an error for each damaged job, event and parameter set in the store.

        See :meth:`dfm_async.Session.check_store`.
        """
        return Stream(self._loop, self._call(lambda: self._async.check_store(progress)))

    def stats(self) -> SessionStats:
        """Return the numbers of jobs, the state of the workers, and the sizes of the logs.

        See :meth:`dfm_async.Session.stats`.
        """
        return self._call(lambda: self._async.stats())

    @overload
    def call(self, operation: Operation[P, Any, V], /, *args: P.args, **kwargs: P.kwargs) -> V: ...

    @overload
    def call(self, operation: type[Any], /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def call(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        site: SiteChoice | None,
        **kwargs: Any,
    ) -> V: ...

    @overload
    def call(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        provider: str | None,
        **kwargs: Any,
    ) -> V: ...

    @overload
    def call(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        retry: RetryPolicy | None,
        **kwargs: Any,
    ) -> V: ...

    @overload
    def call(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        deadline: float | None,
        **kwargs: Any,
    ) -> V: ...

    def call(self, operation: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call one operation, and return its value: ``session.call(anomaly, 17.0)``.

        See :meth:`dfm_async.Session.call`.
        """
        return self._wait(self._async.call(operation, *args, **kwargs))

    @overload
    def map(
        self,
        operation: Takes[A, B, C, V],
        first: Iterable[A],
        second: Iterable[B] = ...,
        third: Iterable[C] = ...,
        /,
        *more: Iterable[Any],
        errors: Literal["raise"] = "raise",
        concurrency: int | None = None,
        ordered: bool = True,
        **kwargs: Any,
    ) -> MapStream[V]: ...

    @overload
    def map(
        self,
        operation: Takes[A, B, C, V],
        first: Iterable[A],
        second: Iterable[B] = ...,
        third: Iterable[C] = ...,
        /,
        *more: Iterable[Any],
        errors: Literal["yield"],
        concurrency: int | None = None,
        ordered: bool = True,
        **kwargs: Any,
    ) -> MapStream[MapItem[V]]: ...

    @overload
    def map(self, operation: type[Any], /, *iterables: Iterable[Any], **kwargs: Any) -> MapStream[Any]: ...

    def map(
        self,
        operation: Any,
        /,
        *iterables: Any,
        concurrency: int | None = None,
        ordered: bool = True,
        errors: Literal["raise", "yield"] = "raise",
        **kwargs: Any,
    ) -> MapStream[Any]:
        """Call an operation with each element of an iterable: ``for value in session.map(anomaly, values)``.

        See :meth:`dfm_async.Session.map`.
        """
        return MapStream(
            self._loop,
            self._call(
                lambda: self._async.map(
                    operation,
                    *map(pulled, iterables),
                    concurrency=concurrency,
                    ordered=ordered,
                    errors=errors,
                    **kwargs,
                )
            ),
        )

    @overload
    def each(self, operation: Operation[P, Any, V], /, *args: P.args, **kwargs: P.kwargs) -> Stream[SiteReply[V]]: ...

    @overload
    def each(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        at_least: int | None,
        **kwargs: Any,
    ) -> Stream[SiteReply[V]]: ...

    @overload
    def each(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        within: float | None,
        **kwargs: Any,
    ) -> Stream[SiteReply[V]]: ...

    @overload
    def each(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        provider: str | None,
        **kwargs: Any,
    ) -> Stream[SiteReply[V]]: ...

    @overload
    def each(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        retry: RetryPolicy | None,
        **kwargs: Any,
    ) -> Stream[SiteReply[V]]: ...

    @overload
    def each(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        deadline: float | None,
        **kwargs: Any,
    ) -> Stream[SiteReply[V]]: ...

    @overload
    def each(
        self,
        operation: Takes[A, B, C, V],
        first: A = ...,
        second: B = ...,
        third: C = ...,
        /,
        *more: Any,
        late: Literal["discard", "keep"],
        **kwargs: Any,
    ) -> Stream[SiteReply[V]]: ...

    @overload
    def each(self, operation: type[Any], /, *args: Any, **kwargs: Any) -> Stream[SiteReply[Any]]: ...

    def each(  # type: ignore[misc] # as of the other
        self,
        operation: Any,
        /,
        *args: Any,
        at_least: int | None = None,
        within: float | None = None,
        late: Literal["discard", "keep"] = "discard",
        **kwargs: Any,
    ) -> Stream[SiteReply[Any]]:
        """Call an operation at every site that offers it: ``for reply in session.each(train, model)``.

        See :meth:`dfm_async.Session.each`.
        """
        return Stream(
            self._loop,
            self._call(
                lambda: self._async.each(operation, *args, at_least=at_least, within=within, late=late, **kwargs)
            ),
        )

    def run(self, pipeline: Pipeline[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a pipeline made from a function, and return its result: ``session.run(report, day="mon")``.

        See :meth:`dfm_async.Session.run`.
        """
        return self._wait(self._async.run(pipeline, *args, **kwargs))
