"""Build a tree of advice: one field after the other, in all branches. It returns queries; others call advisors.

``while questions := growth.questions(): growth.answer([... for question in questions])``, then ``growth.tree()``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from dfm_async.discovery import advised_values
from dfm_async.discovery.advice import (
    Advice,
    BranchFieldAdvice,
    ErrorFieldAdvice,
    Form,
    PartialFieldAdvice,
    SingleFieldAdvice,
)
from dfm_async.discovery.advised_values import AdvisedError, AdvisedValue, Okay, plain, short
from dfm_async.discovery.advisors import Advisor, advisors_of
from dfm_async.language.expressions import Advise
from dfm_async.model.scalars import plain_text

MOST_BRANCHES: Final = 10_000
"""The largest number of values of a tree."""

_MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What is known of the fields before advisors are queried.

    Attributes:
        given: values of the pipeline: advisors check them.
        known: values that advisors can see and that are not checked, such as defaults and secrets.
        closed: fields that may not be queried: their advisors only check what is passed.
        names: what fields are called in the tree, where that is not their own name.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _AssumedValue:
    """A value that was assumed, in the tree that grows. It is the context of the advisors that are asked after it."""

    __slots__ = ("_values", "then")

    def __init__(self, values: ChainMap[str, Any]) -> None:
        self._values = values
        self.then: _FieldValues | None = None

    def get(self, field: str, default: Any = _MISSING) -> Any:
        """Return the value of a field, as far as it is known here."""
        if field in self._values:
            return self._values[field]
        if default is not _MISSING:
            return default
        raise LookupError(
            f"nothing is known of field {field!r} here: the pipeline does not give it, and no advisor of it was asked "
            "before; see order= of field_advisor, or use context.get(field, default)"
        )

    def with_value(self, field: str, option: AdvisedValue) -> _AssumedValue:
        """Return a branch below this one, where a field has a value."""
        assumed = {} if isinstance(option, Okay) else {field: option.assumed_value()}
        return _AssumedValue(self._values.new_child(assumed))


_Growing = _AssumedValue | ErrorFieldAdvice | PartialFieldAdvice


@dataclass(slots=True)
class _FieldValues:
    """The values of one field below a branch."""

    field: str
    edges: list[tuple[Any, Form, _Growing]] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Question:
    """One query of an advisor: ``advisor.function(value, context)``."""

    advisor: Advisor
    value: Any
    context: _AssumedValue


Answer = AdvisedValue | ErrorFieldAdvice


def failed(error: BaseException) -> ErrorFieldAdvice:
    """Return an exception as a part of a tree."""
    text = str(error)
    return ErrorFieldAdvice(
        plain_text(f"{type(error).__name__}: {text}" if text else type(error).__name__),
        plain_text("".join(traceback.format_exception(error))),
    )


class Growth:
    """A tree of advice while it grows."""

    def __init__(self, advisors: Iterable[Advisor], fields: Fields) -> None:
        self._fields = fields
        speaking = [found for found in advisors if found.field in fields.given or found.field not in fields.closed]
        self._waiting = speaking[::-1]
        self._root = _AssumedValue(ChainMap({**fields.known, **fields.given}))
        self._open = [self._root]
        self._asked: list[Question] = []
        self._count = 0

    def questions(self) -> list[Question]:
        """Return what is to be asked next, in any order; nothing if the tree is complete."""
        if not self._waiting or not self._open:
            return []
        advisor = self._waiting.pop()
        value = self._fields.given.get(advisor.field, _MISSING)
        self._asked = [
            Question(advisor, _asking(advisor) if value is _MISSING else value, branch) for branch in self._open
        ]
        return self._asked

    def answer(self, answers: Sequence[Answer | Any]) -> None:
        """Take the answers to the questions, in the order of the questions."""
        asked, self._asked, self._open = self._asked, [], []
        for question, found in zip(asked, answers, strict=True):
            field = question.advisor.field
            answer = found if isinstance(found, ErrorFieldAdvice) else _adopted(found)
            if field in self._fields.given:
                self._check(question, answer, self._fields.given[field])
            else:
                self._advise(question, answer)

    def _level(self, question: Question) -> _FieldValues:
        field = question.advisor.field
        level = question.context.then = _FieldValues(self._fields.names.get(field, field))
        return level

    def _check(self, question: Question, answer: Answer | Any, value: Any) -> None:
        """Check a value that was given: if it does not fit, the branch ends here."""
        try:
            if isinstance(answer, ErrorFieldAdvice):
                wrong: ErrorFieldAdvice | None = answer
            else:
                message = _advice(question, answer).validate(value)
                wrong = None if message is None else ErrorFieldAdvice(plain_text(message))
        except Exception as error:  # noqa: BLE001 - the user's code: advice can be a class of their own
            wrong = failed(error)
        if wrong is None:
            self._open.append(question.context)
            return
        try:
            shown = plain(value)
        except TypeError:
            shown = short(value)
        self._level(question).edges.append((shown, "literal", wrong))

    def _advise(self, question: Question, answer: Answer | Any) -> None:
        if isinstance(answer, Okay):
            self._open.append(question.context)  # any value: later advisors do not know it
            return
        level = self._level(question)
        if isinstance(answer, ErrorFieldAdvice):
            level.edges.append((None, "", answer))
            return
        try:
            for option in _advice(question, answer).iterate_advice_branches():
                self._count += 1
                if self._count > MOST_BRANCHES:
                    level.edges.append((None, "", _too_many(level.field)))
                    return
                level.edges.append(self._edge(question, option))
        except Exception as error:  # noqa: BLE001 - the user's code: advice can be a class of their own
            level.edges.append((None, "", failed(error)))

    def _edge(self, question: Question, option: AdvisedValue) -> tuple[Any, Form, _Growing]:
        if isinstance(option, AdvisedError):
            return None, "", ErrorFieldAdvice(plain_text(str(option.msg)))
        value, form = option.as_pydantic_value(), cast("Form", option.kind)
        if option.break_on_advice:
            return value, form, PartialFieldAdvice()
        branch = question.context.with_value(question.advisor.field, option)
        self._open.append(branch)
        return value, form, branch

    def tree(self) -> Advice | None:
        """Return the tree, as far as it has grown; None if there is no advice."""
        return _built(self._root)


def _advice(question: Question, answer: Any) -> AdvisedValue:
    if isinstance(answer, AdvisedValue):
        return answer
    name = question.advisor.name
    raise TypeError(f"the advisor {name!r} must return an advised value, such as AdvisedOneOf([...]), not {answer!r}")


def _too_many(field: str) -> ErrorFieldAdvice:
    return ErrorFieldAdvice(
        f"there are more than {MOST_BRANCHES:,} values in this tree: give a value for a field before {field!r}, or let "
        "its advisor use break_on_advice"
    )


def _built(branch: _AssumedValue) -> Advice | None:
    level = branch.then
    if level is None:
        return None
    edges = tuple(
        (value, form, _built(edge) if isinstance(edge, _AssumedValue) else edge) for value, form, edge in level.edges
    )
    if len(edges) == 1:
        value, form, edge = edges[0]
        return SingleFieldAdvice(field=level.field, value=value, edge=edge, form=form)
    return BranchFieldAdvice(field=level.field, branches=tuple((value, edge) for value, _, edge in edges))


_PACKAGE: Final = "nv_dfm_core"
"""DFM's own package, for whose adapters advice is translated. It is never imported: its classes are known by name."""


