"""Reads pipelines from DFM's JSON."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dfm_async.base.text import shortened
from dfm_async.federation.dfm_json.names import (
    FOR_EACH,
    IF,
    TRY_FROM_CACHE,
    WRITE_TO_CACHE,
    YIELD,
    Called,
    ClassNames,
    Nodes,
    Parameters,
    Path,
)
from dfm_async.federation.dfm_json.values import (
    BEST_OF,
    MAX_DEPTH,
    MAX_STATEMENTS,
    Ident,
    Problems,
    StatementValues,
    is_advise,
    node_ident,
    plain_ident,
    pointer,
)
from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.language.pipeline import Pipeline

if TYPE_CHECKING:
    from dfm_async.federation.site import FederatedSites


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a variant of the format calls its keys."""

    body: str
    node_id: str
    after: str
    top: tuple[str, ...]


_NEW: Final = _Variant("dfm_body", "dfm_node_id", "dfm_after", ("api_version", "mode", "name", "dfm_body"))
_OLD: Final = _Variant("body", "node_id", "after", ("api_version", "mode", "name", "target", "body"))
_NO_IDENT: Final = ""  # replaces the id of a block whose id is invalid; no id is empty


def read_pipeline(data: Any, federation: FederatedSites) -> Pipeline:
    """Make a pipeline of the data of DFM's JSON. A PipelineError lists everything that is wrong, by JSON pointers."""
    problems = Problems()
    if not isinstance(data, dict):
        problems.report("", "a pipeline is a JSON object")
        problems.check(None)
    variant = _OLD if "dfm_body" not in data and "body" in data else _NEW
    _check_top(data, variant, problems)
    name = data.get("name")
    discovery = data.get("mode") == "discovery"
    body = _PipelineReader(federation, variant, problems, discovery=discovery).read(data.get(variant.body))
    problems.check(name if isinstance(name, str) else None)
    return Pipeline(name, api_version=data.get("api_version", ""), mode=data.get("mode", "execute"), body=body)


def _check_top(data: dict[str, Any], variant: _Variant, problems: Problems) -> None:
    for key in data:
        if key not in variant.top:
            problems.report(pointer("", key), f"is not a key of a pipeline (allowed: {', '.join(variant.top)})")
    if variant.body not in data:
        problems.report("", f"has no {variant.body!r}, the list of its statements")
    if not isinstance(data.get("api_version", ""), str):
        problems.report("/api_version", "must be a string")
    if data.get("mode", "execute") not in ("execute", "discovery"):
        problems.report("/mode", "must be 'execute' or 'discovery'")
    if not isinstance(data.get("name"), (str, type(None))):
        problems.report("/name", "must be a string or null")


@dataclass(frozen=True, slots=True)
class _StatementEntry:
    """One statement of the file, while it is read."""

    data: dict[str, Any]
    where: str
    path: Path
    ident: Ident | None
    number: int
    values: StatementValues

    def at(self, key: str) -> str:
        """Return the place of one of its keys."""
        return pointer(self.where, key)

    @property
    def inside(self) -> Path:
        """The path of the statements in its block."""
        return (*self.path, _NO_IDENT if self.ident is None else self.ident)


