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
from dfm_async.pipeline.expressions import Constant, Expression, Parameter, Ref, references
from dfm_async.pipeline.statements import CallStatement
from dfm_async.planner.graph import Option
from dfm_async.planner.structure import Spot, Structure
from dfm_async.planner.types import fits, type_text, validate

__all__ = ["Candidates", "adapters_of", "kinds_of", "may_stream"]

_KINDS: Final = {"literal": "a constant", "node": "the value of a node", "place": "a parameter of the pipeline"}
_WHOLE: Final = (None, type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
"""Types of results that are no generators."""


class Candidates:
    """Finds where calls can run. What cannot be is added to the problems of the structure.

    Args:
        found: the pipeline.
        federation: the sites.
        allowed: the sites that may be used; None means all.
    """

    def __init__(self, found: Structure, federation: Federation, allowed: Iterable[str] | None) -> None:
        self.found = found
        self.federation = federation
        self.allowed = None if allowed is None else frozenset(allowed)
        self._offers: dict[tuple[str, str | None], list[Option]] = {}

    def offers(self, operation: str, provider: str | None) -> list[Option]:
        """Who offers an operation, in the order of the federation."""
        key = (operation, provider)
        found = self._offers.get(key)
        if found is None:
            found = self._offers[key] = [
                Option(site.name, adapter)
                for site in self.federation.sites.values()
                for adapter in adapters_of(site, operation, provider)
            ]
        return found

    def of(self, spot: Spot, statement: CallStatement) -> list[Option]:
        """Where a call can run; nowhere, if that is a problem, which is reported then."""
        name = statement.operation
        operation = self.federation.operations.get(name)
        if operation is None:
            known = ", ".join(sorted(self.federation.operations)) or "none"
            self.found.report(spot, f"no operation {name!r} in federation {self.federation.name!r} (it has: {known})")
            return []
        self._check_inputs(spot, statement, operation)
        asked = statement.site
        offers = self.offers(name, statement.provider)
        if isinstance(asked, str):
            options = self._fixed(spot, statement, asked, offers)
        else:
            options = self._free(spot, statement, offers)
        if options and operation.exposed:
            options = self._taking(spot, statement, operation, options)
        retried = statement.retry is not None and statement.retry.tries_again
        if (retried or statement.deadline is not None) and any(o.adapter.kind in GENERATORS for o in options):
            options = [option for option in options if option.adapter.kind not in GENERATORS]
            if not options:
                self.found.report(spot, "retry and deadline need an operation that returns; this one is a generator")
        return options

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
        """Who offers an operation, under whichever provider, for messages."""
        found = [
            f"{site.name} from provider {provider!r}" if provider else site.name
            for site in self.federation.sites.values()
            for name, provider in site.adapters
            if name == operation
        ]
        return f"offered by {', '.join(found)}" if found else "no site offers it"

    def sites(self) -> str:
        """The sites of the federation, for messages."""
        return f"it has: {', '.join(self.federation.sites) or 'none'}"

    # what only some sites take

    def _taking(
        self, spot: Spot, statement: CallStatement, operation: Operation[..., Any], options: list[Option]
    ) -> list[Option]:
        """Those options that take everything that the call passes."""
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
                told = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
                hint = f"taken at {', '.join(taken)}" if taken else "no site takes it"
                self.found.report(spot, f"{name} cannot be passed where it may run: {told} ({hint})")
                return []
            options = left
        return options

    def _refusal(self, adapter: Adapter, name: str, expression: Expression) -> str | None:
        """Why an adapter does not take a parameter that is no part of the operation; None if it does."""
        exposed = adapter.exposed.get(name)
        if exposed is None:
            return f"has no parameter {name!r}"
        for kind in kinds_of(expression):
            if not _accepts(exposed, kind):
                return f"{name} may not be {_KINDS[kind]}"
        hint = self._type(exposed)
        if isinstance(expression, Constant) and expression.value is not None:
            return validate(hint, expression.value, convert=False)[1]
        if isinstance(expression, Ref) and not expression.path:
            target = self.found.spots.get(expression.node)
            if target is not None and isinstance(target.statement, CallStatement):
                source = self.federation.operations.get(target.statement.operation)
                if source is not None and not fits(source.signature.returns, hint):
                    made = type_text(source.signature.returns)
                    return f"{name} is declared {type_text(shown(hint))}, but {target.label} returns {made}"
        return None

    def _type(self, exposed: ExposedParameter) -> Any:
        """The type of an exposed parameter, as far as JSON schemas name it; classes are not imported for that."""
        kinds = exposed.type if isinstance(exposed.type, list) else [exposed.type]
        known = all(isinstance(kind, str) and kind in JSON_TYPES for kind in kinds)
        return type_of({"type": exposed.type}, self.federation.models) if known else Any

    def _check_inputs(self, spot: Spot, statement: CallStatement, operation: Operation[..., Any]) -> None:
        """Whether each argument is of a kind that the operation's declaration accepts."""
        if operation.declaration is None:
            return
        for name, expression in statement.args.items():
            schema = operation.declaration.parameters.get(name, {})
            for kind in kinds_of(expression):
                key = f"accepts-{kind}-input"
                if schema.get(key, schema.get(key.replace("-", "_"), True)) is False:
                    self.found.report(
                        spot, f"{name} may not be {_KINDS[kind]}: operation {operation.name!r} has {key}: false"
                    )


def adapters_of(site: Site, operation: str, provider: str | None) -> Iterator[Adapter]:
    """What a call can mean at a site; without a provider its own code, or else that of all providers."""
    found = site.adapters.get((operation, provider))
    if found is not None:
        yield found
    elif provider is None:
        for (name, _), adapter in site.adapters.items():
            if name == operation:
                yield adapter


def may_stream(federation: Federation, operation: str) -> bool:
    """Whether an operation may return a generator: the code at one of its sites is one, or its type does not say."""
    returns = federation.operations[operation].signature.returns
    return (typing.get_origin(returns) or returns) not in _WHOLE or any(
        adapter.kind in GENERATORS
        for site in federation.sites.values()
        for adapter in adapters_of(site, operation, None)
    )


def kinds_of(expression: Expression) -> list[str]:
    """What an argument is made of: "literal", "node", "place"."""
    found = list(references(expression))
    kinds = ["node"] if any(isinstance(ref, Ref) for ref in found) else []
    if any(isinstance(ref, Parameter) for ref in found):
        kinds.append("place")
    return kinds or ["literal"]


def _accepts(exposed: ExposedParameter, kind: str) -> bool:
    match kind:
        case "literal":
            return exposed.accepts_literal_input
        case "node":
            return exposed.accepts_node_input
        case _:
            return exposed.accepts_place_input
