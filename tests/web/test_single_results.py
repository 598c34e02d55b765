"""Results one by one: as JSON, and tables as Arrow IPC streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.ipc
import pytest

from dfm_async import Federation, ResultLimits
from dfm_async.model.options import LocalOptions
from dfm_async.session.session import Session
from dfm_async.web.requests import quality
from tests.support.pipelines import pipeline_of
from tests.support.waiting import PROMPT, until
from tests.web.rig import Server, Tokens, new_service, refusal, rest_of, serving, unread

ARROW = "application/vnd.apache.arrow.stream"
ACCEPT = {"accept": ARROW}

fed = Federation("tables")
lab = fed.site("lab")
HOURS = pd.date_range("2024-07-01 12:00", periods=2, freq="h", tz="Europe/Rome", name="hour")
COLUMNS: dict[str, list[Any]] = {"celsius": [21.5, None], "station": ["Pisa", "Lucca"]}
VALUES: dict[str, Any] = {
    "pandas": pd.DataFrame(COLUMNS, index=HOURS),
    "polars": pl.DataFrame(COLUMNS),
    "Table": pa.table(COLUMNS),
    "RecordBatch": pa.RecordBatch.from_pydict(COLUMNS),
    "mixed": pd.DataFrame({"mixed": [1, "x"]}),
    "periods": pd.DataFrame({"month": pd.period_range("2024-01", periods=2, freq="M")}),
    "series": pd.Series([1, 2]),
    "number": 5,
}


@lab.operation
async def load(name: str) -> Any:
    return VALUES[name]


@lab.operation
async def large(rows: int) -> pd.DataFrame:
    texts = pd.Series([f"row {number}" for number in range(rows)], dtype=object)  # Arrow needs a copy of them
    return pd.DataFrame({"number": range(rows), "text": texts})


PIPELINES = {"load": pipeline_of(load, "name", name="load"), "large": pipeline_of(large, "rows", name="large")}
ROWS = 500_000
"""Those of a table of more than 10 MB, which is more than the kernel buffers."""


def tables(**options: Any) -> Any:
    given = {name: options.pop(name) for name in ("store", "options") if name in options}
    session = {"session": lambda: Session(fed, target="inline", **given)}
    return serving(new_service(pipelines=PIPELINES, **session, **options))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with tables() as found:
        yield found


async def result_of(server: Server, name: str = "load", /, **params: Any) -> str:
    """Run a job, and return the path of its result."""
    job_id = await server.submit(name, params)
    await server.finished(job_id)
    return f"/jobs/{job_id}/results/1"


def read(response: httpx2.Response) -> pa.Table:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == ARROW
    with pyarrow.ipc.open_stream(response.content) as reader:
        return reader.read_all()


async def test_table_is_an_arrow_stream_for_clients_that_accept_it(server: Server) -> None:
    found = {
        name: read(await server.client.get(await result_of(server, name=name), headers=ACCEPT))
        for name in ("pandas", "polars", "Table", "RecordBatch")
    }
    pd.testing.assert_frame_equal(found["pandas"].to_pandas(), VALUES["pandas"], check_freq=False)
    assert pl.DataFrame(found["polars"]).equals(VALUES["polars"])
    assert found["polars"].schema.field("station").type == pa.large_string(), "views of texts are new in Arrow"
    assert found["Table"].equals(VALUES["Table"])
    assert found["RecordBatch"].to_batches() == [VALUES["RecordBatch"]]


async def test_result_is_json_for_other_clients(server: Server) -> None:
    path = await result_of(server, name="pandas")
    page = (await server.client.get(path.replace("results/1", "events"))).json()
    for accept in ("*/*", "application/json", f"application/json, {ARROW};q=0.5", "application/*, text/html"):
        response = await server.client.get(path, headers={"accept": accept})
        assert response.json() == page["events"][1]
        assert response.headers["vary"] == "accept"
    for accept in (f"{ARROW}, */*", f"{ARROW};q=0.9, application/json;q=0.1", ARROW.upper()):
        assert read(await server.client.get(path, headers={"accept": accept})).num_rows == 2
    assert await refusal(server.client.get(path, headers={"accept": "text/csv"})) == (406, "table")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("number", "the value of type int is not a table: accept application/json"),
        ("series", "the value of type pandas.Series is not a table"),
        ("mixed", "the table cannot be sent as Arrow"),
    ],
)
async def test_what_arrow_cannot_hold_is_refused_with_a_hint(server: Server, name: str, why: str) -> None:
    path = await result_of(server, name=name)
    response = await server.client.get(path, headers=ACCEPT)
    assert (response.status_code, response.json()["error"]) == (406, "table")
    assert why in response.json()["message"]
    assert "Traceback" not in response.text
    assert (await server.client.get(path, headers={"accept": f"{ARROW}, application/json"})).json()["offset"] == 1


async def test_offset_without_a_result_is_refused(server: Server) -> None:
    path = (await result_of(server, name="number")).removesuffix("1")
    for offset, expected in (
        ("0", (404, "result")),  # an event, but no result
        ("99", (404, "result")),
        ("9" * 18, (404, "result")),
        ("9" * 5000, (422, "query")),
        ("-1", (422, "query")),
        ("x", (422, "query")),
    ):
        assert await refusal(server.client.get(path + offset)) == expected, offset
    assert await refusal(server.client.get("/jobs/unknown/results/1")) == (404, "job")


async def test_expired_result_is_gone() -> None:
    limits = ResultLimits(max_items=2, window=1)
    async with tables(options=LocalOptions(results=limits)) as server:
        job_id = await server.submit("load", [{"name": "number"}] * 6)
        job = await server.session.reattach(job_id)
        assert len(await job.collect()) == 6
        for offset in (0, 1):
            found = await server.client.get(f"/jobs/{job_id}/results/{offset}")
            assert (found.status_code, found.json()["error"]) == (410, "expired")


async def test_stored_result_is_served_after_a_restart(tmp_path: Path) -> None:
    async with tables(store=f"sqlite:///{tmp_path}/jobs.db") as server:
        path = await result_of(server, name="polars")
    async with tables(store=f"sqlite:///{tmp_path}/jobs.db") as server:
        found = read(await server.client.get(path, headers=ACCEPT))
    assert pl.DataFrame(found).equals(VALUES["polars"])


async def test_results_of_others_are_hidden() -> None:
    async with tables(authorizer=Tokens()) as server:
        ada, bob = ({**ACCEPT, "authorization": name} for name in ("ada", "bob"))
        body = {"params": {"name": "Table"}}
        job = (await server.client.post("/pipelines/load/jobs", json=body, headers=ada)).json()
        await server.finished(job["job_id"])
        path = f"/jobs/{job['job_id']}/results/1"
        assert read(await server.client.get(path, headers=ada)).num_rows == 2
        assert await refusal(server.client.get(path, headers=bob)) == (404, "job")
        assert await refusal(server.client.get(path, headers=ACCEPT)) == (401, "unauthenticated")


async def test_large_table_is_read_whole_and_has_a_length(server: Server) -> None:
    path = await result_of(server, "large", rows=ROWS)
    response = await server.client.get(path, headers=ACCEPT)
    assert int(response.headers["content-length"]) == len(response.content) > 10_000_000
    assert read(response).equals(pa.Table.from_pandas(await large.code(ROWS)))


async def test_clients_that_do_not_read_share_one_table_and_count_as_streams() -> None:
    async with tables(streams_per_principal=3, stall=0.5) as server, AsyncExitStack() as stack:
        path = await result_of(server, "large", rows=ROWS)
        streams, before = server.service._state.streams, pa.total_allocated_bytes()
        held: list[int] = []
        for _ in range(3):
            await stack.enter_async_context(unread(server, path, f"accept: {ARROW}"))
            await until(lambda: streams.slots > len(held))
            held.append(pa.total_allocated_bytes() - before)
        assert held[0] == held[1] == held[2] > 0
        assert await refusal(server.client.get(path, headers=ACCEPT)) == (429, "streams")
        await until(lambda: streams.stalled == 3)
        assert streams.slots == 3, "the server still has their connections"
        await stack.aclose()
        await until(lambda: streams.slots == 0)


@pytest.mark.parametrize("end", ["stall", "drain"])
async def test_table_that_is_cut_off_does_not_look_whole(end: str) -> None:
    async with tables(stall=0.3 if end == "stall" else 60.0) as server:
        path = await result_of(server, "large", rows=ROWS)
        streams = server.service._state.streams
        async with unread(server, path, f"accept: {ARROW}", window=1 << 16) as stuck:
            if end == "stall":
                await until(lambda: streams.stalled == 1)
                head, _, body = (await rest_of(stuck)).partition(b"\r\n\r\n")
            else:
                await until(lambda: len(streams) == 1)
                draining = asyncio.create_task(server.service.drain())
                head, _, body = (await rest_of(stuck)).partition(b"\r\n\r\n")
                async with asyncio.timeout(PROMPT):
                    await draining
            length = next(line for line in head.decode().splitlines() if line.startswith("content-length"))
            assert 0 < len(body) < int(length.partition(": ")[2])
            await until(lambda: streams.slots == 0)


def test_quality_of_a_media_type_follows_the_accept_header() -> None:
    assert quality("text/html, application/json;q=0.5", "application/json") == 0.5
    assert quality("application/*;q=0.3, */*;q=0.1", "application/json") == 0.3
    assert quality("*/*;q=0.1", "application/json") == 0.1
    assert quality("*/*", ARROW, named=True) == 0
    assert quality(f"{ARROW} ; charset=x ; q=0", ARROW, named=True) == 0
    for odd in ("", ",", ";", "q=1", f"{ARROW};q=x", f"{ARROW};q=1e999", f"{ARROW};q=nan"):
        assert quality(odd, ARROW) == 0
