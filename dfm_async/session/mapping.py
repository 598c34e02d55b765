"""Maps: one operation over many inputs, as one job whose parameter sets are streamed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from dfm_async.base.signals import Signal
from dfm_async.base.tasks import OwnedTasks, completed
from dfm_async.errors import DfmError, EncodingError, JobFailed, ParameterError
from dfm_async.model.status import JobStatus
from dfm_async.results.log import LogReader
from dfm_async.runtime.operation_errors import cancel_task, is_our_cancellation, ordinary
from dfm_async.session.job import Job
from dfm_async.session.map_window import MapWindow
from dfm_async.session.stream import ClosableIterator, ResultStream

V = TypeVar("V")

INPUTS: Final = "inputs"
"""The parameter of a map's pipeline: the list of some inputs."""
CHUNK: Final = 64
"""The largest number of inputs that are sent together."""
_PULLING: Final = 0.005
"""After how many seconds of pulling from a slow iterable the inputs are sent."""
_BATCH: Final = 256
"""The number of events that are read at once."""
_LIGHT: Final = frozenset({type(None), bool, int, float, complex})
_SHORT: Final = 1024

Check = Callable[[Any], tuple[Any, str | None]]
"""Checks an input: returns it as the operation declares it, and what is wrong with it, or None."""


def single_error(error: JobFailed) -> DfmError:
    """Return the error of a job that failed with only one, or else the error of the job."""
    return error.errors[0] if error.count == len(error.errors) == 1 else error


class ValueOrError(Generic[V]):
    """What has become of a call.

    Attributes:
        error: why there is no value; None if there is one.
    """

    __slots__ = ("_value", "error")

    def __init__(self, value: V, error: Exception | None) -> None:
        self.error = error
        self._value = value

    @property
    def value(self) -> V:
        """The value. Getting it raises the error of a call that has failed."""
        if self.error is not None:
            raise self.error
        return self._value

    def _described(self, name: str, key: object) -> str:
        what = f"value={self._value!r}" if self.error is None else f"error={self.error!r}"
        return f"{type(self).__name__}({name}={key!r}, {what})"


def _noted(error: DfmError, index: int) -> DfmError:
    """Return the error of an input with a note that names it. That of a whole set is the error of several inputs."""
    if hasattr(error, "__notes__"):
        cause, error = error.__cause__, copy.copy(error)
        error.__cause__ = cause
        del error.__notes__
    error.add_note(f"input {index} of session.map")
    return error


class MapItem(ValueOrError[V]):
    """What a map has made of one input, with ``errors="yield"``.

    Attributes:
        index: the position of the input, counted from 0.
        error: why there is no value; None if there is one.
    """

    __slots__ = ("index",)
    error: DfmError | None

    def __init__(self, index: int, value: V, error: DfmError | None) -> None:
        super().__init__(value, error)
        self.index: int = index

    def __repr__(self) -> str:
        return self._described("index", self.index)


def is_light(value: Any, depth: int = 2) -> bool:
    """Return whether a value is certainly small."""
    kind = type(value)
    if kind in _LIGHT:
        return True
    if kind is str or kind is bytes:
        return len(value) < _SHORT
    if depth and (kind is tuple or kind is list or kind is dict) and len(value) <= 16:
        return all(is_light(part, depth - 1) for part in (value.values() if kind is dict else value))
    return False


