"""Checks of untrusted parts of values, for libraries that are built on numpy.

Constructors accept whatever can become an array. A range or a shape takes a few bytes, and as an array any number: so
parts must be arrays already.
"""

from __future__ import annotations

from typing import Any

import numpy


def array(value: Any) -> Any:
    """Return a part, which must be an array.

    Raises:
        TypeError: it is something else.
    """
    if type(value) is not numpy.ndarray:
        raise TypeError(f"an array was expected, not a {type(value).__name__}")
    return value
