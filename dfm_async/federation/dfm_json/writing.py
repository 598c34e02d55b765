"""Writes pipelines as DFM's JSON, in the variant that nv_dfm_core reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dfm_async.errors import PipelineError
from dfm_async.federation.dfm_json.names import (
    CORE,
    FOR_EACH,
    IF,
    TRY_FROM_CACHE,
    WRITE_TO_CACHE,
    YIELD,
    Called,
    ClassNames,
    Parameters,
)
from dfm_async.federation.dfm_json.values import ADVISE, BEST_OF, NODE, PLACE_PARAM, Problems, is_tagged, kind_of
from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.language.pipeline import Pipeline
from dfm_async.language.pipeline_text import expression_text

if TYPE_CHECKING:
    from dfm_async.federation.site import FederatedSites


def write_pipeline(pipeline: Pipeline, federation: FederatedSites) -> dict[str, Any]:
    """Return a pipeline as data for DFM's JSON. A PipelineError lists everything that DFM cannot express."""
    problems = Problems()
    body = _PipelineWriter(pipeline, federation, problems).block(pipeline.body)
    uses = set(_uses(pipeline))
    for name in sorted(name for kind, name in uses if kind == "parameter" and ("place", name) in uses):
        problems.report(
            f"PlaceParam({name!r})", "has the same name as a place of Yield; in DFM they are the same place"
        )
    try:
        problems.check(pipeline.name)
    except PipelineError as error:
        error.add_note("Pipeline.save_to_file writes all of this, in a format of our own.")
        raise
    return {"api_version": pipeline.api_version, "mode": pipeline.mode, "name": pipeline.name, "dfm_body": body}


def _head(class_name: str, ident: int, after: int | None = None) -> dict[str, Any]:
    return {
        "dfm_class_name": class_name if "." in class_name else CORE + class_name,
        "dfm_node_id": _node(ident),
        "dfm_after": None if after is None else _node(after),
    }


def _node(ident: int) -> dict[str, Any]:
    return {"tag": NODE, "ident": ident}


def _use(found: ex.Parameter | st.YieldStatement) -> tuple[str, str]:
    return ("parameter", found.name) if isinstance(found, ex.Parameter) else ("place", found.place)


