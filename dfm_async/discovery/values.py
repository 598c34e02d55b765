"""Advised values: what an advisor says of a field. Constructors and methods have the names that DFM's have."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dfm_async.discovery.plain import plain, same, short

__all__ = [
    "AdvisedDateRange",
    "AdvisedDict",
    "AdvisedError",
    "AdvisedLiteral",
    "AdvisedOneOf",
    "AdvisedSubsetOf",
    "AdvisedValue",
    "Okay",
]


class AdvisedValue(ABC):
    """What an advisor returns: which values a field may have."""

    kind: ClassVar[str] = ""
    break_on_advice: bool = False
    """Whether nothing can be said of the fields behind this one before somebody has chosen."""

    @abstractmethod
    def assumed_value(self) -> Any:
        """The value that advisors of later fields see, because nobody has chosen one yet."""

    @abstractmethod
    def validate(self, value: Any) -> str | None:
        """Tells what is wrong with a value that was given; None if it fits."""

    @abstractmethod
    def as_pydantic_value(self) -> Any:
        """The advice as plain data that JSON can hold."""

    def iterate_advice_branches(self) -> Iterator[AdvisedValue]:
        """The branches that the tree has here: one for each value that is looked at by itself."""
        yield self


@dataclass(frozen=True)
class AdvisedLiteral(AdvisedValue):
    """Exactly this value.

    Args:
        value: the value.
        break_on_advice: say nothing of later fields before somebody has chosen.
    """

    kind: ClassVar[str] = "literal"
    value: Any
    break_on_advice: bool = False

    def assumed_value(self) -> Any:
        """The value itself."""
        return self.value

    def validate(self, value: Any) -> str | None:
        """Only the same value fits: 1 is 1.0, but not true."""
        return None if same(self.value, value) else f"expected {short(self.value)}, not {short(value)}"

    def as_pydantic_value(self) -> Any:
        """The value as plain data."""
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
        """Tells whether one of the options is this value."""
        return any(_problem(option, value) is None for option in self.values)

    def as_pydantic_value(self) -> Any:
        """The list of the options."""
        return [_plain(option) for option in self.values if not isinstance(option, AdvisedError)]

    def iterate_advice_branches(self) -> Iterator[AdvisedValue]:
        """One branch with all options, or one for each of them if they are split."""
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
        break_on_advice: say nothing of later fields before somebody has chosen.
        split_on_advice: look at each value by itself: later fields get advice for each of them.
    """

    kind: ClassVar[str] = "one of"

    def iterate_advice_branches(self) -> Iterator[AdvisedValue]:
        """One branch with all options, or one for each; an error if there are none."""
        return super().iterate_advice_branches() if self.values else iter([AdvisedError("no value is possible")])

    def assumed_value(self) -> Any:
        """The first option."""
        return _assumed(self.values[0])

    def validate(self, value: Any) -> str | None:
        """The value must be one of the options."""
        return None if self.allows(value) else f"expected one of {short(self.as_pydantic_value())}, not {short(value)}"


class AdvisedSubsetOf(_Choice):
    """Any number of several values: a list of them, or one by itself.

    Args:
        values: the values; advised values may be among them.
        break_on_advice: say nothing of later fields before somebody has chosen.
        split_on_advice: look at each value by itself: later fields get advice for each of them.
    """

    kind: ClassVar[str] = "subset of"

    def assumed_value(self) -> Any:
        """All options."""
        return [_assumed(option) for option in self.values]

    def validate(self, value: Any) -> str | None:
        """Every item must be one of the options."""
        single = isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
        for item in [value] if single else value:
            if not self.allows(item):
                return f"expected some of {short(self.as_pydantic_value())}, and {short(item)} is none of them"
        return None


@dataclass(frozen=True)
class AdvisedDict(AdvisedValue):
    """A dict with these keys and values.

    Args:
        dictionary: what each key must have; values may be advice themselves.
        allow_extras: whether other keys may be there, too.
        break_on_advice: say nothing of later fields before somebody has chosen.
    """

    kind: ClassVar[str] = "dict"
    dictionary: Mapping[str, Any]
    allow_extras: bool = False
    break_on_advice: bool = False

    def assumed_value(self) -> Any:
        """A dict of what is assumed for each key."""
        return {key: _assumed(option) for key, option in self.dictionary.items()}

    def validate(self, value: Any) -> str | None:
        """The value must be a dict whose keys and values fit."""
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
        """A dict of the advice for each key."""
        return {key: _plain(option) for key, option in self.dictionary.items()}


@dataclass(frozen=True)
class AdvisedDateRange(AdvisedValue):
    """A date or a time from ``start`` to ``end``, both included.

    Args:
        start: the first, as ISO 8601 writes it.
        end: the last.
        break_on_advice: say nothing of later fields before somebody has chosen.
    """

    kind: ClassVar[str] = "date range"
    start: str
    end: str
    break_on_advice: bool = False

    def assumed_value(self) -> Any:
        """The first date."""
        return self.start

    def validate(self, value: Any) -> str | None:
        """The value must be a date within the range, or a range within it."""
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
        """A dict with ``startdate`` and ``enddate``."""
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
        """There is none: raises."""
        raise ValueError(f"there is no value: {self.msg}")

    def validate(self, value: Any) -> str | None:
        """No value fits."""
        return self.msg

    def as_pydantic_value(self) -> Any:
        """There is none: raises."""
        raise ValueError(f"there is no value: {self.msg}")


@dataclass(frozen=True)
class Okay(AdvisedValue):
    """The value that was given is fine; where none was given, any is."""

    kind: ClassVar[str] = "okay"

    def assumed_value(self) -> Any:
        """There is none: raises."""
        raise ValueError("any value is fine, so none can be assumed")

    def validate(self, value: Any) -> str | None:
        """Every value fits."""
        return None

    def as_pydantic_value(self) -> Any:
        """None."""
        return None


_FINAL = (AdvisedError, Okay)


def _assumed(option: Any) -> Any:
    return option.assumed_value() if isinstance(option, AdvisedValue) else option


def _plain(option: Any) -> Any:
    return option.as_pydantic_value() if isinstance(option, AdvisedValue) else plain(option)


def _problem(option: Any, value: Any) -> str | None:
    return (option if isinstance(option, AdvisedValue) else AdvisedLiteral(option)).validate(value)


def _moment(value: str | dt.date) -> dt.datetime | None:
    """A date as a time that can be compared: midnight, and UTC if it does not say otherwise."""
    try:
        found = dt.datetime.fromisoformat(value if isinstance(value, str) else value.isoformat())
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=dt.UTC)
