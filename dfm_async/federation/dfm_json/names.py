"""Names in DFM's JSON: classes, their parameters, and the ids of nodes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dfm_async.federation.dfm_json.values import Ident, Problems

if TYPE_CHECKING:
    from dfm_async.federation.operation import Operation
    from dfm_async.federation.site import FederatedSites

CORE: Final = "nv_dfm_core.api."
_OLD_CORE: Final = "dfm.api."

YIELD: Final = "Yield"
FOR_EACH: Final = "ForEach"
IF: Final = "If"
TRY_FROM_CACHE: Final = "TryFromCache"
WRITE_TO_CACHE: Final = "_WriteToCache"
_STATEMENTS: Final = frozenset({YIELD, FOR_EACH, IF, TRY_FROM_CACHE, WRITE_TO_CACHE})


@dataclass(frozen=True, slots=True)
class Called:
    """What a class name of an operation means."""

    operation: Operation[..., Any]
    site: str | None = None
    """The site that the class is fixed to."""
    provider: str | None = None
    """The provider that the class is fixed to."""


class ClassNames:
    """The classes that pipelines of a federation may name."""

    def __init__(self, federation: FederatedSites) -> None:
        self._federation = federation
        self._called: dict[str, Called] = {}
        for site in federation.sites.values():
            for name, provider in sorted(site.adapters, key=lambda key: key[1] is not None):
                operation = federation.operations[name]
                self._called.setdefault(self.at_site(name, site.name, provider), Called(operation, site.name, provider))
        for name, operation in federation.operations.items():
            self._called[self.anywhere(name)] = Called(operation)

    def anywhere(self, operation: str) -> str:
        """Return the class of an operation that any site may run."""
        return f"{self._federation.name}.fed.api.{operation}"

    def at_site(self, operation: str, site: str, provider: str | None) -> str:
        """Return the class of an operation as one site offers it, with the parameters that the site adds."""
        inner = "" if provider is None else f"{provider}."
        return f"{self._federation.name}.fed.site.{site}.{inner}{operation}"

    def statement(self, class_name: str) -> str | None:
        """Return which statement of the language a class is, if it is one."""
        for prefix in (CORE, _OLD_CORE):
            found = class_name.removeprefix(prefix)
            if found != class_name and found in _STATEMENTS:
                return found
        return None

    def called(self, class_name: str) -> Called | None:
        """Return which operation a class is, if it is one of the federation."""
        return self._called.get(class_name)

    def unknown(self, class_name: str) -> str:
        """Return what is wrong with the name of a class that does not exist."""
        package, separator, rest = class_name.partition(".fed.")
        name = self._federation.name
        if not separator:
            return f"{class_name!r} is neither a statement of the language nor an operation of federation {name!r}"
        if package != name:
            return f"{class_name!r} belongs to package {package!r}, not to federation {name!r}"
        kind, _, rest = rest.partition(".")
        if kind == "api":
            return f"federation {name!r} has no operation {rest!r} (it has: {_listed(self._federation.operations)})"
        site, _, rest = rest.partition(".")
        found = self._federation.sites.get(site)
        if kind != "site" or found is None:
            return f"{class_name!r} names no site of federation {name!r} (it has: {_listed(self._federation.sites)})"
        return f"site {site!r} offers no {rest!r} (it offers: {_listed(n for n, _ in found.adapters)})"


def _listed(names: Any) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:20]) + (", ..." if len(found) > 20 else "") or "none"


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters that a call may give."""

    own: Mapping[str, inspect.Parameter]
    nullable: frozenset[str]
    """Those for which null is a value like others."""
    added: frozenset[str]
    """Those that the site adds."""
    open_ended: bool

    @classmethod
    def of(cls, called: Called, federation: FederatedSites) -> Parameters:
        """Return the parameters of a class: one that is fixed to a site has those that the site adds."""
        signature = called.operation.signature
        listed = signature.parameters.parameters
        adapter = None
        if called.site is not None:
            adapter = federation.sites[called.site].adapters.get((called.operation.name, called.provider))
        return cls(
            own={name: parameter for name, parameter in listed.items() if parameter.kind not in _VARIABLE},
            nullable=frozenset(name for name in listed if _nullable(name, called.operation)),
            added=frozenset(() if adapter is None else adapter.exposed.keys() - listed.keys()),
            open_ended=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in listed.values()),
        )

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self.added or self.open_ended

    @property
    def required(self) -> list[str]:
        """The names of those that a call must give."""
        return [name for name, parameter in self.own.items() if parameter.default is inspect.Parameter.empty]

    def null_is_absent(self, name: str) -> bool:
        """Return whether null means that the call does not give it: DFM writes null for what was left out."""
        if name in self.added:
            return True
        parameter = self.own.get(name)
        return parameter is not None and parameter.default is not inspect.Parameter.empty and name not in self.nullable

    def null_changes(self, name: str) -> bool:
        """Return whether null means another value than None, because it means that the call does not give it."""
        parameter = self.own.get(name)
        return self.null_is_absent(name) and (parameter is None or parameter.default is not None)


