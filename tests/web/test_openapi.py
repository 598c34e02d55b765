"""Requests that are made from the service's own OpenAPI document, fitting ones and others, to a real server."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import positive_data_acceptance
from schemathesis.specs.openapi.schemas import OpenApiSchema

from dfm_async.web import AllowAnyone, Service, WebLimits
from tests.web.rig import PIPELINES as ALL
from tests.web.rig import inline, serving

PIPELINES = {name: ALL[name] for name in ("squares", "failing", "telling", "endless")}
"""Those that do little, whatever their parameters are."""

EXAMPLES = 15
"""How many requests there are of each kind for each route."""


ENDLESS = "streamJobs"
"""The one route that is not tried: its answer ends with the service."""
MORE = ("runPipeline", "sendInputs", "streamEvents")
"""They refuse also what fits the document: unknown operations, other parameters, what is behind the end of the log."""


class Background:
    """A loop in a thread of its own: the clients of this module block."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._up = threading.Event()
        self._leave: Callable[[], Any] = self._up.set
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.address = ""

    async def _run(self) -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        self._leave = lambda: loop.call_soon_threadsafe(end.set)
        async with serving(self._service, self._service.app, prefix="") as server:
            self.address = f"http://127.0.0.1:{server.port}"
            self._up.set()
            await end.wait()

    @contextmanager
    def running(self) -> Iterator[str]:
        self._thread.start()
        self._up.wait()
        try:
            yield self.address
        finally:
            self._leave()
            self._thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service with a job in each state."""
    limits = WebLimits(jobs_per_principal=1000)
    service = Service(
        session=inline, pipelines=PIPELINES, limits=limits, allow_pipelines=True, authorizer=AllowAnyone()
    )
    with Background(service).running() as found, httpx.Client(base_url=found) as client:
        for name, job_id, params in (
            ("squares", "finished", {"x": 5}),
            ("failing", "failed", {"x": 1}),
            ("endless", "running", {}),
            ("squares", "open", None),
        ):
            body = {"params": params, "job_id": job_id}
            assert client.post(f"/pipelines/{name}/jobs", json=body).status_code == 201
        for job_id in ("finished", "failed"):
            assert client.get(f"/jobs/{job_id}/stream").status_code == 200  # to its end
        yield found


def operations() -> list[str]:
    """The operations that the document has, by their names."""
    names = ["health", "ready", "metrics", "openapi", "listPipelines", "listJobs", "showJob", "forgetJob"]
    names += ["readEvents", "streamEvents", "sendInputs", "finishInputs", "resumeJob", "cancelJob", "drawJob"]
    names += ["page", "pageFile", "runPipeline"]
    return names + [f"run_{name}" for name in PIPELINES]


@functools.cache
def schema(address: str) -> OpenApiSchema:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


def test_all_operations_are_tried(address: str) -> None:
    document = httpx.get(f"{address}/openapi.json").json()
    found = {operation["operationId"] for methods in document["paths"].values() for operation in methods.values()}
    assert found == {*operations(), ENDLESS}


def requests() -> list[tuple[str, GenerationMode]]:
    """Requests that fit, and, where there is something that can be wrong, others."""
    fitting = [(name, GenerationMode.POSITIVE) for name in operations()]
    wrong = ["listJobs", "readEvents", "streamEvents", "sendInputs", "cancelJob", "runPipeline"]
    wrong += [f"run_{name}" for name in PIPELINES]
    return fitting + [(name, GenerationMode.NEGATIVE) for name in wrong]


@pytest.mark.parametrize(("name", "mode"), requests())
def test_no_request_is_a_server_error_and_every_answer_is_as_described(
    address: str, name: str, mode: GenerationMode
) -> None:
    operation = schema(address).find_operation_by_id(name)
    ended = ["finished", "failed"]
    known = st.sampled_from(ended if name in ("readEvents", "streamEvents") else [*ended, "open"]) | st.none()
    loose: list[CheckFunction] = [positive_data_acceptance] if name in MORE else []
    tried = 0

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(mode), job_id=known)
    def send(case: Case[Any], job_id: str | None) -> None:
        nonlocal tried
        tried += 1
        if "job_id" in case.path_parameters and job_id is not None and name != "forgetJob":
            case.path_parameters["job_id"] = job_id
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body.pop("on_disconnect", None)  # it needs an answer that is a stream
        case.call_and_validate(excluded_checks=loose, timeout=10)

    send()
    assert tried
