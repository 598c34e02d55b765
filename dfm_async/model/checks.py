"""Checks of options that users give, and their messages."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

FINITE: Final = sys.float_info.max
"""The limit of numbers that may not be infinite."""
_MOST: Final = 10**15
LAST_MOMENT: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The last moment that can be written, in seconds since 1970."""


def whole(name: str, value: object, *, least: int = 1, most: int = _MOST - 1) -> int:
    """Return a whole number.

    Raises:
        ValueError: it is not, or too small or too large.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limits = f"{least} or more" if most >= _MOST - 1 else f"from {least:,} to {most:,}"
        raise ValueError(f"{name} must be a whole number, {limits}, not {value!r}")
    return value


def is_number(value: object, *, positive: bool = False, most: float = math.inf) -> bool:
    """Return whether this is a number that is not negative, or that is positive, and not too large."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return (value > 0 if positive else value >= 0) and value <= most


def check_number(name: str, value: object, *, positive: bool = False, most: float = math.inf) -> None:
    """Check a number with a fraction, such as a number of seconds.

    Raises:
        ValueError: it is not a number, or too small or too large.
    """
    if not is_number(value, positive=positive, most=most):
        limits = f"number from 0 to {most:g}" if most < math.inf else "number that is not negative"
        raise ValueError(f"{name} must be a {'positive number' if positive else limits}, not {value!r}")


def moment(name: str, value: float | datetime) -> float:
    """Return a moment in seconds since 1970.

    Raises:
        ValueError: it cannot be written, or has no time zone, so that it is not determined.
    """
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            problem = f"{name} must have a time zone, which {value!r} has not"
            raise ValueError(f"{problem}: pass tzinfo=UTC, or {name}=value.astimezone() for that of this machine")
        return value.timestamp()
    check_number(name, value, most=LAST_MOMENT)
    return float(value)


def unexpected(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the message about a keyword that is not known: which may be meant, and which there are.

    ``others`` are meant as well, but not listed.
    """
    import difflib  # here: only mistakes need it

    names = list(known)
    candidates = [*names, *others]
    found = ["deadline"] if name == "timeout" and "deadline" in candidates else []
    found = found or difflib.get_close_matches(name, candidates, 1)
    meant = f" (did you mean {found[0]!r}?)" if found else ""
    return f"got an unexpected keyword argument {name!r}{meant}; it takes: {', '.join(names) or 'no parameters'}"


if TYPE_CHECKING:
    Options = msgspec.Struct
else:

    class _OptionsType(msgspec.StructMeta):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            names = cls.__struct_fields__
            for name in kwargs:
                if name not in names:
                    raise TypeError(f"{cls.__name__}() {unexpected(name, names)}")
            if args:
                hint = f"such as {cls.__name__}({names[0]}={args[0]!r}); it takes: {', '.join(names)}"
                raise TypeError(f"{cls.__name__}() takes its options by name, {hint}")
            return super().__call__(**kwargs)

    class Options(msgspec.Struct, metaclass=_OptionsType):
        """The base of options that users write: by name, with messages that list the names."""
