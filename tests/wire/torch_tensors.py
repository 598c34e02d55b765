"""Tensors of PyTorch arrive as they were. Runs with ``nox -s values``: PyTorch is too large for every test run."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import EncodingError
from dfm_async.wire.codec import Codec
from dfm_async.wire.json_values import JsonValues
from dfm_async.wire.memory import Arena
from tests.wire.shapes import through, trusted, untrusted

CODECS = [trusted, untrusted, Codec.for_store(), Codec.for_programs()]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
]


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [found.contiguous().reshape(-1).view(torch.uint8) for found in (a, b)]
    return bool(torch.equal(*flat))


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.sampled_from(CODECS))
def test_a_tensor_keeps_its_type_shape_and_bytes(dtype: Any, shape: list[int], codec: Codec) -> None:
    value = (torch.rand(shape) * 4).to(dtype)
    assert same(through(value, codec), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24)[::5],
        torch.tensor([1 + 2j, 3]).conj(),
        torch.ones(3).expand(2, 3),
        torch.full((3,), 2.0, requires_grad=True) * 2,
    ],
    ids=["permuted", "strided", "conjugate", "expanded", "with a gradient"],
)
def test_a_tensor_arrives_as_what_it_shows(value: Any) -> None:
    arrived = through(value, untrusted)
    assert same(arrived, value.detach().resolve_conj())
    assert not arrived.requires_grad


async def test_a_large_tensor_arrives_by_shared_memory_and_can_be_changed() -> None:
    sender = Codec.for_processes(Arena())
    value = torch.arange(100_000, dtype=torch.bfloat16)
    payload = sender.payload(sender.pack(value))
    assert not isinstance(payload, bytes)
    assert len(payload.data) < 1000
    arrived = Codec.for_processes().loads(payload)
    assert same(arrived, value)
    arrived.add_(1)  # a copy of its own: shared memory must not be written to
    assert same(Codec.for_processes().loads(payload), value)


def test_the_state_of_a_module_can_be_loaded() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    arrived = through(state, untrusted)
    assert type(arrived) is OrderedDict
    assert arrived._metadata == state._metadata  # type: ignore[attr-defined]
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    other.load_state_dict(arrived)
    assert all(same(value, state[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(3).to_sparse(), "the layout torch.sparse_coo"),
        (torch.empty(3, device="meta"), "is on meta"),
        (torch.nn.Parameter(torch.rand(3)), "no codec knows this type"),
    ],
    ids=["sparse", "meta", "parameter"],
)
def test_other_tensors_are_refused_between_organisations(value: Any, reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        untrusted.pack([value])


def test_equal_tensors_are_equal_keys() -> None:
    keys = untrusted.for_keys()
    value = torch.arange(6).reshape(2, 3)
    assert keys.encode(value) == keys.encode(value.T.contiguous().T)
    assert keys.encode(value) != keys.encode(value.reshape(3, 2))


@pytest.mark.parametrize(
    "state",
    [
        ["float32", [2**40], memoryview(b"")],
        ["float32", [-1, -1], memoryview(b"1234")],
        ["Tensor", [1], memoryview(b"1234")],
        ["float32", [1], [1, 2, 3, 4]],
        ["float32", ["1"], memoryview(b"1234")],
        ["float32", range(10**8), memoryview(b"")],
        ["float32", [0] * 1000, memoryview(b"")],
    ],
)
def test_states_that_no_tensor_has_are_refused(state: Any) -> None:
    from msgspec.msgpack import Ext

    data = untrusted.dumps(Ext(30, untrusted.dumps(["torch.Tensor", untrusted.pack(state)])))
    with pytest.raises(EncodingError):
        untrusted.loads(data)


def test_tensors_are_nested_lists_in_json() -> None:
    values = JsonValues(array_items=10, record_bytes=1000, json_depth=8)
    assert values.encode({"w": torch.ones(2, 2, dtype=torch.bfloat16)}) == b'{"w":[[1.0,1.0],[1.0,1.0]]}'
    assert values.encode(torch.ones(11)) == b'{"type":"torch.Tensor","shape":[11],"dtype":"torch.float32"}'


def test_torch_is_imported_with_the_first_tensor_only() -> None:
    code = (
        "import sys; from dfm_async.wire.codec import Codec; codec = Codec.for_untrusted();"
        "codec.loads(codec.encode([1])); print('torch' in sys.modules);"
        f"codec.loads({untrusted.encode(torch.ones(1))!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == ["False", "True"]
