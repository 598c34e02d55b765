"""Pipelines as people read them: text and Mermaid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dfm_async.pipeline.expressions import (
    Advise,
    Attribute,
    Combination,
    Comparison,
    Constant,
    Entries,
    Expression,
    Items,
    Negation,
    Parameter,
    Ref,
    references,
)
from dfm_async.pipeline.statements import (
    BestOf,
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    Statement,
    YieldStatement,
    walk_statements,
)

if TYPE_CHECKING:
    from dfm_async.pipeline.pipeline import Pipeline

__all__ = ["expression_text", "pipeline_mermaid", "pipeline_text", "statement_label"]

_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}")}
_NO_NAMES: Mapping[int, str] = {}


def expression_text(found: Expression, names: Mapping[int, str] = _NO_NAMES) -> str:
    """Writes an expression as Python would. ``names``: what statements are called; by default ``n`` and their id."""
    match found:
        case Constant():
            text = repr(found.value)
            return text if len(text) <= 60 else text[:57] + "..."
        case Advise():
            return "Advise()"
        case Ref() | Parameter():
            if isinstance(found, Ref):
                head = names.get(found.node, f"n{found.node}")
            else:
                head = f"PlaceParam({found.name!r}{', multiuse=True' if found.multiuse else ''})"
            return head + "".join(f".{s.name}" if isinstance(s, Attribute) else f"[{s.key!r}]" for s in found.path)
        case Items():
            start, end = _BRACKETS[found.type]
            comma = "," if found.type == "tuple" and len(found.items) == 1 else ""
            return start + ", ".join(expression_text(item, names) for item in found.items) + comma + end
        case Entries():
            entries = (f"{expression_text(k, names)}: {expression_text(v, names)}" for k, v in found.entries)
            return "{" + ", ".join(entries) + "}"
        case Comparison():
            return f"{expression_text(found.left, names)} {found.op} {expression_text(found.right, names)}"
        case Combination():
            sign = " & " if found.op == "and" else " | "
            return sign.join(f"({expression_text(term, names)})" for term in found.terms)
        case Negation():
            return f"~({expression_text(found.term, names)})"


def statement_label(statement: Statement) -> str:
    """Names a statement in messages, results and drawings."""
    match statement:
        case CallStatement():
            return f"{statement.operation}#{statement.id}"
        case YieldStatement():
            return f"Yield#{statement.id}"
        case ForEachStatement():
            return f"ForEach#{statement.id}"
        case RepeatStatement():
            return f"Repeat#{statement.id}"
        case IfStatement():
            return f"If#{statement.id}"
        case CacheStatement():
            return f"TryFromCache#{statement.id}"
        case CollectStatement():
            return f"collect#{statement.id}"


def _after(nodes: tuple[int, ...]) -> list[str]:
    return [f"after=[{', '.join(f'n{node}' for node in nodes)}]"] if nodes else []


def _lines(body: tuple[Statement, ...], indent: str) -> list[str]:
    lines: list[str] = []
    deeper = indent + "    "
    for s in body:
        match s:
            case CallStatement():
                args = [f"{name}={expression_text(value)}" for name, value in s.args.items()]
                if isinstance(s.site, BestOf):
                    args.append(f"site=BestOf({list(s.site.sites or ())!r})" if s.site.sites else "site=BestOf()")
                elif s.site is not None:
                    args.append(f"site={s.site!r}")
                if s.provider is not None:
                    args.append(f"provider={s.provider!r}")
                if s.retry is not None:
                    args.append(f"retry={s.retry!r}")
                if s.deadline is not None:
                    args.append(f"deadline={s.deadline:g}")
                args += _after(s.after)
                lines.append(f"{indent}n{s.id} = {s.operation}({', '.join(args)})")
            case YieldStatement():
                multiuse = ["multiuse=True"] if s.multiuse else []
                args = [expression_text(s.value), f"place={s.place!r}", *multiuse, *_after(s.after)]
                lines.append(f"{indent}Yield({', '.join(args)})")
            case ForEachStatement():
                limit = "" if s.concurrency is None else f", concurrency={s.concurrency}"
                lines.append(f"{indent}with ForEach({expression_text(s.seq)}{limit}) as n{s.id}:")
                lines += _lines(s.body, deeper) or [deeper + "pass"]
            case RepeatStatement():
                times = "" if s.times is None else f", times={expression_text(s.times)}"
                lines.append(f"{indent}with Repeat({expression_text(s.carry)}{times}) as n{s.id}:")
                lines += _lines(s.body, deeper)
                lines.append(f"{deeper}n{s.id}.next({'' if s.next is None else expression_text(s.next)})")
                if s.until is not None:
                    lines.append(f"{deeper}n{s.id}.until({expression_text(s.until)})")
            case IfStatement():
                lines.append(f"{indent}with If({expression_text(s.cond)}) as n{s.id}:")
                lines += _lines(s.body, deeper) or [deeper + "pass"]
                if s.otherwise:
                    lines.append(f"{indent}with n{s.id}.otherwise():")
                    lines += _lines(s.otherwise, deeper)
            case CacheStatement():
                where = "" if s.site is None else f", site={s.site!r}"
                lines.append(f"{indent}with TryFromCache(key={expression_text(s.key)}{where}) as n{s.id}:")
                lines += _lines(s.body, deeper)
                lines.append(f"{deeper}n{s.id}.store({'' if s.store is None else expression_text(s.store)})")
            case CollectStatement():
                lines.append(f"{indent}n{s.id} = collect(n{s.node})")
    return lines


def pipeline_text(pipeline: Pipeline) -> str:
    """Writes a pipeline as the Python that would build it."""
    args = [] if pipeline.name is None else [repr(pipeline.name)]
    if pipeline.mode != "execute":
        args.append(f"mode={pipeline.mode!r}")
    head = f"with Pipeline({', '.join(args)}) as pipeline:"
    return "\n".join([head, *(_lines(pipeline.body, "    ") or ["    pass"])])


def _expressions(s: Statement) -> list[Expression]:
    match s:
        case CallStatement():
            return list(s.args.values())
        case YieldStatement():
            return [s.value]
        case ForEachStatement():
            return [s.seq]
        case RepeatStatement():
            return [e for e in (s.carry, s.times, s.until, s.next) if e is not None]
        case IfStatement():
            return [s.cond]
        case CacheStatement():
            return [e for e in (s.key, s.store) if e is not None]
        case CollectStatement():
            return [Ref(node=s.node)]


def _escape(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def pipeline_mermaid(pipeline: Pipeline) -> str:
    """Draws a pipeline as a Mermaid flow chart: blocks are boxes, data flows along arrows."""
    lines = ["flowchart TD"]
    edges: list[str] = []
    parameters: dict[str, str] = {}

    def draw(body: tuple[Statement, ...], indent: str) -> None:
        for s in body:
            label = _escape(statement_label(s))
            match s:
                case CallStatement():
                    site = f"<br/>{_escape(s.site)}" if isinstance(s.site, str) else ""
                    lines.append(f'{indent}n{s.id}["{label}{site}"]')
                case YieldStatement():
                    lines.append(f'{indent}n{s.id}(["Yield {_escape(s.place)}"])')
                case CollectStatement():
                    lines.append(f'{indent}n{s.id}[/"{label}"/]')
                case IfStatement():
                    lines.append(f'{indent}n{s.id}{{"{_escape(expression_text(s.cond))}"}}')
                    for branch, block, word in (("t", s.body, "then"), ("e", s.otherwise, "otherwise")):
                        if block:
                            lines.append(f'{indent}subgraph b{s.id}{branch}["{word}"]')
                            draw(block, indent + "  ")
                            lines.append(f"{indent}end")
                            edges.append(f"  n{s.id} -->|{word}| b{s.id}{branch}")
                case _:
                    lines.append(f'{indent}subgraph b{s.id}["{label}"]')
                    lines.append(f'{indent}  n{s.id}(("{label}"))')
                    draw(s.body, indent + "  ")
                    lines.append(f"{indent}end")

    draw(pipeline.body, "  ")
    for s in walk_statements(pipeline.body):
        for expression in _expressions(s):
            for found in references(expression):
                if isinstance(found, Ref):
                    edges.append(f"  n{found.node} --> n{s.id}")
                else:
                    name = parameters.setdefault(found.name, f"p{len(parameters)}")
                    edges.append(f"  {name} --> n{s.id}")
        if isinstance(s, (CallStatement, YieldStatement)):
            edges += [f"  n{node} -.-> n{s.id}" for node in s.after]
    lines += [f'  {name}>"{_escape(place)}"]' for place, name in parameters.items()]
    return "\n".join([*lines, *dict.fromkeys(edges)])
