"""What a peer system, and a stock pool of processes, are known to do wrong; and the tests which show it right here.

Every line that begins with an arrow names a test, by its file below ``tests`` and its name.

Statements:

- loops are dropped, and the job succeeds
    -> conformance/test_statements.py::test_nested_loops_over_three_sites
    -> conformance/test_statements.py::test_a_loop_over_nothing_collects_an_empty_list
- cache blocks are dropped, and the job succeeds
    -> conformance/test_statements.py::test_concurrent_misses_of_one_key_run_the_body_once
    -> conformance/test_statements.py::test_a_failing_cache_body_lets_the_next_one_try
- what cannot be compiled is dropped without a word
    -> conformance/test_errors.py::test_bad_pipelines_are_refused_with_all_their_problems
    -> planner/test_problems.py::test_all_problems_are_reported_together_with_their_statements
    -> property/test_random_pipelines.py::test_inline_does_what_plain_python_does
    -> property/test_random_pipelines.py::test_worker_processes_do_what_plain_python_does
- no condition compiles
    -> regressions/test_known_wrongs.py::test_conditions_choose_one_of_two_branches
    -> conformance/test_statements.py::test_a_loop_inside_a_branch_that_does_not_run_does_nothing
- blocks inside blocks do not work, or only at one site
    -> conformance/test_statements.py::test_every_statement_of_the_language_in_one_pipeline
    -> conformance/test_statements.py::test_repeat_inside_a_loop_and_a_loop_inside_repeat
- operations of providers always fail
    -> regressions/test_known_wrongs.py::test_operations_of_providers_run
- a literal that is yielded comes or does not come, depending on the hash seed
    -> regressions/test_known_wrongs.py::test_a_yielded_literal_comes_with_every_hash_seed
    -> planner/test_plan.py::test_a_plan_is_the_same_with_every_hash_seed
- order without data between two sites hangs
    -> conformance/test_statements.py::test_after_orders_operations_across_sites
    -> conformance/test_statements.py::test_after_waits_also_for_what_fails_or_is_skipped
- a parameter cannot be yielded
    -> conformance/test_statements.py::test_literals_and_parameters_can_be_yielded

Frames:

- the first producer of a place that stops ends it, and what the others send later is lost
    -> regressions/test_known_wrongs.py::test_a_place_ends_with_the_last_of_its_producers
- parameters stay in memory as long as the job
    -> regressions/test_known_wrongs.py::test_parameters_are_freed_when_their_set_is_done
    -> net/test_game.py::test_parameter_sets_that_are_done_do_not_add_up
    -> net/test_game.py::test_an_element_that_is_done_is_freed_while_its_loop_goes_on

Firing:

- operations of a site run strictly one after the other
    -> regressions/test_known_wrongs.py::test_operations_of_one_site_that_wait_for_each_other_meet
- nothing leaves a site before all its operations are done
    -> regressions/test_known_wrongs.py::test_values_leave_a_site_while_its_other_operations_run
    -> conformance/test_streams.py::test_elements_arrive_although_the_next_one_never_comes
- a tuple inside a value, a dict with numbers as keys, or a function ends the worker
    -> regressions/test_known_wrongs.py::test_no_value_ends_the_worker_that_made_it
    -> regressions/test_known_wrongs.py::test_a_value_that_cannot_be_sent_is_one_error_of_its_node
    -> conformance/test_statements.py::test_values_of_every_kind_arrive_as_what_they_were
    -> conformance/test_errors.py::test_an_operation_that_misbehaves_fails_and_the_site_goes_on

Errors:

- a job with an error is a success, and nothing raises
    -> conformance/test_errors.py::test_an_error_names_site_node_frame_and_carries_the_remote_traceback
- an error takes the place of good results
    -> conformance/test_errors.py::test_what_needs_a_failed_value_is_reported_because_of_it_and_the_rest_goes_on
    -> conformance/test_errors.py::test_good_results_come_before_the_error_is_raised
- errors that meet lose their types and tracebacks
    -> regressions/test_known_wrongs.py::test_errors_that_meet_keep_their_types_and_tracebacks
    -> conformance/test_errors.py::test_several_errors_form_a_group

Results:

- the oldest results that nobody has read are dropped
    -> conformance/test_streams.py::test_waiting_for_a_job_whose_results_nobody_reads_says_so
    -> conformance/test_streams.py::test_a_reader_that_stops_reading_stops_the_producer
    -> conformance/test_sessions.py::test_what_was_read_and_dropped_is_expired_never_a_silent_gap
- the first reader of a job that nobody has read throws its results away
    -> regressions/test_known_wrongs.py::test_a_reader_that_leaves_takes_nothing_away
    -> conformance/test_sessions.py::test_two_consumers_of_one_job_and_a_third_that_comes_late

Jobs:

- what a cancelled job has sent ends the next job on its lane
    -> regressions/test_known_wrongs.py::test_a_cancelled_job_does_not_end_the_next_one
- the next job on the lane of a cancelled one gets its results
    -> regressions/test_known_wrongs.py::test_a_cancelled_job_does_not_give_its_results_to_the_next_one
- the loss of a worker is told late or never
    -> local/test_processes.py::test_a_killed_worker_is_noticed_at_once_and_replaced
    -> local/test_lost_workers.py::test_killing_a_worker_again_and_again_loses_nothing
- a pipeline for another version of the operations waits for ever
    -> regressions/test_known_wrongs.py::test_a_pipeline_for_another_major_version_is_refused_by_execute
    -> planner/test_problems.py::test_another_major_version_is_refused_and_another_minor_one_is_not

Plans:

- sites run code that is generated from a plan, with strings of the pipeline inside
    -> regressions/test_known_wrongs.py::test_strings_of_a_pipeline_are_data
    -> regressions/test_known_wrongs.py::test_the_library_runs_no_text_as_code

A stock pool of processes:

- it polls: a call takes as long as the polls at both ends
    -> regressions/test_stock_pool.py::test_a_call_does_not_wait_for_a_poll
- it polls: it uses the processor while it is idle
    -> regressions/test_stock_pool.py::test_nothing_wakes_up_while_nothing_happens
- a worker that dies, and a result that cannot be pickled, leave the caller waiting for ever
    -> regressions/test_stock_pool.py::test_whoever_waits_for_a_call_that_cannot_answer_is_told
    -> local/test_processes.py::test_a_worker_that_exits_by_itself_is_lost_too
- cancelling a call does not stop the work
    -> regressions/test_stock_pool.py::test_cancelling_a_call_stops_its_work
    -> local/test_processes.py::test_a_synchronous_operation_that_does_not_return_is_killed_after_the_grace
- cancelling a call does not free its result
    -> regressions/test_stock_pool.py::test_cancelling_a_call_frees_its_result
- exceptions lose their type
    -> regressions/test_stock_pool.py::test_an_exception_keeps_its_type
- it starts a manager process
    -> regressions/test_stock_pool.py::test_there_is_no_process_besides_the_workers
- starting processes blocks the loop
    -> regressions/test_stock_pool.py::test_the_loop_turns_while_a_worker_starts
- its processes outlive an application that is killed
    -> regressions/test_stock_pool.py::test_no_process_outlives_an_application_that_is_killed
    -> local/test_processes.py::test_workers_end_when_the_application_does_however_it_does
"""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dfm_async
from dfm_async import (
    EncodingError,
    Failure,
    FrameCompleted,
    If,
    Job,
    JobFailed,
    JobStatus,
    LocalOptions,
    OperationFailed,
    Pipeline,
    PipelineError,
    PlaceParam,
    Result,
    Session,
    TryFromCache,
    Yield,
)
from tests.conftest import Connect
from tests.regressions import test_stock_pool
from tests.regressions import wrongs as w


