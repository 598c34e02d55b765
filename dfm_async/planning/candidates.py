"""Which sites and providers a call can run at, and why others cannot."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final

from dfm_async.federation.bindings import ExposedParameter
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import GENERATORS, Adapter, Operation
from dfm_async.federation.schemas import JSON_TYPES, shown, type_of
from dfm_async.federation.site import Site
from dfm_async.language.expressions import Constant, Expression, Parameter, Ref, references
from dfm_async.language.statements import CallStatement, WaitStatement
from dfm_async.planning.structure import Spot, Structure
from dfm_async.planning.types import fits, redefinition, type_of_event, type_text, validate
from dfm_async.planning.work_graph import Option

_KINDS: Final = {"literal": "a constant", "node": "the value of a node", "place": "a parameter of the pipeline"}
_WHOLE: Final = (None, type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
"""Types of results that are not generators."""


class Candidates:
    """Finds where calls can run, of the ``allowed`` sites (None: all). Problems are added to the structure."""

    def __init__(self, found: Structure, federation: Federation, allowed: Iterable[str] | None) -> None:
        self.found = found
        self.federation = federation
        self.allowed = None if allowed is None else frozenset(allowed)
        self._offers: dict[tuple[str, str | None], list[Option]] = {}

    def offers(self, operation: str, provider: str | None) -> list[Option]:
        """Return who offers an operation, in the order of the federation."""
        key = (operation, provider)
        if key not in self._offers:
            self._offers[key] = [
                Option(site.name, adapter)
                for site in self.federation.sites.values()
                for adapter in _adapters_of(site, operation, provider)
            ]
        return self._offers[key]

    def of(self, spot: Spot, statement: CallStatement) -> list[Option]:
        """Return where a call can run; nowhere, if that is a problem, which is reported then."""
        operation = self.operation(spot, statement)
        if operation is None:
            return []
        self._check_inputs(spot, statement, operation)
        options = self.offered(spot, statement)
        if options and operation.exposed:
            options = self._taking(spot, statement, operation, options)
        retried = statement.retry is not None and statement.retry.tries_again
        gathered = statement.id in self.found.gathered or None
        given = {"retry": retried, "deadline": statement.deadline, "fallback": statement.fallback, "gather": gathered}
        whole = " and ".join(name for name, value in given.items() if value is not None and value is not False)
        if whole and any(o.adapter.kind in GENERATORS for o in options):
            options = [option for option in options if option.adapter.kind not in GENERATORS]
            if not options:
                self.found.report(spot, f"{whole}: the operation must return a value; this one is a generator")
        return options

    def operation(self, spot: Spot, statement: CallStatement) -> Operation[..., Any] | None:
        """Return the operation of a call; report one that does not exist."""
        name = statement.operation
        found = self.federation.operations.get(name)
        if found is None:
            known = ", ".join(sorted(self.federation.operations)) or "none"
            self.found.report(spot, f"no operation {name!r} in federation {self.federation.name!r} (it has: {known})")
        return found

    def offered(self, spot: Spot, statement: CallStatement) -> list[Option]:
        """Return what is offered at the sites that a call allows; report if that is nothing."""
        offers = self.offers(statement.operation, statement.provider)
        if isinstance(statement.site, str):
            return self._fixed(spot, statement, statement.site, offers)
        return self._free(spot, statement, offers)

    def _fixed(self, spot: Spot, statement: CallStatement, name: str, offers: list[Option]) -> list[Option]:
        if name not in self.federation.sites:
            self.found.report(spot, f"no site {name!r} in federation {self.federation.name!r} ({self.sites()})")
            return []
        if self.allowed is not None and name not in self.allowed:
            self.found.report(spot, f"is fixed to site {name!r}, but restrict_to_sites allows {sorted(self.allowed)}")
            return []
        options = [option for option in offers if option.site == name]
        if not options:
            offered = dict.fromkeys(option.site for option in offers)
            provider = f" from provider {statement.provider!r}" if statement.provider else ""
            where = f"offered by {', '.join(offered)}" if offered else self._offered(statement.operation)
            self.found.report(
                spot, f"site {name!r} does not offer operation {statement.operation!r}{provider} ({where})"
            )
        return options

    def _free(self, spot: Spot, statement: CallStatement, options: list[Option]) -> list[Option]:
        asked = statement.site
        among = ""
        if asked is not None and not isinstance(asked, str) and asked.sites is not None:
            for name in asked.sites:
                if name not in self.federation.sites:
                    self.found.report(spot, f"BestOf names site {name!r}, which does not exist ({self.sites()})")
            options = [option for option in options if option.site in asked.sites]
            among = f" among {list(asked.sites)}"
        if self.allowed is not None:
            options = [option for option in options if option.site in self.allowed]
        if not options:
            provider = f" from provider {statement.provider!r}" if statement.provider else ""
            elsewhere = f" ({self._offered(statement.operation)})" if provider else ""
            limit = "" if self.allowed is None else f" (restricted to {sorted(self.allowed)})"
            self.found.report(
                spot, f"no site{among} offers operation {statement.operation!r}{provider}{limit}{elsewhere}"
            )
        return options

    def _offered(self, operation: str) -> str:
        """Return who offers an operation, under whichever provider, for messages."""
        found = [
            f"{site.name} from provider {provider!r}" if provider else site.name
            for site in self.federation.sites.values()
            for name, provider in site.adapters
            if name == operation
        ]
        return f"offered by {', '.join(found)}" if found else "no site offers it"

    def sites(self) -> str:
        """Return the sites of the federation, for messages."""
        return f"it has: {', '.join(self.federation.sites) or 'none'}"

    # what only some sites take

    def _taking(
        self, spot: Spot, statement: CallStatement, operation: Operation[..., Any], options: list[Option]
    ) -> list[Option]:
        """Return those options that take everything that the call passes."""
        own = operation.signature.parameters.parameters
        extra = [name for name in statement.args if name not in own and name in operation.exposed]
        for name in extra:
            reasons = {option.name: self._refusal(option.adapter, name, statement.args[name]) for option in options}
            left = [option for option in options if reasons[option.name] is None]
            if not left:
                taken = dict.fromkeys(
                    option.name
                    for option in self.offers(operation.name, None)
                    if self._refusal(option.adapter, name, statement.args[name]) is None
                )
                listed = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
                hint = f"taken at {', '.join(taken)}" if taken else "no site takes it"
                self.found.report(spot, f"{name} cannot be passed where it may run: {listed} ({hint})")
                return []
            options = left
        return options

    def _refusal(self, adapter: Adapter, name: str, expression: Expression) -> str | None:
        """Return why an adapter does not take a parameter that is not part of the operation; None if it does."""
        exposed = adapter.exposed.get(name)
        if exposed is None:
            return f"has no parameter {name!r}"
        for kind in _kinds_of(expression):
            if not getattr(exposed, f"accepts_{kind}_input"):
                return f"{name} may not be {_KINDS[kind]}"
        hint = self._type(exposed)
        if isinstance(expression, Constant) and expression.value is not None:
            return validate(hint, expression.value, convert=False)[1]
        if isinstance(expression, (Ref, Parameter)):
            return type_conflict(expression, name, hint, self.found, self.federation)
        return None

    def _type(self, exposed: ExposedParameter) -> Any:
        """Return the type of an exposed parameter, if JSON schemas have a name for it; no class is imported."""
        kinds = exposed.type if isinstance(exposed.type, list) else [exposed.type]
        known = all(isinstance(kind, str) and kind in JSON_TYPES for kind in kinds)
        return type_of({"type": exposed.type}, self.federation.models) if known else Any

    def _check_inputs(self, spot: Spot, statement: CallStatement, operation: Operation[..., Any]) -> None:
        """Whether each argument is of a kind that the operation's declaration accepts."""
        if operation.declaration is None:
            return
        for name, expression in statement.args.items():
            schema = operation.declaration.parameters.get(name, {})
            for kind in _kinds_of(expression):
                key = f"accepts-{kind}-input"
                if schema.get(key, schema.get(key.replace("-", "_"), True)) is False:
                    self.found.report(
                        spot, f"{name} may not be {_KINDS[kind]}: operation {operation.name!r} has {key}: false"
                    )