class MapInputs:
    """The parameter sets of a map: inputs, pulled as the window allows, checked, and several of them in one set.

    Args:
        iterables: where the inputs come from; each input has an element of all of them.
        window: how many may be pulled.
        check: checks an input.
        heavy: returns whether an input should have a parameter set of its own.
        chunk: the largest number of inputs in one set.
    """

    def __init__(
        self,
        iterables: Sequence[Any],
        window: MapWindow,
        *,
        check: Check | None,
        heavy: Callable[[Any], bool],
        chunk: int = CHUNK,
    ) -> None:
        self.error: Exception | None = None
        """What an iterable has raised."""
        self.closed = asyncio.Event()
        """Set when the iterables are closed."""
        self.changed = Signal()
        """Notified when the window may have room."""
        self.on_reject: Callable[[], object] | None = None
        """Is called when an input is wrong."""
        self._window = window
        self._check = check
        self._heavy = heavy
        self._chunk = chunk
        self._pulled: deque[Any] = deque()
        self._ended = False
        self._block = 1
        self._tasks = OwnedTasks()
        self._pump_task: asyncio.Task[None] | None = None
        self._sources: list[Any] = [
            aiter(found) if isinstance(found, AsyncIterable) else iter(found) for found in iterables
        ]
        self._sync: Iterator[Any] | None = None
        if not any(isinstance(source, AsyncIterator) for source in self._sources):
            self._sync = self._sources[0] if len(self._sources) == 1 else zip(*self._sources)  # noqa: B905 - as map

    def __aiter__(self) -> MapInputs:
        return self

    async def __anext__(self) -> dict[str, list[Any]]:
        while True:
            room = min(self._window.room, self._chunk)
            if room > 0 and not self._pulled and not self._ended:
                self._pull(room)
            if room > 0 and self._pulled:
                inputs = self._take(room)
                if inputs:
                    self._window.open(len(inputs))
                    return {INPUTS: inputs}
            elif self._ended and not self._pulled:
                raise StopAsyncIteration
            else:
                await self.changed.wait()

    def _take(self, room: int) -> list[Any]:
        """Take inputs that go into one set: light ones, up to the next that is wrong."""
        inputs: list[Any] = []
        pulled, check = self._pulled, self._check
        while pulled and len(inputs) < room:
            found, wrong = (pulled[0], None) if check is None else check(pulled[0])
            heavy = False
            if wrong is None and not is_light(found):
                try:
                    heavy = self._heavy(found)
                except EncodingError as error:
                    wrong = str(error)
            if inputs and (heavy or wrong is not None):
                break
            pulled.popleft()
            if wrong is None:
                inputs.append(found)
            else:
                self._window.reject(ParameterError([f"input {self._window.pulled}: {wrong}"]))
                if self.on_reject is not None:
                    self.on_reject()
            if heavy or wrong is not None:
                break
        return inputs

    def _pull(self, room: int) -> None:
        if self._sync is None:
            if self._pump_task is None:
                self._pump_task = self._tasks.spawn(self._pump(), "dfm_async map")
            return
        began = last = time.perf_counter()
        try:
            while len(self._pulled) < room and last - began < _PULLING:
                before = len(self._pulled)
                wanted = min(self._block, room - before)
                self._pulled.extend(itertools.islice(self._sync, wanted))
                if len(self._pulled) - before < wanted:
                    self._ended = True
                    return
                now = time.perf_counter()
                self._block = min(2 * self._block, CHUNK) if now - last < 0.001 else 1
                last = now
        except BaseException as error:  # noqa: BLE001 - of the application's iterable; raised again where it is read
            self.error, self._ended = ordinary(error, "the inputs"), True

    async def _pump(self) -> None:
        """Pull from asynchronous iterables: those that do not wait fill a whole set at once."""
        single = len(self._sources) == 1
        try:
            while True:
                while len(self._pulled) >= min(self._window.room, self._chunk):
                    await self.changed.wait()
                found = [
                    await anext(source) if isinstance(source, AsyncIterator) else next(source)
                    for source in self._sources
                ]
                self._pulled.append(found[0] if single else tuple(found))
                self.changed.notify()
        except (StopAsyncIteration, StopIteration):
            pass
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            self.error = ordinary(error, "the inputs")  # of the application's iterable; raised again where it is read
        finally:
            self._ended = True
            self.changed.notify()

    async def aclose(self) -> None:
        """Close the iterables, as far as they can be closed. Safe to call more than once."""
        self._ended = True
        try:
            if self._pump_task is not None:
                cancel_task(self._pump_task)
            await self._tasks.close()
            for source in self._sources:
                if isinstance(source, AsyncIterator):
                    if (close := getattr(source, "aclose", None)) is not None:
                        await close()
                elif isinstance(source, Generator):
                    source.close()
        finally:
            self.closed.set()


