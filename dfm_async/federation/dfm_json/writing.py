"""Writes pipelines as DFM's JSON, in the variant that nv_dfm_core reads."""

from __future__ import annotations

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
)
from dfm_async.federation.dfm_json.parameters import Parameters
from dfm_async.federation.dfm_json.problems import Problems
from dfm_async.federation.dfm_json.values import ADVISE, BEST_OF, NODE, PLACE_PARAM, is_tagged, kind_of
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
    is_json,
)
from dfm_async.pipeline.pipeline import Pipeline
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
from dfm_async.pipeline.text import expression_text, statement_label

if TYPE_CHECKING:
    from dfm_async.federation.federation import Federation

__all__ = ["write_pipeline"]


def write_pipeline(pipeline: Pipeline, federation: Federation) -> dict[str, Any]:
    """Gives a pipeline as data for DFM's JSON.

    Raises:
        PipelineError: with everything that DFM has no words for.
    """
    problems = Problems()
    body = _Writer(pipeline, federation, problems).block(pipeline.body)
    try:
        problems.check(pipeline.name)
    except PipelineError as error:
        error.add_note("Pipeline.save_to_file writes all of this, in a format of our own.")
        raise
    return {"api_version": pipeline.api_version, "mode": pipeline.mode, "name": pipeline.name, "dfm_body": body}


def _node(ident: int) -> dict[str, Any]:
    return {"tag": NODE, "ident": ident}


