"""Registered pipelines as tools: their schemas, calls that are jobs, and what such a call returns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.base.tasks import completed
from dfm_async.language.functions import summary_text
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.events import Event, Failure, Progress, Result
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.results.event_codec import error_data
from dfm_async.web.access import Principal
from dfm_async.web.job_handlers import submit_job
from dfm_async.web.open_streams import JobReader, StreamPhase, StreamState
from dfm_async.web.pipeline_schemas import PipelineSchema, Schema
from dfm_async.web.requests import Submission
from dfm_async.web.state import Handlers, State

_REF: Final = "#/$defs/{model}"
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_ERRORS: Final = 20
"""The most errors that are reported of one call."""
_CANCELLED: Final = "the client of the tool call has cancelled it, or has disconnected"

Report: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""Sends a progress notification: a number that grows, the total if it is known, and a message."""


@dataclass(frozen=True, slots=True)
class PipelineTool:
    """A pipeline as a tool."""

    name: str
    title: str | None
    description: str
    schema: Schema


@dataclass(slots=True)
class ToolResult:
    """What a call returns: texts for the model, data for programs, and whether it has failed."""

    texts: list[str]
    data: dict[str, Any] | None = None
    failed: bool = False
    job_id: str | None = None


def check_names(pipelines: Iterable[str]) -> None:
    """Raise a ``ValueError`` if the name of a pipeline cannot be the name of a tool."""
    if wrong := [name for name in pipelines if not _TOOL_NAME.fullmatch(name)]:
        rule = "at most 128 letters, digits, . _ -"
        raise ValueError(f"the name {wrong[0]!r} of a pipeline cannot be that of a tool: use {rule}")


class ToolRequest:
    """One request of a client, from its first byte until its response is complete.

    Attributes:
        principal: whose request it is.
        state: the phase of the response; the reader of a job that the request waits for has the same.
        gone: is set when the client has disconnected, or reads nothing for too long.
    """

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.state = StreamState(self._changed)
        self.gone = asyncio.Event()
        self._reader: JobReader | None = None

    def follow(self, reader: JobReader) -> None:
        """Have a reader end with this exchange."""
        self._reader = reader
        self._changed()

    def end(self) -> None:
        """Note that there will be no response any longer: it is complete, or the client has disconnected."""
        self.state.reach(StreamPhase.GONE)

    def _changed(self) -> None:
        if self._reader is not None:
            self._reader.state.reach(self.state.phase)
        if self.state.gone:
            self.gone.set()


