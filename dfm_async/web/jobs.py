"""Handlers: submit, look at, steer and stream jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.errors import JobExists
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.session.job import Job
from dfm_async.web.access import Principal
from dfm_async.web.answers import Refusal, answer
from dfm_async.web.bodies import Cancel, Inputs, Submission, read_body
from dfm_async.web.endpoints import choice, flag, unless_gone, whole_number
from dfm_async.web.sse import EventWriter
from dfm_async.web.state import State
from dfm_async.web.streams import Seat
from dfm_async.web.uploads import Upload

__all__ = ["JobHandlers", "info_data", "on_disconnect", "read_after"]

ON_DISCONNECT: Final = ("keep", "cancel")
_NAMED: Final = 20
"""How many pipelines the answer for an unknown one names."""


def info_data(info: JobInfo) -> dict[str, Any]:
    """What clients are told about a job."""
    data = {name: getattr(info, name) for name in info.__struct_fields__ if name != "label"}
    return {**data, "status": info.status.value, "principal": info.label}


@dataclass(frozen=True, slots=True)
class _Order:
    """How a client wants to have a stream."""

    principal: Principal
    after: int
    on_disconnect: str
    activity: bool
    status: int = 200


class JobHandlers:
    """Answers what is asked about jobs."""

    def __init__(self, state: State) -> None:
        self._state = state

    # submitting

    async def submit(self, request: Request, send: Send) -> Response | None:
        """Runs a registered pipeline."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "submit")
        pipeline = state.pipelines.get(request.path_params["name"])
        if pipeline is None:
            message = f"there is no pipeline {request.path_params['name']!r} here"
            known = sorted(state.pipelines) if state.guard.allows(principal, "list") else []
            names = ", ".join(known[:_NAMED]) + ", ..." * (len(known) > _NAMED)
            raise Refusal(404, "pipeline", f"{message}; there are: {names}" if known else message)
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Submission)
            return await self.run(request, send, principal, upload, pipeline, body)

    async def run(
        self, request: Request, send: Send, principal: Principal, upload: Upload, pipeline: Pipeline, body: Submission
    ) -> Response | None:
        """Submits a job, and answers with what is known of it, or with its events if the client asks for them."""
        if "text/event-stream" not in request.headers.get("accept", ""):
            if body.on_disconnect == "cancel":
                message = "on_disconnect needs an answer that is a stream: accept text/event-stream"
                raise Refusal(422, "body", message)
            job = await self._execute(principal, pipeline, body)
            return answer(info_data(job.info()), 201)
        activity = flag(request.query_params, "activity")
        order = _Order(principal, -1, body.on_disconnect, activity, 201)
        with self._state.streams.seat(principal) as seat:
            job = await self._execute(principal, pipeline, body)
            upload.release()
            await self._stream(request, send, seat, job, order)
        return None

    async def _execute(self, principal: Principal, pipeline: Pipeline, body: Submission) -> Job:
        state = self._state
        state.check_draining()
        if body.priority > 0 and not state.guard.allows(principal, "prioritize"):
            raise Refusal(403, "forbidden", "you may not submit jobs with a priority above 0")
        slots = state.session.options.max_concurrent_jobs
        with state.quota.room(principal, idle=body.open or body.params is None, slots=slots):
            job = await state.session.execute(
                pipeline,
                body.params,
                autostop=not body.open,
                job_id=body.job_id,
                priority=body.priority,
                deadline=body.deadline,
                on_error=body.on_error,
                label=principal.id,
                watch=state.page,
            )
            if job.info().label != principal.id:  # the id was taken, by an equal job of somebody else
                raise JobExists(job.job_id)
            state.quota.add(principal, job)
        return job

    # looking

    async def show(self, request: Request, _send: Send) -> Response:
        """Tells what is known of one job."""
        principal = await self._state.guard.principal(request)
        _, info = await self._state.job(principal, "read", request.path_params["job_id"])
        return answer(info_data(info))

    async def stream(self, request: Request, send: Send) -> Response | None:
        """Streams the events of a job."""
        state = self._state
        principal = await state.guard.principal(request)
        job, info = await state.job(principal, "read", request.path_params["job_id"])
        activity = flag(request.query_params, "activity")
        gone = on_disconnect(request)
        if gone == "cancel":
            state.guard.check_job(principal, "cancel", info)
        after = read_after(request, info)
        if info.status.terminal and after >= info.events - 1:
            return Response(status_code=204)  # a browser does not come back after that
        with state.streams.seat(principal) as seat:
            await self._stream(request, send, seat, job, _Order(principal, after, gone, activity))
        return None

    async def _stream(self, request: Request, send: Send, seat: Seat, job: Job, order: _Order) -> None:
        state = self._state
        async with seat.reading(state.session, job, order.after) as reader:
            headers = [(b"x-job-id", quote(job.job_id, safe="").encode())]
            records = state.records_for(order.principal, job.info(), reader.log)
            writer = EventWriter((request.receive, send), reader, records, state.limits, order.activity)
            await writer.run(order.status, headers)
        if reader.course.gone and order.on_disconnect == "cancel":
            await job.cancel("the reader of its stream has gone")
        await writer.line.linger(seat)

    # steering

    async def send(self, request: Request, _send: Send) -> Response:
        """Sends further parameter sets to a job that is open for them."""
        state = self._state
        principal = await state.guard.principal(request)
        job, _ = await state.job(principal, "send", request.path_params["job_id"])
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Inputs)
            if not job.info().accepts:
                await state.session.check_steerable(job.job_id)
                raise Refusal(409, "closed", "the job takes no further parameter sets")
            with state.uploads.inputs(job.job_id):
                await unless_gone(request, job.send_input_params(body.params))
        if body.last:
            await job.send_stop_frame()
        return answer(info_data(job.info()), 202)

    async def finish(self, request: Request, _send: Send) -> Response:
        """Says that no further parameter sets will come."""
        principal = await self._state.guard.principal(request)
        job, _ = await self._state.job(principal, "send", request.path_params["job_id"])
        await job.send_stop_frame()
        return answer(info_data(job.info()), 202)

    async def resume(self, request: Request, _send: Send) -> Response:
        """Goes on with a job that was interrupted."""
        state = self._state
        principal = await state.guard.principal(request)
        job, info = await state.job(principal, "send", request.path_params["job_id"])
        state.check_draining()
        if info.status is not JobStatus.INTERRUPTED:
            raise Refusal(409, "not interrupted", f"the job is {info.status.value}: only interrupted jobs are resumed")
        with state.quota.room(principal):
            job = await state.session.resume(job.job_id, watch=state.page)
            state.quota.add(principal, job)
        return answer(info_data(job.info()), 202)

    async def forget(self, request: Request, _send: Send) -> Response:
        """Forgets a job that has ended, with its events."""
        state = self._state
        principal = await state.guard.principal(request)
        job, info = await state.job(principal, "forget", request.path_params["job_id"])
        if not info.status.ended:
            raise Refusal(409, "not ended", f"the job is {info.status.value}: cancel it, or wait for its end")
        await state.session.forget(job.job_id)
        return Response(status_code=204)

    async def cancel(self, request: Request, _send: Send) -> Response:
        """Cancels a job; answers when nothing of it runs any more."""
        state = self._state
        principal = await state.guard.principal(request)
        job, _ = await state.job(principal, "cancel", request.path_params["job_id"])
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, Cancel)
        outcomes = await job.cancel(body.reason)
        return answer({**info_data(job.info()), "outcomes": outcomes})


def on_disconnect(request: HTTPConnection) -> str:
    """Return what is to happen to a job when the reader of its stream goes away.

    Raises:
        Refusal: it is not one of the choices; or a link or a page of another site wants the job to be cancelled.
    """
    found = choice(request.query_params, "on_disconnect", "keep", ON_DISCONNECT)
    mode, site = (request.headers.get(f"sec-fetch-{name}") for name in ("mode", "site"))
    if found == "cancel" and (mode == "navigate" or site not in (None, "none", "same-origin")):
        raise Refusal(403, "origin", "only a program or a page of this service can use on_disconnect=cancel")
    return found


def read_after(request: HTTPConnection, info: JobInfo) -> int:
    """Return the offset behind which a reader begins: what a browser remembers, else what the query says.

    Raises:
        Refusal: it is not an offset of the job's log.
    """
    header = request.headers.get("last-event-id")
    name = "after" if header is None else "Last-Event-ID"
    query = request.query_params if header is None else QueryParams({name: header})
    found = whole_number(query, name, -1, -1)
    if found >= max(info.events, 0):
        last = f"its last event is {info.events - 1}" if info.events else "it has no events yet"
        raise Refusal(422, "query", f"{name} is {found}, but {last}: this is another job, or another log of it")
    return found
