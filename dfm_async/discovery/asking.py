"""Asks advisors, one after the other: for tests of adapters. Sites ask those of all branches at the same time."""

from __future__ import annotations

import inspect
from typing import Any

from dfm_async.discovery.advice import Advice
from dfm_async.discovery.advisors import advisors_of
from dfm_async.discovery.growth import Answer, Fields, Growth, Question, failed
from dfm_async.pipeline.expressions import Advise

__all__ = ["build_advice"]


async def build_advice(adapter: object, **params: Any) -> Advice | None:
    """Asks the advisors of an adapter, as a site would.

    Args:
        adapter: the object.
        params: what the pipeline gives; ``Advise()``, or leaving it out, asks for advice.

    Returns:
        The tree of advice; None if there is nothing to say.
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