def unique() -> str:
    return os.urandom(8).hex()


async def run(session: Session, pipeline: Pipeline, params: Any = {}) -> list[Result]:  # noqa: B006
    async with asyncio.timeout(20):
        return await (await session.execute(pipeline, params)).collect()


def opening(gate: str, site: str = "b") -> Pipeline:
    with Pipeline("open") as pipeline:
        Yield(w.open_gate(gate, site=site))
    return pipeline


# the table


def _claims() -> dict[str, list[tuple[str, str]]]:
    """The table above: for each claim the files and names of its tests."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (__doc__ or "").splitlines():
        if line.startswith("- "):
            tests = found[line[2:]] = []
        elif line.strip().startswith("->"):
            match = re.fullmatch(r"    -> ([a-z_/]+)\.py::(test_[a-z0-9_]+)", line)
            assert match is not None, line
            tests.append((match[1], match[2]))
    return found


CLAIMS = _claims()


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_claim_names_exists(claim: str) -> None:
    assert CLAIMS[claim]
    for file, name in CLAIMS[claim]:
        test = getattr(importlib.import_module(f"tests.{file.replace('/', '.')}"), name, None)
        assert callable(test), f"{file}.py has no {name}"


def test_every_test_of_these_files_stands_in_the_table() -> None:
    here = {"regressions/test_known_wrongs": globals(), "regressions/test_stock_pool": vars(test_stock_pool)}
    written = {(file, name) for file, names in here.items() for name in names if name.startswith("test_")}
    about_the_table = {"test_what_a_claim_names_exists", "test_every_test_of_these_files_stands_in_the_table"}
    named = {test for tests in CLAIMS.values() for test in tests}
    missing = {(file, name) for file, name in written - named if name not in {*about_the_table, "test_stock_pool"}}
    assert missing == set()


# statements


async def test_conditions_choose_one_of_two_branches(connect: Connect) -> None:
    """No pipeline with a condition compiles there."""
    with Pipeline("branches") as pipeline:
        x = w.echo(PlaceParam("x", multiuse=True), site="a")
        y = w.echo(PlaceParam("x", multiuse=True), site="b")
        with If(((x > 1) & ~(y == 3)) | (x == 0)) as outer:
            with If(y >= 2) as inner:
                Yield(w.echo([x, y], site="c"), place="large")
            with inner.otherwise():
                Yield(x, place="zero")
        with outer.otherwise():
            Yield(w.echo("no", site="c"), place="otherwise")
    async with connect(w.fed) as session:
        found = await run(session, pipeline, [{"x": n} for n in range(5)])
    assert sorted((result.frame[0], result.place, result.value) for result in found) == [
        (0, "zero", 0),
        (1, "otherwise", "no"),
        (2, "large", [2, 2]),
        (3, "otherwise", "no"),
        (4, "large", [4, 4]),
    ]


async def test_operations_of_providers_run(connect: Connect) -> None:
    """There, a call that names a provider fails whatever the provider does."""
    with Pipeline("providers") as pipeline:
        Yield(w.measure(1, site="a"), place="own")
        for provider in ("plain", "scaled"):
            Yield(w.measure(2, site="a", provider=provider), place=provider)
        Yield(w.measure(3, provider="remote"), place="remote")
        Yield(w.measure(w.measure(4, provider="remote")[1], provider="scaled"), place="both")
    async with connect(w.fed) as session:
        found = {result.place: result.value for result in await run(session, pipeline)}
    assert found == {
        "own": ("own", 1),
        "plain": ("plain", 2),
        "scaled": ("scaled", 20),
        "remote": ("remote", 3),
        "both": ("scaled", 40),
    }


_LITERALS = """
import asyncio, json
from dfm_async import Federation, ForEach, Pipeline, Session, Yield

