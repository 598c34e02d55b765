"""Advised values: what an advisor returns for a field. Constructors and methods have the names of DFM's."""

from __future__ import annotations

import datetime as dt
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 12


def plain(value: Any) -> Any:
    """Return a value as plain data that JSON can hold; TypeError for what JSON has no form for."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return plain(dump(mode="json"))
    for kind in (str, bool, int, float):  # subclasses, such as numpy's float64
        if isinstance(value, kind):
            return kind(value)
    item = getattr(value, "tolist", None)
    if callable(item) and not isinstance(value, type):  # scalars and arrays of numpy
        return plain(item())
    name = type(value).__qualname__
    raise TypeError(f"advice is plain data that JSON can hold, and a value of type {name} is not: {short(value)}")


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON: 1 is 1.0, but not true."""
    try:
        return _same(plain(one), plain(other))
    except TypeError:
        return bool(one == other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(item, other[key]) for key, item in one.items())
    return bool(one == other)


def short(value: Any) -> str:
    """Return a short text for any value."""
    try:
        return _short.repr(value)
    except Exception as error:  # noqa: BLE001 - the value's own code runs here
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


class AdvisedValue(ABC):
    """What an advisor returns: which values a field may have."""

    kind: ClassVar[str] = ""
    break_on_advice: bool = False
    """Whether advice for later fields needs a choice for this one first."""

    @abstractmethod
    def assumed_value(self) -> Any:
        """Return the value that advisors of later fields see, because none has been chosen yet."""

    @abstractmethod
    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value that was given; None if it fits."""

    @abstractmethod
    def as_pydantic_value(self) -> Any:
        """Return the advice as plain data that JSON can hold."""

    def iterate_advice_branches(self) -> Iterator[AdvisedValue]:
        """Yield the branches that the tree has here: one for each value with separate advice."""
        yield self


@dataclass(frozen=True)
class AdvisedLiteral(AdvisedValue):
    """Exactly this value.

    Args:
        value: the value.
        break_on_advice: give no advice for later fields before a value is chosen.
    """

    kind: ClassVar[str] = "literal"
    value: Any
    break_on_advice: bool = False

    def assumed_value(self) -> Any:
        """Return the value itself."""
        return self.value

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: only the same value fits; 1 is 1.0, but not true."""
        return None if same(self.value, value) else f"expected {short(self.value)}, not {short(value)}"

    def as_pydantic_value(self) -> Any:
        """Return the value as plain data."""
        return plain(self.value)


@dataclass(frozen=True)
class _Choice(AdvisedValue):
    """Some of several values, which may be advice themselves."""

    values: Sequence[Any]
    break_on_advice: bool = False
    split_on_advice: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.values, (str, bytes)) or not isinstance(self.values, Iterable):
            raise TypeError(f"{type(self).__name__} takes a list of values, not {short(self.values)}")
        object.__setattr__(self, "values", list(self.values))

    def allows(self, value: Any) -> bool:
        """Return whether one of the options is this value."""
        return any(_problem(option, value) is None for option in self.values)

    def as_pydantic_value(self) -> Any:
        """Return the list of the options."""
        return [_plain(option) for option in self.values if not isinstance(option, AdvisedError)]

    def iterate_advice_branches(self) -> Iterator[AdvisedValue]:
        """Yield one branch with all options, or one for each of them if they are split."""
        if not self.split_on_advice or not self.values:
            yield self
            return
        for option in self.values:
            if not isinstance(option, AdvisedValue):
                yield AdvisedLiteral(option, self.break_on_advice)
            elif self.break_on_advice and hasattr(option, "__dataclass_fields__") and not isinstance(option, _FINAL):
                yield from replace(option, break_on_advice=True).iterate_advice_branches()  # type: ignore[type-var]
            else:
                yield from option.iterate_advice_branches()


class AdvisedOneOf(_Choice):
    """One of several values.

    Args:
        values: the values; advised values may be among them.
        break_on_advice: give no advice for later fields before a value is chosen.
        split_on_advice: give later fields separate advice for each value.
    """

    kind: ClassVar[str] = "one of"

    def iterate_advice_branches(self) -> Iterator[AdvisedValue]:
        """Yield one branch with all options, or one for each; an error if there are none."""
        return super().iterate_advice_branches() if self.values else iter([AdvisedError("no value is possible")])

    def assumed_value(self) -> Any:
        """Return the first option."""
        return _assumed(self.values[0])

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: it must be one of the options."""
        return None if self.allows(value) else f"expected one of {short(self.as_pydantic_value())}, not {short(value)}"


class AdvisedSubsetOf(_Choice):
    """Any number of several values: a list of them, or one by itself.

    Args:
        values: the values; advised values may be among them.
        break_on_advice: give no advice for later fields before a value is chosen.
        split_on_advice: give later fields separate advice for each value.
    """

    kind: ClassVar[str] = "subset of"

    def assumed_value(self) -> Any:
        """Return all options."""
        return [_assumed(option) for option in self.values]

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: every item must be one of the options."""
        single = isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
        for item in [value] if single else value:
            if not self.allows(item):
                return f"expected some of {short(self.as_pydantic_value())}, not {short(item)}"
        return None


