"""How a tree of advice grows: one field after the other, in all branches. It calls nobody: it says what is to be asked.

``while questions := growth.questions(): growth.answer([... for question in questions])``, then ``growth.tree()``.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from dfm_async.discovery.advice import (
    Advice,
    BranchFieldAdvice,
    ErrorFieldAdvice,
    Form,
    PartialFieldAdvice,
    SingleFieldAdvice,
)
from dfm_async.discovery.advisors import Advisor
from dfm_async.discovery.foreign import adopted, asking
from dfm_async.discovery.plain import plain, short
from dfm_async.discovery.values import AdvisedError, AdvisedValue, Okay
from dfm_async.model.scalars import plain_text

__all__ = ["MOST_BRANCHES", "Answer", "Fields", "Growth", "Question", "failed"]

MOST_BRANCHES: Final = 10_000
"""How many values a tree may have."""

_MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What is known of the fields before anybody is asked.

    Attributes:
        given: values of the pipeline: advisors check them.
        known: values that advisors can see and nobody checks, such as defaults and secrets.
        closed: fields that may not be asked for: their advisors only check what is given.
        names: what fields are called in the tree, where that is not their own name.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _Branch:
    """A value that was assumed, in the tree that grows. It is the context of the advisors that are asked behind it."""

    __slots__ = ("_values", "then")

    def __init__(self, values: ChainMap[str, Any]) -> None:
        self._values = values
        self.then: _Level | None = None

    def get(self, field: str, default: Any = _MISSING) -> Any:
        """The value of a field, as far as it is known here."""
        if field in self._values:
            return self._values[field]
        if default is not _MISSING:
            return default
        raise LookupError(
            f"nothing is known of field {field!r} here: the pipeline does not give it, and no advisor of it was asked "
            "before; see order= of field_advisor, or use context.get(field, default)"
        )

    def with_value(self, field: str, option: AdvisedValue) -> _Branch:
        """A branch behind this one, where a field has a value."""
        assumed = {} if isinstance(option, Okay) else {field: option.assumed_value()}
        return _Branch(self._values.new_child(assumed))


_Growing = _Branch | ErrorFieldAdvice | PartialFieldAdvice


@dataclass(slots=True)
class _Level:
    """The values of one field behind a branch."""

    field: str
    edges: list[tuple[Any, Form, _Growing]] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Question:
    """What an advisor is to be asked: ``advisor.function(value, context)``."""

    advisor: Advisor
    value: Any
    context: _Branch


Answer = AdvisedValue | ErrorFieldAdvice


def failed(error: BaseException) -> ErrorFieldAdvice:
    """What an exception says in a tree."""
    text = str(error)
    return ErrorFieldAdvice(
        plain_text(f"{type(error).__name__}: {text}" if text else type(error).__name__),
        plain_text("".join(traceback.format_exception(error))),
    )


class Growth:
    """A tree of advice while it grows."""

    def __init__(self, advisors: Iterable[Advisor], fields: Fields) -> None:
        self._fields = fields
        self._waiting = [found for found in advisors if self._speaks(found)]
        self._waiting.reverse()
        self._root = _Branch(ChainMap({**fields.known, **fields.given}))
        self._open = [self._root]
        self._asked: list[Question] = []
        self._count = 0

    def _speaks(self, advisor: Advisor) -> bool:
        fields, name = self._fields, advisor.field
        return name in fields.given or (name not in fields.closed)

    def questions(self) -> list[Question]:
        """What is to be asked next, in any order; nothing if the tree is complete."""
        if not self._waiting or not self._open:
            return []
        advisor = self._waiting.pop()
        value = self._fields.given.get(advisor.field, _MISSING)
        self._asked = [
            Question(advisor, asking(advisor) if value is _MISSING else value, branch) for branch in self._open
        ]
        return self._asked

    def answer(self, answers: Sequence[Answer | Any]) -> None:
        """Takes the answers to the questions, in the order of the questions."""
        asked, self._asked, self._open = self._asked, [], []
        for question, found in zip(asked, answers, strict=True):
            field = question.advisor.field
            answer = found if isinstance(found, ErrorFieldAdvice) else adopted(found)
            if field in self._fields.given:
                self._check(question, answer, self._fields.given[field])
            else:
                self._advise(question, answer)

    def _level(self, question: Question) -> _Level:
        field = question.advisor.field
        level = question.context.then = _Level(self._fields.names.get(field, field))
        return level

    def _check(self, question: Question, answer: Answer | Any, value: Any) -> None:
        """A value that was given either fits, and nothing is said of it; or the branch ends here."""
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
            self._open.append(question.context)  # any value: nothing is known of it behind this
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
        """The tree, as far as it has grown; None if there is nothing to say."""
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


def _built(branch: _Branch) -> Advice | None:
    level = branch.then
    if level is None:
        return None
    edges = tuple(
        (value, form, _built(edge) if isinstance(edge, _Branch) else edge) for value, form, edge in level.edges
    )
    if len(edges) == 1:
        value, form, edge = edges[0]
        return SingleFieldAdvice(field=level.field, value=value, edge=edge, form=form)
    return BranchFieldAdvice(field=level.field, branches=tuple((value, edge) for value, _, edge in edges))
