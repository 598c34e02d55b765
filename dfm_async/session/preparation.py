"""Plans of a session: prepared from pipelines, cached, and checked against what the federation offers now."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, Final, Literal

from dfm_async.base.containers import BoundedDict
from dfm_async.base.tasks import in_thread
from dfm_async.engine.target import Target
from dfm_async.errors import PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.federation.namespace import PlacedOperation
from dfm_async.federation.operation import Operation
from dfm_async.language.pipeline import Pipeline
from dfm_async.language.statements import walk_statements
from dfm_async.model.options import LocalOptions
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import code_of, misfits, operations_of, prepare, retry_policies
from dfm_async.planning.profile import Profile
from dfm_async.session.profiling import SessionProfile

_PLANS: Final = 128
_LARGE: Final = 500
"""The number of statements from which on a pipeline is prepared in a thread."""


class Preparation:
    """Prepare pipelines for one session."""

    def __init__(
        self, federation: Federation, homesite: str, target: Target, options: LocalOptions, profile: SessionProfile
    ) -> None:
        self._federation = federation
        self._homesite = homesite
        self._target = target
        self._profile = profile
        self._lanes = options.lanes_for(site.workers for site in federation.sites.values())
        self._plans: BoundedDict[int, tuple[Any, Plan]] = BoundedDict(_PLANS)
        self._reruns: BoundedDict[tuple[str, int], int] = BoundedDict(_PLANS)
        self._code: BoundedDict[tuple[str, int], tuple[tuple[str, str], ...]] = BoundedDict(_PLANS)
        self._revision = self._first_revision = -1

    def connected(self) -> None:
        """Note that the session is connected: plans may be older than what is defined from now on."""
        self._first_revision = self._federation.revision

    async def prepare(
        self,
        pipeline: Pipeline,
        restrict_to_sites: Iterable[str] | str | None = None,
        costs: Literal["configured", "measured"] | Profile = "configured",
    ) -> Plan:
        """Return the plan of a pipeline; one that was prepared before, if nothing has changed.

        Raises:
            PipelineError: with everything that is wrong.
        """
        if not isinstance(pipeline, Pipeline):
            raise TypeError(not_a_pipeline(pipeline))
        measured = None if costs == "configured" else self._measured(pipeline, costs)
        revision = self._federation.revision
        if self._revision != revision:  # operations, and the sites that offer them, may have changed
            self._revision = revision
            self._plans.clear()
        body = pipeline.body
        usual = restrict_to_sites is None and measured is None
        known = self._plans.get(id(body)) if usual else None
        if known is not None and known[0] is body:
            return known[1]

        def make() -> Plan:
            return prepare(pipeline, self._federation, self._homesite, restrict_to_sites, self._lanes, measured)

        # A large one takes seconds, in which other tasks of this loop have to run.
        large = next(islice(walk_statements(body), _LARGE, None), None) is not None
        plan = await in_thread(make, "prepare") if large else make()
        await self._check_possible(plan)
        if usual and self._revision == revision:
            self._plans[id(body)] = (body, plan)
        return plan

    def _measured(self, pipeline: Pipeline, costs: Literal["configured", "measured"] | Profile) -> Profile | None:
        if isinstance(costs, Profile):
            return costs
        if costs != "measured":
            raise ValueError(f"costs must be 'configured', 'measured' or a Profile, not {costs!r}")
        found = self._profile.measured()
        if not found:
            message = "nothing was measured: execute jobs in a block 'with session.profile()', or pass a profile"
            raise PipelineError(pipeline.name, [Problem("costs", message)])
        return found

    async def check(self, plan: Plan) -> None:
        """Check a plan that was prepared before, perhaps by another session.

        Raises:
            PipelineError: the federation does not offer what it needs, or the target cannot run it.
        """
        if self._federation.revision != self._first_revision:  # it may be older than what was defined since
            self.check_offered(plan)
        await self._check_possible(plan)

    async def _check_possible(self, plan: Plan) -> None:
        problems = await self._target.refusals(plan)
        if problems:
            raise PipelineError(plan.pipeline, problems)

    def check_offered(self, plan: Plan) -> None:
        """Check that the federation offers what a plan needs.

        Raises:
            PipelineError: it does not.
        """
        problems = misfits(plan, self._federation)
        if plan.homesite != self._homesite:
            text = f"the federation {self._federation.name!r} has no homesite {plan.homesite!r}"
            problems.append(Problem("", text))
        if problems:
            raise PipelineError(plan.pipeline, problems)

    def code(self, plan: Plan) -> tuple[tuple[str, str], ...]:
        """Return the operations of a plan, and the fingerprints of their code."""
        key = (plan.hash, self._federation.revision)
        found = self._code.get(key)
        if found is None:
            found = self._code[key] = code_of(plan, self._federation)
        return found

    def check_code(
        self, plan: Plan, before: tuple[tuple[str, str], ...], advice: str, nodes: Collection[str] | None = None
    ) -> None:
        """Check that operations have the code that a job began with; with ``nodes``, only those that they call.

        Raises:
            PipelineError: some have other code. It lists them, with the advice.
        """
        now = dict(self.code(plan))
        changed = [name for name, text in before if now.get(name, text) != text]
        if nodes is not None:
            called = operations_of(plan, nodes)
            changed = [name for name in changed if name in called]
        if changed:
            what = "has changed since the job was submitted"
            raise PipelineError(
                plan.pipeline, [Problem("", f"the code of {name} {what}; {advice}") for name in changed]
            )

    def reruns(self, plan: Plan) -> int:
        """Return how often parameter sets may run again after a worker was lost: as often as every operation allows."""
        key = (plan.hash, self._federation.revision)
        found = self._reruns.get(key)
        if found is None:
            policies = retry_policies(plan, self._federation)
            found = self._reruns[key] = min((policy.on_worker_lost if policy else 0 for policy in policies), default=0)
        return found


def not_a_pipeline(given: object) -> str:
    """Return the message about something that cannot be executed, with what to pass instead."""
    operation = given.operation if isinstance(given, PlacedOperation) else given
    if isinstance(operation, Operation):
        arguments = ", ".join(f"PlaceParam({name!r})" for name in operation.signature.parameters.parameters)
        example = f"with Pipeline() as pipeline: Yield({operation.name}({arguments}))"
        return (
            f"expected a Pipeline or a Plan, not the operation {operation.name!r}: use session.call for one call, or "
            f"call it in a pipeline, such as '{example}'"
        )
    if isinstance(given, (str, os.PathLike)):
        hint = "Pipeline.load_from_file(path) reads one from a file"
    elif inspect.isfunction(given):
        hint = "make the function a pipeline with @federation.pipeline, or write a block 'with Pipeline() as pipeline:'"
    else:
        hint = (
            "an operation that is called outside a pipeline just runs. Use session.call(operation, ...) for one call, "
            "or call operations in a block 'with Pipeline() as pipeline:'"
        )
    return f"expected a Pipeline or a Plan, not {given!r}: {hint}"
