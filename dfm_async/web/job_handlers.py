"""Handlers: pipelines, and the jobs that run them: submit, show, steer and stream."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.errors import JobExists, PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline, is_dfm
from dfm_async.language.statements import SleepStatement, WaitStatement, walk_statements
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.endpoints import unless_disconnected
from dfm_async.web.limits import BodyUpload
from dfm_async.web.open_streams import StreamSlot
from dfm_async.web.requests import (
    Cancel,
    Fork,
    Inputs,
    Sent,
    Submission,
    WholePipeline,
    flag,
    on_disconnect,
    read_after,
    read_body,
)
from dfm_async.web.responses import Refusal, answer, info_data
from dfm_async.web.state import Handlers, State
from dfm_async.web.writers import ServerSentEventWriter

_MOST_NAMES: Final = 20
"""The most pipelines that the response for an unknown one names."""


@dataclass(frozen=True, slots=True)
class _StreamOrder:
    """How a client wants to have a stream."""

    principal: Principal
    after: int
    on_disconnect: str
    activity: bool
    status: int = 200


class JobHandlers(Handlers):
    """Answers requests about pipelines and jobs."""

    # pipelines

    async def pipelines(self, request: Request, _send: Send) -> Response:
        """List the registered pipelines with the schemas of their parameters and results."""
        await self._state.authorize(request, "list")
        schemas, definitions = await self._state.schemas("#/$defs/{model}")
        return answer({"pipelines": [asdict(schema) for schema in schemas.values()], "$defs": definitions})

    async def submit(self, request: Request, send: Send) -> Response | None:
        """Run a registered pipeline."""
        state = self._state
        principal = await state.authorize(request, "submit")
        pipeline = state.pipelines.get(request.path_params["name"])
        if pipeline is None:
            message = f"there is no pipeline {request.path_params['name']!r} here"
            known = sorted(state.pipelines) if state.guard.allows(principal, "list") else []
            names = ", ".join(known[:_MOST_NAMES]) + ", ..." * (len(known) > _MOST_NAMES)
            raise Refusal(404, "pipeline", f"{message}; there are: {names}" if known else message)
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Submission)
            return await self._run(request, send, principal, upload, pipeline, body)

    async def submit_pipeline(self, request: Request, send: Send) -> Response | None:
        """Run a pipeline that comes with the request, if that is allowed."""
        state = self._state
        principal = await state.authorize(request, "submit")
        if not state.allow_pipelines:
            raise Refusal(403, "pipelines", "only registered pipelines can be run here")
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, WholePipeline)
            pipeline = client_pipeline(body.pipeline, state.session.federation)
            return await self._run(request, send, principal, upload, pipeline, body)

    async def _run(
        self,
        request: Request,
        send: Send,
        principal: Principal,
        upload: BodyUpload,
        pipeline: Pipeline,
        body: Submission,
    ) -> Response | None:
        """Submit a job, and respond with its description, or with its events if the client accepts a stream."""
        activity = flag(request.query_params, "activity")
        if "text/event-stream" not in request.headers.get("accept", ""):
            if body.on_disconnect == "cancel":
                message = "on_disconnect needs a response that is a stream: accept text/event-stream"
                raise Refusal(422, "body", message)
            job = await submit_job(self._state, principal, pipeline, body)
            return answer(info_data(job.info()), 201)
        order = _StreamOrder(principal, -1, body.on_disconnect, activity, 201)
        with self._state.streams.slot(principal) as slot:
            job = await submit_job(self._state, principal, pipeline, body)
            upload.release()
            await self._stream(request, send, slot, job, order)
        return None

    # reading

    async def show(self, request: Request, _send: Send) -> Response:
        """Describe one job."""
        _, _, info = await self._state.job(request, "read")
        return answer(info_data(info))

    async def stream(self, request: Request, send: Send) -> Response | None:
        """Stream the events of a job."""
        state = self._state
        principal, job, info = await state.job(request, "read")
        activity = flag(request.query_params, "activity")
        gone = on_disconnect(request)
        if gone == "cancel":
            state.guard.check_job(principal, "cancel", info)
        after = read_after(request, info)
        if info.status.terminal and after >= info.events - 1:
            return Response(status_code=204)  # a browser does not reconnect after that
        with state.streams.slot(principal) as slot:
            await self._stream(request, send, slot, job, _StreamOrder(principal, after, gone, activity))
        return None

    async def _stream(self, request: Request, send: Send, slot: StreamSlot, job: Job, order: _StreamOrder) -> None:
        state = self._state
        async with slot.reading(state.session, job, order.after) as reader:
            headers = [(b"x-job-id", quote(job.job_id, safe="").encode())]
            records = state.records_for(order.principal, job.info(), reader.log)
            writer = ServerSentEventWriter((request.receive, send), reader, records, state.limits, order.activity)
            await writer.run(order.status, headers)
        if reader.state.gone and order.on_disconnect == "cancel":
            await job.cancel("the reader of its stream has gone")
        await writer.connection.keep(slot)

    # steering

    async def send(self, request: Request, _send: Send) -> Response:
        """Send further parameter sets to an open job."""
        state = self._state
        principal, job, info = await state.job(request, "send")
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Inputs)
            if not info.accepts and info.status is not JobStatus.INTERRUPTED:
                raise Refusal(409, "closed", "the job accepts no further parameter sets")
            with state.uploads.inputs(job.job_id):
                await unless_disconnected(request, job.send_input_params(body.params))
        if body.last:
            await job.send_stop_frame()
        return answer(info_data(job.info()), 202)

    async def send_event(self, request: Request, _send: Send) -> Response:
        """Send an event to a parameter set of a job."""
        state = self._state
        principal, job, info = await state.job(request, "send")
        if info.status.terminal:
            raise Refusal(409, "ended", f"the job is {info.status.value}: it takes no events")
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Sent)
        await job.send(request.path_params["event"], body.value, frame=body.frame)
        return answer(info_data(job.info()), 202)

    async def finish(self, request: Request, _send: Send) -> Response:
        """Close the inputs of a job: no further parameter sets will come."""
        _, job, _ = await self._state.job(request, "send")
        await job.send_stop_frame()
        return answer(info_data(job.info()), 202)

    async def resume(self, request: Request, _send: Send) -> Response:
        """Resume a job that was interrupted."""
        state = self._state
        principal, job, info = await state.job(request, "send")
        state.streams.check_draining()
        if info.status is not JobStatus.INTERRUPTED:
            raise Refusal(409, "not interrupted", f"the job is {info.status.value}: only interrupted jobs are resumed")
        with state.quota.reserve(principal, state.slots, waits=bool(job.plan.waits)):
            accept = flag(request.query_params, "accept_changes")
            job = await state.session.resume(job.job_id, watch=state.page, accept_changes=accept)
            state.quota.add(principal, job)
        return answer(info_data(job.info()), 202)

    async def retry(self, request: Request, _send: Send) -> Response:
        """Run the failed parameter sets of a job again, as a new job of the principal that requests it."""
        principal, job, info = await self._repeatable(request)
        if not info.status.terminal:
            message = f"the job is {info.status.value}: failed parameter sets can run again when it has ended"
            raise Refusal(409, "not ended", message)
        return await self._repeat(principal, job, job.retry_failed)

    async def fork(self, request: Request, _send: Send) -> Response:
        """Run a job again from a node on, as a new job of the principal that requests it."""
        principal, job, info = await self._repeatable(request)
        with self._state.uploads.upload(principal) as upload:
            body = await read_body(request, self._state.limits, upload, Fork)
        if not info.status.ended:
            raise Refusal(409, "not ended", f"the job is {info.status.value}: it can be forked when it has ended")
        submit = functools.partial(job.fork, body.from_node, body.frame, body.accept_changes)
        return await self._repeat(principal, job, submit)

    async def _repeatable(self, request: Request) -> tuple[Principal, Job, JobInfo]:
        """Return the job of a request by a principal who may run it again."""
        state = self._state
        await state.authorize(request, "submit")
        principal, job, info = await state.job(request, "read")
        state.guard.check_job(principal, "send", info)
        state.streams.check_draining()
        return principal, job, info

    async def _repeat(self, principal: Principal, job: Job, submit: Callable[..., Awaitable[Job]]) -> Response:
        """Submit a job that repeats another one, with a priority that the principal may have."""
        state = self._state
        priority = None if state.guard.allows(principal, "prioritize") else 0
        with state.quota.reserve(principal, state.slots, waits=bool(job.plan.waits)):
            again = await submit(label=principal.id, priority=priority, watch=state.page)
            state.quota.add(principal, again)
        return answer(info_data(again.info()), 201)

    async def forget(self, request: Request, _send: Send) -> Response:
        """Forget a job that has ended, with its events."""
        _, job, info = await self._state.job(request, "forget")
        if not info.status.ended:
            raise Refusal(409, "not ended", f"the job is {info.status.value}: cancel it, or wait for its end")
        await self._state.session.forget(job.job_id)
        return Response(status_code=204)

    async def cancel(self, request: Request, _send: Send) -> Response:
        """Cancel a job; respond when nothing of it runs any longer."""
        state = self._state
        principal, job, _ = await state.job(request, "cancel")
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Cancel)
        outcomes = await job.cancel(body.reason)
        return answer({**info_data(job.info()), "outcomes": outcomes})


async def submit_job(state: State, principal: Principal, pipeline: Pipeline, body: Submission) -> Job:
    """Run a pipeline as a job of a principal, who may submit jobs; refuse it if there are too many."""
    state.streams.check_draining()
    if body.priority > 0 and not state.guard.allows(principal, "prioritize"):
        raise Refusal(403, "forbidden", "you may not submit jobs with a priority above 0")
    if body.checkpoint == "calls" and not state.session._has_store:
        raise Refusal(422, "body", "the body is invalid", ["checkpoint: 'calls' needs a service with a store"])
    waits = any(isinstance(found, WaitStatement | SleepStatement) for found in walk_statements(pipeline.body))
    with state.quota.reserve(principal, state.slots, idle=body.open or body.params is None, waits=waits):
        job = await state.session.execute(
            pipeline,
            body.params,
            autostop=not body.open,
            job_id=body.job_id,
            priority=body.priority,
            deadline=body.deadline,
            start_at=body.start_at,
            on_error=body.on_error,
            checkpoint=body.checkpoint,
            label=principal.id,
            watch=state.page,
        )
        if job.info().label != principal.id:  # the id was taken, by an equal job of another principal
            raise JobExists(job.job_id)
        state.quota.add(principal, job)
    return job


def client_pipeline(data: dict[str, Any], federation: Federation) -> Pipeline:
    """Return the pipeline that a client sent: our own JSON, or DFM's.

    It may use nothing beyond the operations of the federation: no constants in an encoding of our own, which can name
    classes, and no private attributes of objects. ``PipelineError`` has all its problems.
    """
    if is_dfm(data):  # it has neither
        return federation.pipeline_from_dfm(data)
    found: list[Problem] = []
    stack: list[tuple[str, Any]] = [("$", data)]
    while stack:
        where, node = stack.pop()
        if isinstance(node, dict):
            if node.get("kind") == "constant" and node.get("encoded") is not None:
                found.append(Problem(where, "constants must be plain JSON here"))
            if node.get("kind") == "constant":
                continue  # its value is data, whatever it looks like
            if node.get("kind") == "attribute" and str(node.get("name", "")).startswith("_"):
                found.append(Problem(where, f"the attribute {node['name']!r} cannot be used here"))
            stack.extend((f"{where}.{key}", value) for key, value in node.items())
        elif isinstance(node, list):
            stack.extend((f"{where}[{index}]", value) for index, value in enumerate(node))
    if found:
        raise PipelineError(None, sorted(found, key=str))
    return Pipeline.model_validate(data)
