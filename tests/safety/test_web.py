"""Pipelines that strangers send to a web service are refused, and the service goes on."""

from __future__ import annotations

from typing import Any

from dfm_async.web import AllowAnyone, Service
from tests.safety.documents import DFM_PIPELINES
from tests.safety.test_pipelines import BAD_BODIES, CALL, yielding
from tests.web.rig import PIPELINES, inline, serving

OURS: dict[str, Any] = {
    **{name: {"body": body} for name, body in BAD_BODIES.items()},
    "an operation that is not offered": {"body": [{**CALL, "operation": "subprocess.run"}]},
    "a constant that could be anything": {"body": [yielding(kind="constant", encoded="1gGSoWsB")]},
    "a question": {"mode": "discovery", "body": [CALL]},
    "a list": [],
    "a class": {"body": [{"kind": "call", "id": 0, "operation": "#discover", "args": {}, "class": "os.system"}]},
}


async def test_hostile_pipelines_are_refused_and_the_service_goes_on() -> None:
    async with serving(Service(session=inline, allow_pipelines=True, authorizer=AllowAnyone())) as server:
        for name, data in OURS.items():
            found = await server.client.post("/jobs", json={"pipeline": data})
            assert found.status_code == 422, f"{name}: {found.text}"
        for name, text in DFM_PIPELINES.items():
            content = '{"pipeline": ' + text + "}"
            found = await server.client.post("/jobs", content=content, headers={"content-type": "application/json"})
            assert found.status_code in (400, 422), f"{name}: {found.text}"
            assert len(found.text) < 100_000
        good = {"pipeline": PIPELINES["squares"].model_dump(), "params": {"x": 6}}
        assert (await server.client.post("/jobs", json=good)).status_code == 201
