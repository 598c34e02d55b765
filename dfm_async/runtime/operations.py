"""The code of one site, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.federation.operation import Adapter, CodeKind
from dfm_async.model.policies import RetryPolicy
from dfm_async.runtime.adapters import AdapterObject, adapter_arguments, needs_site

if TYPE_CHECKING:
    from dfm_async.runtime.objects import JobObjects

__all__ = ["Callee", "OperationTable"]


class Callee:
    """One adapter, taken apart once so that calling it is cheap."""

    __slots__ = (
        "adapter",
        "deadline",
        "defaults",
        "external",
        "function",
        "kind",
        "needs_site",
        "plain",
        "positional",
        "rest",
        "retry",
        "waits",
        "wants_context",
        "whole",
    )

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.function: Callable[..., Any] | None = None if adapter.per_job else adapter.function
        self.kind: CodeKind = adapter.kind
        self.retry: RetryPolicy | None = adapter.retry
        self.deadline: float | None = adapter.deadline
        self.needs_site = needs_site(adapter)
        """Whether what calls the code stands between: it finds the class, the object and the arguments."""
        signature = adapter.signature
        self.wants_context = signature.wants_context and not self.needs_site
        listed = signature.parameters.parameters.values()
        self.positional = [p.name for p in listed if p.kind is p.POSITIONAL_ONLY]
        self.rest = next((p.name for p in listed if p.kind is p.VAR_POSITIONAL), None)
        if self.rest is not None:
            self.positional = [p.name for p in listed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.external = adapter.external
        """Whether an external program does the work: it gets all arguments by name, and streams as lists."""
        self.waits: bool = adapter.external and getattr(adapter.code, "reports_start", False)
        """Whether a call may have to wait for its turn, and says itself when it begins."""
        self.defaults: dict[str, Any] = {}
        if adapter.declared is not None:  # the code does not know them
            self.positional, self.rest = [], None
            # What an exposed parameter stands for is bound: a default must not take its place.
            hidden = adapter.exposed
            self.defaults = {p.name: p.default for p in listed if p.default is not p.empty and p.name not in hidden}
        self.plain = not self.positional and self.rest is None
        # A parameter declared as a list gets a list, also where a stream comes.
        self.whole = signature.whole

    def bound(self, instance: Any) -> Callable[..., Any]:
        """The function to call; ``instance`` is what :meth:`build` made, for a class."""
        if self.function is not None:
            return self.function
        return instance.body  # type: ignore[no-any-return]

    def build(self, objects: JobObjects) -> Any:
        """Makes the object of a class adapter, once per job."""
        if self.needs_site:
            return AdapterObject(self.adapter, objects)
        return self.adapter.code(**adapter_arguments(self.adapter))

    def arguments(self, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Splits named arguments into positional ones and the rest, as the function wants them."""
        positional: list[Any] = []
        named = dict(args)
        for name in self.positional:
            if name not in named:
                break
            positional.append(named.pop(name))
        if self.rest is not None:
            positional.extend(named.pop(self.rest, ()))
        return positional, named


class OperationTable:
    """All operations of one site."""

    def __init__(self, site: str, adapters: Iterable[Adapter]) -> None:
        self.site = site
        self._adapters: dict[tuple[str, str | None], Adapter] = {}
        self._callees: dict[tuple[str, str | None], Callee] = {}
        self.replace(adapters)

    def replace(self, adapters: Iterable[Adapter]) -> None:
        """Offers these from now on. Calls that are under way go on with the code that they began with."""
        self._adapters = {(adapter.operation, adapter.provider): adapter for adapter in adapters}
        self._callees = {}

    def find(self, operation: str, provider: str | None) -> Callee:
        """Finds an operation.

        Raises:
            LookupError: the site does not offer it.
        """
        key = (operation, provider)
        found = self._callees.get(key)
        if found is None:
            adapter = self._adapter(operation, provider)
            found = self._callees[key] = (adapter.callee or Callee)(adapter)
        return found

    def _adapter(self, operation: str, provider: str | None) -> Adapter:
        if operation == DISCOVER:
            from dfm_async.runtime.discovering import discover  # only sites that are asked load it

            return Adapter(operation=DISCOVER, code=discover)
        adapter = self._adapters.get((operation, provider))
        if adapter is None and provider is None:
            offers = [found for (name, _), found in self._adapters.items() if name == operation]
            adapter = offers[0] if len(offers) == 1 else None
        if adapter is None:
            raise LookupError(f"site {self.site!r} does not offer operation {operation!r}")
        return adapter
