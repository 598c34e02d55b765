"""Tokens from one job to a parameter of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from dfm_async.errors import EncodingError
from dfm_async.targets.coordinator import Coordinator
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.offers import Answer
from dfm_async.targets.values import Values
from dfm_async.wire import messages as msg

__all__ = ["Offer", "deliver"]

Offer: TypeAlias = Callable[[Coordinator, str, str, Any, Answer], None]
"""Gives a job a value for a parameter: the job, the place, the key, the value, the answer."""


def deliver(
    jobs: JobTable[Coordinator], codec: Values, sender: Coordinator, message: msg.SendToPlace, offer: Offer
) -> None:
    """Hands a token to the job that it is for, and tells the sender what became of it."""
    at, request, number = message.at, message.request, message.job

    def answer(error: str) -> None:
        sender.answer(at, msg.PlaceTaken(number, at, request, error))

    target = jobs.coordinator(message.target)
    if target is None:
        known = jobs.find(message.target)
        state = "is not known" if known is None else f"has ended ({known.status.value})"
        answer(f"job {message.target} {state}")
    else:
        try:
            value = codec.loads(message.payload)
        except EncodingError as error:
            answer(str(error))
            return
        offer(target, message.place, message.key, value, answer)
