"""Both ends of a connection as machines, without a loop: event by event, and in random orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import AgentClosed, CallStateError, ExchangeError, PeerGone
from dfm_async.exchange import AgentOptions, Encoded, ExecutorOptions, Task
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.agent_machine import AgentMachine, DecodeTask
from dfm_async.exchange.endpoint import Endpoint, PipeTraits, SendChunks, SendMessage
from dfm_async.exchange.site_machine import SiteMachine

M = TypeVar("M", bound=Endpoint)

SMALL = Encoded(b"data")
LARGE = Encoded(b"data", {1: memoryview(bytes(600_000))})
TASK = Task("train", id="t1")


class Rig:
    """A machine, its clock, and what it has sent."""

    def __init__(self, make: Callable[[Callable[[], float]], Any]) -> None:
        self.now = 100.0
        self.machine: Any = make(lambda: self.now)
        self.sent: list[msg.Message] = []

    def take(self) -> list[msg.Message]:
        """Carry out all effects; return the messages that were sent."""
        found: list[msg.Message] = []
        effects = self.machine.effects
        while effects:
            effect = effects.popleft()
            if isinstance(effect, SendMessage):
                found.append(effect.message)
            elif isinstance(effect, DecodeTask):
                self.machine.task_decoded(effect.offer, Task(effect.offer.name, id=effect.offer.task))
            elif isinstance(effect, SendChunks):
                while (chunk := self.machine.next_chunk()) is not None:
                    found.append(chunk[0])
        self.sent += found
        return found

    def receive(self, *messages: msg.Message) -> list[msg.Message]:
        for message in messages:
            self.machine.received(message)
        return self.take()

    def wait(self, seconds: float) -> list[msg.Message]:
        """Let time pass; the machine is woken whenever it is due."""
        end = self.now + seconds
        found: list[msg.Message] = []
        while self.machine.due <= end:
            self.now = max(self.now, self.machine.due)
            before = self.machine.due
            self.machine.wake()
            found += self.take()
            assert self.machine.due > before, "it would be woken again and again"
        self.now = end
        return found


def agent(*, traits: PipeTraits | None = None, launch_once: bool = True, **options: Any) -> Rig:
    made = AgentOptions(**options)
    return Rig(lambda clock: AgentMachine(made, traits or PipeTraits(), clock, launch_once=launch_once))


def site(*, traits: PipeTraits | None = None, **options: Any) -> Rig:
    return Rig(lambda clock: SiteMachine(ExecutorOptions(**options), traits or PipeTraits(), clock))


def offer(task: str = "t1") -> msg.TaskOffer:
    return msg.TaskOffer(task=task, name="train", data=b"", parts=[], receivers=["site"])


@pytest.mark.parametrize("reliable", [True, False])
def test_a_message_is_sent_again_only_where_it_can_be_lost(reliable: bool) -> None:
    rig = agent(traits=PipeTraits(reliable=reliable), heartbeat_interval=50.0)
    rig.receive(offer())
    rig.machine.next_task()
    rig.machine.begin_answer()
    rig.machine.submit(SMALL, "OK", "")
    rig.take()
    again = [message for message in rig.wait(30) if isinstance(message, msg.ResultOffer)]
    assert len(again) == (0 if reliable else 3)


def begin(rig: Rig, encoded: Encoded = SMALL) -> None:
    rig.machine.begin_exchange(TASK)
    rig.machine.offer(TASK, encoded, ["site"])


def test_a_result_may_take_the_limit_from_the_acceptance_on() -> None:
    rig = site(task_wait_timeout=100.0, heartbeat_timeout=0)
    begin(rig)
    rig.wait(50)
    rig.receive(msg.TaskAnswer("t1", True))
    rig.wait(99)
    assert rig.machine.result() is None
    rig.wait(1)
    with pytest.raises(TimeoutError):
        rig.machine.result()


# random orders


MESSAGES = st.sampled_from(
    [
        msg.Beat(),
        msg.TaskAnswer("t1", True),
        msg.TaskAnswer("t1", False, "no"),
        msg.TaskAnswer("t0", True),
        msg.ResultOffer("t1", "r1", "OK", b"", []),
        msg.ResultOffer("t1", "r2", "OK", b"", [(1, 10)]),
        msg.ResultOffer("t0", "r0", "OK", b"", []),
        msg.TransferReport(tx="t1", transfer=1, receiver="program", sequence=0, bytes_done=0, limit=1000),
        msg.TransferReport(tx="t1", transfer=1, receiver="program", sequence=1, bytes_done=600_000, state="completed"),
        msg.Withdrawn("r2"),
        msg.ProgramMetrics(1, b""),
        msg.EndOfTasks("end"),
        msg.Abort("abort"),
    ]
)
EVENTS = st.lists(st.one_of(MESSAGES, st.floats(0, 40), st.sampled_from(["lost", "fail"])), max_size=12)


@given(EVENTS, st.booleans(), st.booleans())
def test_an_exchange_at_the_site_has_one_outcome_in_any_order(events: list[Any], large: bool, reliable: bool) -> None:
    rig = site(traits=PipeTraits(reliable=reliable), task_wait_timeout=50.0)
    begin(rig, LARGE if large else SMALL)
    rig.take()
    outcome: Any = None
    for event in events:
        if event == "lost":
            rig.machine.lost("lost")
        elif event == "fail":
            rig.machine.fail(PeerGone("failed"))
        elif isinstance(event, float):
            rig.wait(event)
        else:
            rig.receive(event)
        rig.take()
        try:
            found = rig.machine.result()
        except (ExchangeError, TimeoutError) as error:
            found = error
        assert outcome is None or found is outcome, "an outcome does not change"
        outcome = found
        if isinstance(event, (msg.EndOfTasks, msg.Abort)) or event in ("lost", "fail"):
            assert outcome is not None
    rig.wait(200)
    try:
        found = rig.machine.result()
    except (ExchangeError, TimeoutError) as error:
        found = error
    assert found is not None, "every wait ends"
    rig.machine.end_exchange(found if isinstance(found, Exception) else None)
    assert rig.machine.next_chunk() is None, "nothing is offered any more"


AGENT_EVENTS = st.lists(
    st.one_of(
        st.sampled_from(["offer", "take", "submit", "accept", "reject", "settle", "fail", "pull", "cancel"]),
        st.sampled_from(["lost", "stop", "end", "abort"]),
        st.floats(0, 40),
    ),
    max_size=25,
)


@given(AGENT_EVENTS, st.booleans(), st.booleans())
def test_an_agent_answers_each_task_once_in_any_order(events: list[Any], large: bool, launch_once: bool) -> None:
    rig = agent(launch_once=launch_once)
    machine = rig.machine
    offered = 0
    answering: msg.ResultOffer | None = None
    given_: list[str] = []
    submitted: list[str] = []

    def ended() -> bool:
        try:
            return bool(machine.delivered())
        except (ExchangeError, TimeoutError):
            return True

    for event in events:
        if event == "offer":
            offered += 1
            rig.receive(offer(f"t{offered}"))
        elif event == "take":
            try:
                task = machine.next_task()
            except (AgentClosed, CallStateError):
                task = None
            if task is not None:
                given_.append(task.id)
        elif event == "submit" and answering is None and machine.current is not None:
            machine.begin_answer()
            if machine.stopped is not None:
                machine.end_answer()
                continue
            machine.submit(LARGE if large else SMALL, "OK", "")
            answering = next((m for m in rig.take() if isinstance(m, msg.ResultOffer)), None)
            if answering is not None:
                submitted.append(answering.task)
        elif event in ("accept", "reject") and answering is not None:
            rig.receive(msg.ResultAnswer(answering.task, answering.result, event == "accept"))
        elif event in ("settle", "fail") and answering is not None:
            rig.receive(msg.Settled(answering.result, "finished" if event == "settle" else "failed"))
        elif event == "pull" and answering is not None:
            rig.receive(
                msg.TransferReport(
                    tx=answering.result, transfer=1, receiver="site", sequence=1, bytes_done=600_000, state="completed"
                )
            )
        elif event == "cancel" and answering is not None:
            machine.end_answer()
            answering = None
        elif event == "lost":
            machine.lost("lost")
        elif event == "stop":
            machine.stop(msg.EndOfTasks())
        elif event == "end":
            rig.receive(msg.EndOfTasks())
        elif event == "abort":
            rig.receive(msg.Abort())
        elif isinstance(event, float):
            rig.wait(event)
        rig.take()
        if answering is not None and ended():
            machine.end_answer()
            answering = None
    rig.wait(2000)
    if answering is not None:
        assert ended(), "every delivery ends"
        machine.end_answer()
    assert len(set(given_)) == len(given_)
    assert submitted == [task for task in given_ if task in submitted], "in order, and once"
    assert machine.next_chunk() is None
    answers = [message.task for message in rig.sent if isinstance(message, msg.TaskAnswer)]
    assert len(set(answers)) == len(answers)
    assert set(given_) <= set(answers)
