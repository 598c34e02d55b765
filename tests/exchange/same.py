"""Equality that also compares types, arrays, and numbers that are not equal to themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        # Compared as bytes: those of numbers that are none are equal, too.
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict):
        # Keys by their representation: 1, 1.0 and True would be equal, numbers that are none would not.
        ours, theirs = ({repr(key): value for key, value in found.items()} for found in (left, right))
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return bool(left == right) or (left != left and right != right)
