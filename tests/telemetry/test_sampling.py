"""The thread that samples calls: what it survives, and which calls it samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dfm_async.telemetry import sampling
from dfm_async.telemetry.sampling import CallStacks, generate_sampled, run_sampled


def spin_until(reached: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end, "nothing was sampled"
        sum(range(1000))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Check that no call is left, and no thread that samples."""
    yield
    assert not sampling._sampler._threads
    spin_until(lambda: not sampling._sampler._sampling)


def test_a_frame_that_cannot_be_read_does_not_end_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    own, raised = sampling._stack, threading.Event()

    def fail_once(frame: Any) -> str | None:
        if not raised.is_set():
            raised.set()
            raise RuntimeError("globals that raise")
        return own(frame)

    monkeypatch.setattr(sampling, "_stack", fail_once)
    stacks = CallStacks()
    run_sampled(stacks, lambda: spin_until(stacks.text))
    assert raised.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_sampling_begins_again_after_its_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(sampling.sys, "_current_frames", fail)  # type: ignore[attr-defined]
        run_sampled(CallStacks(), lambda: spin_until(lambda: not sampling._sampler._sampling))
    stacks = CallStacks()
    run_sampled(stacks, lambda: spin_until(stacks.text))


def test_a_nested_call_leaves_the_outer_one_sampled() -> None:
    outer, inner = CallStacks(), CallStacks()

    def nested() -> None:
        run_sampled(inner, lambda: spin_until(inner.text))
        before = outer.text()
        spin_until(lambda: outer.text() != before)

    run_sampled(outer, nested)


def test_a_generator_that_is_closed_in_another_thread_is_not_sampled_any_longer() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    def begin() -> None:
        next(found)
        run_sampled(CallStacks(), closing.start)

    found: Any = generate_sampled(CallStacks(), numbers())  # type: ignore[arg-type]
    closing = threading.Thread(target=lambda: found.close())
    beginning = threading.Thread(target=begin)
    beginning.start()
    beginning.join()
    closing.join()
