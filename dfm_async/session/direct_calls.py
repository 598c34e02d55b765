"""Calls of single operations, without a pipeline of one's own: each is an ordinary job on a plan that is kept."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeAlias, TypeVar, overload

from dfm_async.base.containers import BoundedDict
from dfm_async.base.tasks import completed
from dfm_async.engine.target import Target
from dfm_async.errors import EncodingError, JobFailed, ParameterError, PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.federation.namespace import PlacedOperation
from dfm_async.federation.operation import DIRECT, GENERATORS, RESERVED, Operation
from dfm_async.federation.schemas import plain_data
from dfm_async.federation.site import Site
from dfm_async.language.builder import ForEach, PlaceParam, Yield
from dfm_async.language.current_pipeline import current_builder
from dfm_async.language.pipeline import Pipeline
from dfm_async.language.statements import BestOf
from dfm_async.model.job_spec import FRAME_WINDOW
from dfm_async.model.options import LocalOptions
from dfm_async.model.policies import RetryPolicy
from dfm_async.model.signatures import unknown_keyword
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import CANONICAL
from dfm_async.planning.types import validate
from dfm_async.session.broadcast import Ask, EachStream, LateReplies
from dfm_async.session.job import Job
from dfm_async.session.map_window import MapWindow
from dfm_async.session.mapping import CHUNK, INPUTS, Check, MapInputs, MapItem, MapStream, single_error
from dfm_async.wire.codec import weight

if TYPE_CHECKING:
    from dfm_async.federation.call_types import Takes
    from dfm_async.session.submission import Params

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")
V = TypeVar("V")

_PIPELINES: Final = 128
_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Inputs: TypeAlias = Iterable[A] | AsyncIterable[A]
"""Where the inputs of a map come from."""
SiteChoice: TypeAlias = str | Site | BestOf
"""A site, its name, or a choice of sites."""


class CallPipelines:
    """The pipelines of direct calls: one per operation, options, and form of its arguments. The newest are kept."""

    def __init__(self) -> None:
        self._known: BoundedDict[Hashable, tuple[Pipeline, tuple[str, ...], object]] = BoundedDict(_PIPELINES)

    def mapping(self, operation: Operation[..., Any, Any], options: Mapping[str, Any], count: int) -> Pipeline:
        """Return the pipeline that calls an operation with each input of a list, which has ``count`` elements."""
        get = options.get
        key = ("map", operation, count, get("site"), get("provider"), get("retry"), get("deadline"))
        known = self._known.use(key)
        if known is None or known[2] is not operation.__signature__:
            known = self._known[key] = mapped(operation, options, count, {}), (), operation.__signature__
        return known[0]

    def of(
        self,
        operation: Operation[..., Any, Any],
        options: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Pipeline, dict[str, Any]]:
        """Return the pipeline that calls an operation and yields its value, and its parameters for these arguments.

        Raises:
            TypeError: the arguments do not fit the operation.
        """
        get = options.get
        key = (operation, len(args), *kwargs, get("site"), get("provider"), get("retry"), get("deadline"))
        known = self._known.use(key)
        if known is not None and known[2] is operation.__signature__:
            pipeline, names, _ = known
            if names:
                return pipeline, {**dict(zip(names, args, strict=True)), **kwargs}
        params = operation.bind(args, kwargs, options=DIRECT)
        if known is None or known[2] is not operation.__signature__:
            pipeline = _calling(operation, tuple(params), options)
            names = tuple(params)[: len(args)] if _is_plain(operation) else ()
            self._known[key] = pipeline, names, operation.__signature__
        return pipeline, params


def _calling(operation: Operation[..., Any, Any], names: Sequence[str], options: Mapping[str, Any]) -> Pipeline:
    with Pipeline(operation.name) as pipeline:
        builder = current_builder()
        assert builder is not None  # noqa: S101 - the block is open
        Yield(builder.call(operation.name, {name: PlaceParam(name) for name in names}, **options))
    return pipeline


def mapped(
    operation: Operation[..., Any, Any], options: Mapping[str, Any], count: int, constants: Mapping[str, Any]
) -> Pipeline:
    """Return the pipeline that calls an operation with each input of a list, and with constants.

    Raises:
        TypeError: the arguments do not fit the operation.
    """
    with Pipeline(operation.name) as pipeline:
        builder = current_builder()
        assert builder is not None  # noqa: S101 - the block is open
        with ForEach(PlaceParam(INPUTS)) as found:
            args = [found] if count == 1 else [found[at] for at in range(count)]
            Yield(builder.call(operation.name, operation.bind(args, constants, options=DIRECT), **options))
    return pipeline


def checked_constants(operation: Operation[..., Any, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are the same for all calls of a map, as the operation declares them.

    Raises:
        ParameterError: with everything that is wrong.
    """
    parameters, types = operation.signature.parameters.parameters, operation.signature.types
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in given.items():
        own = name in parameters and parameters[name].kind not in _VARIABLE
        plain = value if operation.declaration is None else plain_data(value)
        found[name], wrong = validate(types.get(name, Any) if own else Any, plain)
        if wrong is None:
            try:
                CANONICAL.pack(found[name])
            except EncodingError as error:
                wrong = str(error)
        if wrong is not None:
            problems.append(f"parameter {name!r}: {wrong}")
    if problems:
        raise ParameterError(problems)
    return found


