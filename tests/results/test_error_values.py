"""Errors on their way between organisations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import errors
from dfm_async.errors import DfmError, OperationFailed, WorkerLost
from dfm_async.results.error_values import decode_error, encode_error
from dfm_async.wire.codec import Codec


@dataclass
class Shape:
    corners: int


def test_an_error_arrives_as_what_it_is() -> None:
    lost = decode_error(encode_error(WorkerLost("lab", -9, "gone", ("last words",), out_of_memory=True)))
    assert isinstance(lost, WorkerLost)
    assert (lost.site, lost.exit_code, lost.lines, lost.out_of_memory) == ("lab", -9, ("last words",), True)


def test_of_an_error_with_values_of_classes_the_words_arrive() -> None:
    error = DfmError("too many corners", Shape(5))
    told = decode_error(encode_error(error))
    assert type(told) is DfmError
    assert str(told) == str(error)


@pytest.mark.parametrize("value", [Shape(5), range(10**12), {"a": 1}, b"bytes"])
def test_nothing_is_built_but_texts_and_numbers(value: Any) -> None:
    told = decode_error(Codec(trusted=False).encode(["DfmError", [[value]]]))
    assert type(told) is DfmError
    assert "cannot be read" in str(told)


def test_an_error_whose_words_are_no_text_arrives() -> None:
    told = decode_error(encode_error(DfmError("half a character: \ud800", 2**70)))
    assert "half a character" in str(told)


plain = st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda some: st.lists(some, max_size=3))


@given(st.sampled_from([*errors.__all__, "Exception", "os.system"]) | st.text(), st.lists(plain, max_size=5))
def test_whatever_is_told_becomes_an_error(name: str, args: list[Any]) -> None:
    told = decode_error(Codec(trusted=False).encode([name, args]))
    assert isinstance(told, DfmError)
    assert isinstance(str(told), str)


@given(st.binary())
def test_bytes_that_are_none_become_one(data: bytes) -> None:
    assert isinstance(decode_error(data), DfmError)


@pytest.mark.parametrize("kind", [OperationFailed, WorkerLost])
def test_arguments_that_do_not_fit_are_told_as_text(kind: type[DfmError]) -> None:
    told = decode_error(Codec(trusted=False).encode([kind.__name__, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]))
    assert kind.__name__ in str(told)
