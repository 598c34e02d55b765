"""Asks the advisors of an operation at a site: the operation that every site has for discovery."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from dfm_async.discovery.advisors import advisors_of
from dfm_async.discovery.growth import Answer, Fields, Growth, Question, failed
from dfm_async.federation.bindings import FromParam, FromSecrets
from dfm_async.federation.operation import Adapter
from dfm_async.runtime.adapters import AdapterObject
from dfm_async.runtime.calls import instance_of
from dfm_async.runtime.context import OperationContext, caller_of
from dfm_async.runtime.faults import is_our_cancellation
from dfm_async.runtime.job_threads import in_thread

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob

__all__ = ["AT_ONCE", "discover"]

AT_ONCE: Final = 16
"""How many branches of a tree an advisor is asked about at the same time."""


async def discover(
    context: OperationContext,
    operation: str,
    provider: str | None,
    given: dict[str, Any],
    asked: list[str],
    closed: list[str],
) -> Any:
    """Asks the advisors of an operation which values its parameters may have.

    Args:
        context: the call.
        operation: the operation.
        provider: its provider.
        given: the values of parameters that the pipeline gives.
        asked: the parameters that will have a value which is not known yet.
        closed: the parameters that may not be asked for.

    Returns:
        The tree of advice as plain data; None if there are no advisors.
    """
    job = cast("SiteJob", caller_of(context))
    callee = job.find(operation, provider)
    adapter = callee.adapter
    code = instance_of(job, callee) if adapter.per_job else adapter.code
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


async def _ask(job: SiteJob, question: Question, room: asyncio.Semaphore) -> Answer | Any:
    function, value, context = question.advisor.function, question.value, question.context
    async with room:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(value, context)
            name = getattr(function, "__name__", "advisor")
            answer = await in_thread(job, name, lambda: function(value, context))
            return await answer if inspect.isawaitable(answer) else answer
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            return failed(error)


def _fields(
    adapter: Adapter, values: dict[str, Any], given: dict[str, Any], asked: Sequence[str], closed: Sequence[str]
) -> Fields:
    """What is known of the arguments of an adapter's code, which need not be those of the operation.

    Args:
        adapter: the adapter.
        values: its arguments, as a call would bind them.
        given: the operation's arguments that have a value.
        asked: those that will have one which is not known yet.
        closed: those that may not be asked for.
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
        elif isinstance(binding, FromSecrets):  # advisors may use it, but nobody speaks of it
            known[argument] = values[argument]
            shut.add(argument)
        elif name not in asked:
            checked[argument] = values[argument]
    return Fields(given=checked, known=known, closed=frozenset(shut), names=names)