def check_of(operation: Operation[..., Any, Any], count: int, constants: Mapping[str, Any]) -> Check | None:
    """Return what checks an input of a map against the types that the operation declares; None if it declares none."""
    markers = [object() for _ in range(count)]
    names = {id(value): name for name, value in operation.bind(markers, constants).items()}
    types = operation.signature.types
    hints = [types.get(names[id(marker)], Any) if id(marker) in names else Any for marker in markers]
    plain = operation.declaration is None
    if plain and all(hint is Any for hint in hints):
        return None

    labels = [names.get(id(marker), "") for marker in markers]

    def one(value: Any, hint: Any, name: str) -> tuple[Any, str | None]:
        if type(value) is hint:
            return value, None
        found, wrong = validate(hint, value if plain else plain_data(value))
        return found, wrong and f"parameter {name!r}: {wrong}"

    def several(value: tuple[Any, ...]) -> tuple[Any, str | None]:
        found = [one(*found) for found in zip(value, hints, labels, strict=True)]
        wrong = next((wrong for _, wrong in found if wrong is not None), None)
        return tuple(part for part, _ in found), wrong

    return several if count > 1 else lambda value: one(value, hints[0], labels[0])


def _is_plain(operation: Operation[..., Any, Any]) -> bool:
    """Return whether arguments are passed on as they are, each to a parameter of its own."""
    parameters = operation.call_signature.parameters.values()
    return operation.declaration is None and all(found.kind not in _VARIABLE for found in parameters)


def chosen(given: object, method: str, kwargs: dict[str, Any]) -> tuple[Operation[..., Any, Any], dict[str, Any]]:
    """Return the operation that was passed to a method, and the options of the call, taken out of the keywords.

    Parameters of the operation come before options of the same name.

    Raises:
        TypeError: it is not an operation.
    """
    placed = given if isinstance(given, PlacedOperation) else None
    if placed is not None:
        if "site" in kwargs:
            raise TypeError(f"{given!r} is fixed to its site: leave site= out")
        given = placed.operation
    if not isinstance(given, Operation):
        if isinstance(given, Pipeline):
            hint = "use session.run or session.execute for pipelines"
        elif callable(given):
            hint = "offer it at a site, with @site.operation"
        else:
            hint = f"pass the operation itself, then its arguments: session.{method}(operation, ...)"
        raise TypeError(f"{method} takes an operation of the federation, not {given!r}: {hint}")
    if not kwargs:  # the usual case
        return given, {} if placed is None else {"site": placed.site}
    options: dict[str, Any] = {}
    own = given.signature.parameters.parameters
    if (others := (RESERVED - DIRECT - own.keys()) & kwargs.keys()) and not _is_open_ended(given):
        what = f"{min(others)}= is an option of calls in pipelines only: write a pipeline, or leave it out"
        raise TypeError(f"{method} of operation {given.name!r}: {what}")
    if named := DIRECT & kwargs.keys():
        found = {name: kwargs.pop(name) for name in named if name not in own}
        options = {name: value for name, value in found.items() if value is not None}
        if isinstance(site := options.get("site"), Site):
            options["site"] = site.name
    if placed is not None:
        options["site"] = placed.site
    return given, options