def _uses(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Yield every use of a parameter, and of a place of a yield."""
    for statement in st.walk_statements(pipeline.body):
        if isinstance(statement, st.YieldStatement):
            yield _use(statement)
        for _, expression, _ in statement.expressions():
            yield from (_use(found) for found in ex.references(expression) if isinstance(found, ex.Parameter))


class _PipelineWriter(st.DefaultVisitor[None, dict[str, Any]]):
    def __init__(self, pipeline: Pipeline, federation: FederatedSites, problems: Problems) -> None:
        self._federation = federation
        self._classes = ClassNames(federation)
        self._problems = problems
        self._uses = Counter(_uses(pipeline))
        self._next_id = max((statement.id for statement in st.walk_statements(pipeline.body)), default=-1) + 1

    def block(self, body: tuple[st.Statement, ...]) -> list[dict[str, Any]]:
        """Write the statements of a block."""
        return [self.visit(statement, None) for statement in body]

    def _multiuse(self, found: ex.Parameter | st.YieldStatement) -> bool:
        """Return whether DFM must be told that a parameter or a place is used more than once."""
        return found.multiuse or self._uses[_use(found)] > 1

    def _refuse(self, statement: st.Statement, message: str) -> None:
        self._problems.report(statement.label, message)

    def _head(self, class_name: str, statement: st.Statement) -> dict[str, Any]:
        after = statement.after
        if len(after) > 1:
            self._refuse(statement, f"waits for {len(after)} nodes; in DFM a statement waits for one at most")
        return _head(class_name, statement.id, after[0] if after else None)

    def visit_yield(self, statement: st.YieldStatement, context: None) -> dict[str, Any]:
        return self._head(YIELD, statement) | {
            "value": self._value(statement.value, statement),
            "place": statement.place,
            "multiuse": self._multiuse(statement),
        }

    def visit_for_each(self, statement: st.ForEachStatement, context: None) -> dict[str, Any]:
        if statement.concurrency is not None:
            self._refuse(statement, "concurrency= does not exist in DFM")
        seq = self._reference(statement.seq, statement, "the sequence")
        return self._head(FOR_EACH, statement) | {"seq": seq, "dfm_body": self.block(statement.body)}

    def visit_if(self, statement: st.IfStatement, context: None) -> dict[str, Any]:
        if statement.otherwise:
            self._refuse(statement, "otherwise() does not exist in DFM: use a second If with the negation")
        cond = self._condition(statement.cond, statement)
        return self._head(IF, statement) | {"cond": cond, "dfm_body": self.block(statement.body)}

    def visit_other(self, statement: st.Statement, context: None) -> dict[str, Any]:
        self._refuse(statement, f"{statement.word} does not exist in DFM")
        for body in statement.blocks:
            self.block(body)
        return {}

    def visit_call(self, statement: st.CallStatement, context: None) -> dict[str, Any]:
        for option in ("retry", "deadline", "fallback"):
            if getattr(statement, option) is not None:
                self._refuse(statement, f"{option}= of a call does not exist in DFM: set it in the federation")
        operation = self._federation.operations.get(statement.operation)
        if operation is None:
            self._refuse(statement, f"federation {self._federation.name!r} has no such operation")
            return {}
        name, site = statement.operation, statement.site
        class_name, called = self._classes.anywhere(name), Called(operation)
        parameters = Parameters.of(called, self._federation)
        if not all(arg in parameters for arg in statement.args) and isinstance(site, str):
            class_name = self._classes.at_site(name, site, statement.provider)
            called = self._classes.called(class_name) or called
            parameters = Parameters.of(called, self._federation)
        found = self._head(class_name, statement) | {
            "site": site if isinstance(site, str) else _best_of(site),
            "provider": statement.provider,
        }
        for arg, value in statement.args.items():
            if arg not in parameters:
                where = "a site that adds it" if arg in operation.exposed else "it at all"
                self._refuse(statement, f"passes {arg!r}, but is not fixed to {where}")
            elif arg in found:
                self._refuse(statement, f"passes {arg!r}, which is a key of each statement in DFM")
            elif isinstance(value, ex.Constant) and value.value is None and parameters.null_changes(arg):
                self._refuse(statement, f"passes None for {arg!r}; in DFM that means that it is not given")
            elif isinstance(value, ex.Advise):
                found[arg] = {"tag": ADVISE, "advise": "Field"}
            else:
                found[arg] = self._value(value, statement)
        return found

    def visit_try_from_cache(self, statement: st.CacheStatement, context: None) -> dict[str, Any]:
        if statement.site is not None:
            self._refuse(statement, "site= of TryFromCache does not exist in DFM")
        key = self._reference(statement.key, statement, "the key")
        body = self.block(statement.body)
        if statement.store is None:
            self._refuse(statement, "the block stores nothing: call store(value) in it")
        else:
            value = self._reference(statement.store, statement, "what is stored")
            body.append(_head(WRITE_TO_CACHE, self._next_id) | {"key": key, "value": value})
            self._next_id += 1
        return self._head(TRY_FROM_CACHE, statement) | {"key": key, "dfm_body": body}

    def _value(self, value: ex.Expression, statement: st.Statement) -> Any:
        match value:
            case ex.Ref():
                return self._reference(value, statement, "a value")
            case ex.Parameter() if not value.path:
                if value.default is not None:
                    self._refuse(statement, f"passes {expression_text(value)}; default= does not exist in DFM")
                return {"tag": PLACE_PARAM, "place": value.name, "multiuse": self._multiuse(value)}
            case ex.Constant():
                return self._literal(value, statement)
            case ex.Items() if value.type == "list":
                return [self._value(item, statement) for item in value.items]
            case ex.Entries():
                return self._entries(value, statement)
            case _:
                self._refuse(statement, f"passes {expression_text(value)}, which DFM cannot express")
                return None

    def _entries(self, value: ex.Entries, statement: st.Statement) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.entries:
            if isinstance(key, ex.Constant) and isinstance(key.value, str):
                found[key.value] = self._value(item, statement)
            else:
                self._refuse(statement, f"the key {expression_text(key)} is not a string, as JSON requires")
        if kind_of(found) is not None:
            self._refuse(statement, f"passes {expression_text(value)}, which DFM would take for something else")
        return found

    def _literal(self, constant: ex.Constant, statement: st.Statement) -> Any:
        if not ex.is_json(constant.value):
            self._refuse(statement, f"passes {expression_text(constant)}, which JSON does not give back as it is")
        elif is_tagged(constant.value):
            self._refuse(statement, f"passes {expression_text(constant)}, which DFM would take for something else")
        return constant.value

    def _reference(self, value: ex.Expression, statement: st.Statement, what: str) -> Any:
        if not isinstance(value, ex.Ref):
            self._refuse(statement, f"{what} must be a node in DFM, not {expression_text(value)}")
            return None
        selected: Any = None
        subscript = True
        if len(value.path) == 1:
            (step,) = value.path
            subscript = not isinstance(step, ex.Attribute)
            selected = step.name if isinstance(step, ex.Attribute) else step.key
        writable = selected is None or (isinstance(selected, (int, str)) and not isinstance(selected, bool))
        private = not subscript and str(selected).startswith("_")
        if len(value.path) > 1 or not writable or private or (value.path and selected is None):
            self._refuse(statement, f"reads {expression_text(value)}; DFM has one step, by a public name or an integer")
        return {"id": _node(value.node), "sel": selected, "issubs": subscript}

    def _condition(self, value: ex.Expression, statement: st.Statement) -> Any:
        match value:
            case ex.Ref():
                return self._reference(value, statement, "a condition")
            case ex.Constant() if not isinstance(value.value, dict):
                return self._literal(value, statement)
            case ex.Comparison():
                left, right = self._condition(value.left, statement), self._condition(value.right, statement)
                return {"operator": value.op, "left": left, "right": right}
            case ex.Combination() if len(value.terms) > 1:
                return {"operator": value.op, "exp": [self._condition(term, statement) for term in value.terms]}
            case ex.Negation():
                return {"operator": "not", "exp": self._condition(value.term, statement)}
            case _:
                self._refuse(statement, f"{expression_text(value)} cannot be used in a condition of DFM")
                return None


def _best_of(site: st.BestOf | None) -> dict[str, Any]:
    sites = None if site is None or site.sites is None else list(site.sites)
    return {"tag": BEST_OF, "sites": sites}