class _Writer:
    def __init__(self, pipeline: Pipeline, federation: Federation, problems: Problems) -> None:
        self._federation = federation
        self._classes = ClassNames(federation)
        self._problems = problems
        self._next_id = max((statement.id for statement in walk_statements(pipeline.body)), default=-1) + 1

    def block(self, body: tuple[Statement, ...]) -> list[dict[str, Any]]:
        """Writes the statements of a block."""
        return [self._statement(statement) for statement in body]

    def _refuse(self, statement: Statement, message: str) -> None:
        self._problems.report(statement_label(statement), message)

    def _head(self, class_name: str, ident: int, after: tuple[int, ...] = ()) -> dict[str, Any]:
        return {
            "dfm_class_name": class_name,
            "dfm_node_id": _node(ident),
            "dfm_after": _node(after[0]) if after else None,
        }

    def _statement(self, statement: Statement) -> dict[str, Any]:
        after = statement.after if isinstance(statement, (CallStatement, YieldStatement)) else ()
        if len(after) > 1:
            self._refuse(statement, f"waits for {len(after)} nodes; in DFM a statement waits for one at most")
        match statement:
            case CallStatement():
                return self._call(statement)
            case YieldStatement():
                return self._head(CORE + YIELD, statement.id, after) | {
                    "value": self._value(statement.value, statement),
                    "place": statement.place,
                    "multiuse": statement.multiuse,
                }
            case ForEachStatement():
                if statement.concurrency is not None:
                    self._refuse(statement, "concurrency= has no words in DFM")
                seq = self._reference(statement.seq, statement, "the sequence")
                return self._head(CORE + FOR_EACH, statement.id) | {"seq": seq, "dfm_body": self.block(statement.body)}
            case IfStatement():
                if statement.otherwise:
                    self._refuse(statement, "otherwise() has no words in DFM: use a second If with the negation")
                cond = self._condition(statement.cond, statement)
                return self._head(CORE + IF, statement.id) | {"cond": cond, "dfm_body": self.block(statement.body)}
            case CacheStatement():
                return self._cache(statement)
            case RepeatStatement():
                self._refuse(statement, "Repeat has no words in DFM")
                self.block(statement.body)
            case CollectStatement():
                self._refuse(statement, "collect(...) has no words in DFM")
        return {}

    def _call(self, statement: CallStatement) -> dict[str, Any]:
        for option in ("retry", "deadline"):
            if getattr(statement, option) is not None:
                self._refuse(statement, f"{option}= of a call has no words in DFM: set it in the federation")
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
        found = self._head(class_name, statement.id, statement.after) | {
            "site": site if isinstance(site, str) else _best_of(site),
            "provider": statement.provider,
        }
        for arg, value in statement.args.items():
            if arg not in parameters:
                where = "a site that adds it" if arg in operation.exposed else "it at all"
                self._refuse(statement, f"passes {arg!r}, but is not fixed to {where}")
            elif arg in found:
                self._refuse(statement, f"passes {arg!r}, which is a key of each statement in DFM")
            elif isinstance(value, Constant) and value.value is None and parameters.null_changes(arg):
                self._refuse(statement, f"passes None for {arg!r}; in DFM that means that it is not given")
            elif isinstance(value, Advise):
                found[arg] = {"tag": ADVISE, "advise": "Field"}
            else:
                found[arg] = self._value(value, statement)
        return found

    def _cache(self, statement: CacheStatement) -> dict[str, Any]:
        if statement.site is not None:
            self._refuse(statement, "site= of TryFromCache has no words in DFM")
        key = self._reference(statement.key, statement, "the key")
        body = self.block(statement.body)
        if statement.store is None:
            self._refuse(statement, "the block stores nothing: call store(value) in it")
        else:
            value = self._reference(statement.store, statement, "what is stored")
            body.append(self._head(CORE + WRITE_TO_CACHE, self._next_id) | {"key": key, "value": value})
            self._next_id += 1
        return self._head(CORE + TRY_FROM_CACHE, statement.id) | {"key": key, "dfm_body": body}

    def _value(self, value: Expression, statement: Statement) -> Any:
        match value:
            case Ref():
                return self._reference(value, statement, "a value")
            case Parameter() if not value.path:
                return {"tag": PLACE_PARAM, "place": value.name, "multiuse": value.multiuse}
            case Constant():
                return self._literal(value, statement)
            case Items() if value.type == "list":
                return [self._value(item, statement) for item in value.items]
            case Entries():
                return self._entries(value, statement)
            case _:
                self._refuse(statement, f"passes {expression_text(value)}, which has no words in DFM")
                return None

    def _entries(self, value: Entries, statement: Statement) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.entries:
            if isinstance(key, Constant) and isinstance(key.value, str):
                found[key.value] = self._value(item, statement)
            else:
                self._refuse(statement, f"the key {expression_text(key)} is no string, which JSON needs")
        if kind_of(found) is not None:
            self._refuse(statement, f"passes {expression_text(value)}, which DFM would take for something else")
        return found

    def _literal(self, constant: Constant, statement: Statement) -> Any:
        if not is_json(constant.value):
            self._refuse(statement, f"passes {expression_text(constant)}, which JSON does not give back as it is")
        elif is_tagged(constant.value):
            self._refuse(statement, f"passes {expression_text(constant)}, which DFM would take for something else")
        return constant.value

    def _reference(self, value: Expression, statement: Statement, what: str) -> Any:
        if not isinstance(value, Ref):
            self._refuse(statement, f"{what} must be a node in DFM, not {expression_text(value)}")
            return None
        selected: Any = None
        subscript = True
        if len(value.path) == 1:
            (step,) = value.path
            subscript = not isinstance(step, Attribute)
            selected = step.name if isinstance(step, Attribute) else step.key
        writable = selected is None or (isinstance(selected, (int, str)) and not isinstance(selected, bool))
        private = not subscript and str(selected).startswith("_")
        if len(value.path) > 1 or not writable or private or (value.path and selected is None):
            self._refuse(statement, f"reads {expression_text(value)}; DFM has one step, by a public name or an integer")
        return {"id": _node(value.node), "sel": selected, "issubs": subscript}

    def _condition(self, value: Expression, statement: Statement) -> Any:
        match value:
            case Ref():
                return self._reference(value, statement, "a condition")
            case Constant() if not isinstance(value.value, dict):
                return self._literal(value, statement)
            case Comparison():
                left, right = self._condition(value.left, statement), self._condition(value.right, statement)
                return {"operator": value.op, "left": left, "right": right}
            case Combination() if len(value.terms) > 1:
                return {"operator": value.op, "exp": [self._condition(term, statement) for term in value.terms]}
            case Negation():
                return {"operator": "not", "exp": self._condition(value.term, statement)}
            case _:
                self._refuse(statement, f"{expression_text(value)} cannot stand in a condition of DFM")
                return None


def _best_of(site: BestOf | None) -> dict[str, Any]:
    sites = None if site is None or site.sites is None else list(site.sites)
    return {"tag": BEST_OF, "sites": sites}