fed = Federation("literals")

@fed.site("site").operation
async def echo(value):
    return value

with Pipeline("literals") as pipeline:
    Yield("alone", place="first")
    Yield(echo(1), place="second")
    Yield("behind", place="third")
    with ForEach(["x"]):
        Yield("inside", place="fourth")

async def main():
    found = []
    for target in ("inline", "local"):
        async with Session(fed, target=target) as session:
            results = await (await session.execute(pipeline)).collect()
            found.append(sorted((result.place, result.value) for result in results))
    print(json.dumps(found))

asyncio.run(main())
"""


def test_a_yielded_literal_comes_with_every_hash_seed() -> None:
    """There, with some seeds it never comes, and the job succeeds."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LITERALS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "2", "3")
    ]
    answers = [process.communicate()[0] for process in processes]
    expected = [["first", "alone"], ["fourth", "inside"], ["second", 1], ["third", "behind"]]
    assert [json.loads(answer) for answer in answers] == [[expected, expected]] * len(processes)


# frames


async def test_a_place_ends_with_the_last_of_its_producers(connect: Connect) -> None:
    """There, the first of two stops is enough: what the slower one sends afterwards is lost."""
    gate = unique()
    with Pipeline("two producers") as pipeline:
        n = PlaceParam("n", multiuse=True)
        quick, late = w.echo(n, site="a"), w.gated(gate, n, site="b")
        Yield(quick, place="both", multiuse=True)
        Yield(late, place="both", multiuse=True)
        Yield(w.echo([quick, late], site="c"), place="joined")
    sets = range(20)
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline, [{"n": n} for n in sets])  # and no more: the stop is on its way
        async with job.results() as results:
            found = [await anext(results) for _ in sets]
            assert {result.site for result in found} == {"a"}
            await run(session, opening(gate))
            found += [result async for result in results]
        assert await job is JobStatus.FINISHED
    assert Counter((result.place, result.site) for result in found) == {
        ("both", "a"): 20,
        ("both", "b"): 20,
        ("joined", "c"): 20,
    }
    assert sorted(result.value for result in found if result.place == "joined") == [[n, n] for n in sets]


