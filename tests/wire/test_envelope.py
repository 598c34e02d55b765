"""Messages that are forwarded without being decoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.wire import messages as msg
from dfm_async.wire.messages import Envelope, peek

numbers = st.integers(0, 2**64 - 1)


@given(numbers, numbers, st.binary())
def test_the_head_of_any_message_is_found(job: int, at: int, payload: bytes) -> None:
    for message in (msg.Tokens(job, at, [(1, (0,), 0)], payload), msg.CancelJob(job, at), msg.Credit(job, at, 1, 2)):
        data = msg.encoder.encode(message)
        head = peek(data)
        assert head == (type(message), job, at)
        assert Envelope(*head, data).decode() == message


@pytest.mark.parametrize("message", [msg.WorkerReady(1, "address"), msg.SendNet("plan", 0, b"net"), msg.Release([1])])
def test_messages_that_belong_to_no_job_have_no_head(message: Any) -> None:
    assert peek(msg.encoder.encode(message)) is None


@given(st.binary(max_size=40))
def test_any_bytes_have_a_head_or_none(data: bytes) -> None:
    head = peek(data)
    assert head is None or (isinstance(head[0], type) and head[1] >= 0 and head[2] >= 0)


@given(numbers, st.integers(1, 12))
def test_what_is_cut_off_in_its_head_has_none(job: int, length: int) -> None:
    data = msg.encoder.encode(msg.CancelJob(job, 300))
    cut = data[: min(length, len(data) - 1)]
    assert peek(cut) is None
    with pytest.raises(ValueError):
        Envelope(msg.CancelJob, job, 300, cut).decode()
