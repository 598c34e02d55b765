"""What an operation can know about the call that it serves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeVar

from dfm_async.federation.operation import Adapter
from dfm_async.model.events import Metrics, OperationEvent
from dfm_async.model.ids import Frame
from dfm_async.model.scalars import plain_step, plain_text, plain_values
from dfm_async.telemetry import current
from dfm_async.telemetry.recorder import NO_SPAN, RecordedSpan, TracedCall, UserSpan

if TYPE_CHECKING:
    from upath import UPath

T = TypeVar("T")

_current: ContextVar[OperationContext | None] = ContextVar("dfm_async_context", default=None)


class Caller(Protocol):
    """The job that a call belongs to, as its operation sees it."""

    @property
    def stopping(self) -> bool:
        """Whether the job was cancelled."""

    def code_of(self, operation: str, provider: str | None) -> tuple[Adapter, Any]:
        """Return the adapter of an operation, and its code or, for a class, the object of the job."""

    async def in_thread(self, what: str, work: Callable[[], T]) -> T:
        """Run synchronous code in a thread of the site."""

    def progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Report how far a call is."""

    def add_event(self, event: OperationEvent) -> None:
        """Send an event of a call to the application."""

    async def send_to_place(self, target: str, place: str, key: str, value: Any) -> None:
        """Send a value to a parameter of another job."""

    async def secret(self, key: str) -> Any:
        """Return a secret of the site."""

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it in a thread."""

    def cache_storage(self, subpath: str | None) -> UPath:
        """Return a directory for files that outlive the job."""


class OperationContext:
    """The call that an operation serves, from a parameter named ``context`` or from :func:`current_context`.

    Attributes:
        job_id: the job.
        site: the site that the operation runs at.
        operation: the operation's name.
        node: the label of the node in the pipeline.
        frame: the execution that the call belongs to.
        attempt: the number of the attempt, counted from 1.
        trace: its span, if the job is traced; :meth:`span` opens others in it.
    """

    __slots__ = ("_caller", "_on_start", "attempt", "frame", "job_id", "node", "operation", "site", "trace")

    def __init__(
        self,
        job_id: str,
        site: str,
        operation: str,
        node: str,
        frame: Frame,
        attempt: int,
        caller: Caller,
        trace: TracedCall | None = None,
    ) -> None:
        self.job_id: str = job_id
        self.site: str = site
        self.operation: str = operation
        self.node: str = node
        self.frame: Frame = frame
        self.attempt: int = attempt
        self._caller = caller
        self._on_start: Callable[[], None] | None = None
        self.trace: TracedCall | None = trace

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled. A long-running synchronous operation should check this, and return."""
        return self._caller.stopping

    @property
    def idempotency_key(self) -> str:
        """The unique key of the call: the same in each attempt, and when the job runs again or is resumed."""
        return "/".join([self.job_id, self.node, ".".join(map(str, self.frame))])

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report the progress of the operation; ``job.events()`` yields it as ``Progress``. Never waits.

        More than twenty reports per second are coalesced: the latest one is sent.

        Args:
            done: the completed amount, in any unit.
            total: the total amount, if it is known.
            note: a text about the current step.
        """
        amount = float(done)  # in the operation's own thread: what is wrong with it is raised there
        whole = None if total is None else float(total)
        self._caller.progress(self.node, self.frame, amount, whole, plain_text(str(note)))

    def metrics(self, values: Mapping[str, Any], step: SupportsIndex | None = None) -> None:
        """Report metrics; ``job.events()`` yields each report as ``Metrics``. Never waits; any thread may call it.

        Unlike progress, reports are never coalesced: each is one event, in the order of the calls. If the worker is
        lost and the parameter set runs again, it reports its metrics again.

        Args:
            values: numbers, strings and booleans by name; numpy scalars are converted to Python ones.
            step: the step that they belong to, if the operation counts steps.

        Raises:
            TypeError: a name is not a string, a value is none of these, or the step is not a whole number.
            ValueError: an integer needs more than 64 bits.
        """
        self._caller.add_event(Metrics(0, self.frame, self.site, self.node, plain_values(values), plain_step(step)))

    def span(self, name: str, /, **attributes: Any) -> UserSpan:
        """Return a span for a part of the operation, which lasts as long as its ``with`` block; any thread may open it.

        It is a part of the span around it: that of the operation, or another one that is open in the same task or
        thread. An exception that leaves the block is recorded. Does nothing if the job is not traced::

            with context.span("download", url=url) as span:
                data = await fetch(url)
                span.set(size=len(data))

        Args:
            name: the name of the span, which should be the same each time.
            attributes: numbers, strings and booleans by name.

        Raises:
            TypeError: an attribute is none of these.
            ValueError: an integer needs more than 64 bits.
        """
        return NO_SPAN if self.trace is None else RecordedSpan(self.trace, name, attributes)

    async def send_to_place(self, place: str, value: Any, *, job: str, key: str | None = None) -> None:
        """Send a value to a parameter of another job that is open for more; return when that job has accepted it.

        When all parameters of the other job's pipeline, including those with a default, have been sent with the same
        key, they form a new parameter set. In a synchronous operation: ``context.wait(context.send_to_place(...))``.

        Args:
            place: the name of the other pipeline's parameter.
            value: the value.
            job: the id of the other job.
            key: identifies the values of one parameter set; by default, these are the values that one job sends in one
                frame.

        Raises:
            TypeError: a name is not a string.
            RuntimeError: the other job is not running, accepts no more parameter sets, has no such parameter, or the
                value does not fit.
            EncodingError: the value cannot be sent.
        """
        for name, text in (("place", place), ("job", job), ("key", key)):
            if not isinstance(text, str) and not (name == "key" and text is None):
                raise TypeError(f"{name} must be a string, not {text!r}")
        if key is None:
            key = f"{self.job_id}:{'.'.join(map(str, self.frame))}"
        await self._caller.send_to_place(job, place, key, value)

    async def secret(self, key: str) -> Any:
        """Return a secret from the site's vault. From then on it is redacted in all text that leaves the process.

        Do not store it: the next call should request it again. In a synchronous operation:
        ``context.wait(context.secret("key"))``.

        Args:
            key: the name of the secret.

        Raises:
            SecretError: there is no such secret, or the vault does not work.
        """
        return await self._caller.secret(key)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the site's loop, and wait for it. Only for synchronous operations, in their thread.

        Raises:
            RuntimeError: the job was cancelled, or this is the loop's own thread.
        """
        return self._caller.wait(work)

    def cache_storage(self, subpath: str | None = None) -> UPath:
        """Return the directory in which this site keeps files between jobs, or one inside it; it exists.

        It is a :class:`upath.UPath`: it has the methods of :class:`pathlib.Path`, on the file system that the
        :class:`~dfm_async.federation.CacheConfig` of the site names. They do I/O: use them in synchronous operations,
        or in a thread.

        Args:
            subpath: a path inside the directory.

        Raises:
            ValueError: the subpath leads out of the directory, or the file system is unknown.
            OSError: the directory cannot be created.
        """
        return self._caller.cache_storage(subpath)

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds the job, the site, the frame, the node and the operation to every record."""
        extra = {
            "job": self.job_id,
            "site": self.site,
            "frame": self.frame,
            "node": self.node,
            "operation": self.operation,
        }
        return logging.LoggerAdapter(logging.getLogger(f"dfm_async.site.{self.site}"), extra)

    def __repr__(self) -> str:
        return f"<OperationContext {self.node} at {self.site!r}, job {self.job_id}, frame {self.frame}>"


def caller_of(context: OperationContext) -> Caller:
    """Return the job that a call belongs to; for operations that every site has."""
    return context._caller  # noqa: SLF001 - same module


def on_start(context: OperationContext, call: Callable[[], None]) -> None:
    """Have a function called when the code of a call begins; until then, the call waits."""
    context._on_start = call  # noqa: SLF001 - same module


def call_started(context: OperationContext) -> None:
    """Report that a call begins which has waited so far, for instance for a free process of an external program."""
    call = context._on_start  # noqa: SLF001 - same module
    if call is not None:
        call()


def fresh(context: OperationContext) -> Context:
    """Return a context of contextvars for a call: an operation sees nothing of the code that happens to drive it."""
    found = Context()
    found.run(_current.set if context.trace is None else enter, context)
    return found


def enter(context: OperationContext) -> Callable[[], None]:
    """Make a context the current one. Return a function that undoes that."""
    token = _current.set(context)
    if context.trace is None:
        return lambda: _current.reset(token)
    leave = current.enter_position(context.trace.position)
    return lambda: _leave(token, leave)


def resumable(context: OperationContext) -> Callable[[], Callable[[], None]]:
    """Return a function that enters the context each time that code runs on, such as a generator, in whatever task."""
    if context.trace is None:
        return functools.partial(enter, context)
    enter_span = current.resumable(context.trace.position)

    def enter_both() -> Callable[[], None]:
        token, leave = _current.set(context), enter_span()
        return lambda: _leave(token, leave)

    return enter_both


def _leave(token: Token[OperationContext | None], leave: Callable[[], None]) -> None:
    leave()
    _current.reset(token)


def current_context() -> OperationContext:
    """Return the context of the call that is running.

    Raises:
        LookupError: no operation is running here.
    """
    found = _current.get()
    if found is None:
        raise LookupError("current_context() works only in an operation that a job calls: none is running here")
    return found
