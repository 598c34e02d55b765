"""Requests that are made from the service's own OpenAPI document, fitting ones and others, to a real server."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st

from tests.support.processes import started_server

if TYPE_CHECKING:  # it takes long to import: only in the process that runs these tests
    from schemathesis import Case
    from schemathesis.specs.openapi.schemas import OpenApiSchema

PIPELINES = ("squares", "failing", "telling", "endless")
"""Those that do little, whatever their parameters are."""
SERVER = f"""
import uvicorn
from tests.web.rig import PIPELINES, new_service

pipelines = {{name: PIPELINES[name] for name in {PIPELINES}}}
service = new_service(pipelines=pipelines, jobs_per_principal=1000, allow_pipelines=True)
uvicorn.run(service.app, port=0, access_log=False)
"""

EXAMPLES = 15
"""How many requests there are of each kind for each route."""


ENDLESS = "streamJobs"
"""The one route that is not tried: its answer ends with the service."""
MORE = ("runPipeline", "sendInputs", "sendEvent", "streamEvents")
"""They refuse also what fits the document: unknown operations, other parameters, what is behind the end of the log."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service with a job in each state."""
    with started_server("-c", SERVER) as (_, found), httpx2.Client(base_url=found) as client:
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
    names = [
        "listSchedules",
        "health",
        "ready",
        "stats",
        "metrics",
        "openapi",
        "listPipelines",
        "listJobs",
        "showJob",
        "forgetJob",
    ]
    names += [
        "readEvents",
        "readResult",
        "readImage",
        "streamEvents",
        "sendInputs",
        "sendEvent",
        "finishInputs",
        "resumeJob",
        "retryJob",
        "forkJob",
        "cancelJob",
        "drawJob",
    ]
    names += ["page", "pageFile", "runPipeline"]
    return names + [f"run_{name}" for name in PIPELINES]


@functools.cache
def schema(address: str) -> OpenApiSchema:
    import schemathesis

    return schemathesis.openapi.from_url(f"{address}/openapi.json")


def test_all_operations_are_tried(address: str) -> None:
    document = httpx2.get(f"{address}/openapi.json").json()
    found = {operation["operationId"] for methods in document["paths"].values() for operation in methods.values()}
    assert found == {*operations(), ENDLESS}


def requests() -> list[tuple[str, str]]:
    """Requests that fit, and, where there is something that can be wrong, others."""
    fitting = [(name, "positive") for name in operations()]
    wrong = ["listJobs", "readEvents", "streamEvents", "sendInputs", "forkJob", "cancelJob", "runPipeline"]
    wrong += [f"run_{name}" for name in PIPELINES]
    return fitting + [(name, "negative") for name in wrong]


@pytest.mark.parametrize(("name", "mode"), requests())
def test_random_requests_get_the_documented_responses(address: str, name: str, mode: str) -> None:
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    operation = schema(address).find_operation_by_id(name)
    ended = ["finished", "failed"]
    known = st.sampled_from(ended if name in ("readEvents", "streamEvents") else [*ended, "open"]) | st.none()
    loose: list[Any] = [positive_data_acceptance] if name in MORE else []
    tried = 0

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(GenerationMode(mode)), job_id=known)
    def send(case: Case[Any], job_id: str | None) -> None:
        nonlocal tried
        tried += 1
        if "job_id" in case.path_parameters and job_id is not None and name != "forgetJob":
            case.path_parameters["job_id"] = job_id
        if isinstance(case.body, dict) and mode == "positive":
            case.body.pop("on_disconnect", None)  # it needs an answer that is a stream
            case.body.pop("checkpoint", None)  # it needs a store
        case.call_and_validate(excluded_checks=loose, timeout=10)

    send()
    assert tried