def _asking(advisor: Advisor) -> Any:
    """Return the value that an advisor gets where it is asked: ``Advise()``, as its own package has it."""
    if advisor.foreign:
        theirs = getattr(sys.modules.get(f"{_PACKAGE}.api"), "Advise", None)
        if theirs is not None:
            return theirs()
    return Advise()


_THEIRS: Final[Mapping[str, tuple[str, ...]]] = {
    "AdvisedLiteral": ("_value", "_break_on_advice"),
    "AdvisedOneOf": ("_values", "_break_on_advice", "_split_on_advice"),
    "AdvisedSubsetOf": ("_values", "_break_on_advice", "_split_on_advice"),
    "AdvisedDict": ("_dictionary", "_allow_extras", "_break_on_advice"),
    "AdvisedDateRange": ("_start", "_end", "_break_on_advice"),
    "AdvisedError": ("_msg",),
    "Okay": (),
}
"""The attributes of DFM's own advice that our classes of the same names take."""


def _adopted(advice: Any) -> Any:
    """Convert advice of DFM's own classes to ours, also inside lists and dicts; leave everything else as it is."""
    if isinstance(advice, list):
        return [_adopted(option) for option in advice]
    if isinstance(advice, dict):
        return {key: _adopted(option) for key, option in advice.items()}
    name = type(advice).__name__
    if type(advice).__module__.partition(".")[0] != _PACKAGE or name not in _THEIRS:
        return advice
    return getattr(advised_values, name)(*(_adopted(getattr(advice, attribute)) for attribute in _THEIRS[name]))


async def build_advice(adapter: object, **params: Any) -> Advice | None:
    """Ask the advisors of an adapter, as a site would.

    Args:
        adapter: the object.
        params: the parameters of the pipeline; ``Advise()``, or leaving one out, requests advice.

    Returns:
        The tree of advice; None if there is no advice.
    """
    given = {name: value for name, value in params.items() if not isinstance(value, Advise)}
    growth = Growth(advisors_of(adapter), Fields(given=given))
    while questions := growth.questions():
        growth.answer([await _ask(question) for question in questions])
    return growth.tree()


async def _ask(question: Question) -> Answer | Any:
    try:
        answer = question.advisor.function(question.value, question.context)
        return await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # noqa: BLE001 - the user's code: what it raises is a part of the tree
        return failed(error)
