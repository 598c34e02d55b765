"""Pipelines as text and as Mermaid flow charts."""

from __future__ import annotations

from collections.abc import Mapping

from dfm_async.base.text import shortened
from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.language.event_types import type_text

_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}")}
_NO_NAMES: Mapping[int, str] = {}
_INDENT = "    "


def expression_text(found: ex.Expression, names: Mapping[int, str] = _NO_NAMES) -> str:
    """Write an expression as Python would. ``names``: what statements are called; by default ``n`` and their id."""
    match found:
        case ex.Constant():
            return shortened(found.value)
        case ex.Advise():
            return "Advise()"
        case ex.Ref() | ex.Parameter():
            if isinstance(found, ex.Ref):
                head = names.get(found.node, f"n{found.node}")
            else:
                multiuse = ", multiuse=True" if found.multiuse else ""
                default = "" if found.default is None else f", default={shortened(found.default.value)}"
                head = f"PlaceParam({found.name!r}{multiuse}{default})"
            return head + "".join(f".{s.name}" if isinstance(s, ex.Attribute) else f"[{s.key!r}]" for s in found.path)
        case ex.Items():
            start, end = _BRACKETS[found.type]
            comma = "," if found.type == "tuple" and len(found.items) == 1 else ""
            return start + ", ".join(expression_text(item, names) for item in found.items) + comma + end
        case ex.Entries():
            entries = (f"{expression_text(k, names)}: {expression_text(v, names)}" for k, v in found.entries)
            return "{" + ", ".join(entries) + "}"
        case ex.Comparison():
            return f"{expression_text(found.left, names)} {found.op} {expression_text(found.right, names)}"
        case ex.Combination():
            sign = " & " if found.op == "and" else " | "
            return sign.join(f"({expression_text(term, names)})" for term in found.terms)
        case ex.Negation():
            return f"~({expression_text(found.term, names)})"


def _after(nodes: tuple[int, ...]) -> list[str]:
    return [f"after=[{', '.join(f'n{node}' for node in nodes)}]"] if nodes else []


class _LineWriter(st.StatementVisitor[str, list[str]]):
    """Writes each statement as lines; the context is the indent."""

    def block(self, body: tuple[st.Statement, ...], indent: str) -> list[str]:
        return [line for statement in body for line in self.visit(statement, indent)]


class _Text(_LineWriter):
    """Writes statements as Python."""

    def visit_call(self, statement: st.CallStatement, context: str) -> list[str]:
        s = statement
        args = [f"{name}={expression_text(value)}" for name, value in s.args.items()]
        if isinstance(s.site, st.BestOf):
            args.append(f"site=BestOf({list(s.site.sites or ())!r})" if s.site.sites else "site=BestOf()")
        elif s.site is not None:
            args.append(f"site={s.site!r}")
        if s.provider is not None:
            args.append(f"provider={s.provider!r}")
        if s.retry is not None:
            args.append(f"retry={s.retry!r}")
        if s.deadline is not None:
            args.append(f"deadline={s.deadline:g}")
        if s.fallback is not None:
            args.append(f"fallback={shortened(s.fallback.value)}")
        return [f"{context}n{s.id} = {s.operation}({', '.join([*args, *_after(s.after)])})"]

    def visit_yield(self, statement: st.YieldStatement, context: str) -> list[str]:
        multiuse = ["multiuse=True"] if statement.multiuse else []
        args = [expression_text(statement.value), f"place={statement.place!r}", *multiuse, *_after(statement.after)]
        return [f"{context}Yield({', '.join(args)})"]

    def visit_for_each(self, statement: st.ForEachStatement, context: str) -> list[str]:
        limit = "" if statement.concurrency is None else f", concurrency={statement.concurrency}"
        return self._with(f"ForEach({expression_text(statement.seq)}{limit})", statement, context, [])

    def visit_repeat(self, statement: st.RepeatStatement, context: str) -> list[str]:
        times = "" if statement.times is None else f", times={expression_text(statement.times)}"
        ends = [f"next({'' if statement.next is None else expression_text(statement.next)})"]
        if statement.until is not None:
            ends.append(f"until({expression_text(statement.until)})")
        return self._with(f"Repeat({expression_text(statement.carry)}{times})", statement, context, ends)

    def visit_if(self, statement: st.IfStatement, context: str) -> list[str]:
        lines = self._with(f"If({expression_text(statement.cond)})", statement, context, [])
        if statement.otherwise:
            lines.append(f"{context}with n{statement.id}.otherwise():")
            lines += self.block(statement.otherwise, context + _INDENT)
        return lines

    def visit_try_from_cache(self, statement: st.CacheStatement, context: str) -> list[str]:
        where = "" if statement.site is None else f", site={statement.site!r}"
        ends = [f"store({'' if statement.store is None else expression_text(statement.store)})"]
        return self._with(f"TryFromCache(key={expression_text(statement.key)}{where})", statement, context, ends)

    def visit_collect(self, statement: st.CollectStatement, context: str) -> list[str]:
        errors = "" if statement.errors == "fail" else f", errors={statement.errors!r}"
        value = expression_text(ex.Ref(node=statement.node, path=statement.path))
        return [f"{context}n{statement.id} = collect({value}{errors})"]

    def visit_choice(self, statement: st.ChoiceStatement, context: str) -> list[str]:
        both = f"{expression_text(statement.value)}, {expression_text(statement.otherwise)}"
        return [f"{context}n{statement.id} = n{statement.branch}.value({both})"]

    def visit_gather(self, statement: st.GatherStatement, context: str) -> list[str]:
        calls = ", ".join(f"n{call}" for call in statement.calls)
        within = "" if statement.within is None else f", within={statement.within:g}"
        return [f"{context}n{statement.id} = gather([{calls}], at_least={statement.at_least}{within})"]

    def visit_wait(self, statement: st.WaitStatement, context: str) -> list[str]:
        s = statement
        args = [repr(s.event)]
        if s.schema:
            args.append(f"type={type_text(s.schema)}")
        if s.timeout is not None:
            args.append(f"timeout={expression_text(s.timeout)}")
        if s.fallback is not None:
            args.append(f"fallback={shortened(s.fallback.value)}")
        return [f"{context}n{s.id} = Wait({', '.join([*args, *_after(s.after)])})"]

    def visit_sleep(self, statement: st.SleepStatement, context: str) -> list[str]:
        args = [expression_text(statement.seconds), *_after(statement.after)]
        return [f"{context}n{statement.id} = Sleep({', '.join(args)})"]

    def _with(self, head: str, statement: st.Statement, indent: str, ends: list[str]) -> list[str]:
        deeper = indent + _INDENT
        lines = self.block(statement.blocks[0], deeper) + [f"{deeper}n{statement.id}.{end}" for end in ends]
        return [f"{indent}with {head} as n{statement.id}:", *(lines or [deeper + "pass"])]


