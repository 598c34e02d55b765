"""In a real Jupyter kernel: await on the top level, rich output, sessions over several cells. One kernel for all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import nbformat
import psutil
import pytest
import pytest_asyncio

from tests.notebooks.kernel import Kernel

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]

MARK = uuid.uuid4().hex
ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import asyncio
from dfm_async import Federation, ForEach, JobStatus, Pipeline, PlaceParam, Session, Yield

fed = Federation("weather")
archive, lab = fed.site("archive"), fed.site("lab", workers=2)
BASE = 15.0


@archive.operation
async def load(day: str) -> list[float]:
    return {"mon": [14.0, 19.5, 16.0], "tue": [9.5, 12.0]}[day]


@lab.operation
def anomaly(value: float) -> float:
    return value - BASE


with Pipeline("anomalies") as pipeline:
    with ForEach(load(PlaceParam("day"))) as value:
        Yield(anomaly(value), place="delta")
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def kernel(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kernel]:
    found = await Kernel.start(tmp_path_factory.mktemp("notebook"), MARK)
    try:
        await found.does(SETUP)
        yield found
    finally:
        await found.stop()


@pytest_asyncio.fixture(loop_scope="module", params=["inline", "local"])
async def session(kernel: Kernel, request: pytest.FixtureRequest) -> AsyncIterator[Kernel]:
    """The kernel, with a session that one cell opened and another one closes."""
    await kernel.does(f"session = Session(fed, target={request.param!r})\nawait session.connect()")
    yield kernel
    await kernel.does("await session.close()")


def in_marked_processes() -> list[psutil.Process]:
    """The processes that the kernel started, and the kernel itself: all of them have its mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DFM_TEST_MARK") == MARK:
                found.append(process)
    return found


async def test_await_and_async_for_work_on_the_top_level(session: Kernel) -> None:
    await session.does("job = await session.execute(pipeline, {'day': 'mon'})")
    cell = await session.does("async for result in job:\n    print(result.value)\nawait job")
    assert sorted(map(float, cell.printed.split())) == [-1.0, 1.0, 4.5]
    assert cell.result["text/plain"] == "JobStatus.FINISHED"


async def test_running_jobs_continue_between_cells(session: Kernel) -> None:
    await session.does("job = await session.execute(pipeline, [{'day': 'mon'}, {'day': 'tue'}] * 50)")
    await session.does("await asyncio.sleep(0)")
    cell = await session.does("results = await job.collect()\nlen(results)")
    assert cell.result["text/plain"] == "250"


async def test_a_cell_that_is_run_again_replaces_what_it_defined(kernel: Kernel) -> None:
    again = "@lab.operation\ndef twice(value: int) -> int:\n    return value * {}\n"
    with_it = "with Pipeline('twice') as p:\n    Yield(twice(21))\n"
    use = "async with Session(fed) as s:\n    print((await (await s.execute(p)).first()).value)"
    for factor, printed in ((2, "42"), (3, "63")):
        cell = await kernel.does(again.format(factor) + with_it + use)
        assert cell.printed.strip() == printed


@pytest.mark.parametrize(
    ("thing", "text", "html"),
    [
        ("pipeline", "<Pipeline 'anomalies'", 'data-node="anomaly#2"'),
        ("await session.prepare(pipeline)", "<Plan 'anomalies'", 'data-site="archive"'),
        ("fed", "<Federation 'weather'", "<b>archive</b>"),
        ("job", "<Job one: finished", "finished</span>"),
        ("await job.collect()", "[Result(", "<th>place</th>"),
        ("await job.first()", "Result(", "<b>delta</b>"),
        ("session", "<Session of 'weather'", None),
    ],
)
async def test_things_show_themselves_richly_and_as_text(
    kernel: Kernel, thing: str, text: str, html: str | None
) -> None:
    await kernel.does(
        "session = Session(fed, target='inline')\nawait session.connect()\n"
        "job = await session.execute(pipeline, {'day': 'mon'}, job_id='one')\nawait job"
    )
    try:
        result = (await kernel.does(thing)).result
    finally:
        await kernel.does("await session.close()")
    assert result["text/plain"].startswith(text)
    assert html is None or html in result["text/html"]