async def test_parameters_are_freed_when_their_set_is_done(connect: Connect) -> None:
    """There, a parameter stays where it was sent to until the job ends."""
    with Pipeline("parcels") as pipeline:
        Yield(w.echo(1, site="b", after=w.receive(w.receive(PlaceParam("parcel"), site="a"), site="b")))
    with Pipeline("left") as left:
        Yield(w.parcels(site="a"), place="a")
        Yield(w.parcels(site="b"), place="b")
    sent: weakref.WeakSet[w.Parcel] = weakref.WeakSet()
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline, None)
        events = job.events()
        for _ in range(30):
            parcel = w.Parcel()
            sent.add(parcel)
            await job.send_input_params({"parcel": parcel})
            del parcel
            async for event in events:
                if isinstance(event, FrameCompleted):
                    break
        gc.collect()
        assert len(sent) <= 1
        assert all(result.value <= 2 for result in await run(session, left))
        assert job.status is JobStatus.RUNNING
        await job.send_stop_frame()
        assert await job is JobStatus.FINISHED


# firing


@pytest.mark.parametrize("operation", [w.meet, w.meet_in_threads])
async def test_operations_of_one_site_that_wait_for_each_other_meet(connect: Connect, operation: Any) -> None:
    """There, the operations of a block at one site run in a row: the first would wait for ever."""
    name = unique()
    with Pipeline("meeting") as pipeline:
        Yield(operation(name), place="one")
        Yield(operation(name), place="two")
    async with connect(w.fed) as session:
        assert [result.value for result in await run(session, pipeline)] == [True, True]


async def test_values_leave_a_site_while_its_other_operations_run(connect: Connect) -> None:
    """There, the results of a block, and what other sites wait for, leave when all of the block is done."""
    gate = unique()
    with Pipeline("early") as pipeline:
        Yield(w.gated(gate, "late", site="a"), place="late")
        value = w.echo("early", site="a")
        Yield(value, place="here")
        Yield(w.echo(value, site="b"), place="there")
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline)
        assert (await job.first("here")).value == "early"
        assert (await job.first("there")).value == "early"
        assert job.status is JobStatus.RUNNING
        await run(session, opening(gate, "a"))
        assert (await job.first("late")).value == "late"


