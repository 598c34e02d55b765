"""What one client costs the others: lists, slots, turns of the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import HTTPConnection

from dfm_async import ForEach, JobInfo, LocalOptions, Pipeline, PlaceParam, Session, Sleep, Wait, Yield
from dfm_async.model.job_filter import ALL_JOBS, JobFilter
from dfm_async.store.base import Position, StoredJob
from dfm_async.store.sqlite import SqliteStore
from dfm_async.web import Action, Authorizer, Principal, WebLimits, openapi
from tests.web.rig import PIPELINES, Tokens, client_of, count, fed, inline, new_service, refusal, serving, square


class Counted(Tokens):
    """Counts how many jobs are looked at."""

    seen = 0

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        self.seen += job is not None
        return super().allows(principal, action, job)


class CountedOwn(Counted):
    """Declares that everybody but root reads only its own jobs."""

    def only_label(self, principal: Principal) -> str | None:
        return None if principal.id == "root" else principal.id


class Owners(Authorizer):
    """Everybody sees its own jobs, as by default."""

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        return Principal(request.headers["authorization"])


class CountedStore(SqliteStore):
    """Counts the jobs that lists read."""

    read_jobs = 0

    async def jobs(
        self, wanted: JobFilter = ALL_JOBS, *, before: Position | None = None, limit: int = -1
    ) -> list[StoredJob]:
        found = await super().jobs(wanted, before=before, limit=limit)
        self.read_jobs += len(found)
        return found


async def test_list_of_jobs_checks_only_the_listed_jobs() -> None:
    authorizer = Counted()
    options = LocalOptions(keep_finished=50)
    service = new_service(options=options, authorizer=authorizer)
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        assert service.current is not None
        for number in range(200):
            job = await service.current.execute(PIPELINES["squares"], {"x": number}, label="ada", job_id=f"{number:03}")
            await job
        authorizer.seen = 0
        page = (await ada.get("/jobs?limit=1")).json()
        assert [job["job_id"] for job in page["jobs"]] == ["199"]
        assert authorizer.seen <= 2
        found = []
        while page["next"] is not None:
            page = (await ada.get("/jobs", params={"limit": 30, "after": page["next"]})).json()
            found += [job["job_id"] for job in page["jobs"]]
        assert found == [f"{number:03}" for number in range(198, -1, -1)]
        assert (await ada.delete("/jobs/150")).status_code == 204
        assert (await ada.delete("/jobs/010")).status_code == 204
        left = (await ada.get("/jobs?limit=1000")).json()["jobs"]
        assert [job["job_id"] for job in left] == [f"{n:03}" for n in range(199, -1, -1) if n not in (150, 10)]


async def test_list_of_jobs_reads_none_of_others() -> None:
    authorizer = CountedOwn()
    service = new_service(options=LocalOptions(keep_finished=20), authorizer=authorizer)
    async with service.lifespan(), client_of(service) as client:
        assert service.current is not None
        for number in range(50):
            label = "bob" if number in (3, 40) else "ada"
            await (await service.current.execute(PIPELINES["squares"], {"x": 1}, label=label, job_id=f"{number:02}"))

        async def listed(who: str, **query: str) -> tuple[list[str], int]:
            authorizer.seen = 0
            page = (await client.get("/jobs", params=query, headers={"authorization": who})).json()
            return [job["job_id"] for job in page["jobs"]], authorizer.seen

        assert await listed("bob") == (["40", "03"], 2)
        assert await listed("bob", principal="bob", status="finished") == (["40", "03"], 2)
        assert await listed("bob", principal="ada") == ([], 0)
        assert await listed("eve", limit="1") == ([], 0)
        assert await listed("root", principal="bob") == (["40", "03"], 2)
        assert len((await listed("root"))[0]) == 50
        for job_id in ("40", "03"):
            await service.current.forget(job_id)
        assert await listed("bob") == ([], 0)


async def test_list_of_stored_jobs_reads_none_of_others(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with inline(store=f"sqlite:///{path}") as session:
        for number in range(30):
            await (await session.execute(PIPELINES["squares"], {"x": 1}, label="bob" if number == 7 else "ada"))
    store = CountedStore(path)
    service = new_service(store=store, authorizer=Owners(), options=LocalOptions(keep_summaries=0))
    async with service.lifespan(), client_of(service) as client:
        for who, own in (("eve", 0), ("bob", 1), ("ada", 29)):
            store.read_jobs = 0
            page = (await client.get("/jobs", headers={"authorization": who})).json()
            assert (len(page["jobs"]), store.read_jobs) == (own, own)


async def test_a_list_has_jobs_of_a_store_in_order(tmp_path: Any) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    names = [f"job-{number}" for number in range(6)]
    async with inline(store=store) as session:
        for name in names[:4]:
            await (await session.execute(PIPELINES["squares"], {"x": 1}, job_id=name))
    service = new_service(store=store)
    async with service.lifespan(), client_of(service) as anyone:
        assert service.current is not None
        for name in names[4:]:
            await (await service.current.execute(PIPELINES["squares"], {"x": 1}, job_id=name))
        await service.current.reattach(names[1])
        first = (await anyone.get("/jobs?limit=3")).json()
        rest = (await anyone.get("/jobs", params={"after": first["next"]})).json()
        assert [job["job_id"] for job in [*first["jobs"], *rest["jobs"]]] == names[::-1]


async def test_idle_open_jobs_are_limited() -> None:
    limits = WebLimits(idle_jobs_per_principal=2)
    service = new_service(limits=limits, authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        idle = {"params": None}
        jobs = [(await ada.post("/pipelines/squares/jobs", json=idle)).json()["job_id"] for _ in range(2)]
        assert await refusal(ada.post("/pipelines/squares/jobs", json=idle)) == (429, "idle")
        assert (await ada.post("/pipelines/squares/jobs", json={"params": {"x": 1}})).status_code == 201
        assert (await ada.post("/pipelines/endless/jobs", json={})).status_code == 201
        async with client_of(service, authorization="bob") as bob:
            assert (await bob.post("/pipelines/squares/jobs", json=idle)).status_code == 201
        assert (await ada.post(f"/jobs/{jobs[0]}/finish")).status_code == 202
        assert service.current is not None
        await (await service.current.reattach(jobs[0]))
        assert (await ada.post("/pipelines/squares/jobs", json=idle)).status_code == 201


async def test_simultaneous_idle_open_jobs_are_limited(tmp_path: Any) -> None:
    limits = WebLimits(idle_jobs_per_principal=2)
    store = f"sqlite:///{tmp_path}/jobs.db"
    service = new_service(store=store, limits=limits, authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        idle = [ada.post("/pipelines/squares/jobs", json={"params": None}) for _ in range(8)]
        codes = [answer.status_code for answer in await asyncio.gather(*idle)]
        assert (codes.count(201), codes.count(429)) == (2, 6)


async def test_idle_open_jobs_leave_slots_for_others() -> None:
    options = LocalOptions(max_concurrent_jobs=4)
    service = new_service(options=options, authorizer=Tokens())
    async with service.lifespan(), client_of(service, authorization="mallory") as mallory:
        answers = [await mallory.post("/pipelines/squares/jobs", json={"params": None}) for _ in range(10)]
        assert [answer.status_code for answer in answers].count(201) == 2
        async with client_of(service, authorization="ada") as ada:
            job = (await ada.post("/pipelines/squares/jobs", json={"params": {"x": 3}})).json()
            assert service.current is not None
            await (await service.current.reattach(job["job_id"]))


def waiting_pipelines() -> dict[str, Pipeline]:
    with Pipeline("approval") as approval:
        Yield(square(Wait("number", type=int)))
    with Pipeline("sleep") as sleep:
        Yield(square(PlaceParam("x"), after=Sleep(1e6)))
    return {**PIPELINES, "approval": approval, "sleep": sleep}


async def test_jobs_that_wait_leave_slots_for_others() -> None:
    options = LocalOptions(max_concurrent_jobs=8)
    service = new_service(options=options, authorizer=Tokens(), pipelines=waiting_pipelines())
    bodies: dict[str, dict[str, Any]] = {"approval": {}, "sleep": {"params": {"x": 1}}, "squares": {"params": None}}
    async with service.lifespan(), client_of(service, authorization="ada") as ada:
        assert service.current is not None

        async def submitted(client: httpx2.AsyncClient, *names: str) -> list[int]:
            sent = [client.post(f"/pipelines/{name}/jobs", json=bodies[name]) for name in names]
            return sorted(answer.status_code for answer in await asyncio.gather(*sent))

        # At once: none of them has reached its Wait when the last one is submitted.
        assert await submitted(ada, *["approval"] * 6) == [201] * 4 + [429] * 2
        async with client_of(service, authorization="bob") as bob:
            for name in bodies:
                assert await refusal(bob.post(f"/pipelines/{name}/jobs", json=bodies[name])) == (429, "idle")
            job = (await bob.post("/pipelines/squares/jobs", json={"params": {"x": 3}})).json()
            await (await service.current.reattach(job["job_id"]))
            first, second = [info.job_id async for info in service.current.find_jobs(label="ada")][:2]
            assert (await ada.post(f"/jobs/{first}/events/number", json={"value": 3})).status_code == 202
            await (await service.current.reattach(first))
            assert (await ada.post(f"/jobs/{second}/cancel")).status_code == 200
            assert await submitted(bob, *bodies) == [201, 201, 429]
            again = bob.post(f"/jobs/{second}/retry")
            assert await refusal(again) == (404, "job")
        assert await refusal(ada.post(f"/jobs/{second}/retry")) == (429, "idle")


async def test_last_waiting_jobs_are_for_principals_with_few() -> None:
    options = LocalOptions(max_concurrent_jobs=40)
    service = new_service(options=options, authorizer=Tokens(), pipelines=waiting_pipelines())
    async with service.lifespan():
        accepted = []
        for who in ("ada", "bob", "joe", "amy"):
            async with client_of(service, authorization=who) as client:
                answers = [await client.post("/pipelines/approval/jobs", json={}) for _ in range(20)]
                accepted.append([answer.status_code for answer in answers].count(201))
        assert accepted == [18, 1, 1, 0]


@asynccontextmanager
async def turns() -> AsyncIterator[list[int]]:
    """Counts the turns of the loop."""
    counted = [0]

    async def run() -> None:
        while True:
            counted[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    try:
        yield counted
    finally:
        task.cancel()


async def test_many_parameter_sets_let_others_run() -> None:
    async with inline() as session, turns() as counted:
        plan = await session.prepare(PIPELINES["squares"])
        before = counted[0]
        job = await session.execute(plan, [{"x": number} for number in range(50_000)], autostop=False)
        assert counted[0] - before > 50
        await job.cancel()


async def test_large_pipeline_is_prepared_off_the_event_loop() -> None:
    with Pipeline("wide") as wide:
        with ForEach(count(PlaceParam("n"))) as number:
            for at in range(600):
                Yield(square(number), place=f"p{at}")
    async with inline() as session, turns() as counted:
        before = counted[0]
        await session.prepare(wide)
        assert counted[0] - before > 50


async def test_the_openapi_document_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    document = openapi._document

    def counted(*given: Any) -> Any:
        made.append(given)
        return document(*given)

    monkeypatch.setattr(openapi, "_document", counted)
    service = new_service()
    async with serving(service) as server:
        found = [(await server.client.get("/openapi.json")).json() for _ in range(3)]
        assert len(made) == 1
        assert found[0] == found[2]
        assert found[0]["servers"] == [{"url": "/dfm"}]


async def test_huge_number_is_not_a_server_error() -> None:
    """The square of a number that a client sends may have twice as many digits."""
    service = new_service()
    async with serving(service) as server:
        body = f'{{"params": [{{"x": {"9" * 4000}}}, {{"x": 3}}]}}'
        headers = {"content-type": "application/json"}
        job_id = (await server.client.post("/pipelines/squares/jobs", content=body, headers=headers)).json()["job_id"]
        await (await server.session.reattach(job_id)).wait_until_finished()
        page = await server.client.get(f"/jobs/{job_id}/events")
        assert page.status_code == 200
        large, small = [event["value"] for event in page.json()["events"] if event["event"] == "result"]
        assert (large["type"], large["omitted"], small) == ("int", True, 9)
        text = (await server.client.get(f"/jobs/{job_id}/stream")).text
        assert json.dumps(large, separators=(",", ":")) in text
        assert "event: end" in text


async def test_ended_jobs_take_no_more_memory_together_than_allowed() -> None:
    options = LocalOptions(keep_finished_bytes=200_000)
    session = Session(fed, target="inline", options=options)
    service = new_service(session=session)
    async with service.lifespan(), client_of(service) as anyone:
        body = {"params": {"n": 10, "size": 5000}}
        for number in range(10):
            await anyone.post("/pipelines/texts/jobs", json={**body, "job_id": f"job-{number}"})
            await (await session.reattach(f"job-{number}")).wait_until_finished()
        assert session.stats().result_bytes <= 200_000
        assert await refusal(anyone.get("/jobs/job-0/events")) == (410, "expired")
        assert len((await anyone.get("/jobs/job-9/events")).json()["events"]) == 13
        assert (await anyone.get("/jobs/job-0")).json()["status"] == "finished"
