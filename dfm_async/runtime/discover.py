"""The operation that every site has for discovery: query the advisors of another operation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dfm_async.discovery.advisors import advisors_of
from dfm_async.discovery.growth import Answer, Fields, Growth, Question, failed
from dfm_async.federation.bindings import FromParam, FromSecrets
from dfm_async.federation.operation import Adapter
from dfm_async.runtime.adapters import AdapterObject
from dfm_async.runtime.context import Caller, OperationContext, caller_of
from dfm_async.runtime.operation_errors import is_our_cancellation

AT_ONCE: Final = 16
"""The number of branches of a tree that are queried at the same time."""


async def discover(
    context: OperationContext,
    operation: str,
    provider: str | None,
    given: dict[str, Any],
    asked: list[str],
    closed: list[str],
) -> Any:
    """Query the advisors of an operation, and return their tree of advice as plain data; None if there are none.

    Args:
        context: the call.
        operation: the operation.
        provider: its provider.
        given: the values of parameters that the pipeline passes.
        asked: the parameters that will have a value which is not known yet.
        closed: the parameters that may not be queried.
    """
    job = caller_of(context)
    adapter, code = job.code_of(operation, provider)
    bound = code if isinstance(code, AdapterObject) else None
    advisors = advisors_of(code if bound is None else await bound.built(), adapter.advisors)
    if not advisors:
        return None
    values = given if bound is None else await bound.arguments(given)
    growth = Growth(advisors, _fields(adapter, values, given, asked, closed))
    room = asyncio.Semaphore(AT_ONCE)
    while questions := growth.questions():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask(job, question, room)) for question in questions]
        growth.answer([task.result() for task in tasks])
    return msgspec.to_builtins(growth.tree())


async def _ask(job: Caller, question: Question, room: asyncio.Semaphore) -> Answer | Any:
    function, value, context = question.advisor.function, question.value, question.context
    async with room:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(value, context)
            name = getattr(function, "__name__", "advisor")
            answer = await job.in_thread(name, lambda: function(value, context))
            return await answer if inspect.isawaitable(answer) else answer
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            return failed(error)


def _fields(
    adapter: Adapter, values: dict[str, Any], given: dict[str, Any], asked: Sequence[str], closed: Sequence[str]
) -> Fields:
    """Return what is known of the arguments of an adapter's code, which may differ from those of the operation.

    ``values`` are its arguments, as a call would bind them; the others are those of :func:`discover`.
    """
    parameters = adapter.signature.parameters.parameters
    defaults = {name: found.default for name, found in parameters.items() if found.default is not found.empty}
    if adapter.bindings is None:
        return Fields(given=given, known=defaults, closed=frozenset(closed))
    names: dict[str, str] = {}
    checked: dict[str, Any] = {}
    known: dict[str, Any] = {}
    shut: set[str] = set()
    for argument, binding in adapter.bindings.items():
        if isinstance(binding, FromParam):
            name: str | None = binding.param
        else:
            name = None if binding.expose_as is None else binding.expose_as.param
        if name is not None:
            names[argument] = name
        if name in closed:
            shut.add(argument)
        if name in given:
            checked[argument] = given[name]
        elif isinstance(binding, FromParam):
            if name in defaults:
                known[argument] = defaults[name]
        elif isinstance(binding, FromSecrets):  # advisors may use it, but it is not shown
            known[argument] = values[argument]
            shut.add(argument)
        elif name not in asked:
            checked[argument] = values[argument]
    return Fields(given=checked, known=known, closed=frozenset(shut), names=names)