def pipeline_text(name: str | None, mode: str, body: tuple[st.Statement, ...]) -> str:
    """Write a pipeline as the Python that would build it."""
    args = [] if name is None else [repr(name)]
    if mode != "execute":
        args.append(f"mode={mode!r}")
    head = f"with Pipeline({', '.join(args)}) as pipeline:"
    return "\n".join([head, *(_Text().block(body, _INDENT) or [_INDENT + "pass"])])


def _escape(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


class _Mermaid(_LineWriter):
    """Draws statements as nodes and subgraphs."""

    def visit_call(self, statement: st.CallStatement, context: str) -> list[str]:
        site = f"<br/>{_escape(statement.site)}" if isinstance(statement.site, str) else ""
        return [f'{context}n{statement.id}["{_escape(statement.label)}{site}"]']

    def visit_yield(self, statement: st.YieldStatement, context: str) -> list[str]:
        return [f'{context}n{statement.id}(["Yield {_escape(statement.place)}"])']

    def visit_collect(self, statement: st.CollectStatement, context: str) -> list[str]:
        return [f'{context}n{statement.id}[/"{statement.label}"/]']

    def visit_choice(self, statement: st.ChoiceStatement, context: str) -> list[str]:
        return [f'{context}n{statement.id}[/"{statement.label}"/]']

    def visit_gather(self, statement: st.GatherStatement, context: str) -> list[str]:
        return [f'{context}n{statement.id}[/"{statement.label}"/]']

    def visit_wait(self, statement: st.WaitStatement, context: str) -> list[str]:
        return [f'{context}n{statement.id}[/"Wait {_escape(statement.event)}"/]']

    def visit_sleep(self, statement: st.SleepStatement, context: str) -> list[str]:
        return [f'{context}n{statement.id}[/"{statement.label}"/]']

    def visit_if(self, statement: st.IfStatement, context: str) -> list[str]:
        lines = [f'{context}n{statement.id}{{"{_escape(expression_text(statement.cond))}"}}']
        for branch, block, word in _branches(statement):
            head = f'{context}subgraph b{statement.id}{branch}["{word}"]'
            lines += [head, *self.block(block, context + "  "), f"{context}end"]
        return lines

    def visit_for_each(self, statement: st.Statement, context: str) -> list[str]:
        return [
            f'{context}subgraph b{statement.id}["{statement.label}"]',
            f'{context}  n{statement.id}(("{statement.label}"))',
            *self.block(statement.blocks[0], context + "  "),
            f"{context}end",
        ]

    visit_repeat = visit_try_from_cache = visit_for_each


def _branches(statement: st.IfStatement) -> list[tuple[str, tuple[st.Statement, ...], str]]:
    """Return the branches that are not empty, each with its mark and its word."""
    both = (("t", statement.body, "then"), ("e", statement.otherwise, "otherwise"))
    return [branch for branch in both if branch[1]]


def pipeline_mermaid(body: tuple[st.Statement, ...]) -> str:
    """Draw a pipeline as a Mermaid flow chart: blocks are boxes, data flows along arrows."""
    edges: dict[str, None] = {}
    parameters: dict[str, str] = {}
    defaults: dict[str, str] = {}
    for s in st.walk_statements(body):
        for branch, _, word in _branches(s) if isinstance(s, st.IfStatement) else ():
            edges[f"  n{s.id} -->|{word}| b{s.id}{branch}"] = None
    for s in st.walk_statements(body):
        read = [expression for _, expression, _ in s.expressions()]
        if isinstance(s, st.CollectStatement):
            read.append(s.anchor)
        elif isinstance(s, st.ChoiceStatement):
            read.append(ex.Ref(node=s.branch))
        for found in (found for expression in read for found in ex.references(expression)):
            if isinstance(found, ex.Ref):
                source = f"n{found.node}"
            else:
                source = parameters.setdefault(found.name, f"p{len(parameters)}")
                if found.default is not None:
                    defaults.setdefault(found.name, f" = {shortened(found.default.value)}")
            edges[f"  {source} --> n{s.id}"] = None
        edges.update((f"  n{node} -.-> n{s.id}", None) for node in s.after)
    places = [f'  {name}>"{_escape(place + defaults.get(place, ""))}"]' for place, name in parameters.items()]
    return "\n".join(["flowchart TD", *_Mermaid().block(body, "  "), *places, *edges])