def _adapters_of(site: Site, operation: str, provider: str | None) -> Iterator[Adapter]:
    """Yield what a call can mean at a site; without a provider its own code, or else that of all providers."""
    found = site.adapters.get((operation, provider))
    if found is not None:
        yield found
    elif provider is None:
        for (name, _), adapter in site.adapters.items():
            if name == operation:
                yield adapter


def type_conflict(ref: Ref | Parameter, name: str, hint: Any, found: Structure, federation: Federation) -> str | None:
    """Return why the result of a call, or a parameter of the pipeline, cannot be passed where a type is declared.

    None if it may fit; fields of values do.
    """
    if ref.path:
        return None
    if isinstance(ref, Parameter):
        source, made = f"parameter {ref.name!r} is declared", found.types.get(ref.name, Any)
    else:
        target = found.spots.get(ref.node)
        if target is not None and isinstance(target.statement, WaitStatement):
            source, made = f"{target.label} gets", type_of_event(target.statement.schema)
        elif target is None or not isinstance(target.statement, CallStatement):
            return None
        else:
            operation = federation.operations.get(target.statement.operation)
            source, made = f"{target.label} returns", Any if operation is None else operation.signature.returns
    if fits(made, hint):
        return None
    return (
        f"{name} is declared {type_text(shown(hint))}, but {source} {type_text(shown(made))}{redefinition(made, hint)}"
    )


def may_stream(federation: Federation, operation: str) -> bool:
    """Return whether an operation may return a generator: code at a site is one, or its type does not exclude it."""
    returns = federation.operations[operation].signature.returns
    return (typing.get_origin(returns) or returns) not in _WHOLE or any(
        adapter.kind in GENERATORS
        for site in federation.sites.values()
        for adapter in _adapters_of(site, operation, None)
    )


def _kinds_of(expression: Expression) -> list[str]:
    """Return what an argument is made of: "literal", "node", "place"."""
    found = list(references(expression))
    kinds = ["node"] if any(isinstance(ref, Ref) for ref in found) else []
    if any(isinstance(ref, Parameter) for ref in found):
        kinds.append("place")
    return kinds or ["literal"]