def _nullable(name: str, operation: Operation[..., Any]) -> bool:
    """Return whether null is a value. For an operation of a file, its schema decides: the type always allows None."""
    if operation.declaration is not None:
        schema = operation.declaration.parameters.get(name, {})
        kinds = schema.get("type", "null")
        return "null" in kinds if isinstance(kinds, list) else kinds == "null" or schema.get("nullable") is True
    return _accepts_null(operation.signature.types.get(name, Any))


def _accepts_null(declared: Any) -> bool:
    if typing.get_origin(declared) is typing.Annotated:
        return _accepts_null(typing.get_args(declared)[0])
    return declared in (Any, None, type(None), object) or type(None) in typing.get_args(declared)


Path: TypeAlias = tuple[Ident, ...]
"""The blocks around a statement, from the outside in."""

_VALUELESS = frozenset({YIELD, IF, WRITE_TO_CACHE})
_UNUSUAL = 2**53  # larger numbers are not the same number in every reader of JSON


@dataclass(frozen=True, slots=True)
class _ReadNode:
    kind: str
    path: Path
    waits: tuple[int, ...]
    """The nodes that are done when it is; for a Yield, which has no value itself."""


class Nodes:
    """The nodes of a file that is read from top to bottom. Integer ids are kept; names get the numbers after them."""

    def __init__(self, idents: Iterable[Ident], problems: Problems) -> None:
        self._problems = problems
        listed = list(idents)
        usual = {ident for ident in listed if isinstance(ident, int) and 0 <= ident < _UNUSUAL}
        self._numbers: dict[Ident, int] = {ident: ident for ident in usual}
        following = max(usual, default=-1)
        for ident in listed:
            if ident not in self._numbers:
                following += 1
                self._numbers[ident] = following
        self._read: dict[Ident, _ReadNode] = {}

    def number(self, ident: Ident) -> int:
        """Return the number of a node of the file."""
        return self._numbers[ident]

    def define(self, ident: Ident | None, kind: str, path: Path, where: str, waits: tuple[int, ...] = ()) -> None:
        """Record that a statement was read, so that those after it and inside it can refer to it."""
        if ident is None:
            return
        if ident in self._read:
            self._problems.report(where, f"the node id {ident!r} is used twice")
        self._read[ident] = _ReadNode(kind, path, waits)

    def value(self, path: Path, ident: Ident, where: str) -> int | None:
        """Find a node whose value is read by a statement of a block; report if it cannot be."""
        node = self._visible(path, ident, where)
        if node is None:
            return None
        if node.kind in _VALUELESS:
            self._problems.report(where, f"refers to node {ident!r}, a {node.kind}, which has no value")
        elif ident in path and node.kind != FOR_EACH:
            self._problems.report(where, f"refers to node {ident!r}, whose block it is in")
        elif ident not in path and node.kind == FOR_EACH:
            self._problems.report(where, f"refers to the element of loop {ident!r} outside that loop")
        return self._numbers[ident]

    def order(self, path: Path, ident: Ident, where: str) -> tuple[int, ...]:
        """Find the nodes that a statement waits for, and report if it cannot. For a Yield: of the value it sends."""
        node = self._visible(path, ident, where)
        if node is None:
            return ()
        if ident in path:
            self._problems.report(where, f"waits for node {ident!r}, whose block it is in")
        elif node.kind in (IF, FOR_EACH, WRITE_TO_CACHE):
            self._problems.report(where, f"waits for node {ident!r}, a {node.kind}; name an operation instead")
        elif node.kind == YIELD:
            return node.waits
        return (self._numbers[ident],)

    def _visible(self, path: Path, ident: Ident, where: str) -> _ReadNode | None:
        if ident not in self._numbers:
            self._problems.report(where, f"refers to node {ident!r}, which does not exist")
            return None
        node = self._read.get(ident)
        if node is None:
            self._problems.report(where, f"refers to node {ident!r}, which is defined later")
            return None
        if path[: len(node.path)] != node.path:
            self._problems.report(where, f"refers to node {ident!r}, which is inside another block")
            return None
        return node
