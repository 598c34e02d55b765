"""Masked arrays of numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy
import numpy.ma

from dfm_async.wire.codec.libraries.array_checks import array
from dfm_async.wire.codec.registry import NamedCodec, Unsupported, register_ours

_SMALL: Final = 4096
"""The number of bytes that a mask may have if it is larger than its data."""


def _mask_type(data: Any) -> Any:
    """Return the type of the mask of an array. It has a boolean for each field, also for those that take no bytes."""
    dtype = numpy.ma.make_mask_descr(data.dtype)
    if dtype.itemsize * data.size > max(data.nbytes, _SMALL):
        raise Unsupported("its mask would be larger than its data")
    return dtype


def _encode(value: Any) -> Any:
    _mask_type(value.data)
    mask = None if value.mask is numpy.ma.nomask else value.mask
    # The fill value as an array of no dimensions: it keeps the type.
    return {"data": value.data, "mask": mask, "fill_value": numpy.asarray(value.fill_value), "hard": value.hardmask}


def _decode(state: Any) -> Any:
    data, mask, fill_value = array(state["data"]), state["mask"], array(state["fill_value"])
    dtype = _mask_type(data)
    if mask is not None and (array(mask).shape != data.shape or mask.dtype not in (dtype, bool)):
        raise ValueError("this is not the mask of an array")
    return numpy.ma.MaskedArray(
        data,
        mask=numpy.ma.nomask if mask is None else mask,
        fill_value=fill_value,
        hard_mask=bool(state["hard"]),
        copy=False,
    )


register_ours(
    NamedCodec(
        type=numpy.ma.MaskedArray,
        name="numpy.ma.MaskedArray",
        encode=_encode,
        decode=_decode,
        ours=True,
    )
)
