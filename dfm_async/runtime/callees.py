"""The operations of one site, prepared for calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.federation.operation import GENERATORS, Adapter, CodeKind
from dfm_async.model.call_limits import CallLimits
from dfm_async.model.policies import RetryPolicy
from dfm_async.runtime.adapters import AdapterObject, Objects, adapter_arguments, needs_site
from dfm_async.runtime.dispatch import OperationCost
from dfm_async.runtime.recorded import RESUME_FROM


class Callee:
    """One adapter, analysed once so that calling it is cheap."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.per_job = adapter.per_job
        self.function: Callable[..., Any] | None = None if self.per_job else adapter.function
        self.kind: CodeKind = adapter.kind
        self.generates = self.kind in GENERATORS
        """Whether a call returns an iterator, and runs nothing of its code yet."""
        self.cost = OperationCost()
        """What its calls have cost so far, in this process and in others that run them for it."""
        self.retry: RetryPolicy | None = adapter.retry
        self.deadline: float | None = adapter.deadline
        self.limits: CallLimits | None = adapter.limits
        self.checkpoint: bool = adapter.checkpoint
        self.name = adapter.operation if adapter.provider is None else f"{adapter.provider}.{adapter.operation}"
        """Distinguishes it from other operations of the site."""
        self.needs_site = needs_site(adapter)
        """Whether an :class:`AdapterObject` calls the code: it finds the class, the object and the arguments."""
        signature = adapter.signature
        self.wants_context = signature.wants_context and not self.needs_site
        self.resumes = RESUME_FROM in signature.parameters.parameters
        """Whether a call that makes a stream can begin after elements that are recorded."""
        listed = signature.parameters.parameters.values()
        self.positional = [p.name for p in listed if p.kind is p.POSITIONAL_ONLY]
        self.rest = next((p.name for p in listed if p.kind is p.VAR_POSITIONAL), None)
        if self.rest is not None:
            self.positional = [p.name for p in listed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.external = adapter.external
        """Whether an external program does the work: it gets all arguments by name, and streams as lists."""
        self.waits: bool = adapter.external and getattr(adapter.code, "reports_start", False)
        """Whether a call may have to wait for its turn, and reports itself when it begins."""
        bound = adapter.external or self.needs_site or adapter.operation == DISCOVER
        wanted = not self.per_job if adapter.spread is None else adapter.spread
        self.spreads = wanted and not bound and self.kind in (CodeKind.SYNC, CodeKind.GENERATOR)
        """Whether a call may run in another worker of the site."""
        self.binds = self.kind in (CodeKind.SYNC, CodeKind.ASYNC) and not bound and not self.per_job
        """Whether a call can run in a worker that has the GPUs which it needs."""
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
        """Return the function to call; ``instance`` is what :meth:`build` returned, for a class."""
        return self.function or instance.body

    def default(self, name: str) -> Any:
        """Return the value of a parameter that a call does not pass."""
        found = self.adapter.signature.parameters.parameters.get(name)
        return None if found is None or found.default is found.empty else found.default

    def build(self, objects: Objects) -> Any:
        """Return the object of a class adapter, for one job."""
        if self.needs_site:
            return AdapterObject(self.adapter, objects)
        return self.adapter.code(**adapter_arguments(self.adapter))

    def arguments(self, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Split named arguments into positional ones and the rest, as the function takes them."""
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
        """Offer these from now on. Calls that run go on with the code that they began with."""
        self._adapters = {(adapter.operation, adapter.provider): adapter for adapter in adapters}
        self._callees = {}

    def find(self, operation: str, provider: str | None) -> Callee:
        """Return an operation.

        Raises:
            LookupError: the site does not offer it.
        """
        key = (operation, provider)
        found = self._callees.get(key)
        if found is None:
            adapter = self._adapter(operation, provider)
            found = self._callees[key] = (adapter.callee or Callee)(adapter)
        return found

    def named(self, operation: str) -> Callee | None:
        """Return an operation that :meth:`find` has returned, whatever its provider. Any thread may call this."""
        return next((found for (name, _), found in list(self._callees.items()) if name == operation), None)

    def _adapter(self, operation: str, provider: str | None) -> Adapter:
        if operation == DISCOVER:
            from dfm_async.runtime.discover import discover  # only sites that need it load it

            return Adapter(operation=DISCOVER, code=discover)
        adapter = self._adapters.get((operation, provider))
        if adapter is None and provider is None:
            offers = [found for (name, _), found in self._adapters.items() if name == operation]
            adapter = offers[0] if len(offers) == 1 else None
        if adapter is None:
            raise LookupError(f"site {self.site!r} does not offer operation {operation!r}")
        return adapter