@pytest.mark.parametrize("kind", ["a nested tuple", "numbers as keys", "a function"])
async def test_no_value_ends_the_worker_that_made_it(connect: Connect, kind: str) -> None:
    """There, the encoding of such a value ends the process, and everything that ran in it."""
    gate = unique()
    with Pipeline("values") as pipeline:
        Yield(w.pid(), place="pid")
        value = w.make(kind)
        Yield(value, place="value")
        Yield(w.echo(value, site="b"), place="sent")
        Yield(w.gated(gate, "still there", site="a"), place="other")
    with Pipeline("again") as again:
        Yield(w.pid())
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline)
        before = (await job.first("pid")).value
        async with job.results(errors="yield") as results:
            items: list[Any] = []
            while {item.place for item in items} < {"pid", "value", "sent"}:
                items.append(await anext(results))
            await run(session, opening(gate, "a"))
            items += [item async for item in results]
        found = {item.place: item.value for item in items if isinstance(item, Result)}
        assert found.pop("other") == "still there"
        assert found.pop("pid") == before
        if kind == "a function":
            assert found == {}
            causes = [item.error.__cause__ for item in items if isinstance(item, Failure)]
            assert all(isinstance(cause, EncodingError) for cause in causes)
            assert {cause.path for cause in causes if isinstance(cause, EncodingError)} == {"value['functions'][0]"}
            assert job.status is JobStatus.FAILED
        else:
            assert found == {"value": await w.make(kind), "sent": await w.make(kind)}
            assert await job is JobStatus.FINISHED
        assert [result.value for result in await run(session, again)] == [before]


async def test_a_value_that_cannot_be_sent_is_one_error_of_its_node(connect: Connect) -> None:
    """It is an ordinary error, however many places and sites would have got the value."""
    with Pipeline("many uses") as pipeline:
        value = w.make("a function")
        Yield(value, place="one")
        Yield(value, place="two")
        Yield(w.echo(value, site="b"), place="three")
        Yield(w.echo(value, site="c"), place="four")
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline)
        failures = [item async for item in job.results(errors="yield") if isinstance(item, Failure)]
    assert sorted(failure.place for failure in failures if failure.place) == ["four", "one", "three", "two"]
    assert len([failure for failure in failures if failure.place is None]) == 1


# errors


async def test_errors_that_meet_keep_their_types_and_tracebacks(connect: Connect) -> None:
    """There, where two errors come together they become one, of another type and without a traceback."""
    with Pipeline("meet") as pipeline:
        Yield(w.echo([w.misfit(7), w.no_such_thing("x")], site="c"))
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline)
        items = [item async for item in job.results(errors="yield")]
        with pytest.raises(JobFailed) as caught:
            await job
    errors = {error.operation: error for error in caught.value.errors if isinstance(error, OperationFailed)}
    assert caught.value.count == len(errors) == 2
    first, second = errors["misfit"], errors["no_such_thing"]
    assert isinstance(first.__cause__, w.Misfit)
    assert first.__cause__.number == 7
    assert "in _deep" in first.remote_traceback
    assert isinstance(second.__cause__, LookupError)
    assert "in no_such_thing" in second.remote_traceback
    (lost,) = [item.error for item in items if isinstance(item, Failure) and item.place == "yield"]
    assert lost in (first, second)


# results


async def test_a_reader_that_leaves_takes_nothing_away(connect: Connect) -> None:
    """There, who reads first of a job that nobody has read throws away what it holds, for all others too."""
    seen: list[int] = []
    with Pipeline("count") as pipeline:
        Yield(w.count(10))
    async with connect(w.fed) as session, asyncio.timeout(20):
        job = await session.execute(pipeline)
        assert await job is JobStatus.FINISHED
        assert (await job.first()).value == 0
        async with job.results() as results:
            assert [(await anext(results)).value for _ in range(3)] == [0, 1, 2]
        called = await session.reattach(job.job_id, default_callback=lambda *args: seen.append(args[-1]))
        await called
        assert [result.value for result in await job.collect()] == seen == list(range(10))


# jobs


