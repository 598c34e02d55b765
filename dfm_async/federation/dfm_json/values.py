"""Values in DFM's JSON: references, parameters, requests for advice, literals; and conditions over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from dfm_async.base.text import shortened
from dfm_async.errors import PipelineError, Problem
from dfm_async.language import expressions as ex

MAX_BYTES: Final = 64 * 1024 * 1024
"""How large a file may be."""
MAX_DEPTH: Final = 64
"""How deep blocks, values and conditions may be nested, together."""
MAX_STATEMENTS: Final = 100_000
"""How many statements a file may have."""
_SHOWN: Final = 100


def pointer(where: str, key: str | int) -> str:
    """Return the JSON pointer of a member."""
    return f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"


class Problems:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self._more = 0

    def report(self, where: str, message: str) -> None:
        """Add a problem; of very many, the first ones are kept."""
        if len(self.found) < _SHOWN:
            self.found.append(Problem(where, message))
        else:
            self._more += 1

    def check(self, pipeline: str | None) -> None:
        """Raise a PipelineError with all problems, if there are any."""
        if self.found:
            more = [Problem("", f"and {self._more} more")] if self._more else []
            raise PipelineError(pipeline, [*self.found, *more])


NODE: Final = "@dfm-node"
PLACE_PARAM: Final = "@dfm-place-param"
ADVISE: Final = "@dfm-advise"
BEST_OF: Final = "@dfm-best-of"
_PICKLED: Final = "__dfm__pickled__"

Ident: TypeAlias = int | str
"""How DFM names a node."""
Resolve: TypeAlias = Callable[[Ident, str], int | None]
"""Finds the node that is meant, from a certain statement; reports at the pointer if it cannot be."""
_COMPARISONS: Final = ("==", "!=", "<", "<=", ">", ">=")
_TERMS: Final = ("and", "or")


def kind_of(data: Any) -> str | None:
    """Return which tagged value this is meant to be; None for a literal."""
    if not isinstance(data, dict):
        return None
    inner = data.get("id")
    if isinstance(inner, dict) and inner.get("tag") == NODE:
        return NODE
    tag = data.get("tag")
    return tag if isinstance(tag, str) and tag in (PLACE_PARAM, ADVISE, _PICKLED) else None


def is_advise(data: Any) -> bool:
    """Return whether this asks for advice."""
    return isinstance(data, dict) and data in ({"tag": ADVISE, "advise": "Field"}, {"tag": ADVISE})


def is_tagged(data: Any) -> bool:
    """Return whether the data contain a tagged value."""
    stack = [data]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            if kind_of(found) is not None:
                return True
            stack.extend(found.values())
        elif isinstance(found, list):
            stack.extend(found)
    return False


class _TooDeep(Exception):
    pass


def _find_holders(data: dict[str, Any] | list[Any], depth: int, found: set[int]) -> bool:
    """Find the lists and objects that are tagged values or hold some, by their identity. Visit each of them once."""
    if depth > MAX_DEPTH:
        raise _TooDeep
    holds = kind_of(data) is not None
    if not holds:
        for part in data.values() if isinstance(data, dict) else data:
            if isinstance(part, (dict, list)) and _find_holders(part, depth + 1, found):
                holds = True
    if holds:
        found.add(id(data))
    return holds


def plain_ident(data: Any) -> Ident | None:
    """Read the id of a node; None if it is not one."""
    if not isinstance(data, dict) or data.get("tag") != NODE or set(data) != {"tag", "ident"}:
        return None
    ident = data["ident"]
    if isinstance(ident, str):
        return ident if ident.isidentifier() else None
    return ident if isinstance(ident, int) and not isinstance(ident, bool) else None


def node_ident(data: Any, where: str, problems: Problems) -> Ident | None:
    """Read the id of a node; report what is not one."""
    found = plain_ident(data)
    if found is None:
        problems.report(where, f'must be a node id, such as {{"tag": "{NODE}", "ident": 0}}; names are identifiers')
    return found


class StatementValues:
    """Reads the values of one statement, which is nested ``depth`` deep; ``resolve`` finds the nodes that are meant."""

    def __init__(self, problems: Problems, resolve: Resolve, depth: int) -> None:
        self._problems = problems
        self._resolve = resolve
        self._depth = depth

    def value(self, data: Any, where: str) -> ex.Expression:
        """Read a value: lists and objects may contain tagged values, all else is a literal."""
        holders: set[int] = set()
        if not isinstance(data, (dict, list)):
            return ex.Constant(value=data)
        try:
            _find_holders(data, self._depth, holders)
        except _TooDeep:
            self._problems.report(where, f"is nested more than {MAX_DEPTH} deep")
            return ex.Constant()
        return self._value(data, where, holders)

    def condition(self, data: Any, where: str) -> ex.Expression:
        """Read a condition: references, literals that are not objects, comparisons, and/or/not."""
        return self._condition(data, where, self._depth)

    def _value(self, data: Any, where: str, holders: set[int]) -> ex.Expression:
        if not isinstance(data, (dict, list)) or id(data) not in holders:
            return ex.Constant(value=data)
        if isinstance(data, dict) and (kind := kind_of(data)) is not None:
            return self._tagged(kind, data, where)
        if isinstance(data, list):
            items = (self._value(item, pointer(where, index), holders) for index, item in enumerate(data))
            return ex.Items(type="list", items=tuple(items))
        entries = ((ex.Constant(value=key), self._value(data[key], pointer(where, key), holders)) for key in data)
        return ex.Entries(entries=tuple(entries))

    def reference(self, data: Any, where: str, what: str) -> ex.Expression:
        """Read a value that has to be a node or a field of one."""
        if kind_of(data) == NODE:
            return self._reference(data, where)
        self._problems.report(where, f"{what} must be a reference to a node, not {shortened(data)}")
        return ex.Constant()

    def _condition(self, data: Any, where: str, depth: int) -> ex.Expression:
        if depth > MAX_DEPTH:
            self._problems.report(where, f"is nested more than {MAX_DEPTH} deep")
            return ex.Constant()
        if isinstance(data, list):
            found = self.value(data, where)
            if not isinstance(found, ex.Constant):
                self._problems.report(where, "a list in a condition holds only literals")
            return found
        if not isinstance(data, dict):
            return ex.Constant(value=data)
        if kind_of(data) == NODE:
            return self._reference(data, where)
        operator = data.get("operator")
        if not isinstance(operator, str):
            operator = ""
        if operator in _TERMS:
            return self._combination(operator, data, where, depth)
        if operator == "not" and self._has(data, where, {"operator", "exp"}):
            return ex.Negation(term=self._condition(data["exp"], pointer(where, "exp"), depth + 1))
        if operator in _COMPARISONS and self._has(data, where, {"operator", "left", "right"}):
            left = self._condition(data["left"], pointer(where, "left"), depth + 1)
            right = self._condition(data["right"], pointer(where, "right"), depth + 1)
            return ex.Comparison(op=cast(Any, operator), left=left, right=right)
        if operator != "not" and operator not in _COMPARISONS:
            known = ", ".join([*_TERMS, "not", *_COMPARISONS])
            self._problems.report(
                where, f"a condition is a reference to a node, a literal, or an object with an operator ({known})"
            )
        return ex.Constant()

    def _combination(self, op: str, data: dict[str, Any], where: str, depth: int) -> ex.Expression:
        if not self._has(data, where, {"operator", "exp"}):
            return ex.Constant()
        terms = data["exp"]
        inner = pointer(where, "exp")
        if not isinstance(terms, list) or len(terms) < 2:
            self._problems.report(inner, f"{op!r} takes a list of at least two conditions")
            return ex.Constant()
        found = tuple(self._condition(term, pointer(inner, index), depth + 1) for index, term in enumerate(terms))
        return ex.Combination(op=cast(Any, op), terms=found)

    def _has(self, data: dict[str, Any], where: str, keys: set[str]) -> bool:
        if data.keys() == keys:
            return True
        self._problems.report(where, f"must have the keys {', '.join(sorted(keys))}, not {', '.join(sorted(data))}")
        return False

    def _tagged(self, kind: str, data: dict[str, Any], where: str) -> ex.Expression:
        if kind == NODE:
            return self._reference(data, where)
        if kind == PLACE_PARAM:
            return self._parameter(data, where)
        if kind == _PICKLED:
            self._problems.report(where, "is a pickled object; pickles run code when they are read, and are refused")
            return ex.Constant()
        message = (
            f'advice is asked for with {{"tag": "{ADVISE}", "advise": "Field"}}, as the whole value of a parameter'
        )
        self._problems.report(where, message)
        return ex.Constant()

    def _parameter(self, data: dict[str, Any], where: str) -> ex.Expression:
        place, multiuse = data.get("place"), data.get("multiuse", False)
        if not isinstance(place, str) or not place or not isinstance(multiuse, bool) or data.keys() - _PARAMETER:
            self._problems.report(where, 'a parameter has the keys tag, place (a name), and perhaps "multiuse": true')
            return ex.Constant()
        return ex.Parameter(name=place, multiuse=multiuse)

    def _reference(self, data: dict[str, Any], where: str) -> ex.Expression:
        ident = node_ident(data["id"], pointer(where, "id"), self._problems)
        selected, subscript = data.get("sel"), data.get("issubs", True)
        if not isinstance(subscript, bool) or data.keys() - _REFERENCE:
            self._problems.report(where, "a reference has the keys id, and perhaps sel and issubs (true or false)")
            return ex.Constant()
        path: tuple[ex.Item | ex.Attribute, ...]
        if selected is None:
            path = ()
        elif isinstance(selected, bool) or not isinstance(selected, (int, str)):
            self._problems.report(pointer(where, "sel"), f"must be a string or an integer, not {shortened(selected)}")
            return ex.Constant()
        elif isinstance(selected, str) and not subscript:
            if selected.startswith("_") or not selected.isidentifier():
                self._problems.report(pointer(where, "sel"), f"the attribute {shortened(selected)} cannot be used")
                return ex.Constant()
            path = (ex.Attribute(name=selected),)
        else:
            path = (ex.Item(key=selected),)
        node = None if ident is None else self._resolve(ident, where)
        return ex.Constant() if node is None else ex.Ref(node=node, path=path)


_PARAMETER: Final = {"tag", "place", "multiuse"}
_REFERENCE: Final = {"id", "sel", "issubs"}
