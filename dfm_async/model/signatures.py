"""The signatures of functions that users write."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dfm_async.model.checks import unexpected

ANNOTATIONS = "__annotate__" if sys.version_info >= (3, 14) else "__annotations__"
"""The attribute that one function takes over from another without evaluating it."""


def signature_of(code: Callable[..., Any]) -> inspect.Signature:
    """Read a signature. A name in an annotation need not exist when the program runs.

    From Python 3.14 on, annotations are evaluated on access; before, quotes or a ``__future__`` import
    keep them as texts.

    Raises:
        TypeError: this is nothing that can be called.
        ValueError: it has no readable signature.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(code, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(code)


def unknown_keyword(signature: inspect.Signature, kwargs: Mapping[str, Any], options: Iterable[str] = ()) -> str | None:
    """Return which argument does not exist, and which may be meant: more than that another one is missing.

    ``options`` may be meant as well.
    """
    known = signature.parameters
    if any(found.kind is inspect.Parameter.VAR_KEYWORD for found in known.values()):
        return None
    return next((unexpected(name, known, sorted(options)) for name in kwargs if name not in known), None)
