"""Values in FOBS messages for which NVFLARE needs no class of its own, by the names of the samples."""

from __future__ import annotations

from collections import OrderedDict
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np

PLAIN: dict[str, Any] = {
    "heartbeat": "",
    "none": None,
    "booleans": [True, False],
    "integers": [0, 1, -1, 127, 128, -32, -33, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -(2**63)],
    "floats": [0.0, -1.5, 1e300, float("inf")],
    "texts": ["", "a" * 31, "b" * 32, "c" * 255, "d" * 256, "\u00e4\u20ac\U0001f600"],
    "bytes": [b"", b"\x00" * 255, b"\x01" * 256],
    "dict": {"a": [1, {"b": None}], 2: "two", None: 0, 1.5: 1, b"k": 2},
    "tuple": (1, ("a", [2])),
    "tuple key": {(1, "a"): 2},
    "set": {5},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict([((1, 2), [3])]))]),
    "datetime": datetime(2024, 2, 29, 12, 30, 1, 250),
    "aware datetime": datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=2))),
    "float64": np.float64(0.1),
    "float32": np.float32(0.1),
    "int64": np.int64(-(2**62)),
    "int32": np.int32(7),
    "array": np.arange(12, dtype=np.float64).reshape(3, 4),
    "fortran array": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "sliced array": np.arange(20, dtype=np.uint8)[::3],
    "scalar array": np.array(4.5),
    "empty array": np.zeros((0, 3), dtype=np.float32),
    "boolean array": np.array([True, False]),
    "complex array": np.array([1 + 2j], dtype=np.complex64),
    "text array": np.array(["a", "\u00e4b"]),
    "bytes array": np.array([b"a", b"bcd"]),
    "datetime array": np.array(["2024-02-29"], dtype="datetime64[D]"),
    "big endian array": np.array([1, 2], dtype=">i4"),
}
LARGE: dict[str, Any] = {
    "large text": "x" * 1024,
    "large bytes": b"y" * 1024,
    "just not large": ["x" * 1023, b"y" * 1023],
    "large wide text": "\u20ac" * 1024,
    "large array": np.arange(200, dtype=np.float64),
    "large fortran array": np.asfortranarray(np.arange(200, dtype=np.float64).reshape(10, 20)),
    "large in ordered": OrderedDict([("k", b"o" * 1024), ("l", ("p" * 1024,))]),
}
"""Written with a threshold of 1024."""