async def cancelled_and_next(session: Session, gate: str) -> tuple[Job, Job]:
    """A job that is cancelled while it sends as fast as it can, and one that is executed at the same time."""
    with Pipeline("flood") as floods:
        Yield(w.flood())
    with Pipeline("next") as pipeline:
        Yield(w.gated(gate, "own", site="a"))
    with Pipeline("ping") as ping:
        Yield(w.pid())
    cancelled = await session.execute(floods)
    await cancelled.first()
    cancelling = asyncio.create_task(cancelled.cancel())
    job = await session.execute(pipeline)
    assert (await cancelling)["a"].startswith("stopped")
    await run(session, ping)  # what the worker had sent before has arrived now
    return cancelled, job


ONE_LANE = LocalOptions(lanes=1)


async def test_a_cancelled_job_does_not_end_the_next_one(connect: Connect) -> None:
    """There, the next job takes the marker of the cancelled one's end for its own."""
    async with connect(w.fed, options=ONE_LANE) as session, asyncio.timeout(20):
        for _ in range(10):
            gate = unique()
            cancelled, job = await cancelled_and_next(session, gate)
            assert (cancelled.status, job.status) == (JobStatus.ABORTED, JobStatus.RUNNING)
            await run(session, opening(gate, "a"))
            assert await job is JobStatus.FINISHED
            assert cancelled.status is JobStatus.ABORTED


async def test_a_cancelled_job_does_not_give_its_results_to_the_next_one(connect: Connect) -> None:
    """There, what the cancelled job has sent and nobody has read comes out of the next one."""
    async with connect(w.fed, options=ONE_LANE) as session, asyncio.timeout(20):
        for _ in range(10):
            gate = unique()
            _, job = await cancelled_and_next(session, gate)
            await run(session, opening(gate, "a"))
            assert [result.value for result in await job.collect()] == ["own"]


async def test_a_pipeline_for_another_major_version_is_refused_by_execute(connect: Connect) -> None:
    """There, ``execute`` never returns."""
    async with connect(w.fed) as session, asyncio.timeout(20):
        for version, fits in (("1.9", False), ("3.0.0", False), ("2.0", True), ("2.9.9", True)):
            with Pipeline("versions", api_version=version) as pipeline:
                Yield(w.echo(version, site="a"))
            if fits:
                assert [result.value for result in await run(session, pipeline)] == [version]
            else:
                with pytest.raises(PipelineError, match=re.escape(version)):
                    await session.execute(pipeline)


# plans


@pytest.mark.parametrize(
    "text",
    [
        "\"); import os; os.environ['HARMED'] = '1'; (\"",
        "'); __import__('os').environ.update(HARMED='1'); ('",
        "\"\"\"\nimport os\nos.environ['HARMED'] = '1'\n'''",
        "{__import__('os').environ} %s \\N{BULLET} \\",
        "line\nbreak\r\ttab \x00 \u2028 \U0001f600",
        "a.b[0] -> c",
    ],
)
async def test_strings_of_a_pipeline_are_data(connect: Connect, text: str) -> None:
    """There, sites run generated code, into which names and literals are written as they are."""
    with Pipeline(text) as pipeline:
        value = w.echo({text: [text, PlaceParam(text)]}, site="a")
        Yield(value, place=text + "0")
        Yield(w.echo(value[text], site="b"), place=text + "1")
        with TryFromCache(key=text, site="a") as cached:
            cached.store(w.echo(text, site="a"))
        with If(cached == text):
            Yield(cached, place=text + "2")
        Yield(w.harmed(site="a"), place="a")
        Yield(w.harmed(site="b"), place="b")
    again = Pipeline.model_validate_json(pipeline.model_dump_json())
    async with connect(w.fed) as session, asyncio.timeout(20):
        plan = await session.prepare(again)
        job = await session.execute(type(plan).from_json(plan.to_json()), {text: text}, job_id=text)
        found = {result.place: result.value for result in await job.collect()}
    assert found == {
        text + "0": {text: [text, text]},
        text + "1": [text, text],
        text + "2": text,
        "a": False,
        "b": False,
    }
    assert "HARMED" not in os.environ


def test_the_library_runs_no_text_as_code() -> None:
    """There, a plan becomes source code that each site executes."""
    files = list(Path(dfm_async.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("exec", "eval", "compile"), f"{file}:{node.lineno}"