def _is_open_ended(operation: Operation[..., Any, Any]) -> bool:
    """Return whether an operation takes any keyword as an argument."""
    return any(found.kind is found.VAR_KEYWORD for found in operation.call_signature.parameters.values())


async def call_value(job: Job, grace: float) -> Any:
    """Return the value of a job that calls one operation, or raise its error."""
    try:
        return await value_of(job, None, grace)
    except JobFailed as error:
        failed = single_error(error)
    raise failed


async def value_of(job: Job, place: str | None, grace: float) -> Any:
    """Return the only result of a job with one parameter set, or the list of a stream's elements.

    Cancelled, it cancels the job, and returns when nothing of the job is running any more.
    """
    try:
        async with job.results(place) as results:
            found = [result async for result in results]
    except asyncio.CancelledError:
        await completed(job.cancel("the call was cancelled", grace))
        raise
    if len(found) == 1 and len(found[0].frame) == 1:
        return found[0].value
    found.sort(key=lambda result: result.frame)
    return [result.value for result in found]


class DirectCalls(ABC):
    """The methods of a session that call operations directly."""

    federation: Federation
    options: LocalOptions

    def __init__(self) -> None:
        self._pipelines = CallPipelines()
        self._late = LateReplies()

    @abstractmethod
    async def execute(self, pipeline: Pipeline, input_params: Params, *, concurrency: int | None = None) -> Job:
        """Start a job."""

    @property
    @abstractmethod
    def target(self) -> Target:
        """The target that runs the jobs."""

    @abstractmethod
    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the session."""

    def _halt(self, job_id: str, reason: str) -> None:
        """Stop a job, without waiting for its end."""
        coordinator = self.target.jobs.coordinator(job_id)
        if coordinator is not None:
            coordinator.halt(JobStatus.ABORTED, reason, self.options.cancel_grace)

    @overload
    async def call(self, operation: Operation[P, Any, V], /, *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    async def call(self, operation: type[Any], /, *args: Any, **kwargs: Any) -> Any: ...  # of a decorated class
    @overload
    async def call(
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
    async def call(
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
    async def call(
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
    async def call(
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
    async def call(self, operation: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call one operation, and return its value: ``await session.call(anomaly, 17.0)``.

        Each call is an ordinary job; its plan is prepared once per operation. A generator, or a function that returns
        an iterator, returns the list of its elements. Cancelling the call cancels the job, and waits until nothing of
        the job is running any more.

        Args:
            operation: the operation.
            args: its arguments.
            site: where it runs, if several sites offer it: a site, its name, or ``BestOf([...])``.
            provider: the provider whose code runs, if the site has several providers.
            retry: the retry policy of the call.
            deadline: the number of seconds that one attempt may take; waiting for a thread does not count. To limit the
                total time, use ``asyncio.timeout``.
            kwargs: its arguments by name.

        Raises:
            OperationFailed: the operation raised; the original exception is the ``__cause__``, if it could be sent.
            PipelineError: no site offers it.
            ParameterError: an argument has the wrong type, or cannot be sent.
            TypeError: arguments are missing or unknown.
            JobAborted: the process that ran it was lost, or the session was closed.
        """
        found, options = chosen(operation, "call", kwargs)
        pipeline, params = self._pipelines.of(found, options, args, kwargs)
        job = await self.execute(pipeline, params)
        return await call_value(job, self.options.cancel_grace)

    @overload
    def map(
        self,
        operation: Takes[A, B, C, V],
        first: Inputs[A],
        second: Inputs[B] = ...,
        third: Inputs[C] = ...,
        /,
        *more: Inputs[Any],
        errors: Literal["raise"] = "raise",
        concurrency: int | None = None,
        ordered: bool = True,
        **kwargs: Any,
    ) -> MapStream[V]: ...
    @overload
    def map(
        self,
        operation: Takes[A, B, C, V],
        first: Inputs[A],
        second: Inputs[B] = ...,
        third: Inputs[C] = ...,
        /,
        *more: Inputs[Any],
        errors: Literal["yield"],
        concurrency: int | None = None,
        ordered: bool = True,
        **kwargs: Any,
    ) -> MapStream[MapItem[V]]: ...
    @overload
    def map(self, operation: type[Any], /, *iterables: Inputs[Any], **kwargs: Any) -> MapStream[Any]: ...
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
        """Call an operation with each element of an iterable: ``async for value in session.map(anomaly, values)``.

        The map is one job, which uses all cores of the site. Inputs are pulled as they are needed, so they may be
        infinite. Leaving the loop cancels the calls in flight and closes the inputs. ``aclose()`` and the end of a
        block ``async with session.map(...) as values`` do the same, and wait until nothing of the job is running any
        more.

        Args:
            operation: the operation.
            iterables: the positional arguments: iterables or async iterables; several, as for the builtin ``map``.
                Synchronous iterables are pulled on the event loop, so they should not block.
            concurrency: the maximum number of calls in flight, 256 by default. At most four times as many inputs are
                ahead of the last value that was read.
            ordered: whether to yield values in the order of the inputs, or as calls complete.
            errors: "raise" ends with the first call that fails; "yield" yields items with ``index``, ``value`` and
                ``error``, and continues.
            kwargs: further arguments, which are the same for all calls; and the options ``site``, ``provider``,
                ``retry`` and ``deadline``, as for :meth:`call`.

        Raises:
            ParameterError: an argument that is the same for all calls has the wrong type, or cannot be sent.
            TypeError: arguments are missing or unknown.
        """
        if errors not in ("raise", "yield"):
            raise ValueError(f"errors must be 'raise' or 'yield', not {errors!r}")
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            raise ValueError(f"concurrency must be a whole number, 1 or more, not {concurrency!r}")
        if not iterables:
            raise TypeError("map needs at least one iterable; use session.call for one call")
        for given in iterables:
            if not isinstance(given, AsyncIterable | Iterable) and not hasattr(given, "__getitem__"):
                hint = "use session.call for one call, and pass what is the same for all calls by name"
                raise TypeError(f"map takes iterables of inputs, not {given!r}: {hint}")
        found, options = chosen(operation, "map", kwargs)
        constants = checked_constants(found, kwargs)
        count, width = len(iterables), FRAME_WINDOW if concurrency is None else concurrency
        # Constants are a part of the pipeline, so that they are sent once and not with each input.
        pipeline = (
            mapped(found, options, count, constants) if constants else self._pipelines.mapping(found, options, count)
        )
        window, codec = MapWindow(width, ordered=ordered), self.target.codec
        streams = any(
            adapter.kind in GENERATORS
            for site in self.federation.sites.values()
            for (name, _), adapter in site.adapters.items()
            if name == found.name
        )
        inputs = MapInputs(
            iterables,
            window,
            check=check_of(found, count, constants),
            heavy=lambda value: weight(codec.pack(value)) > 0,
            chunk=1 if streams else CHUNK,
        )
        return MapStream(
            inputs,
            window,
            start=lambda sets: self.execute(pipeline, sets, concurrency=width),
            halt=self._halt,
            grace=self.options.cancel_grace,
            errors=errors,
        )

    @overload
    def each(self, operation: Operation[P, Any, V], /, *args: P.args, **kwargs: P.kwargs) -> EachStream[V]: ...
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
    ) -> EachStream[V]: ...
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
    ) -> EachStream[V]: ...
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
    ) -> EachStream[V]: ...
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
    ) -> EachStream[V]: ...
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
    ) -> EachStream[V]: ...
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
    ) -> EachStream[V]: ...
    @overload
    def each(self, operation: type[Any], /, *args: Any, **kwargs: Any) -> EachStream[Any]: ...
    def each(  # type: ignore[misc] # an operation cannot have parameters of these names
        self,
        operation: Any,
        /,
        *args: Any,
        at_least: int | None = None,
        within: float | None = None,
        late: Literal["discard", "keep"] = "discard",
        **kwargs: Any,
    ) -> EachStream[Any]:
        """Call an operation at every site that offers it: ``async for reply in session.each(train, model)``.

        Each site has a separate job, so that a site that fails or is lost does not affect the others. Yields the reply
        of each site as soon as it arrives, with ``site``, and ``value`` or ``error``. Leaving the loop cancels the
        calls in flight.

        Args:
            operation: the operation.
            args: its arguments, which are the same at all sites.
            at_least: the minimum number of sites that must reply with a value.
            within: the number of seconds after which sites that have not replied are cancelled; their replies have a
                ``TimeoutError``.
            late: what happens to calls without a reply when the loop ends. With ``"keep"``, the loop ends when
                ``at_least`` sites have replied with a value, or after ``within`` seconds; the other calls continue, and
                the next round of the operation with ``late="keep"`` yields their replies, with ``reply.late``. A site
                is not called again before it has replied.
            kwargs: its arguments by name; and the options ``provider``, ``retry`` and ``deadline``, as for
                :meth:`call`.

        Raises:
            NotEnoughReplies: at the end, fewer sites than ``at_least`` have replied with a value.
            ParameterError: an argument has the wrong type, or cannot be sent.
            PipelineError: no site offers the operation.
            TypeError: arguments are missing or unknown.
        """
        found, options = chosen(operation, "each", kwargs)
        if "site" in options:
            raise TypeError("each calls every site that offers the operation: leave site= out, or use session.call")
        if within is not None and not within > 0:
            raise ValueError(f"within must be a positive number of seconds, not {within!r}")
        if late not in ("discard", "keep"):
            raise ValueError(f'late must be "discard" or "keep", not {late!r}')
        provider = options.get("provider")
        sites = [site for site in self.federation.sites.values() if site.adapter(found.name, provider) is not None]
        if not sites:
            raise PipelineError(found.name, [Problem("each", f"no site offers operation {found.name!r}")])
        if at_least is not None and not (isinstance(at_least, int) and 1 <= at_least <= len(sites)):
            raise ValueError(f"at_least must be from 1 to {len(sites)}, the number of sites, not {at_least!r}")

        def asking(site: str) -> Ask:
            pipeline, params = self._pipelines.of(found, {**options, "site": site}, args, kwargs)

            async def ask() -> Any:
                return await call_value(await self.execute(pipeline, params), self.options.cancel_grace)

            return ask

        asked = {site.name: asking(site.name) for site in sites}
        keep = functools.partial(self._late.begin, (found.name, provider)) if late == "keep" else None
        return EachStream(asked, at_least=at_least, within=within, spawn=self._spawn, keep=keep)

    async def run(self, pipeline: Pipeline[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a pipeline made from a function, and return its result: ``await session.run(report, day="mon")``.

        The run is an ordinary job with one parameter set. Results of other places are not returned: use :meth:`execute`
        to read them. Cancelling the call cancels the job, and waits until nothing of the job is running any more.

        Args:
            pipeline: the pipeline, made by :meth:`Federation.pipeline`.
            args: its parameters.
            kwargs: its parameters by name.

        Raises:
            JobFailed: operations have failed.
            JobAborted: a process was lost, or the session was closed.
            ParameterError: a parameter has the wrong type, or cannot be sent.
            PipelineError: the pipeline cannot be prepared.
            TypeError: parameters are missing or unknown, or the pipeline was not made from a function.
        """
        if not isinstance(pipeline, Pipeline) or pipeline.signature is None:
            hint = "use session.execute for other pipelines, and session.call for operations"
            raise TypeError(f"run takes a function that @federation.pipeline made a pipeline, not {pipeline!r}: {hint}")
        try:
            params = pipeline.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{pipeline.name}() {unknown_keyword(pipeline.signature, kwargs) or error}") from None
        job = await self.execute(pipeline, dict(params))
        found = await value_of(job, pipeline.result, self.options.cancel_grace)
        return found if pipeline.result is not None else None  # type: ignore[return-value]
