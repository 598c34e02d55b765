"""Pipelines, plans, federations, discoveries, results and errors as HTML."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dfm_async.discovery.advice import (
    BranchFieldAdvice,
    Discovery,
    Edge,
    ErrorFieldAdvice,
    FieldAdvice,
    PartialFieldAdvice,
    SingleFieldAdvice,
    option_text,
    single_text,
)
from dfm_async.display.markup import badge, folded, framed, short_repr, table, value_html
from dfm_async.drawing import graph_of, svg
from dfm_async.errors import DfmError, JobFailed, OperationFailed, PipelineError, WorkerLost
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Signature
from dfm_async.federation.site import Site
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.events import Failure, Result
from dfm_async.model.pool_size import workers_text
from dfm_async.planning.plan import REJECTED, Plan
from dfm_async.telemetry.spans import frame_text

_MOST_NODES = 400
_ROWS = 50
_ERRORS = 5


def _drawing(found: Pipeline | Plan) -> str:
    graph = graph_of(found)
    if len(graph.nodes) > _MOST_NODES:
        return f'<p class="dfm-dim">{len(graph.nodes):,} nodes are too many to be drawn here; to_svg() draws them.</p>'
    return f'<div class="dfm-scroll">{svg(graph)}</div>'


def pipeline_html(pipeline: Pipeline) -> str:
    """Return a pipeline: its drawing, and its text when that is wanted."""
    name = "Pipeline" if pipeline.name is None else f"Pipeline <b>{escape(pipeline.name)}</b>"
    return framed(f"<div>{name}</div>", _drawing(pipeline), folded("text", f"<pre>{escape(str(pipeline))}</pre>"))


def plan_html(plan: Plan, *, explained: bool) -> str:
    """Return a plan: its drawing, and where each node runs and why."""
    found = plan.explain()
    rows = (
        (
            f'<span style="padding-left:{min(node.depth, 20)}em">{escape(node.label)}</span>',
            *map(escape, found.row(node)[1:]),
        )
        for node in plan.nodes[:_MOST_NODES]
    )
    why = table(found.heads, rows)
    if found.rejected:
        why += table(REJECTED, (tuple(map(escape, row)) for row in found.rejected[:_MOST_NODES]))
    name = "Plan" if plan.pipeline is None else f"Plan of <b>{escape(plan.pipeline)}</b>"
    total = f": {escape(found.total)}" if found.total else ""
    head = f"<div>{name} over {escape(', '.join(plan.sites))}{total}</div>"
    return framed(head, _drawing(plan), why if explained else folded("where each node runs, and why", why))


def federation_html(federation: Federation) -> str:
    """Return a federation: its sites and what they offer."""
    head = f"<div>Federation <b>{escape(federation.name)}</b> {escape(federation.api_version)}</div>"
    if not federation.sites:
        return framed(head, '<p class="dfm-dim">It has no sites yet.</p>')
    rows = (
        (
            f"<b>{escape(site.name)}</b>",
            workers_text(site.workers).replace("-", " to ") or "as many as cores",
            "<br>".join(_offers(site)) or '<span class="dfm-dim">nothing yet</span>',
        )
        for site in federation.sites.values()
    )
    return framed(head, table(("site", "workers", "operations"), rows))


def _offers(site: Site) -> Iterable[str]:
    for (name, provider), adapter in site.adapters.items():
        operation = site.federation.operations[name]
        signature = _signature_text(operation.signature)
        notes = [] if provider is None else [f"provider {provider}"]
        if adapter.in_process:
            notes.append("in a process of its own")
        if adapter.limits is not None:
            notes.append(str(adapter.limits))
        if adapter.declared is not None:
            notes.append("an external program")
        about = (inspect.getdoc(operation.code) or "").partition("\n")[0]
        words = escape("; ".join([*notes, *([about] if about else [])]))
        yield f'<code><b>{escape(name)}</b>{escape(signature)}</code> <span class="dfm-dim">{words}</span>'


def _signature_text(signature: Signature) -> str:
    """Return the parameters and types of an operation; only names if that is long."""
    empty = inspect.Parameter.empty
    listed = [
        parameter.replace(annotation=signature.types.get(name, empty))
        for name, parameter in signature.parameters.parameters.items()
    ]
    returns = empty if signature.returns is Any else signature.returns
    text = str(inspect.Signature(listed, return_annotation=returns))
    return text if len(text) <= 100 else f"({', '.join(signature.parameters.parameters)})"


def discovery_html(discovery: Discovery) -> str:
    """Return a discovery: a tree per site and node; branches fold, errors stand out."""
    name = "Discovery" if discovery.pipeline is None else f"Discovery of <b>{escape(discovery.pipeline)}</b>"
    parts = [f"<div>{name}</div>"]
    for site, nodes in discovery.sites.items():
        trees = "".join(f"<li>{_node(node, advice)}</li>" for node, advice in nodes.items())
        parts.append(f"<div><b>{escape(site)}</b></div><ul>{trees}</ul>")
    return framed(*parts)


def _node(label: str, advice: Edge) -> str:
    if isinstance(advice, FieldAdvice):
        return f"{escape(label)}<ul><li>{_tree(advice)}</li></ul>"
    end = _end(advice) if advice is not None else '<span class="dfm-dim">no advice</span>'
    return f"{escape(label)} {end}"


def _tree(advice: FieldAdvice) -> str:
    field = f"<b>{escape(advice.field)}</b>"
    if isinstance(advice, SingleFieldAdvice):
        failed = advice.value is None and isinstance(advice.edge, ErrorFieldAdvice)
        value = "" if failed else f" <code>{escape(single_text(advice))}</code>"
        return f"{field}{value} {_behind(advice.edge)}"
    assert isinstance(advice, BranchFieldAdvice)  # noqa: S101 - there are two kinds
    items = "".join(
        f"<li>{'' if value is None else f'<code>{escape(option_text(value))}</code>'} {_behind(edge)}</li>"
        for value, edge in advice.branches[:_ROWS]
    )
    total = len(advice.branches)
    count = f'<span class="dfm-dim">{sum(1 for _ in advice):,} of {total:,} possible</span>'
    return f"<details open><summary>{field} {count}</summary><ul>{items}</ul>{_more(total - _ROWS)}</details>"


def _behind(edge: Edge) -> str:
    if isinstance(edge, FieldAdvice):
        return f"<ul><li>{_tree(edge)}</li></ul>"
    return _end(edge)


def _end(edge: Edge) -> str:
    if isinstance(edge, PartialFieldAdvice):
        return '<span class="dfm-dim">choose, and discover again</span>'
    if not isinstance(edge, ErrorFieldAdvice):
        return ""
    line = f"{badge('error', 'bad')} {escape(edge.msg)}"
    return folded(line, f"<pre>{escape(edge.traceback.rstrip())}</pre>") if edge.traceback else line


def result_html(result: Result) -> str:
    """Return one result: where it comes from, and its value as that shows itself."""
    return framed(_origin(result, result.place), f"<div>{value_html(result.value)}</div>")


def _origin(event: Result | Failure, word: str) -> str:
    where = f"{event.node} at {event.site}, frame {frame_text(event.frame)}, offset {event.offset}"
    return f'<div><b>{escape(word)}</b> <span class="dfm-dim">{escape(where)}</span></div>'


def results_table(results: Sequence[Result]) -> str:
    """Return results as rows; of many, the first ones."""
    rows = (
        (
            str(result.offset),
            escape(result.place),
            frame_text(result.frame),
            escape(result.site),
            escape(result.node),
            f"<code>{escape(short_repr(result.value))}</code>",
        )
        for result in results[:_ROWS]
    )
    return table(("offset", "place", "frame", "site", "node", "value"), rows) + _more(len(results) - _ROWS)


def _more(number: int) -> str:
    return f'<div class="dfm-dim">and {number:,} more</div>' if number > 0 else ""


def results_html(results: Sequence[Result]) -> str:
    """Return results as a table."""
    if not results:
        return framed('<span class="dfm-dim">no results</span>')
    return framed(results_table(results))


def failure_html(failure: Failure) -> str:
    """Return a failure: what it costs, and its error."""
    word = "failed" if failure.place is None else f"no result for {failure.place}"
    return framed(_origin(failure, word), _error_part(failure.error))


def error_html(error: DfmError) -> str:
    """Return an error by itself."""
    return framed(_error_part(error))


def _error_part(error: BaseException) -> str:
    name = f"{badge(type(error).__name__, 'bad')} "
    match error:
        case OperationFailed():
            tries = f", attempt {error.attempt}" if error.attempt > 1 else ""
            where = f"{error.node} at {error.site}, frame {frame_text(error.frame)}{tries}"
            line = f"{escape(error.type_name)}: {escape(error.message)} <span class='dfm-dim'>{escape(where)}</span>"
            if not error.remote_traceback:
                return f"<div>{name}{line}</div>"
            return folded(name + line, f"<pre>{escape(error.remote_traceback.rstrip())}</pre>")
        case JobFailed():
            return f"<div>{name}job {escape(error.job_id)}</div>{errors_part(error.errors, error.count)}"
        case PipelineError():
            rows = ((f"<code>{escape(p.statement)}</code>", escape(p.message)) for p in error.problems[:_ROWS])
            return f"<div>{name}{escape(error.pipeline or '')}</div>{table(('statement', 'problem'), rows)}"
        case WorkerLost():
            first, _, rest = str(error).partition("\n")
            if rest:
                return folded(name + escape(first), f"<pre>{escape(rest)}</pre>")
    return f"<div>{name}{escape(str(error))}</div>"


def errors_part(errors: Sequence[BaseException], count: int) -> str:
    """Return the first errors, and how many more there are."""
    shown = "".join(_error_part(error) for error in errors[:_ERRORS])
    return shown + _more(count - min(len(errors), _ERRORS))
