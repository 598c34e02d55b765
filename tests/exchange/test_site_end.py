"""The site's side, against real agents and against programs that are played by hand: rules 3.1.2 to 3.1.4, 3.3 and
3.4, without any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dfm_async.errors import (
    AgentClosed,
    BadResult,
    BadTask,
    CallStateError,
    EncodingError,
    ExchangeError,
    LaunchFailed,
    PeerGone,
    ResultNotDelivered,
    TaskAborted,
    TaskRejected,
    TransferFailed,
)
from dfm_async.exchange import (
    AgentOptions,
    ExchangeState,
    ExecutorOptions,
    FlareAgent,
    LauncherExecutor,
    Model,
    PlainCodec,
    ProgramState,
    SubprocessLauncher,
    Task,
    TaskResult,
)
from dfm_async.exchange import messages as msg
from tests.exchange.rig import (
    ANY,
    CountingCodec,
    Hand,
    Meddler,
    attach,
    attached,
    echo,
    first,
    on_virtual_time,
    program_by_hand,
)
from tests.exchange.virtual import VirtualLoop, idle

LARGE = np.arange(300_000, dtype=np.int64)
"""An array of several chunks."""
NOTHING = PlainCodec().encode(None).data


def now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def by_hand(options: ExecutorOptions = ANY, **rest: Any) -> AsyncIterator[tuple[LauncherExecutor, Hand]]:
    """A real executor, and a program that is played by hand."""
    async with LauncherExecutor(None, options, transport="memory", **rest) as executor:
        hand = await program_by_hand(executor)
        try:
            yield executor, hand
        finally:
            await hand.close()


@contextlib.asynccontextmanager
async def serving(
    options: ExecutorOptions = ANY,
    work: Callable[[FlareAgent], Awaitable[Any]] = echo,
    **rest: Any,
) -> AsyncIterator[tuple[LauncherExecutor, FlareAgent, Meddler]]:
    """A real executor, and an agent that works until its end."""
    async with attached(options, **rest) as (executor, agent, meddler):
        working = asyncio.ensure_future(_ended(agent, work(agent)))
        try:
            yield executor, agent, meddler
        finally:
            await executor.finalize()
            await asyncio.wait({working})
            if (error := working.exception()) is not None and not isinstance(error, (AgentClosed, ResultNotDelivered)):
                raise error


async def _ended(agent: FlareAgent, work: Awaitable[Any]) -> None:
    try:
        await work
    finally:
        await agent.close()


def answering(*results: Any) -> Callable[[FlareAgent], Awaitable[None]]:
    """A program that gives these results, one after the other."""

    async def work(agent: FlareAgent) -> None:
        left = iter(results)
        async for _ in agent:
            with contextlib.suppress(ResultNotDelivered):
                await agent.submit_result(next(left))

    return work


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


async def test_the_same_task_can_be_given_again_when_it_was_answered() -> None:
    async with serving() as (executor, _, _):
        task = Task("any", 5)
        for _ in range(3):
            assert (await executor.execute(task)).data == 5


async def test_tasks_are_done_one_at_a_time_and_in_order() -> None:
    async with serving() as (executor, _, _):
        found = await asyncio.gather(*(executor.execute(Task("any", number)) for number in range(10)))
        assert [result.data for result in found] == list(range(10))


# the check of a task (3.3.1)


@on_virtual_time
async def test_a_task_of_a_name_that_is_not_taken_is_refused() -> None:
    async with by_hand(ExecutorOptions(other_tasks=("fit",))) as (executor, hand):
        with pytest.raises(BadTask, match="the names that are taken are train, validate, submit_model, fit"):
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
async def test_a_train_task_without_rounds_warns(task: Task, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(work=answering({"metrics": {}})) as (executor, _, _):
        with caplog.at_level(logging.WARNING, "dfm_async.exchange"):
            await executor.execute(task)
        assert [record.getMessage() for record in caplog.records] == ([f"task {task} has {missing}"] if missing else [])


async def test_a_task_whose_data_cannot_travel_is_refused_and_the_program_goes_on() -> None:
    async with serving() as (executor, _, _):
        with pytest.raises(BadTask, match="its data cannot be encoded") as caught:
            await executor.execute(Task("any", object()))
        assert isinstance(caught.value.__cause__, EncodingError)
        assert executor.state is ExchangeState.REJECTED
        assert (await executor.execute(Task("any", 1))).data == 1


async def test_unlimited_resends_are_refused_for_large_tasks_and_the_program_goes_on() -> None:
    """3.1.3: unlimited is refused for large payloads."""
    async with serving(ExecutorOptions(other_tasks=("*",), max_resends=None)) as (executor, _, _):
        with pytest.raises(BadTask, match="max_resends=None is not allowed"):
            await executor.execute(Task("any", LARGE))
        assert (await executor.execute(Task("any", 1))).data == 1


# the check of a result (3.3.6)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(
    ("options", "task", "bad", "good", "problem"),
    [
        ({}, "validate", Model(params=1), Model(metrics={"loss": 1.0}), "no metrics"),
        ({}, "validate", {"params": 1}, {"metrics": {"loss": 1.0}}, "no metrics"),
        ({"train_with_evaluation": True}, "train", {"params": 1}, {"metrics": {}}, "no metrics"),
        ({}, "submit_model", {"metrics": {}}, {"params": 1}, "no model"),
        ({"evaluate_task_name": "check"}, "check", {}, {"metrics": {}}, "no metrics"),
    ],
)
async def test_a_result_without_what_its_task_asks_for_is_bad_and_the_program_goes_on(
    large: bool, options: dict[str, Any], task: str, bad: Any, good: Any, problem: str
) -> None:
    def grown(value: Any) -> Any:
        if not large:
            return value
        return (
            {**value, "more": LARGE}
            if isinstance(value, dict)
            else Model(params=value.params, metrics=value.metrics, meta={"more": LARGE})
        )

    async with serving(ExecutorOptions(**options), answering(grown(bad), grown(good))) as (executor, _, _):
        with pytest.raises(BadResult, match=problem):
            await executor.execute(Task(task, round=1, total_rounds=1))
        assert (await executor.execute(Task(task, round=1, total_rounds=1))).ok


async def test_a_train_task_needs_no_metrics_unless_it_is_asked_for() -> None:
    async with serving(ExecutorOptions(), answering({"params": 1}, 3)) as (executor, _, _):
        for expected in ({"params": 1}, 3):
            assert (await executor.execute(Task("train", round=1, total_rounds=1))).data == expected


async def test_a_bad_result_is_told_to_the_program() -> None:
    async with attached(ExecutorOptions()) as (executor, agent, _):
        executing = asyncio.ensure_future(executor.execute(Task("validate")))
        await agent.get_task()
        with pytest.raises(ResultNotDelivered, match="it has no metrics"):
            await agent.submit_result({})
        with pytest.raises(BadResult):
            await executing
        assert executor.state is ExchangeState.REJECTED


async def test_a_result_that_cannot_be_rebuilt_is_bad_and_the_program_goes_on() -> None:
    class Refusing(PlainCodec):
        def decode(self, encoded: Any) -> Any:
            found = super().decode(encoded)
            if found == "text":
                raise LookupError("no such class")
            return found

    async with serving(work=answering("text", 5), codec=Refusing()) as (executor, _, _):
        with pytest.raises(BadResult, match="it cannot be rebuilt here: no such class"):
            await executor.execute(Task("any"))
        assert (await executor.execute(Task("any"))).data == 5


# what the program refuses


async def test_a_task_whose_conversion_fails_is_rejected_and_the_program_goes_on() -> None:
    def convert(task: Task) -> Task:
        if task.data == "bad":
            raise ValueError("no such layer")
        return task

    async with serving(agent={"convert_task": convert}) as (executor, _, _):
        with pytest.raises(TaskRejected, match="ValueError: no such layer"):
            await executor.execute(Task("any", "bad"))
        assert executor.state is ExchangeState.REJECTED
        assert (await executor.execute(Task("any", "good"))).data == "good"


async def test_a_result_that_cannot_be_converted_is_an_answer_and_the_program_goes_on() -> None:
    async with serving(work=lambda agent: agent.run(lambda task: object() if task.data else 5)) as (executor, _, _):
        result = await executor.execute(Task("any", 1))
        assert (result.rc, result.data) == ("EXECUTION_EXCEPTION", None)
        assert "could not be converted: EncodingError" in result.reason
        assert (await executor.execute(Task("any", 0))).data == 5


async def test_what_a_handler_raises_is_an_answer_and_the_program_goes_on() -> None:
    async def divide(task: Task) -> Any:
        return 1 / task.data

    async with serving(work=lambda agent: agent.run(divide)) as (executor, _, _):
        result = await executor.execute(Task("any", 0))
        assert (result.rc, result.reason) == ("EXECUTION_EXCEPTION", "ZeroDivisionError: division by zero")
        assert (await executor.execute(Task("any", 2))).data == 0.5


# large results (3.4)


@pytest.mark.parametrize("transport", ["unix", "memory"])
async def test_submit_returns_only_when_every_receiver_has_everything(
    transport: Literal["unix", "memory"], tmp_path: Path
) -> None:
    async with attached(transport=transport) as (executor, agent, _):
        offering = asyncio.ensure_future(executor.offer(Task("any"), ["server", "other", "disk"]))
        await agent.get_task()
        submitting = asyncio.ensure_future(agent.submit_result({"w": LARGE, "b": LARGE[:20_000]}))
        offered = await offering
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


async def test_a_receiver_that_fails_fails_the_result_for_all_at_once() -> None:
    """Failure always frees the source; nobody waits for what will never come."""
    async with attached() as (executor, agent, meddler):
        offering = asyncio.ensure_future(executor.offer(Task("any"), ["good", "bad"]))
        await agent.get_task()
        submitting = asyncio.ensure_future(agent.submit_result(LARGE))
        offered = await offering
        meddler.keeps_out = lambda message: isinstance(message, msg.Chunk)
        good = asyncio.ensure_future(offered.pull("good"))
        with pytest.raises(TransferFailed, match="no room for"):
            await offered.pull("bad", folder="/nowhere")
        with pytest.raises(ResultNotDelivered):
            await submitting
        with pytest.raises(TransferFailed, match="not offered any more"):
            await good
        assert offered.state is ExchangeState.FAILED


async def test_a_pull_that_was_cancelled_goes_on_where_it_was() -> None:
    async with attached() as (executor, agent, meddler):
        offering = asyncio.ensure_future(executor.offer(Task("any"), ["server"]))
        await agent.get_task()
        submitting = asyncio.ensure_future(agent.submit_result(LARGE))
        offered = await offering
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


async def test_a_result_without_large_parts_is_there_for_every_receiver() -> None:
    async with serving(work=answering(5)) as (executor, _, _):
        offered = await executor.offer(Task("any"), ["a", "b"])
        assert offered.settled.is_set()
        assert [(await offered.pull(name)).data for name in ("a", "b", "a")] == [5, 5, 5]


async def test_who_is_no_receiver_or_has_it_already_gets_nothing() -> None:
    async with serving(work=answering(LARGE)) as (executor, _, _):
        offered = await executor.offer(Task("any"), ["server"])
        with pytest.raises(TransferFailed, match="not a receiver"):
            await offered.pull("somebody")
        await offered.pull("server")
        with pytest.raises(TransferFailed, match="has it already"):
            await offered.pull("server")


@pytest.mark.parametrize("receivers", [[], "server", ["a", "a"], [1], [""]])
async def test_receivers_must_be_different_names(receivers: Any) -> None:
    async with attached() as (executor, _, _):
        with pytest.raises(ValueError, match="receivers must be different names"):
            await executor.offer(Task("any"), receivers)


async def test_offered_results_are_checked_as_well() -> None:
    async with serving(ExecutorOptions(), answering({"params": LARGE}, {})) as (executor, _, _):
        offered = await executor.offer(Task("validate"), ["server"])
        with pytest.raises(BadResult, match="no metrics"):
            await offered.pull("server")
        with pytest.raises(BadResult, match="no metrics"):
            await executor.offer(Task("validate"), ["server"])


@on_virtual_time
async def test_damaged_chunks_come_again() -> None:
    async with serving(work=answering(LARGE)) as (executor, _, meddler):
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


# resends on a way that loses messages (3.1.3)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lost", [msg.TaskOffer, msg.TaskAnswer, msg.ResultOffer, msg.ResultAnswer])
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


@on_virtual_time
async def test_a_task_that_nobody_hears_is_sent_again_only_so_often() -> None:
    async with by_hand() as (executor, hand):
        begun = now()
        with pytest.raises(TimeoutError, match=r"the program did not accept task any .* took longer than 60 s"):
            await executor.execute(Task("any"))
        assert now() - begun == pytest.approx(60, abs=0.1)
        await hand.gone.wait()
        assert len(hand.all(msg.TaskOffer)) == 4
        assert len(hand.all(msg.Abort)) == 1, "it is told to stop"


@on_virtual_time
async def test_a_result_says_as_much_as_the_answer_that_was_lost() -> None:
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, []))
        assert (await executing).ok


@on_virtual_time
async def test_messages_of_other_tasks_change_nothing() -> None:
    """Replies must match session, task and request."""
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(
            msg.TaskAnswer("another", False, "no"),
            msg.ResultOffer("another", "r0", "OK", NOTHING, []),
            msg.Settled("another", "finished"),
            msg.Hello(1, "x", "y", 1),
            msg.TaskOffer("t", "any", NOTHING, []),
        )
        refused = await hand.next(msg.ResultAnswer)
        assert (refused.result, refused.accepted, refused.reason) == (
            "r0",
            False,
            "nobody waits for this task's result",
        )
        await idle()
        assert not executing.done()
        hand.say(msg.TaskAnswer(task.task, True), msg.ResultOffer(task.task, "r1", "OK", NOTHING, []))
        assert (await executing).ok


@on_virtual_time
async def test_a_result_that_comes_again_is_answered_again_and_taken_once() -> None:
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        result = msg.ResultOffer(task.task, "r1", "OK", NOTHING, [])
        hand.say(result, result)
        await executing
        hand.say(result)
        assert [(await hand.next(msg.ResultAnswer, number)).accepted for number in range(2)] == [True] * 2
        hand.say(msg.ResultOffer(task.task, "r2", "OK", NOTHING, []))
        assert not (await hand.next(msg.ResultAnswer, 2)).accepted, "exactly one answer per task"


# times


@on_virtual_time
async def test_the_time_to_accept_is_longer_while_the_payload_makes_progress() -> None:
    options = ExecutorOptions(other_tasks=("*",), peer_read_timeout=10, max_resends=0)
    async with by_hand(options) as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any", LARGE)))
        task = await hand.next(msg.TaskOffer)
        number, size = task.parts[0]
        for sequence in range(5):
            await asyncio.sleep(9)
            hand.say(msg.Report(task.task, number, "program", sequence, sequence * 1000, limit=size))
        await asyncio.sleep(9)
        assert not executing.done()
        with pytest.raises(TimeoutError, match="took longer than 10 s"):
            await executing
        assert len(hand.all(msg.Withdrawn)) == 1


@on_virtual_time
async def test_a_result_that_takes_too_long_ends_the_program() -> None:
    options = ExecutorOptions(other_tasks=("*",), task_wait_timeout=100, heartbeat_timeout=0)
    async with by_hand(options) as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
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
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, [(1, 100), (2, 100)]))
        with pytest.raises(TransferFailed, match="nothing has come for 50 s"):
            await executing
        assert [report.state for report in hand.all(msg.Report)[-2:]] == ["failed", "aborted"]


@pytest.mark.parametrize("size", [-1, 1 << 62])
@on_virtual_time
async def test_a_result_of_an_impossible_size_fails_at_once(size: int) -> None:
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, [(1, size)]))
        with pytest.raises(TransferFailed, match="no room for"):
            await executing


@on_virtual_time
async def test_two_parts_of_a_result_with_one_number_fail_it_at_once() -> None:
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, [(1, 100), (1, 200)]))
        with pytest.raises(TransferFailed, match="two parts have the same number"):
            await executing


@pytest.mark.parametrize("size", [1000, -1])
async def test_the_id_of_a_result_does_not_lead_out_of_the_folder_that_it_is_written_to(
    tmp_path: Path, size: int
) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    async with by_hand() as (executor, hand):
        offering = asyncio.ensure_future(executor.offer(Task("any"), ["disk"]))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.ResultOffer(task.task, "../outside", "OK", NOTHING, [(1, size)]))
        offered = await offering
        pulling = asyncio.ensure_future(offered.pull("disk", folder=str(folder)))
        await hand.next(msg.Report)
        hand.say(msg.Withdrawn("../outside"))
        with pytest.raises(TransferFailed):
            await pulling
    assert os.listdir(tmp_path) == ["inside"]
    assert len(os.listdir("/proc/self/fd")) == before


# signs of life (3.1.2)


@on_virtual_time
async def test_a_program_that_stops_to_say_anything_is_gone_after_the_timeout() -> None:
    async with attached() as (executor, agent, meddler):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        await agent.get_task()
        await asyncio.sleep(300)
        assert not executing.done(), "it gave signs of life"
        meddler.stop()
        begun = now()
        with pytest.raises(PeerGone, match="no sign of life for 60"):
            await executing
        assert 54 < now() - begun <= 60.1
        with pytest.raises(AgentClosed, match="peer gone"):
            await agent.get_task()


@on_virtual_time
async def test_a_program_that_works_without_a_word_is_kept_with_timeout_0() -> None:
    options = ExecutorOptions(other_tasks=("*",), heartbeat_timeout=0)
    async with by_hand(options) as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.TaskAnswer(task.task, True))
        await asyncio.sleep(10_000)
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, []))
        assert (await executing).ok


@on_virtual_time
async def test_a_program_that_vanishes_between_tasks_is_noticed_by_the_next_one() -> None:
    async with by_hand() as (executor, hand):
        await asyncio.sleep(61)
        with pytest.raises(PeerGone, match="no sign of life"):
            await executor.execute(Task("any"))
        await hand.gone.wait()


@on_virtual_time
async def test_no_verdict_while_the_program_may_be_decoding_a_task() -> None:
    async with by_hand(ExecutorOptions(other_tasks=("*",), peer_read_timeout=500)) as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        await asyncio.sleep(400)
        hand.say(msg.TaskAnswer(task.task, True), msg.ResultOffer(task.task, "r1", "OK", NOTHING, []))
        assert (await executing).ok


@on_virtual_time
async def test_a_program_that_has_no_limit_to_accept_a_task_must_give_signs_of_life() -> None:
    async with by_hand(ExecutorOptions(other_tasks=("*",), peer_read_timeout=None)) as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        for _ in range(20):
            await asyncio.sleep(50)
            hand.say(msg.Beat())
        assert not executing.done()
        with pytest.raises(PeerGone, match="no sign of life"):
            await executing


class Slow(PlainCodec):
    """Blocks the loop for a long time while it decodes."""

    def decode(self, encoded: Any) -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now += 100
        return super().decode(encoded)


@pytest.mark.parametrize("data", [1, LARGE], ids=["small", "large"])
@on_virtual_time
async def test_no_verdict_while_a_payload_is_decoded(data: Any) -> None:
    async with serving(codec=Slow()) as (executor, agent, _):
        for _ in range(2):
            begun = now()
            np.testing.assert_equal((await executor.execute(Task("any", data))).data, data)
            assert now() - begun >= 200, "both sides were busy for longer than they may be silent"
        assert agent.closed is None


# metrics and progress


async def test_metrics_and_progress_come_in_order() -> None:
    seen: list[Any] = []

    async def work(agent: FlareAgent) -> None:
        async for _ in agent:
            for step in range(3):
                await agent.log({"loss": step / 2}, step=step)
                agent.progress(step, 3, "epochs")
            await agent.submit_result(None)

    async with serving(
        work=work,
        on_metrics=lambda values, step: seen.append((values, step)),
        on_progress=lambda done, total, note: seen.append((done, total, note)),
    ) as (executor, _, _):
        await executor.execute(Task("any"))
        assert seen == [
            item for step in range(3) for item in (({"loss": step / 2}, step), (float(step), 3.0, "epochs"))
        ]


async def test_what_takes_metrics_and_progress_may_raise_and_the_exchange_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bad(*_: Any) -> None:
        raise RuntimeError("the dashboard is gone")

    async def work(agent: FlareAgent) -> None:
        async for _ in agent:
            for _ in range(5):
                await agent.log({"loss": 1})
                agent.progress(1)
            await agent.submit_result("fine")

    program = AgentOptions(metric_queue=1)
    async with serving(work=work, program=program, on_metrics=bad, on_progress=bad) as (executor, _, _):
        assert (await executor.execute(Task("any"))).data == "fine"
    assert len(caplog.records) == 10


async def test_metrics_that_cannot_be_rebuilt_do_not_end_the_exchange(caplog: pytest.LogCaptureFixture) -> None:
    class Half(PlainCodec):
        def decode_metrics(self, data: bytes) -> Any:
            raise ValueError("no such class")

    async def work(agent: FlareAgent) -> None:
        async for _ in agent:
            await agent.log({"loss": 1})
            await agent.log({"loss": 1})
            await agent.submit_result("fine")

    async with serving(work=work, program=AgentOptions(metric_queue=1), codec=Half()) as (executor, _, _):
        assert (await executor.execute(Task("any"))).data == "fine"
    assert "no such class" in caplog.text


# the end of the program


@on_virtual_time
async def test_a_program_that_gives_up_aborts_its_task() -> None:
    async with attached() as (executor, agent, _):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        await agent.get_task()
        await agent.abort("out of memory")
        with pytest.raises(TaskAborted, match="out of memory"):
            await executing


@pytest.mark.parametrize("answer", [msg.End("tired"), None])
@pytest.mark.parametrize("phase", ["offered", "accepted", "pulling"])
@on_virtual_time
async def test_a_program_that_ends_or_vanishes_before_its_result_is_gone(phase: str, answer: Any) -> None:
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        if phase != "offered":
            hand.say(msg.TaskAnswer(task.task, True))
        if phase == "pulling":
            hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, [(1, 100)]))
            await hand.next(msg.Report)
        if answer is not None:
            hand.say(answer)
        hand.pipe.close()
        with pytest.raises(TransferFailed if phase == "pulling" else PeerGone):
            await executing


@on_virtual_time
async def test_a_result_that_came_before_the_end_counts() -> None:
    async with by_hand() as (executor, hand):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, []), msg.End("done"))
        hand.pipe.close()
        assert (await executing).ok


# abort by the site


PHASES = ["attaching", "offered", "accepted", "pulling"]


async def in_phase(
    phase: str, executor: LauncherExecutor, **options: Any
) -> tuple[asyncio.Task[TaskResult], Hand | None]:
    """An execution that has come to a phase, and stays there."""
    hand = None if phase == "attaching" else await program_by_hand(executor)
    if hand is None:
        executor.bootstrap()
    executing = asyncio.ensure_future(executor.execute(Task("any"), **options))
    await idle()
    if hand is not None:
        task = await hand.next(msg.TaskOffer)
        if phase != "offered":
            hand.say(msg.TaskAnswer(task.task, True))
        if phase == "pulling":
            hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, [(1, 100)]))
            await hand.next(msg.Report)
    await idle()
    assert not executing.done()
    return executing, hand


async def works_again(executor: LauncherExecutor) -> None:
    """A program that attaches anew is served."""
    agent, _ = await attach(executor)
    working = asyncio.ensure_future(echo(agent))
    assert (await executor.execute(Task("any", "again"))).data == "again"
    await agent.close()
    await working


@pytest.mark.parametrize("how", ["call", "event", "cancel"])
@pytest.mark.parametrize("phase", PHASES)
@on_virtual_time
async def test_an_abort_ends_a_task_wherever_it_is(phase: str, how: str) -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        event = asyncio.Event()
        executing, hand = await in_phase(phase, executor, abort=event)
        begun = now()
        if how == "call":
            executor.abort("enough")
        elif how == "event":
            event.set()
        else:
            executing.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else TaskAborted) as caught:
            await executing
        assert now() - begun < 1
        if how == "call":
            assert isinstance(caught.value, TaskAborted)
            assert caught.value.reason == "enough"
        if hand is not None:
            await hand.gone.wait()
            reason = {"call": "enough", "event": "the site aborted it", "cancel": "the site stops"}[how]
            assert hand.all(msg.Abort) == [msg.Abort(reason)]
            with pytest.raises(LaunchFailed, match=r"executor.bootstrap\(\) makes the file"):
                await executor.execute(Task("any"))
            await hand.close()
        await works_again(executor)


@on_virtual_time
async def test_an_event_that_is_set_before_aborts_at_once() -> None:
    async with by_hand() as (executor, hand):
        event = asyncio.Event()
        event.set()
        with pytest.raises(TaskAborted):
            await executor.execute(Task("any"), abort=event)
        await hand.gone.wait()


@on_virtual_time
async def test_an_event_ends_a_task_that_waits_for_its_turn() -> None:
    async with by_hand() as (executor, hand):
        event = asyncio.Event()
        current = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        waiting = asyncio.ensure_future(executor.execute(Task("any"), abort=event))
        later = asyncio.ensure_future(executor.execute(Task("any", "later")))
        await idle()
        event.set()
        with pytest.raises(TaskAborted, match="the site aborted it"):
            await waiting
        assert not current.done()
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, []))
        await current
        task = await hand.next(msg.TaskOffer, 1)
        hand.say(msg.ResultOffer(task.task, "r2", "OK", NOTHING, []))
        await later


@on_virtual_time
async def test_a_task_that_is_cancelled_while_it_waits_for_its_turn_gives_it_up() -> None:
    async with by_hand() as (executor, hand):
        current = asyncio.ensure_future(executor.execute(Task("any")))
        task = await hand.next(msg.TaskOffer)
        for abort in (None, asyncio.Event()):
            waiting = asyncio.ensure_future(executor.execute(Task("any"), abort=abort))
            await idle()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        hand.say(msg.ResultOffer(task.task, "r1", "OK", NOTHING, []))
        await current
        assert not executor._turn.locked()


@on_virtual_time
async def test_an_abort_between_tasks_stops_the_program() -> None:
    async with attached() as (executor, agent, _):
        executor.abort("enough")
        with pytest.raises(AgentClosed, match=r"aborted \(enough\)"):
            await agent.get_task()
        with pytest.raises(PeerGone, match="enough"):
            await executor.execute(Task("any"))
        await agent.close()
        await works_again(executor)


@on_virtual_time
async def test_an_abort_before_anything_was_attached_changes_nothing() -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        executor.abort("nobody is there")
        await works_again(executor)


@pytest.mark.parametrize("data", [1, LARGE], ids=["small", "large"])
@on_virtual_time
async def test_cancelling_execute_at_any_moment_leaves_both_ends_consistent(data: Any) -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        done = False
        turns = 0
        while not done:
            agent, _ = await attach(executor)
            working = asyncio.ensure_future(echo(agent))
            executing = asyncio.ensure_future(executor.execute(Task("any", data)))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = not executing.cancel()
            begun = now()
            await asyncio.wait({executing})
            assert now() - begun < 1
            if turns == 0 or not executing.cancelled():
                assert (await executor.execute(Task("any", "next"))).data == "next", "nothing had begun, or all is done"
            else:
                await asyncio.wait({working})
                error = working.exception()
                assert isinstance(error, (AgentClosed, ResultNotDelivered)), "the program was told to stop"
                if isinstance(error, AgentClosed):
                    assert error.reason == "aborted"
            await agent.close()
            await asyncio.wait({working})
            turns += 1
        assert turns > 5
        await works_again(executor)


@pytest.mark.parametrize("data", [1, LARGE], ids=["small", "large"])
@on_virtual_time
async def test_cancelling_submit_at_any_moment_leaves_both_ends_consistent(data: Any) -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        done = False
        turns = 0
        while not done:
            agent, _ = await attach(executor)
            executing = asyncio.ensure_future(executor.execute(Task("any")))
            await agent.get_task()
            submitting = asyncio.ensure_future(agent.submit_result(data))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = not submitting.cancel()
            await asyncio.wait({submitting})
            if turns == 0:  # it had not begun: the task is still to be answered
                with pytest.raises(CallStateError):
                    await agent.get_task()
                await agent.submit_result(data)
            begun = now()
            await asyncio.wait({executing})
            assert now() - begun < 1, "the site does not wait for what will never come"
            error = executing.exception()
            if error is None:
                np.testing.assert_equal(executing.result().data, data)
                following = asyncio.ensure_future(executor.execute(Task("any", "next")))
                task = await agent.get_task()
                assert task is not None
                assert task.data == "next"
                await agent.submit_result("fine")
                assert (await following).data == "fine"
            else:
                assert isinstance(error, TransferFailed)
                with pytest.raises(AgentClosed, match="aborted"):
                    await agent.get_task()
            await agent.close()
            await idle()
            turns += 1
        assert turns > 3


# programs that attach (3.1.1)


async def test_without_a_bootstrap_nobody_can_attach() -> None:
    async with LauncherExecutor(None, ANY) as executor:
        with pytest.raises(LaunchFailed, match=r"executor.bootstrap\(\) makes the file that it needs"):
            await executor.execute(Task("any"))


@on_virtual_time
async def test_a_program_that_does_not_attach_in_time_fails_the_task() -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        executor.bootstrap()
        begun = now()
        with pytest.raises(LaunchFailed, match="no program has attached within 60 s"):
            await executor.execute(Task("any"))
        assert now() - begun == pytest.approx(60, abs=0.1)
        await works_again(executor)


@on_virtual_time
async def test_a_task_may_wait_for_the_program_to_attach() -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        executor.bootstrap()
        executing = asyncio.ensure_future(executor.execute(Task("any", 5)))
        await asyncio.sleep(30)
        agent, _ = await attach(executor)  # with a second file: the first one was lost
        working = asyncio.ensure_future(echo(agent))
        assert (await executing).data == 5
        await agent.close()
        await working


@on_virtual_time
async def test_a_program_that_came_and_went_is_gone() -> None:
    async with LauncherExecutor(None, ANY, transport="memory") as executor:
        agent, _ = await attach(executor)
        await agent.close()
        await idle()
        with pytest.raises(PeerGone, match="the program is done"):
            await executor.execute(Task("any"))
        with pytest.raises(LaunchFailed):
            await executor.execute(Task("any"))
        await works_again(executor)


@on_virtual_time
async def test_only_one_program_is_attached_at_a_time() -> None:
    async with attached() as (executor, agent, _):
        with pytest.raises(RuntimeError, match="a program is attached"):
            executor.bootstrap()
        await agent.close()
        await idle()
        await works_again(executor)


async def test_a_program_that_takes_the_place_of_one_that_has_gone_leaves_nothing_of_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with LauncherExecutor(None, ANY) as executor:
        for _ in range(3):
            agent, _ = await attach(executor)
            await agent.close()
            end = executor._end
            assert end is not None
            await end.fate
        await works_again(executor)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_executor_that_is_not_open_invites_nobody() -> None:
    executor = LauncherExecutor(None, ANY)
    with pytest.raises(RuntimeError, match="open executor"):
        executor.bootstrap()
    await executor.finalize()
    with pytest.raises(BadTask, match="the executor is closed"):
        await executor.execute(Task("any"))


# the end of the executor


@pytest.mark.parametrize("transport", ["unix", "memory"])
async def test_the_end_of_the_executor_ends_the_program_quietly(transport: Literal["unix", "memory"]) -> None:
    async with attached(transport=transport) as (executor, agent, _):
        working = asyncio.ensure_future(echo(agent))
        await executor.execute(Task("any", 1))
        await executor.finalize()
        await executor.finalize()
        assert len(await working) == 1
        assert agent.closed is not None
        assert (agent.closed.reason, agent.closed.detail) == ("ended", "the job is ending")
        with pytest.raises(BadTask, match="the executor is closed"):
            await executor.execute(Task("any"))
        with pytest.raises(RuntimeError, match="make a new one"):
            await executor.initialize()


@on_virtual_time
async def test_end_finishes_the_current_task_and_takes_no_other() -> None:
    async with attached() as (executor, agent, _):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        await agent.get_task()
        ending = asyncio.ensure_future(executor.end())
        await idle()
        with pytest.raises(BadTask, match="the executor is ending"):
            await executor.execute(Task("any"))
        await agent.submit_result("last")
        assert (await executing).data == "last"
        await ending
        with pytest.raises(AgentClosed, match="ended"):
            await agent.get_task()


@on_virtual_time
async def test_end_does_not_take_a_result_from_its_receivers() -> None:
    async with attached() as (executor, agent, _):
        offering = asyncio.ensure_future(executor.offer(Task("any"), ["server"]))
        await agent.get_task()
        submitting = asyncio.ensure_future(agent.submit_result(LARGE))
        offered = await offering
        await executor.end()
        await asyncio.sleep(10)
        assert np.array_equal((await offered.pull("server")).data, LARGE)
        await submitting


@on_virtual_time
async def test_closing_aborts_the_current_task_and_those_that_wait() -> None:
    async with attached() as (executor, agent, _):
        executing = [asyncio.ensure_future(executor.execute(Task("any"))) for _ in range(3)]
        await agent.get_task()
        await executor.finalize()
        found = [await asyncio.gather(one, return_exceptions=True) for one in executing]
        assert [type(error) for (error,) in found] == [TaskAborted, BadTask, BadTask]
        with pytest.raises(AgentClosed, match="aborted"):
            await agent.get_task()


@on_virtual_time
async def test_an_error_that_leaves_the_block_aborts_the_program() -> None:
    agents: list[FlareAgent] = []
    with pytest.raises(ZeroDivisionError):
        async with LauncherExecutor(None, ANY, transport="memory") as executor:
            agent, _ = await attach(executor)
            agents.append(agent)
            _ = 1 / 0
    with pytest.raises(AgentClosed, match=r"aborted.*division by zero"):
        await agents[0].get_task()
    await agents[0].close()


@on_virtual_time
async def test_closing_leaves_no_bootstrap_file() -> None:
    executor = LauncherExecutor(None, ANY, transport="memory")
    await executor.initialize()
    path = executor.bootstrap()
    await executor.finalize()
    with pytest.raises(ExchangeError, match="used already, or the site has ended"):
        await FlareAgent(path).start()


def test_options_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="ExecutorOptions"):
        LauncherExecutor(None, AgentOptions())  # type: ignore[arg-type]


@on_virtual_time
async def test_an_executor_tells_how_far_it_is() -> None:
    async with attached() as (executor, agent, _):
        assert "exchange" not in repr(executor)
        assert executor.status().state is ProgramState.NOT_RUNNING
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        await agent.get_task()
        await idle()
        assert repr(executor) == "<LauncherExecutor open, program not running, exchange accepted>"
        await agent.submit_result(None)
        await executing
        assert repr(executor) == "<LauncherExecutor open, program not running, exchange settled>"


# programs that serve one task (3.2)


@on_virtual_time
async def test_an_agent_that_serves_one_task_ends_after_its_result_has_settled() -> None:
    async with attached(program=AgentOptions(launch_once=False)) as (executor, agent, _):
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        await agent.get_task()
        submitting = asyncio.ensure_future(agent.submit_result(LARGE))
        result = await executing
        await submitting
        assert np.array_equal(result.data, LARGE)
        with pytest.raises(AgentClosed, match="ended"):
            await agent.get_task()
        with pytest.raises(TaskRejected, match="takes no more tasks"):
            await executor.execute(Task("any"))


# signs of life


@on_virtual_time
async def test_both_sides_give_signs_of_life_as_often_as_the_other_needs_them() -> None:
    async with LauncherExecutor(
        None, ExecutorOptions(other_tasks=("*",), heartbeat_interval=0.1, heartbeat_timeout=1), transport="memory"
    ) as executor:
        agent = FlareAgent(executor.bootstrap(), AgentOptions(heartbeat_interval=5, heartbeat_timeout=60))
        async with agent:
            running = asyncio.create_task(executor.execute(Task("any", 1)))
            assert await agent.get_task() is not None
            await asyncio.sleep(30)  # the site would have given up after 1 s
            await agent.submit_result(2)
            assert (await running).data == 2


async def test_a_launcher_that_cannot_be_made_ready_leaves_no_gate_open() -> None:
    class Broken(SubprocessLauncher):
        async def initialize(self) -> None:
            raise OSError("no")

    executor = LauncherExecutor(Broken(["true"]))
    with pytest.raises(OSError, match="no"):
        await executor.initialize()
    await executor.finalize()
    assert repr(executor) == "<LauncherExecutor closed, program not running>"


class _Broken:
    """A launcher that cannot be made ready."""

    launch_once = True
    needs_deferred_stop = False

    async def initialize(self) -> None:
        raise OSError("no launcher today")

    async def stop(self, *, asked: bool = True) -> None: ...

    async def finalize(self) -> None: ...


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_an_executor_that_cannot_be_made_ready_leaves_nothing(transport: Literal["unix", "tcp"]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    executor = LauncherExecutor(_Broken(), transport=transport)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no launcher today"):
        async with executor:
            pass
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_door_that_cannot_be_opened_for_a_program_fails_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    async with LauncherExecutor(SubprocessLauncher(["true"]), ANY) as executor:
        monkeypatch.setattr("dfm_async.exchange.gate.write_bootstrap", full)
        with pytest.raises(LaunchFailed, match="No space left"):
            await executor.execute(Task("any"))