class MapStream(ClosableIterator, Generic[V]):
    """The values of :meth:`~dfm_async.Session.map`. The job starts with the first item.

    It ends with the last value. Closing it, or leaving a loop over it, cancels what is in flight and closes the inputs.
    Several tasks may iterate over it: each value goes to one of them.
    """

    def __init__(
        self,
        inputs: MapInputs,
        window: MapWindow,
        *,
        start: Callable[[MapInputs], Coroutine[Any, Any, Job]],
        halt: Callable[[str, str], object],
        grace: float,
        errors: str,
    ) -> None:
        self._inputs = inputs
        self._window = window
        self._start = start
        self._halt = halt
        self._grace = grace
        self._yields = errors == "yield"
        self._job: Job | None = None
        self._stream: ResultStream | None = None
        self._reader: LogReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._failed: BaseException | None = None
        self._beginning = asyncio.Lock()

    @property
    def job(self) -> Job | None:
        """The job that runs the calls; None before the first item."""
        return self._job

    async def __anext__(self) -> V:
        window = self._window
        while not window.ready:
            if self._closed:
                failed, self._failed = self._failed, None
                if failed is not None:
                    raise failed
                raise StopAsyncIteration
            reader = self._reader or await self._begin()
            if reader is None:
                continue
            events = await reader.take(_BATCH)
            if self._reader is not reader:
                continue  # another task has closed it
            if events is None:
                await self._end()
            elif events:
                window.take(events)
        index, value, error = window.ready.popleft()
        if self._inputs.changed:
            self._inputs.changed.notify()
        if error is not None:
            error = _noted(error, index)
        if self._yields:
            return MapItem(index, value, error)  # type: ignore[return-value] # what V is then
        if error is not None:
            window.ready.clear()
            await self.aclose()
            raise error
        return value  # type: ignore[no-any-return]

    async def _begin(self) -> LogReader | None:
        """Start the job, unless another task has done so meanwhile; return the reader, unless it was closed again."""
        async with self._beginning:
            if self._reader is not None or self._closed:
                return self._reader
            self._loop = asyncio.get_running_loop()
            try:
                job = self._job = await self._start(self._inputs)
            except BaseException:
                self._closed = True
                await completed(self._inputs.aclose())
                raise
            stream = self._stream = job.results()
            reader = self._reader = stream.attach()
            self._inputs.on_reject = reader.log.changed.notify
            return reader

    async def _end(self) -> None:
        """Note that the job has ended, and why values are missing, if they are."""
        job, window = self._job, self._window
        assert job is not None  # noqa: S101 - it has ended
        if job.status is JobStatus.FINISHED:
            window.flush()
        self._failed = self._inputs.error
        if window.unfinished or job.status not in (JobStatus.FINISHED, JobStatus.FAILED):
            try:
                await job
            except JobFailed as error:
                self._failed = single_error(error)
            except DfmError as error:
                self._failed = error
        await self._release()

    async def _release(self) -> None:
        self._closed = True
        self._reader = None
        if self._stream is not None:
            await self._stream.aclose()

    async def aclose(self) -> None:
        """Cancel what is in flight, and close the inputs. Safe to call more than once.

        Returns when nothing of the job runs any longer.
        """
        job, closed = self._job, self._closed
        await self._release()
        self._window.ready.clear()
        self._failed = None
        if job is None:
            await self._inputs.aclose()
        elif not closed:
            await completed(job.cancel("the map was closed", self._grace))
            await self._inputs.closed.wait()

    def __del__(self) -> None:
        job, loop = self._job, self._loop
        if job is not None and loop is not None and not self._closed and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._halt, job.job_id, "the map was left")