class _PipelineReader:
    def __init__(self, federation: FederatedSites, variant: _Variant, problems: Problems, *, discovery: bool) -> None:
        self._federation = federation
        self._discovery = discovery
        self._classes = ClassNames(federation)
        self._variant = variant
        self._problems = problems
        self._nodes = Nodes((), problems)
        self._common = {"dfm_class_name", variant.node_id, variant.after}
        self._parameters: dict[Called, Parameters] = {}

    def read(self, body: Any) -> tuple[st.Statement, ...]:
        """Read the statements of the whole file."""
        idents = []
        for count, ident in enumerate(self._idents(body), start=1):
            if count > MAX_STATEMENTS:
                self._problems.report(f"/{self._variant.body}", f"has more than {MAX_STATEMENTS:,} statements")
                return ()
            if ident is not None:
                idents.append(ident)
        self._nodes = Nodes(idents, self._problems)
        return self._block(body, f"/{self._variant.body}", ())

    def _idents(self, body: Any) -> Iterator[Ident | None]:
        """Yield the ids of all statements; None for one without, which is reported when it is read."""
        stack = [(body, 0)]
        while stack:
            found, depth = stack.pop()
            if not isinstance(found, list) or depth > MAX_DEPTH:
                continue
            for statement in found:
                if isinstance(statement, dict):
                    yield plain_ident(statement.get(self._variant.node_id))
                    stack.append((statement.get(self._variant.body), depth + 1))
                else:
                    yield None

    def _block(self, body: Any, where: str, path: Path) -> tuple[st.Statement, ...]:
        if body is None:
            return ()
        if not isinstance(body, list):
            self._problems.report(where, "must be a list of statements")
            return ()
        if len(path) > MAX_DEPTH:
            self._problems.report(where, f"blocks are nested more than {MAX_DEPTH} deep")
            return ()
        found = (self._statement(statement, pointer(where, index), path) for index, statement in enumerate(body))
        return tuple(statement for statement in found if statement is not None)

    def _statement(self, data: Any, where: str, path: Path) -> st.Statement | None:
        if not isinstance(data, dict):
            self._problems.report(where, "a statement is a JSON object")
            return None
        entry = self._entry(data, where, path)
        class_name = data.get("dfm_class_name")
        if not isinstance(class_name, str):
            self._problems.report(where, "has no 'dfm_class_name', the kind of the statement")
            self._define(entry, "statement")
            return None
        called = self._classes.called(class_name)
        if called is not None:
            return self._call(entry, called)
        kind = self._classes.statement(class_name) or ""
        readers = {YIELD: self._yield, FOR_EACH: self._for_each, IF: self._if, TRY_FROM_CACHE: self._cache}
        if kind in readers:
            return readers[kind](entry)
        if kind == WRITE_TO_CACHE:
            self._problems.report(where, "is outside the block of a TryFromCache")
        else:
            self._problems.report(entry.at("dfm_class_name"), self._classes.unknown(class_name))
        self._define(entry, "statement")  # others may refer to it: that is not their mistake
        return None

    def _entry(self, data: dict[str, Any], where: str, path: Path) -> _StatementEntry:
        key = self._variant.node_id
        if key in data:
            ident = node_ident(data[key], pointer(where, key), self._problems)
        else:
            self._problems.report(where, f"has no {key!r}")
            ident = None
        values = StatementValues(self._problems, functools.partial(self._nodes.value, path), len(path))
        return _StatementEntry(data, where, path, ident, -1 if ident is None else self._nodes.number(ident), values)

    def _define(self, entry: _StatementEntry, kind: str) -> None:
        self._nodes.define(entry.ident, kind, entry.path, entry.where)

    def _keys(
        self, entry: _StatementEntry, what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> bool:
        """Check the keys of a statement of the language; return whether all required ones exist."""
        allowed = {*self._common, *required, *optional}
        for key in entry.data:
            if key not in allowed:
                known = ", ".join([*required, *optional])
                self._problems.report(entry.at(key), f"is not a key of {what} (it has: {known})")
        missing = [key for key in required if key not in entry.data]
        for key in missing:
            self._problems.report(entry.where, f"has no {key!r}, which {what} needs")
        return not missing

    def _after(self, entry: _StatementEntry) -> tuple[int, ...]:
        key = self._variant.after
        data = entry.data.get(key)
        if data is None:
            return ()
        ident = node_ident(data, entry.at(key), self._problems)
        return () if ident is None else self._nodes.order(entry.path, ident, entry.at(key))

    def _call(self, entry: _StatementEntry, called: Called) -> st.Statement:
        name = called.operation.name
        parameters = self._parameters.get(called)
        if parameters is None:
            parameters = self._parameters[called] = Parameters.of(called, self._federation)
        args: dict[str, ex.Expression] = {}
        for key, data in entry.data.items():
            if (key in self._common and key not in parameters.own) or key in ("site", "provider"):
                continue
            if key not in parameters:
                known = ", ".join([*parameters.own, *sorted(parameters.added)]) or "none"
                self._problems.report(entry.at(key), f"is not a parameter of {name} (it has: {known})")
            elif is_advise(data):
                args[key] = self._advise(entry.at(key))
            elif data is not None or not parameters.null_is_absent(key):
                args[key] = entry.values.value(data, entry.at(key))
        for missing in parameters.required:
            if missing not in entry.data and not self._discovery:  # there, what is left out is asked for
                self._problems.report(entry.where, f"has no {missing!r}, which {name} needs")
        statement = st.CallStatement(
            id=entry.number,
            operation=name,
            args=args,
            site=self._site(entry, called),
            provider=self._provider(entry, called),
            after=() if self._variant.after in parameters.own else self._after(entry),
        )
        self._define(entry, "call")
        return statement

    def _site(self, entry: _StatementEntry, called: Called) -> str | st.BestOf | None:
        data = entry.data.get("site", called.site)
        if called.site is not None and data != called.site:
            self._problems.report(entry.at("site"), f"must be {called.site!r}, which the class is fixed to")
        elif isinstance(data, dict) and data.get("tag") == BEST_OF:
            return self._best_of(data, entry.at("site"))
        elif is_advise(data):
            self._advise(entry.at("site"))
            return st.BestOf()
        elif data is not None and not isinstance(data, str):
            self._problems.report(
                entry.at("site"), f'must be the name of a site, or {{"tag": "{BEST_OF}"}}, not {shortened(data)}'
            )
        return data if isinstance(data, str) else None

    def _advise(self, where: str) -> ex.Expression:
        if not self._discovery:
            self._problems.report(where, "advice can be asked for only in a pipeline whose mode is 'discovery'")
        return ex.Advise()

    def _best_of(self, data: dict[str, Any], where: str) -> st.BestOf | None:
        sites = data.get("sites")
        if data.keys() - {"tag", "sites"} or not (
            sites is None or (isinstance(sites, list) and all(isinstance(site, str) for site in sites))
        ):
            self._problems.report(where, "has a list of names of sites in 'sites', or null for all, and nothing else")
            return None
        return None if sites is None else st.BestOf(sites)

    def _provider(self, entry: _StatementEntry, called: Called) -> str | None:
        data = entry.data.get("provider", called.provider)
        if called.site is not None and data != called.provider:
            self._problems.report(entry.at("provider"), f"must be {called.provider!r}, which the class is fixed to")
        elif not isinstance(data, (str, type(None))):
            self._problems.report(
                entry.at("provider"), f"must be the name of a provider or null, not {shortened(data)}"
            )
        return data if isinstance(data, str) else None

    def _yield(self, entry: _StatementEntry) -> st.Statement:
        self._keys(entry, YIELD, ("value",), ("place", "multiuse"))
        place, multiuse = entry.data.get("place", "yield"), entry.data.get("multiuse", False)
        if not isinstance(place, str) or not place:
            self._problems.report(entry.at("place"), f"must be a name, not {shortened(place)}")
            place = "yield"
        if not isinstance(multiuse, bool):
            self._problems.report(entry.at("multiuse"), f"must be true or false, not {shortened(multiuse)}")
            multiuse = False
        value = entry.values.value(entry.data.get("value"), entry.at("value"))
        after = self._after(entry)
        loops = {self._nodes.number(ident) for ident in entry.path if ident != _NO_IDENT}  # their elements are there
        sent = (ref.node for ref in ex.references(value) if isinstance(ref, ex.Ref) and ref.node not in loops)
        waits = tuple(dict.fromkeys((*sent, *after)))
        self._nodes.define(entry.ident, YIELD, entry.path, entry.where, waits)
        return st.YieldStatement(id=entry.number, value=value, place=place, multiuse=multiuse, after=after)

    def _for_each(self, entry: _StatementEntry) -> st.Statement:
        seq: ex.Expression = ex.Constant()
        if self._keys(entry, FOR_EACH, ("seq",), (self._variant.body,)):
            seq = entry.values.reference(entry.data["seq"], entry.at("seq"), "seq")
        return st.ForEachStatement(id=entry.number, seq=seq, body=self._body(entry, FOR_EACH))

    def _if(self, entry: _StatementEntry) -> st.Statement:
        cond: ex.Expression = ex.Constant()
        if self._keys(entry, IF, ("cond",), (self._variant.body,)):
            cond = entry.values.condition(entry.data["cond"], entry.at("cond"))
        return st.IfStatement(id=entry.number, cond=cond, body=self._body(entry, IF))

    def _body(self, entry: _StatementEntry, kind: str) -> tuple[st.Statement, ...]:
        """Read the block of a statement. What the statement waits for, the statements of its block wait for."""
        after = self._after(entry)
        self._define(entry, kind)
        key = self._variant.body
        return _waiting(self._block(entry.data.get(key), entry.at(key), entry.inside), after)

    def _cache(self, entry: _StatementEntry) -> st.Statement:
        key: ex.Expression = ex.Constant()
        if self._keys(entry, TRY_FROM_CACHE, ("key",), (self._variant.body,)):
            key = entry.values.reference(entry.data["key"], entry.at("key"), "key")
        after = self._after(entry)
        self._define(entry, TRY_FROM_CACHE)
        body = entry.data.get(self._variant.body)
        where = entry.at(self._variant.body)
        writes: list[tuple[str, dict[str, Any]]] = []
        rest: list[st.Statement] = []
        if len(entry.path) < MAX_DEPTH and isinstance(body, list):
            for index, data in enumerate(body):
                if self._is_write(data):
                    writes.append((pointer(where, index), data))
                else:
                    found = self._statement(data, pointer(where, index), entry.inside)
                    rest += [] if found is None else [found]
        else:
            self._block(body, where, entry.inside)
        store = self._store(entry, key, writes)
        return st.CacheStatement(id=entry.number, key=key, store=store, body=_waiting(tuple(rest), after))

    def _is_write(self, data: Any) -> bool:
        class_name = data.get("dfm_class_name") if isinstance(data, dict) else None
        return isinstance(class_name, str) and self._classes.statement(class_name) == WRITE_TO_CACHE

    def _store(
        self, entry: _StatementEntry, key: ex.Expression, writes: list[tuple[str, dict[str, Any]]]
    ) -> ex.Expression:
        """Return what the block stores. It is read last, because it may come before what it stores."""
        if len(writes) != 1:
            message = "writes no value to the cache" if not writes else "writes more than one value to the cache"
            self._problems.report(entry.where, f"its block {message}; it takes exactly one {WRITE_TO_CACHE}")
        store: ex.Expression = ex.Constant()
        for where, data in writes:
            write = self._entry(data, where, entry.inside)
            if self._keys(write, WRITE_TO_CACHE, ("key", "value")):
                if write.values.reference(data["key"], write.at("key"), "key") != key:
                    self._problems.report(write.at("key"), "must be the key of the TryFromCache around it")
                store = write.values.reference(data["value"], write.at("value"), "value")
            if data.get(self._variant.after) is not None:
                self._problems.report(write.at(self._variant.after), "must be null: it waits for the value itself")
            self._define(write, WRITE_TO_CACHE)
        return store


def _waiting(body: tuple[st.Statement, ...], after: tuple[int, ...]) -> tuple[st.Statement, ...]:
    """Return the same statements, which wait for others, too."""
    if not after:
        return body
    found: list[st.Statement] = []
    for statement in body:
        if isinstance(statement, (st.CallStatement, st.YieldStatement)):
            found.append(msgspec.structs.replace(statement, after=(*statement.after, *after)))
        elif isinstance(statement, (st.ForEachStatement, st.IfStatement, st.CacheStatement)):
            found.append(msgspec.structs.replace(statement, body=_waiting(statement.body, after)))
    return tuple(found)
