"""Tasks and results of an executor, against real agents and against programs that are played by hand: rules 3.1.3,
3.3 and 3.4, without any process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dfm_async.errors import BadResult, BadTask, ResultNotDelivered, TaskRejected, TransferFailed
from dfm_async.exchange import (
    ExchangeState,
    ExecutorOptions,
    FlareAgent,
    LauncherExecutor,
    Model,
    PlainCodec,
    Task,
    TaskResult,
)
from dfm_async.exchange import program_messages as msg
from tests.exchange.executors import (
    LARGE,
    NOTHING,
    Meddler,
    answering,
    attached,
    begin_task,
    by_hand,
    echo,
    first,
    offer_result,
    result_of,
    serving,
    with_executor,
    with_pair,
    with_program,
)
from tests.exchange.rig import CountingCodec, Hand, idle, now, on_virtual_time

# a task and its result


@pytest.mark.parametrize("transport", ["unix", "tcp", "memory"])
@pytest.mark.parametrize(
    "data", [None, {"x": [1, "two", 3.0]}, LARGE, [LARGE, LARGE[:9000] * 2]], ids=["none", "small", "large", "larger"]
)
async def test_a_task_goes_there_and_its_result_comes_back(
    transport: Literal["unix", "tcp", "memory"], data: Any
) -> None:
    async with serving(transport=transport) as (executor, _, _):
        for number in range(2):
            task = Task("train", data, round=number, total_rounds=2)
            result = await executor.execute(task)
            assert (result.rc, result.ok, result.task, result.reason) == ("OK", True, task.id, "")
            np.testing.assert_equal(result.data, data)
            assert executor.state is ExchangeState.SETTLED


async def test_arrays_can_be_written_to_where_they_arrive() -> None:
    async def work(agent: FlareAgent) -> None:
        async for task in agent:
            np.add(task.data, 1, out=task.data)
            await agent.submit_result(task.data)

    async with serving(work=work) as (executor, _, _):
        result = await executor.execute(Task("any", LARGE))
        np.add(result.data, 1, out=result.data)
        assert np.array_equal(result.data, LARGE + 2)
        assert LARGE[0] == 0


async def test_the_original_return_code_is_kept_with_its_reason() -> None:
    async def work(agent: FlareAgent) -> None:
        async for _ in agent:
            await agent.submit_result({"half": 1}, "MODEL_UNRECOGNIZED", reason="too many layers")

    async with serving(work=work) as (executor, _, _):
        result = await executor.execute(Task("validate"))
        assert result == TaskResult({"half": 1}, rc="MODEL_UNRECOGNIZED", task=result.task, reason="too many layers")
        assert not result.ok


@with_program()
async def test_the_same_task_can_be_given_again_when_it_was_answered(executor: LauncherExecutor) -> None:
    task = Task("any", 5)
    for _ in range(3):
        assert (await executor.execute(task)).data == 5


@with_program()
async def test_tasks_are_done_one_at_a_time_and_in_order(executor: LauncherExecutor) -> None:
    found = await asyncio.gather(*(executor.execute(Task("any", number)) for number in range(10)))
    assert [result.data for result in found] == list(range(10))


# the check of a task (3.3.1)


@with_executor(ExecutorOptions(other_tasks=("fit",)))
async def test_a_task_of_a_name_that_is_not_taken_is_refused(executor: LauncherExecutor, hand: Hand) -> None:
    with pytest.raises(BadTask, match="accepted task names: train, validate, submit_model, fit"):
        await executor.execute(Task("predict"))
    with pytest.raises(TypeError, match="takes a Task"):
        await executor.execute("train")  # type: ignore[arg-type]
    await idle()
    assert hand.all(msg.TaskOffer) == []


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        (Task("train"), "no round and no total_rounds"),
        (Task("train", round=1), "no total_rounds"),
        (Task("train", round=1, total_rounds=2), ""),
        (Task("validate"), ""),
    ],
)
@with_program(work=answering({"metrics": {}}))
async def test_a_train_task_without_rounds_warns(
    executor: LauncherExecutor, task: Task, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dfm_async.exchange"):
        await executor.execute(task)
    logged = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert logged == ([f"task {task} has {missing}"] if missing else [])


# the check of a result (3.3.6)


@pytest.mark.parametrize(
    ("options", "task", "bad", "good", "problem"),
    [
        ({}, "validate", Model(params=1), Model(metrics={"loss": 1.0}), "no metrics"),
        ({}, "validate", {"params": LARGE}, {"metrics": {"loss": LARGE}}, "no metrics"),
        ({"train_with_evaluation": True}, "train", {"params": 1}, {"metrics": {}}, "no metrics"),
        ({}, "submit_model", {"metrics": {}}, {"params": 1}, "no model"),
        ({}, "submit_model", Model(metrics={"loss": LARGE}), Model(params=LARGE), "no model"),
        ({"evaluate_task_name": "check"}, "check", {}, {"metrics": {}}, "no metrics"),
    ],
)
async def test_a_result_without_what_its_task_requires_is_bad(
    options: dict[str, Any], task: str, bad: Any, good: Any, problem: str
) -> None:
    async with serving(ExecutorOptions(**options), answering(bad, good)) as (executor, _, _):
        with pytest.raises(BadResult, match=problem):
            await executor.execute(Task(task, round=1, total_rounds=1))
        assert (await executor.execute(Task(task, round=1, total_rounds=1))).ok, "the program goes on"


@with_program(ExecutorOptions(), answering({"params": 1}, 3))
async def test_a_train_task_needs_no_metrics_unless_it_is_asked_for(executor: LauncherExecutor) -> None:
    for expected in ({"params": 1}, 3):
        assert (await executor.execute(Task("train", round=1, total_rounds=1))).data == expected


@with_pair(ExecutorOptions())
async def test_a_bad_result_is_reported_to_the_program(executor: LauncherExecutor, agent: FlareAgent) -> None:
    executing = asyncio.ensure_future(executor.execute(Task("validate")))
    await agent.get_task()
    with pytest.raises(ResultNotDelivered, match="it has no metrics"):
        await agent.submit_result({})
    with pytest.raises(BadResult):
        await executing
    assert executor.state is ExchangeState.REJECTED


class RefusingCodec(PlainCodec):
    """Cannot decode one value."""

    def decode(self, encoded: Any) -> Any:
        found = super().decode(encoded)
        if found == "unknown":
            raise LookupError("no such class")
        return found


def _convert(task: Task) -> Task:
    if task.data == "bad":
        raise ValueError("no such layer")
    return Task(task.name, "unknown" if task.data == "lost" else task.data, id=task.id)


async def _data(task: Task) -> Any:
    return task.data


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        pytest.param(object(), BadTask, "its data cannot be encoded", id="not encodable"),
        pytest.param(LARGE, BadTask, "max_resends=None is not allowed", id="large, with unlimited resends"),
        pytest.param("bad", TaskRejected, "ValueError: no such layer", id="not convertible"),
        pytest.param("lost", BadResult, "it cannot be decoded here: no such class", id="result not decodable"),
    ],
)
@with_program(
    ExecutorOptions(other_tasks=("*",), max_resends=None),
    lambda agent: agent.run(_data),
    codec=RefusingCodec(),
    agent={"convert_task": _convert},
)
async def test_a_value_that_is_refused_leaves_the_program_for_the_next_task(
    executor: LauncherExecutor, data: Any, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        await executor.execute(Task("any", data))
    assert executor.state is ExchangeState.REJECTED
    assert (await executor.execute(Task("any", "good"))).data == "good"


# large results (3.4)


@pytest.mark.parametrize("transport", ["unix", "memory"])
async def test_submit_returns_only_when_every_receiver_has_everything(
    transport: Literal["unix", "memory"], tmp_path: Path
) -> None:
    async with attached(transport=transport) as (executor, agent, _):
        offered, submitting = await offer_result(
            executor, agent, ["server", "other", "disk"], {"w": LARGE, "b": LARGE[:20_000]}
        )
        assert offered.state is ExchangeState.TRANSFERRING
        assert offered.size == LARGE.nbytes + 160_000
        first, second = await asyncio.gather(offered.pull("server"), offered.pull("other"))
        assert not submitting.done()
        assert not offered.settled.is_set()
        third = await offered.pull("disk", folder=str(tmp_path))
        await submitting
        assert offered.settled.is_set()
        for result in (first, second, third):
            np.testing.assert_equal(result.data, {"w": LARGE, "b": LARGE[:20_000]})
        assert sum(os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)) == offered.size
        third.data["w"][0] = 7  # what is mapped can be written to
        assert offered.state is ExchangeState.SETTLED


@with_pair()
async def test_a_receiver_that_fails_fails_the_result_for_all_at_once(
    executor: LauncherExecutor, agent: FlareAgent, meddler: Meddler
) -> None:
    """Failure always frees the source; nobody waits for what will never come."""
    offered, submitting = await offer_result(executor, agent, ["good", "bad"], LARGE)
    meddler.keeps_out = lambda message: isinstance(message, msg.Chunk)
    good = asyncio.ensure_future(offered.pull("good"))
    with pytest.raises(TransferFailed, match="no room for"):
        await offered.pull("bad", folder="/nowhere")
    with pytest.raises(ResultNotDelivered):
        await submitting
    with pytest.raises(TransferFailed, match="not offered any longer"):
        await good
    assert offered.state is ExchangeState.FAILED


@with_pair()
async def test_a_pull_that_was_cancelled_goes_on_where_it_was(
    executor: LauncherExecutor, agent: FlareAgent, meddler: Meddler
) -> None:
    offered, submitting = await offer_result(executor, agent, ["server"], LARGE)
    pulled = asyncio.Event()
    count = 0

    def second_and_later(message: msg.Message) -> bool:
        nonlocal count
        if isinstance(message, msg.Chunk):
            count += 1
            if count > 1:
                pulled.set()
                return True
        return False

    meddler.keeps_out = second_and_later
    pulling = asyncio.ensure_future(offered.pull("server"))
    await pulled.wait()
    await asyncio.sleep(0)
    pulling.cancel()
    await asyncio.wait({pulling})
    meddler.keeps_out = lambda message: False
    meddler.sent.clear()
    result = await offered.pull("server")
    await submitting
    assert np.array_equal(result.data, LARGE)
    assert min(message.offset for message in meddler.sent if isinstance(message, msg.Chunk)) > 0


@with_program(work=answering(5))
async def test_a_result_without_large_parts_is_there_for_every_receiver(executor: LauncherExecutor) -> None:
    offered = await executor.offer(Task("any"), ["a", "b"])
    assert offered.settled.is_set()
    assert [(await offered.pull(name)).data for name in ("a", "b", "a")] == [5, 5, 5]


@with_program(work=answering(LARGE))
async def test_a_result_is_pulled_only_by_its_receivers_and_once(executor: LauncherExecutor) -> None:
    offered = await executor.offer(Task("any"), ["server"])
    with pytest.raises(TransferFailed, match="not a receiver"):
        await offered.pull("somebody")
    await offered.pull("server")
    with pytest.raises(TransferFailed, match="has it already"):
        await offered.pull("server")


@pytest.mark.parametrize("receivers", [[], "server", ["a", "a"], [1], [""]])
@with_pair()
async def test_receivers_must_be_different_names(executor: LauncherExecutor, receivers: Any) -> None:
    with pytest.raises(ValueError, match="receivers must be different names"):
        await executor.offer(Task("any"), receivers)


@with_program(ExecutorOptions(), answering({"params": LARGE}, {}))
async def test_offered_results_are_checked_as_well(executor: LauncherExecutor) -> None:
    offered = await executor.offer(Task("validate"), ["server"])
    with pytest.raises(BadResult, match="no metrics"):
        await offered.pull("server")
    with pytest.raises(BadResult, match="no metrics"):
        await executor.offer(Task("validate"), ["server"])


@pytest.mark.usefixtures("lossy")
@with_program(work=answering(LARGE))
async def test_damaged_chunks_come_again(executor: LauncherExecutor, meddler: Meddler) -> None:
    send = meddler.inner.send
    damaged: list[int] = []

    def damage(message: msg.Message, data: memoryview | None = None) -> None:
        if isinstance(message, msg.Chunk) and data is not None and len(damaged) < 2 and message.offset:
            damaged.append(message.offset)
            data = memoryview(bytes(data[:-1]) + b"\x77")
        send(message, data)

    meddler.inner.send = damage
    assert np.array_equal((await executor.execute(Task("any"))).data, LARGE)
    assert len(damaged) == 2


# resends on a transport that loses messages (3.1.3)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lost", [msg.TaskOffer, msg.TaskAnswer, msg.ResultOffer, msg.ResultAnswer])
@pytest.mark.usefixtures("lossy")
@on_virtual_time
async def test_a_message_that_gets_lost_is_sent_again_and_done_once(lost: type[msg.Message], count: int) -> None:
    codec = CountingCodec()
    async with attached(codec=codec) as (executor, agent, meddler):
        if lost in (msg.TaskOffer, msg.ResultAnswer):
            meddler.keeps_in = first(count, lost)
        else:
            meddler.keeps_out = first(count, lost)
        working = asyncio.ensure_future(echo(agent))
        begun = now()
        for number in range(2):
            assert (await executor.execute(Task("any", number))).data == number
        await executor.end()
        assert len(await working) == 2, "every task was given once"
        assert (codec.encoded, codec.decoded) == (4, 4), "and everything was encoded once"
        assert now() - begun <= 2 * count + 1


@pytest.mark.usefixtures("lossy")
@with_executor()
async def test_an_unanswered_task_is_sent_again_up_to_the_limit(executor: LauncherExecutor, hand: Hand) -> None:
    begun = now()
    with pytest.raises(TimeoutError, match=r"the program did not accept task any .* took longer than 60 s"):
        await executor.execute(Task("any"))
    assert now() - begun == pytest.approx(60, abs=0.1)
    await hand.gone.wait()
    assert len(hand.all(msg.TaskOffer)) == 4
    assert len(hand.all(msg.Abort)) == 1, "it must stop"


@with_executor()
async def test_messages_of_other_tasks_change_nothing(executor: LauncherExecutor, hand: Hand) -> None:
    """Replies must match session, task and request."""
    executing, task = await begin_task(executor, hand)
    hand.say(
        msg.TaskAnswer("another", False, "no"),
        msg.ResultOffer("another", "r0", "OK", NOTHING, []),
        msg.Settled("another", "finished"),
        msg.Hello(1, "x", "y", 1),
        msg.TaskOffer(task="t", name="any", data=NOTHING, parts=[]),
    )
    refused = await hand.next(msg.ResultAnswer)
    assert (refused.result, refused.accepted, refused.reason) == (
        "r0",
        False,
        "nobody waits for this task's result",
    )
    await idle()
    assert not executing.done()
    hand.say(msg.TaskAnswer(task.task, True), result_of(task))
    assert (await executing).ok


@with_executor()
async def test_a_result_that_comes_again_is_answered_again_and_taken_once(
    executor: LauncherExecutor, hand: Hand
) -> None:
    executing, task = await begin_task(executor, hand)
    result = result_of(task)
    hand.say(result, result)
    await executing
    hand.say(result)
    assert [(await hand.next(msg.ResultAnswer, number)).accepted for number in range(2)] == [True] * 2
    hand.say(result_of(task, result="r2"))
    assert not (await hand.next(msg.ResultAnswer, 2)).accepted, "exactly one answer per task"


# times


@on_virtual_time
async def test_the_time_to_accept_is_longer_while_the_payload_makes_progress() -> None:
    options = ExecutorOptions(other_tasks=("*",), peer_read_timeout=10, max_resends=0)
    async with by_hand(options) as (executor, hand):
        executing, task = await begin_task(executor, hand, LARGE)
        number, size = task.parts[0]
        for sequence in range(5):
            await asyncio.sleep(9)
            hand.say(
                msg.TransferReport(
                    tx=task.task,
                    transfer=number,
                    receiver="program",
                    sequence=sequence,
                    bytes_done=sequence * 1000,
                    limit=size,
                )
            )
        await asyncio.sleep(9)
        assert not executing.done()
        with pytest.raises(TimeoutError, match="took longer than 10 s"):
            await executing
        assert len(hand.all(msg.Withdrawn)) == 1


@on_virtual_time
async def test_a_result_that_takes_too_long_ends_the_program() -> None:
    options = ExecutorOptions(other_tasks=("*",), task_wait_timeout=100, heartbeat_timeout=0)
    async with by_hand(options) as (executor, hand):
        executing, task = await begin_task(executor, hand)
        hand.say(msg.TaskAnswer(task.task, True))
        begun = now()
        with pytest.raises(TimeoutError, match=r"the result of task any .* took longer than 100 s"):
            await executing
        assert now() - begun == pytest.approx(100, abs=0.1)
        await hand.gone.wait()
        assert "took longer" in hand.all(msg.Abort)[0].reason


@on_virtual_time
async def test_a_large_result_that_does_not_come_fails_after_the_idle_timeout() -> None:
    options = ExecutorOptions(other_tasks=("*",), streaming_idle_timeout=50, max_resends=0)
    async with by_hand(options) as (executor, hand):
        executing, task = await begin_task(executor, hand)
        hand.say(result_of(task, (1, 100), (2, 100)))
        with pytest.raises(TransferFailed, match="nothing has come for 50 s"):
            await executing
        assert [report.state for report in hand.all(msg.TransferReport)[-2:]] == ["failed", "aborted"]


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([(1, -1)], "no room for"),
        ([(1, 1 << 62)], "no room for"),
        ([(1, 100), (1, 200)], "several parts have the same number"),
    ],
)
@with_executor()
async def test_a_result_with_impossible_parts_fails_at_once(
    executor: LauncherExecutor, hand: Hand, parts: list[tuple[int, int]], problem: str
) -> None:
    executing, task = await begin_task(executor, hand)
    hand.say(result_of(task, *parts))
    with pytest.raises(TransferFailed, match=problem):
        await executing


@pytest.mark.parametrize("size", [1000, -1])
async def test_the_id_of_a_result_cannot_escape_its_folder(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    async with by_hand() as (executor, hand):
        offering = asyncio.ensure_future(executor.offer(Task("any"), ["disk"]))
        task = await hand.next(msg.TaskOffer)
        hand.say(result_of(task, (1, size), result="../outside"))
        offered = await offering
        pulling = asyncio.ensure_future(offered.pull("disk", folder=str(folder)))
        await hand.next(msg.TransferReport)
        hand.say(msg.Withdrawn("../outside"))
        with pytest.raises(TransferFailed):
            await pulling
    assert os.listdir(tmp_path) == ["inside"]
    assert len(os.listdir("/proc/self/fd")) == before
