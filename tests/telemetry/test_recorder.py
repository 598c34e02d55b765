"""What a site keeps of spans is bounded, and what it leaves out is counted."""

from __future__ import annotations

import math
import threading

import pytest

from dfm_async.telemetry.current import current_position
from dfm_async.telemetry.recorder import NO_SPAN, RecordedSpan, Recorder, failure_of
from dfm_async.telemetry.spans import Made, Origin


def recorder() -> tuple[Recorder, list[int]]:
    batches: list[int] = []
    return Recorder("lab", "1" * 32, 7, 1, lambda: batches.append(1)), batches


def fill(found: Recorder, count: int) -> None:
    for _ in range(count):
        found.arrived(Origin(3, 1, "desk"), 1, 1)


def site_of(spans: list[Made]) -> Made:
    (span,) = [span for span in spans if span[0] == "dfm.site"]
    return span


def test_a_batch_is_announced_once_until_it_was_taken() -> None:
    found, batches = recorder()
    fill(found, 300)
    assert (len(batches), found.full) == (1, True)
    assert len(found.take()) == 300
    assert not found.full
    fill(found, 256)
    assert len(batches) == 2


def test_spans_beyond_the_limit_are_counted() -> None:
    found, _ = recorder()
    fill(found, 8192)
    assert len(found.take()) == 8192
    fill(found, 5)  # those that were sent are not taken yet
    assert found.take() == []
    found.taken(8192)
    fill(found, 2)
    spans = found.end(None)
    assert len(spans) == 3
    assert site_of(spans)[5] == {"dfm.attempt": 1, "dfm.spans_left_out": 5}


def test_calls_that_run_at_the_end_are_ended() -> None:
    found, _ = recorder()
    call = found.begin_call("op", "op#0", (0, 3), 1)
    spans = found.end("the job was stopped")
    (made,) = [span for span in spans if span[0] == "dfm.operation"]
    assert (made[1], made[2], made[6]) == (call.span, 7, "Cancelled: the job was stopped")
    assert made[5]["dfm.frame"] == "0.3"
    call.end(None)  # too late: it was told
    assert found.take() == []


def test_many_threads_may_add_spans() -> None:
    found, _ = recorder()
    call = found.begin_call("op", "op#0", (0,), 1)

    def work() -> None:
        for number in range(500):
            with RecordedSpan(call, "outer", {"number": number}), RecordedSpan(call, "inner", {}):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = found.take()
    outer = {span[1] for span in spans if span[0] == "outer"}
    assert len({span[1] for span in spans}) == len(spans) == 4000
    assert {span[2] for span in spans if span[0] == "inner"} == outer
    assert {span[2] for span in spans if span[0] == "outer"} == {call.span}


def test_leaving_a_span_restores_the_previous_one() -> None:
    found, _ = recorder()
    call = found.begin_call("op", "op#0", (0,), 1)
    assert current_position() is None
    with RecordedSpan(call, "a", {}):
        position = current_position()
        assert position is not None
        assert position.call == call.span
    assert current_position() is None


def test_a_span_can_be_opened_once() -> None:
    found, _ = recorder()
    span = RecordedSpan(found.begin_call("op", "op#0", (0,), 1), "a", {})
    with span:
        pass
    with pytest.raises(RuntimeError, match="was opened before"), span:
        pass


def test_attributes_are_made_plain() -> None:
    found, _ = recorder()
    attributes = {"long": "x" * 10_000, "nan": math.nan, "inf": -math.inf, "half": "a\udc80", "big": 2**63, "yes": True}
    with RecordedSpan(found.begin_call("op", "op#0", (0,), 1), "a", attributes):
        pass
    ((*_, made, error),) = found.take()
    assert error is None
    assert made == {"long": "x" * 4096, "nan": "nan", "inf": "-inf", "half": "a\\udc80", "big": 2**63, "yes": True}


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [({"a": None}, "attribute 'a' must be a number"), ({"a": [1]}, "attribute 'a'"), ({"a": 2**64}, "64 bits")],
)
def test_other_attributes_are_refused(attributes: dict[str, object], problem: str) -> None:
    found, _ = recorder()
    call = found.begin_call("op", "op#0", (0,), 1)
    with pytest.raises((TypeError, ValueError), match=problem):
        RecordedSpan(call, "a", attributes)
    with RecordedSpan(call, "b", {}) as span, pytest.raises((TypeError, ValueError), match=problem):
        span.set(**attributes)


def test_a_span_needs_a_name() -> None:
    found, _ = recorder()
    with pytest.raises(TypeError, match="name of a span"):
        RecordedSpan(found.begin_call("op", "op#0", (0,), 1), "", {})


def test_the_span_of_an_untraced_job_takes_everything() -> None:
    with NO_SPAN as span:
        span.set(anything=object())
    with pytest.raises(ValueError, match="passes"), NO_SPAN:
        raise ValueError("passes")


def test_exception_whose_str_raises_is_recorded() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    kind, message, _ = failure_of(Mute())
    assert kind.endswith("Mute")
    assert "RuntimeError" in message