async def test_an_error_of_an_operation_names_its_origin(session: Kernel) -> None:
    await session.does("job = await session.execute(pipeline, {'day': 'sun'})")
    cell = await session.run("await job")
    assert "KeyError: 'sun'" in cell.error
    assert "in load" in cell.error
    shown = await session.does("job.errors[0]")
    assert "<details>" in shown.result["text/html"]


async def test_a_job_is_shown_live_in_one_view_that_ends_with_it(session: Kernel) -> None:
    cell = await session.does(
        "job = await session.execute(pipeline, [{'day': 'mon'}] * 20, watch=True, job_id='live')\nawait job.show()"
    )
    assert len(cell.shown) <= 1
    last = [*cell.shown, *cell.updates][-1]
    assert "finished</span>" in last["text/html"]
    assert "20 of 20 parameter sets" in last["text/html"]
    assert "<td>anomaly#2</td><td>lab</td><td>0</td><td>60</td><td>0</td>" in last["text/html"]
    assert last["text/plain"].startswith("job live finished: 20 of 20 parameter sets")
    assert (cell.printed, cell.result) == ("", {})


async def test_an_interrupted_view_leaves_the_job_alone(kernel: Kernel) -> None:
    await kernel.does(
        "@lab.operation\nasync def held(value: int) -> int:\n    await gate.wait()\n    return value\n\n"
        "with Pipeline('held') as p:\n    Yield(held(1))\n"
        "gate = asyncio.Event()\nsession = Session(fed, target='inline')\nawait session.connect()\n"
        "job = await session.execute(p)"
    )
    shown = asyncio.Event()
    running = asyncio.ensure_future(kernel.run("await job.show()", seen=shown.set))
    await shown.wait()
    await kernel.interrupt()
    cell = await running
    assert "KeyboardInterrupt" in cell.error or "CancelledError" in cell.error
    cell = await kernel.does("print(job.status)\ngate.set()\nprint(await job)\nawait session.close()")
    assert cell.printed.split() == ["JobStatus.RUNNING", "JobStatus.FINISHED"]


async def test_operations_of_a_federation_are_completed_with_their_parameters(kernel: Kernel) -> None:
    await kernel.does(
        """
from dfm_async.federation import Const, ExposedParameter
declared = Federation("declared")
def create(size: int, fill: float = 0.0) -> list: "Makes an array."
declared.declare("array.Create", create)
class Create:
    def body(self, size, fill, unit): ...
exposed = ExposedParameter(param="unit", type="string", description="the unit")
declared.site("alpha").adapt("array.Create", Create, bind={"unit": Const("m", expose_as=exposed)})
"""
    )
    assert "array" in await kernel.completions("declared.operations.")
    assert "Create" in await kernel.completions("declared.operations.array.")
    assert {"size=", "fill=", "unit="} <= set(await kernel.completions("declared.operations.array.Create("))
    assert "size=" in await kernel.completions("declared.sites['alpha'].operations.array.Create(si")
    shown = await kernel.does("declared.operations.array.Create?")
    assert not shown.error
    helped = await kernel.does("help(declared.sites['alpha'].operations.array.Create)")
    assert "Create(size: int, fill: float = 0.0, *, unit: str | None = None) -> list" in helped.printed
    assert "Makes an array." in helped.printed
    assert "unit: the unit" in helped.printed


async def test_the_tour_runs_unchanged(kernel: Kernel) -> None:
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_bytes())
    nbformat.validate(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells if cell["outputs"]] == []
    outputs = [await kernel.does(cell["source"]) for cell in cells]
    rich = [cell.result["text/html"] for cell in outputs if "text/html" in cell.result]
    assert len(rich) >= 4
    assert any("finished</span>" in update["text/html"] for cell in outputs for update in cell.shown + cell.updates)


async def test_a_kernel_that_ends_with_a_session_open_leaves_no_process(kernel: Kernel) -> None:
    await kernel.does(
        "session = Session(fed)\nawait session.connect()\n"
        "job = await session.execute(pipeline, {'day': 'mon'}, autostop=False)\nawait job.first()"
    )
    assert len(in_marked_processes()) >= 3  # the kernel, and a worker at each site
    await kernel.stop()
    _, alive = psutil.wait_procs(in_marked_processes(), 10)
    assert alive == []
