"""What a site decides about its program: pure functions (3.3)."""

from __future__ import annotations

import pytest

from dfm_async.errors import BadResult, BadTask, PeerGone, TaskAborted, TaskRejected
from dfm_async.exchange import ExchangeState, ProgramState, ProgramStatus
from dfm_async.exchange.site_machine import AfterExit, AfterTask, after_exit, after_task

FAILED = ProgramStatus(ProgramState.FAILED, 3, ("oops",))
DONE = ProgramStatus(ProgramState.SUCCESS, 0)


def test_only_a_good_exit_gives_the_last_result_time_to_arrive() -> None:
    assert after_exit(FAILED, None) is AfterExit.NOTHING
    for state in ExchangeState:
        assert after_exit(DONE, state) is AfterExit.MAY_FAIL
        expected = AfterExit.NOTHING if state is ExchangeState.SETTLED else AfterExit.FAILS
        assert after_exit(FAILED, state) is expected


@pytest.mark.parametrize("error", [BadResult("t", "x"), BadTask("t", "x"), TaskRejected("t", "x"), None])
def test_a_program_that_is_well_goes_on_or_ends_as_it_was_launched(error: Exception | None) -> None:
    def step(**changed: bool) -> AfterTask:
        facts = {"up": True, "launched": True, "launch_once": True, "needs_deferred_stop": False, **changed}
        return after_task(error, **facts)

    assert step() is AfterTask.KEEP
    assert step(launched=False, launch_once=False) is AfterTask.KEEP
    assert step(launch_once=False) is AfterTask.STOP
    assert step(launch_once=False, needs_deferred_stop=True) is AfterTask.STOP_DEFERRED


@pytest.mark.parametrize("error", [PeerGone("x"), TimeoutError("x"), KeyboardInterrupt(), TaskAborted("t", "x")])
def test_a_program_that_is_not_well_is_killed(error: BaseException) -> None:
    for up in (True, False):
        step = after_task(error, up=up, launched=True, launch_once=True, needs_deferred_stop=False)
        assert step is AfterTask.KILL
    rejected = TaskRejected("t", "x")
    step = after_task(rejected, up=False, launched=True, launch_once=True, needs_deferred_stop=False)
    assert step is AfterTask.KILL
