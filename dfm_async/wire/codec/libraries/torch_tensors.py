"""Tensors of PyTorch on the CPU: dtype, shape and bytes. Gradients are left out.

Tensors cannot be read-only, and shared memory must not be written to: what arrives is a copy.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from dfm_async.wire.codec.libraries.array_checks import array
from dfm_async.wire.codec.registry import NamedCodec, Unsupported, register_ours

_DTYPES: Final = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and found.itemsize and not str(found).startswith("torch.q")
}
"""The types of elements by name, without those of quantized tensors."""
_DIMENSIONS: Final = 64


def _encode(value: Any) -> Any:
    if value.device.type != "cpu":
        raise Unsupported(f"this tensor is on {value.device}; send its cpu()")
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_quantized or value.is_nested or dtype not in _DTYPES:
        raise Unsupported(f"this tensor has the layout {value.layout} and the type {dtype}; send a dense one")
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return [dtype, list(value.shape), dense.reshape(-1).view(torch.uint8).numpy()]


def _decode(state: Any) -> Any:
    name, shape, data = state
    dtype = _DTYPES[name]
    if type(shape) is not list or len(shape) > _DIMENSIONS or not all(type(length) is int for length in shape):
        raise TypeError("a list of lengths was expected")
    size = math.prod(shape) * dtype.itemsize
    if array(data).dtype != "u1" or data.ndim != 1 or min(shape, default=0) < 0 or size != len(data):
        raise ValueError(f"{len(data):,} bytes are not a tensor of {name} with the shape {shape}")
    return torch.from_numpy(data.copy()).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


register_ours(NamedCodec(type=torch.Tensor, name="torch.Tensor", encode=_encode, decode=_decode, ours=True))