@dataclass(frozen=True)
class AdvisedDict(AdvisedValue):
    """A dict with these keys and values.

    Args:
        dictionary: what each key must have; values may be advice themselves.
        allow_extras: whether other keys may be there, too.
        break_on_advice: give no advice for later fields before a value is chosen.
    """

    kind: ClassVar[str] = "dict"
    dictionary: Mapping[str, Any]
    allow_extras: bool = False
    break_on_advice: bool = False

    def assumed_value(self) -> Any:
        """Return a dict of what is assumed for each key."""
        return {key: _assumed(option) for key, option in self.dictionary.items()}

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: it must be a dict whose keys and values fit."""
        if not isinstance(value, Mapping):
            return f"expected a dict, not {short(value)}"
        for key, option in self.dictionary.items():
            if key not in value:
                return f"expected the key {key!r}, and {short(value)} does not have it"
            wrong = _problem(option, value[key])
            if wrong is not None:
                return f"[{key!r}]: {wrong}"
        extra = [key for key in value if key not in self.dictionary]
        if extra and not self.allow_extras:
            return f"expected only the keys {short(list(self.dictionary))}, not {short(extra)}"
        return None

    def as_pydantic_value(self) -> Any:
        """Return a dict of the advice for each key."""
        return {key: _plain(option) for key, option in self.dictionary.items()}


@dataclass(frozen=True)
class AdvisedDateRange(AdvisedValue):
    """A date or a time from ``start`` to ``end``, both included.

    Args:
        start: the first, as ISO 8601 writes it.
        end: the last.
        break_on_advice: give no advice for later fields before a value is chosen.
    """

    kind: ClassVar[str] = "date range"
    start: str
    end: str
    break_on_advice: bool = False

    def assumed_value(self) -> Any:
        """Return the first date."""
        return self.start

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: it must be a date within the range, or a range within it."""
        if isinstance(value, Mapping) and {"startdate", "enddate"} <= value.keys():
            return self.validate(value["startdate"]) or self.validate(value["enddate"])
        if not isinstance(value, (str, dt.date)):
            return f"expected a date, not {short(value)}"
        first, last, found = (_moment(text) for text in (self.start, self.end, value))
        if first is None or last is None or found is None:
            # Not all of them are dates that we can read: texts of one form compare as their dates do.
            inside = str(self.start) <= str(value) <= str(self.end)
        else:
            whole_day = len(str(self.end)) <= len("2026-01-01")  # the last day, and all of it
            inside = first <= found <= (last + dt.timedelta(days=1, microseconds=-1) if whole_day else last)
        return None if inside else f"expected a date from {self.start} to {self.end}, not {short(value)}"

    def as_pydantic_value(self) -> Any:
        """Return a dict with ``startdate`` and ``enddate``."""
        return {"startdate": plain(self.start), "enddate": plain(self.end)}


@dataclass(frozen=True)
class AdvisedError(AdvisedValue):
    """No value is possible here.

    Args:
        msg: why.
    """

    kind: ClassVar[str] = "error"
    msg: str

    def assumed_value(self) -> Any:
        """Raise ``ValueError``: an error has no value."""
        raise ValueError(f"there is no value: {self.msg}")

    as_pydantic_value = assumed_value

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: no value fits."""
        return self.msg


@dataclass(frozen=True)
class Okay(AdvisedValue):
    """The value that was given is fine; where none was given, any is."""

    kind: ClassVar[str] = "okay"

    def assumed_value(self) -> Any:
        """Raise ``ValueError``: any value is fine."""
        raise ValueError("any value is fine, so none can be assumed")

    def validate(self, value: Any) -> str | None:
        """Return what is wrong with a value: every value fits."""
        return None

    def as_pydantic_value(self) -> Any:
        """Return None."""
        return None


_FINAL = (AdvisedError, Okay)


def _assumed(option: Any) -> Any:
    return option.assumed_value() if isinstance(option, AdvisedValue) else option


def _plain(option: Any) -> Any:
    return option.as_pydantic_value() if isinstance(option, AdvisedValue) else plain(option)


def _problem(option: Any, value: Any) -> str | None:
    return (option if isinstance(option, AdvisedValue) else AdvisedLiteral(option)).validate(value)


def _moment(value: str | dt.date) -> dt.datetime | None:
    """Return a date as a time that can be compared: midnight, and UTC if it has no time zone."""
    try:
        found = dt.datetime.fromisoformat(value if isinstance(value, str) else value.isoformat())
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=dt.UTC)
