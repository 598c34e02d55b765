"""The renderer of notebooks and terminals."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from dfm_async.discovery.advice import Discovery
from dfm_async.display import views
from dfm_async.display.job_view import JobView, show
from dfm_async.drawing import graph_of, svg
from dfm_async.errors import DfmError
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.events import Failure, Result, Results
from dfm_async.planning.plan import Explanation, Plan
from dfm_async.session.job import Job


@singledispatch
def _html(thing: Any) -> str:
    kinds = "a pipeline, plan, federation, job or result"
    raise TypeError(f"cannot display a value of type {type(thing).__name__}: expected {kinds}")


_html.register(Pipeline, views.pipeline_html)
_html.register(Plan, lambda plan: views.plan_html(plan, explained=False))
_html.register(Explanation, lambda found: views.plan_html(found.plan, explained=True))
_html.register(Federation, views.federation_html)
_html.register(Discovery, views.discovery_html)
_html.register(Result, views.result_html)
_html.register(Results, views.results_html)
_html.register(Failure, views.failure_html)
_html.register(DfmError, views.error_html)
_html.register(Job, lambda job: JobView(job).html())


class NotebookRenderer:
    """Render objects in notebooks and terminals."""

    def svg(self, thing: Pipeline | Plan) -> str:
        """Draw a pipeline or a plan."""
        return svg(graph_of(thing))

    def html(self, thing: Any) -> str:
        """Show something as a part of a page."""
        return _html(thing)

    async def show(self, job: Job) -> None:
        """Show a job while it runs."""
        await show(job)