class Tools(Handlers):
    """The registered pipelines as tools."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        check_names(state.pipelines)
        self._known: dict[str, PipelineTool] = {}
        self._made_of: Mapping[str, Pipeline] | None = None

    async def prepare(self) -> None:
        """Make the tools, unless those of the registered pipelines are made already."""
        if self._made_of is self._state.pipelines:
            return
        schemas, definitions = await self._state.schemas(_REF)
        pipelines = self._made_of = self._state.pipelines
        self._known = {name: _tool(schema, pipelines[name], definitions) for name, schema in schemas.items()}

    def available(self, principal: Principal) -> list[PipelineTool]:
        """Return the tools that a principal may see."""
        self._state.guard.check(principal, "list")
        return list(self._known.values())

    def input_schema(self, name: str) -> Schema | None:
        """Return the schema of the arguments of a tool."""
        found = self._known.get(name)
        return None if found is None else found.schema

    async def call(
        self, exchange: ToolRequest, name: str, arguments: dict[str, Any], report: Report | None
    ) -> ToolResult:
        """Run a pipeline as a job of the principal, who may submit it, and return its results when it has ended.

        Cancelling the call cancels the job, and so does a client that disconnects.
        """
        state = self._state
        pipeline = state.pipelines[name]
        job = await submit_job(state, exchange.principal, pipeline, Submission(params=arguments))
        reader = JobReader(state.session, job, -1)
        try:
            exchange.follow(reader)
            answer = await self._follow(_ToolOutput(state, exchange.principal, pipeline, reader), report)
            if exchange.state.gone:
                await job.cancel(_CANCELLED)
        except BaseException as error:
            reason = _CANCELLED if isinstance(error, asyncio.CancelledError) else "the tool call failed"
            await completed(job.cancel(reason))
            raise
        finally:
            await reader.close()
        return answer

    async def _follow(self, call: _ToolOutput, report: Report | None) -> ToolResult:
        reader, reported = call.reader, 0
        while reader.state.open and not reader.interrupted:
            for event in await reader.follow(self._state.limits.heartbeat):
                message = call.take(event, report is not None)
                if report is not None and message is not None:
                    reported += 1
                    await report(reported, None, message)
        return call.answer()


class _ToolOutput:
    """Collects what a job yields, within the limits of one record."""

    def __init__(self, state: State, principal: Principal, pipeline: Pipeline, reader: JobReader) -> None:
        self.reader = reader
        self._state = state
        self._job = reader.job
        self._debug = state.guard.allows(principal, "debug", self._job.info())
        self._records = state.records.of(reader.log, self._debug)
        self._room = state.limits.record_bytes
        self._place = pipeline.result
        self._named = self._place is None and len(self._job.info().places) > 1
        self._results: list[Any] = []
        self._omitted = 0
        self._errors: list[str] = []
        self._more_errors = 0

    def take(self, event: Event, reported: bool) -> str | None:
        """Take an event of the job; return the message of the notification about it, if there is one."""
        if isinstance(event, Result):
            if self._place in (None, event.place):
                self._add(event)
            return self._records.message(event).decode() if reported else None
        if isinstance(event, Failure) and event.place is None:
            self._fail(event)
        elif isinstance(event, Progress) and reported:
            amount = f"{event.done:g}" if event.total is None else f"{event.done:g} of {event.total:g}"
            return f"{event.node} at {event.site}: {amount}" + (f", {event.note}" if event.note else "")
        return None

    def _add(self, event: Result) -> None:
        data = self._state.records.values.encode(event.value)
        if len(data) > self._room:
            self._omitted += 1
            self._room = 0  # results are omitted from the end, not from their middle
            return
        self._room -= len(data)
        value = msgspec.json.decode(data)
        self._results.append({"place": event.place, "value": value} if self._named else value)

    def _fail(self, event: Failure) -> None:
        if len(self._errors) >= _MOST_ERRORS:
            self._more_errors += 1
            return
        data = error_data(event.error, tracebacks=self._debug)
        text = f"{event.node} at site {event.site!r} raised {data['type']}: {data['message']}"
        self._errors.append(f"{text}\n\n{data['traceback'].rstrip()}" if "traceback" in data else text)

    def answer(self) -> ToolResult:
        """Return what the call returns."""
        info = self._job.info()
        data: dict[str, Any] = {"result": self._results[0]} if self._is_single() else {"results": self._results}
        if self._omitted:
            data["omitted"] = self._omitted
        if info.status is JobStatus.FINISHED and self.reader.state.phase is StreamPhase.ENDED:
            return ToolResult([*self._texts()] or ["the pipeline has ended without a result"], data, job_id=info.job_id)
        errors = [*self._errors, *([f"{self._more_errors} further errors"] if self._more_errors else [])]
        before = ["results before that:", *self._texts()] if self._results else []
        return ToolResult([self._end(info), *errors, *before], data if before else None, True, info.job_id)

    def _is_single(self) -> bool:
        return len(self._results) == 1 and not self._omitted and not self._named

    def _texts(self) -> Iterator[str]:
        """Return the results as texts for the model."""
        if self._is_single() and isinstance(self._results[0], str):
            yield self._results[0]
        elif self._results:
            yield msgspec.json.encode(self._results[0] if self._is_single() else self._results).decode()
        if self._omitted:
            yield f"{self._omitted} further results are omitted, because they are too large for one response"

    def _end(self, info: JobInfo) -> str:
        """Return how a job ended that has not finished, or why the call ended before it."""
        if info.status.ended:
            how = {JobStatus.FAILED: "the pipeline failed"}.get(info.status, f"the job was {info.status.value}")
            return f"{how}: {info.reason}" if info.reason else how
        if self._state.streams.draining:
            return f"the service is shutting down: the call ended before its job {info.job_id!r}"
        return f"the results of job {info.job_id!r} can no longer be read"


def _tool(schema: PipelineSchema, pipeline: Pipeline, definitions: Mapping[str, Schema]) -> PipelineTool:
    params = {name: part for name, part in schema.params.items() if name != "description"}
    if used := _used(params, definitions):
        params["$defs"] = {name: definitions[name] for name in sorted(used)}
    title = pipeline.name if pipeline.name != schema.name else None
    about = summary_text(pipeline.description) or f"Run the pipeline {schema.name!r}."
    return PipelineTool(schema.name, title, about, params)


def _used(schema: Schema, definitions: Mapping[str, Schema]) -> set[str]:
    """Return the names of the definitions that a schema refers to, also by way of others."""
    found: set[str] = set()
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix(_REF.format(model=""))
            if name in definitions and name not in found:
                found.add(name)
                stack.append(definitions[name])
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return found
