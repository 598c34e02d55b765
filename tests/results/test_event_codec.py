"""Events and errors as bytes and as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dfm_async import errors
from dfm_async.errors import DecodingError, DfmError, OperationFailed, WorkerLost
from dfm_async.model.events import (
    Event,
    EventSent,
    Failure,
    FailureHandled,
    FrameCompleted,
    Metrics,
    Progress,
    Result,
    StatusChanged,
    WaitBegan,
    WaitEnded,
    WorkerNotice,
)
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.event_codec import (
    EVENT_NAMES,
    EventBatch,
    Head,
    decode_error,
    encode_error,
    event_data,
    event_from_data,
    events_of,
)
from dfm_async.wire.codec import Broken, Codec
from dfm_async.wire.json_values import JsonValues


class PlanLike:
    """The part of a plan that events refer to."""

    points = (("y", "a#0"), ("z", "b#1"))
    sites_at = ("lab", "desk")


PLAN = cast(Plan, PlanLike())
FAILED = OperationFailed("lab", "op", "a#0", (0, 1), 2, "ValueError", "no", "Traceback ...")
EVENTS: list[Event] = [
    Result(3, "z", [1, "x"], (0, 1), "desk", "b#1"),
    Failure(4, None, FAILED, (0, 1), "lab", "a#0"),
    Failure(5, "y", FAILED, (0, 1), "lab", "a#0"),
    Progress(offset=6, frame=(0,), site="lab", node="a#0", done=0.5, total=2.0, note="half"),
    Progress(offset=7, frame=(0,), site="lab", node="a#0", done=0.5),
    Metrics(8, (0,), "lab", "a#0", {"loss": 0.5, "good": True, "n": 3, "name": "x"}, 7),
    StatusChanged(9, JobStatus.ABORTED, "enough"),
    StatusChanged(10, JobStatus.RUNNING),
    FrameCompleted(11, (4,)),
    WorkerNotice(12, "lab", "unresponsive", 3.5, "it is busy"),
    FailureHandled(offset=13, frame=(0, 1), site="lab", node="a#0", type_name="ValueError", message="no", attempt=3),
    WaitBegan(14, (0, 1), "lab", "Wait#2", "approval", 1e9),
    WaitBegan(15, (0,), "lab", "Wait#2", "approval"),
    EventSent(16, (0,), "approval", {"by": ["é", None, 1.5]}, 1e9),
    WaitEnded(17, (0, 1), "lab", "Wait#2", "approval", "event"),
    WaitEnded(18, (0,), "lab", "Sleep#3", "", "time"),
]


def encoded() -> tuple[list[Head], EventBatch]:
    batch = EventBatch()
    for event in EVENTS:
        batch.add(event, *((1, 1) if isinstance(event, Result) else ()))
    data = msgspec.msgpack.encode(batch.heads)
    return msgspec.msgpack.decode(data, type=list[Head]), batch


def test_every_kind_of_event_has_a_row_and_is_tested() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event)) == set(EVENT_NAMES)


def test_events_survive_as_bytes() -> None:
    heads, batch = encoded()
    assert batch.values == [[1, "x"]]
    assert batch.errors == [FAILED]  # once, for both failures
    assert events_of(PLAN, 3, heads, batch.errors, batch.values) == EVENTS


def test_a_value_that_cannot_be_rebuilt_becomes_a_failure() -> None:
    heads, _ = encoded()
    (found,) = events_of(PLAN, 3, heads[:1], (), [Broken(LookupError("no class"))])
    assert isinstance(found, Failure)
    assert isinstance(found.error, DecodingError)
    assert (found.place, found.node, found.site) == ("z", "b#1", "desk")


@pytest.mark.parametrize(
    "head",
    [
        Head(kind="unknown"),
        Head(kind="result", point=0, at=5),
        Head(kind="result", point=-1, at=0),
        Head(kind="result", point=0, at=0),
        Head(kind="failure", error=-1),
        Head(kind="failure", error=3),
        Head(kind="status", status="flying"),
        Head(kind="worker", node="flying"),
        Head(kind="metrics"),
    ],
)
def test_heads_that_do_not_fit_are_refused(head: Head) -> None:
    with pytest.raises(ValueError, match="event 7 does not fit"):
        events_of(PLAN, 7, [head], [FAILED])


def test_heads_of_earlier_journals_are_read() -> None:
    stored = [
        ["failure", [0, 1], "lab", "a#0", None, -1, 0, None, "", 0.0, None, None, None],
        ["status", [], "", "", None, -1, -1, "enough", "aborted", 0.0, None, None, None],
        ["worker", [], "lab", "unresponsive", None, -1, -1, "it is busy", "", 3.5, None, None, None],
        ["frame", [4]],
    ]
    heads = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=list[Head])
    assert events_of(PLAN, 0, heads, [FAILED]) == [
        Failure(0, None, FAILED, (0, 1), "lab", "a#0"),
        StatusChanged(1, JobStatus.ABORTED, "enough"),
        WorkerNotice(2, "lab", "unresponsive", 3.5, "it is busy"),
        FrameCompleted(3, (4,)),
    ]


def test_events_survive_as_json() -> None:
    values = JsonValues(array_items=10, record_bytes=10_000, json_depth=10)
    for event in EVENTS:
        data = msgspec.json.decode(values.encode_whole(event_data(event, values, tracebacks=True)))
        assert data["event"] == EVENT_NAMES[type(event)]
        found = event_from_data(data["event"], data)
        assert isinstance(found, type(event))
        if isinstance(found, Failure):
            traceback = FAILED.remote_traceback if found.place is None else ""  # once, with the failure itself
            assert found.error.args == (*FAILED.args[:-1], traceback)
            assert (found.offset, found.frame) == (event.offset, (0, 1))
        else:
            assert found == event


@dataclass
class Shape:
    corners: int


def test_an_error_keeps_its_type_and_data() -> None:
    lost = decode_error(encode_error(WorkerLost("lab", -9, "gone", ("last words",), out_of_memory=True)))
    assert isinstance(lost, WorkerLost)
    assert (lost.site, lost.exit_code, lost.lines, lost.out_of_memory) == ("lab", -9, ("last words",), True)


def test_an_error_with_objects_keeps_its_message() -> None:
    error = DfmError("too many corners", Shape(5))
    found = decode_error(encode_error(error))
    assert type(found) is DfmError
    assert str(found) == str(error)


@pytest.mark.parametrize("value", [Shape(5), range(10**12), {"a": 1}, b"bytes"])
def test_errors_hold_only_texts_and_numbers(value: Any) -> None:
    found = decode_error(Codec.for_untrusted().encode(["DfmError", [[value]]]))
    assert type(found) is DfmError
    assert "cannot be read" in str(found)


def test_an_error_with_lone_surrogates_is_encoded() -> None:
    found = decode_error(encode_error(DfmError("half a character: \ud800", 2**70)))
    assert "half a character" in str(found)


plain = st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda some: st.lists(some, max_size=3))


@given(st.sampled_from([*errors.__all__, "Exception", "os.system"]) | st.text(), st.lists(plain, max_size=5))
def test_any_encoded_error_becomes_an_error(name: str, args: list[Any]) -> None:
    found = decode_error(Codec.for_untrusted().encode([name, args]))
    assert isinstance(found, DfmError)
    assert isinstance(str(found), str)


@given(st.binary())
@example(b"\x92\xa5\x00\x00\x00\x00\x80")  # text that is not UTF-8
def test_any_bytes_become_an_error(data: bytes) -> None:
    assert isinstance(decode_error(data), DfmError)


@pytest.mark.parametrize("kind", [OperationFailed, WorkerLost])
def test_arguments_that_do_not_fit_become_text(kind: type[DfmError]) -> None:
    found = decode_error(Codec.for_untrusted().encode([kind.__name__, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]))
    assert kind.__name__ in str(found)
