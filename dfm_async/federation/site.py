"""A site: where data is, with the operations that it offers."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dfm_async.federation.bindings import Binding, FromProvider
from dfm_async.federation.code import (
    body_of,
    check_code,
    check_parameters,
    declared_by,
    plain_function,
    same_source,
    signature_of,
    stand_in,
    without_code,
)
from dfm_async.federation.namespace import Namespace, Operations, PlacedOperation
from dfm_async.federation.operation import (
    GENERATORS,
    RESERVED,
    Adapter,
    CodeKind,
    Declaration,
    Operation,
    OperationOptions,
    Signature,
    advisor_of,
)
from dfm_async.federation.schemas import Models
from dfm_async.model.call_limits import SiteCapacity, parse_bytes
from dfm_async.model.checks import whole
from dfm_async.model.policies import Cost, call_problem
from dfm_async.model.pool_size import IDLE_AFTER, Workers, check_workers, most_workers
from dfm_async.model.resources import CacheConfig, ClassPath, ProviderConfig, SendCost, SiteConfig, VaultConfig

if TYPE_CHECKING:
    from dfm_async.federation.decorator import OperationDecorator

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Site:
    """A location of data, with the operations that it offers. Created by :meth:`Federation.site`."""

    def __init__(
        self,
        federation: FederatedSites,
        name: str,
        *,
        workers: Workers = None,
        threads: int = 8,
        idle_after: float = IDLE_AFTER,
    ) -> None:
        self.federation = federation
        self.name = name
        self.workers: Workers = workers
        self.idle_after = idle_after
        self.threads = threads
        self.capacity: SiteCapacity = SiteCapacity(cpus=most_workers(workers))
        """The resources that its calls share."""
        self.impl: ClassPath | type[Any] | None = None
        self.cache: CacheConfig | None = None
        self.vault: Any = VaultConfig()
        self.send_cost: dict[str, SendCost] = {}
        self.info: dict[str, Any] = {}
        self.providers: dict[str, ProviderConfig] = {}
        """The groups of adapters."""
        self.adapters: dict[tuple[str, str | None], Adapter] = {}
        """The code of this site, by operation and provider."""

    def config(self, homesite: str) -> SiteConfig:
        """Return the configuration of this site, as it is sent to its processes."""
        federation = self.federation
        return SiteConfig(
            federation=federation.name,
            homesite=homesite,
            api_version=federation.api_version,
            impl=self.impl,
            providers=self.providers,
            cache=self.cache,
            vault=self.vault,
            packages=federation.packages,
            compat=federation.compat,
        )

    @property
    def operations(self) -> Namespace[Any]:
        """The operations of this site. Their calls run at this site, and may pass the parameters that the site adds."""
        known = self.federation.operations
        here: dict[str, list[Adapter]] = {}
        for (name, _), adapter in self.adapters.items():
            here.setdefault(name, []).append(adapter)
        return Namespace("operation", {name: PlacedOperation(known[name], self.name, here[name]) for name in here})

    def provider(
        self, name: str, impl: ClassPath | type[Any] | None = None, *, info: Mapping[str, Any] | None = None
    ) -> ProviderConfig:
        """Add a group of adapters that share an object.

        Args:
            name: an identifier; it is an attribute of the site object.
            impl: the class of the object; its constructor gets ``site=`` and the constant arguments.
            info: a text for users.
        """
        if not name.isidentifier():
            raise ValueError(f"a provider's name must be an identifier, not {name!r}")
        if name in self.providers:
            raise ValueError(f"site {self.name!r} has a provider {name!r} already")
        found = self.providers[name] = ProviderConfig(impl=impl, info=dict(info or {}))
        self.federation.changed()
        return found

    def adapt(
        self,
        operation: Operation[..., Any] | str,
        code: ClassPath | type[Any],
        /,
        *,
        bind: Mapping[str, Binding] | None = None,
        is_async: bool | None = None,
        description: str = "",
        returns: str | None = None,
        **options: Any,
    ) -> None:
        """Implement an operation with a class, whose arguments may differ from those of the operation.

        Args:
            operation: the operation, or its name.
            code: the class with a ``body``, or its path.
            bind: the source of each argument of ``body``; by default, the operation's parameters of the same names.
            is_async: whether ``body`` is awaited; by default, this is determined from the code; True for a class
                path.
            description: a text for users.
            returns: the type of its result at this site, if it is more specific than the operation's.
            options: ``provider``, ``cost``, ``retry``, ``deadline``, ``args`` and the limits of calls, as for
                :meth:`operation`.
        """
        name = operation if isinstance(operation, str) else operation.name
        found = self.federation.operations.get(name)
        if found is None:
            known = ", ".join(self.federation.operations) or "none"
            raise ValueError(f"federation {self.federation.name!r} has no operation {name!r} (it has: {known})")
        for argument, binding in (bind or {}).items():
            if isinstance(binding, FromProvider) and binding.provider not in self.providers:
                known = ", ".join(self.providers) or "none"
                raise ValueError(
                    f"argument {argument!r} of {name!r} comes from provider {binding.provider!r}, which site "
                    f"{self.name!r} does not have (it has: {known})"
                )
        if not isinstance(code, ClassPath):
            check_code(code)
        provider = options.pop("provider", None)
        if provider is not None and provider not in self.providers:
            self.provider(provider)
        if isinstance(code, ClassPath) and is_async is None:
            is_async = True
        self._offer(
            name,
            found,
            code,
            found.signature,
            OperationOptions().updated(options),
            provider,
            declared=found.signature,
            bindings=bind,
            is_async=is_async,
            description=description,
            returns=returns,
        )
        found.expose(self.adapters[name, provider].exposed)

    if TYPE_CHECKING:

        @property
        def operation(self) -> OperationDecorator:
            """Offer a function, a class or object with a ``body`` method, or another site's operation, at this site."""
    else:

        def operation(self, code=None, /, **options):  # noqa: D417 - the options are described
            """Offer a function, a class or object with a ``body`` method, or another site's operation, at this site.

            Works as a bare decorator, as a decorator with options, and as a call. Another site's operation keeps the
            options that it was defined with, except for its provider; options that are passed replace them.

            Args:
                code: the function, class, object or operation.
                name: the operation's name; by default the function's.
                provider: the group of adapters that this one belongs to.
                retry: the number of attempts of a failed call.
                deadline: the number of seconds that one attempt may take after its start; waiting for a thread does not
                    count.
                cost: the cost that the planner assumes.
                in_process: run it in a separate process, away from the site's event loop.
                spread: whether its calls may run in any worker of the site. By default, calls of functions and
                    generators may, and calls of classes may not; with True, each worker creates its own instance of the
                    class.
                checkpoint: record the values of its calls in jobs of a session with a store, so that a job that runs
                    again does not repeat them. If the operation is a generator, its elements are recorded: with a
                    parameter ``resume_from``, it is called with their number, and yields the rest.
                args: constructor arguments, if the code is a class.
                program: an external program that does the work. The function only declares the parameters and the
                    return type, and is never run; the program gets streams as lists, and defaults.
                limit: the maximum number of calls that run at the same time at this site, across all jobs; further
                    calls wait.
                rate: the maximum rate at which calls start at this site, such as ``"10/s"``, ``"30/min"`` or
                    ``"0.5/h"``.
                key: a parameter; ``limit`` and ``rate`` then apply separately to each of its values.
                cpus: the number of processors of the site that a call needs.
                gpus: the number of GPUs of the site that a call needs. The call runs in a process that sees only these
                    GPUs.
                memory: the memory of the site that a call needs: a number of bytes, or a text such as ``"8GiB"``.
            """
            return self._define(code, options) if code is not None else lambda found: self._define(found, options)

    def _define(self, code: Any, given: Mapping[str, Any]) -> Operation[..., Any]:
        options = dict(given)
        name, provider = options.pop("name", None), options.pop("provider", None)
        if isinstance(code, Operation):
            chosen = code.name if name is None else name
            self._offer(chosen, code, code.source, code.signature, code.options.updated(options), provider)
            return code
        program = options.get("program")
        signature = signature_of(code, program)
        chosen = name or getattr(code, "__name__", None)
        if chosen is None:
            raise TypeError(f"{code!r} has no name of its own: pass name=")
        check_parameters(chosen, signature)
        plain = plain_function(code, options.get("args")) if program is None else stand_in(chosen, code)
        operation: Operation[..., Any] = Operation(chosen, plain, signature)
        operation.source, operation.options = code, OperationOptions().updated(options)
        before = self.federation.operations.get(chosen)
        self._offer(chosen, operation, code, signature, operation.options, provider)
        if before is not None:
            self._redefine(before, operation)
        return operation

    def _redefine(self, before: Operation[..., Any], operation: Operation[..., Any]) -> None:
        """Offer a redefined operation at the other sites that offer its code, with their own options."""
        names = [found.name for found in fields(OperationOptions)]
        for site in self.federation.sites.values():
            for (name, provider), adapter in list(site.adapters.items()):
                program = adapter.args.get("program") if adapter.external else None
                same = adapter.code is before.source if program is None else program is before.options.program
                if name != operation.name or not same or adapter.code is operation.source:
                    continue
                own = {n: getattr(adapter, n) for n in names if n not in ("args", "program")}
                kept = {n: value for n, value in own.items() if value != getattr(before.options, n)}
                options = replace(operation.options, **kept)
                site._offer(name, operation, operation.source, operation.signature, options, provider)  # noqa: SLF001

    def implements(
        self, operation: Operation[..., Any], /, **options: Any
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Implement an operation of another site with different code. Takes the options of :meth:`operation`."""
        if not isinstance(operation, Operation):
            raise TypeError(f"implements() takes an operation, not {operation!r}")
        provider = options.pop("provider", None)

        def register(code: Callable[P, R]) -> Callable[P, R]:
            signature = signature_of(code, options.get("program"))
            theirs, ours = operation.signature.parameters.parameters, signature.parameters.parameters
            if list(theirs) != list(ours):
                raise TypeError(
                    f"{getattr(code, '__name__', code)}{signature.parameters} does not implement "
                    f"{operation.name}{operation.signature.parameters}: the parameters differ"
                )
            self._offer(operation.name, operation, code, signature, OperationOptions().updated(options), provider)
            return code

        return register

    def _offer(
        self,
        name: str,
        operation: Operation[..., Any],
        code: Any,
        signature: Signature,
        options: OperationOptions,
        provider: str | None,
        **about: Any,
    ) -> None:
        """Add an adapter; ``about`` are further fields of it."""
        known = self.federation.operations.get(name)
        if known is not None and known is not operation and not same_source(known, operation):
            raise ValueError(
                f"federation {self.federation.name!r} has an operation {name!r} already; use "
                f"@{self.name}.implements(...) for other code, or name= for another operation"
            )
        retry, deadline, program, args = options.retry, options.deadline, options.program, options.args
        if options.cost is not None and not isinstance(options.cost, Cost):
            raise TypeError(f"operation {name!r}: cost= takes a Cost, not {options.cost!r}")
        if args is not None and not isinstance(args, Mapping):
            raise TypeError(f"operation {name!r}: args= takes a dict of constructor arguments, not {args!r}")
        wrong = call_problem(retry, deadline)
        if wrong is not None:
            raise ValueError(f"operation {name!r}: {wrong}")
        if program is not None:
            if options.in_process or args is not None:
                what = "in_process=True, because it has a process of its own" if options.in_process else "args="
                raise TypeError(f"operation {name!r} is an external program: it does not take {what}")
            code, args = body_of(program, signature), {"program": program}
            about = {"declared": signature, "external": True, **about}
        adapter = Adapter(
            operation=name,
            code=code,
            args=dict(args or {}),
            provider=provider,
            retry=retry,
            deadline=deadline,
            cost=options.cost,
            in_process=options.in_process,
            limits=options.limits,
            spread=options.spread,
            checkpoint=options.checkpoint,
            advisors=ChainMap({}, operation.advisors),
            callee=self.federation.callee,
            **about,
        )
        if ((retry is not None and retry.tries_again) or deadline is not None) and adapter.kind in GENERATORS:
            raise TypeError(
                f"operation {name!r} is a generator: retry and deadline need one that returns, because the elements "
                "that a generator has yielded may be consumed already. RetryPolicy(attempts=1, on_worker_lost=n) works"
            )
        if options.spread and (adapter.external or adapter.kind in (CodeKind.ASYNC, CodeKind.ASYNC_GENERATOR)):
            what = "an external program" if adapter.external else "asynchronous"
            raise TypeError(
                f"operation {name!r} is {what}: it does not take spread=True, because its calls wait rather than "
                "compute. Write a plain function for work that computes"
            )
        self._check_limits(adapter, operation)
        self.federation.operations[name] = operation
        self.adapters[name, provider] = adapter
        operation.changed = self.federation.changed
        self.federation.changed()

    def _check_limits(self, adapter: Adapter, operation: Operation[..., Any]) -> None:
        """Check the limits of an operation against its parameters, and what its calls need against the site."""
        name, limits = adapter.operation, adapter.limits
        if limits is None:
            return
        parameters = {**operation.signature.parameters.parameters, **adapter.exposed}
        if limits.key is not None and limits.key not in parameters:
            known = ", ".join(parameters) or "no parameters"
            raise ValueError(f"key={limits.key!r} is not a parameter of operation {name!r} (it has: {known})")
        lacks = self.capacity.lacks(limits)
        if lacks is not None:
            raise ValueError(f"operation {name!r} of site {self.name!r} {lacks}")
        if limits.gpus and (adapter.external or adapter.per_job or adapter.kind in GENERATORS):
            if adapter.external:
                what = "an external program: set CUDA_VISIBLE_DEVICES in the environment of the program"
            elif adapter.per_job:
                what = (
                    "a class, whose objects stay in one process: write a function, which can keep what it loads with "
                    "functools.cache"
                )
            else:
                what = "a generator, which stays in one process: write a function that returns a list"
            raise TypeError(f"operation {name!r} cannot have gpus={limits.gpus}, because it is {what}")
        if limits.gpus and adapter.spread is False:
            raise TypeError(
                f"operation {name!r} cannot have gpus={limits.gpus} and spread=False: its calls run in the process "
                "that has their GPUs"
            )

    def advisor(
        self, operation: Operation[..., Any], field: str, order: int = -1, *, provider: str | None = None
    ) -> Callable[[F], F]:
        """Register a function as the advisor of a parameter at this site: ``(value, context) -> AdvisedValue``.

        Args:
            operation: an operation that the site offers.
            field: the parameter that it advises on.
            order: the order of calls, as in :func:`~dfm_async.discovery.field_advisor`.
            provider: the provider whose operation it is.
        """
        adapter = self.adapter(operation.name, provider)
        if adapter is None:
            raise ValueError(f"site {self.name!r} does not offer operation {operation.name!r}")

        def add(function: F) -> F:
            adapter.advisors[field] = advisor_of(operation, field, order, function)
            self.federation.changed()
            return function

        return add

    def adapter(self, operation: str, provider: str | None) -> Adapter | None:
        """Return the code of an operation; without a provider, the site's own, or else the only provider's."""
        found = self.adapters.get((operation, provider))
        if found is None and provider is None:
            offers = [adapter for (name, _), adapter in self.adapters.items() if name == operation]
            return offers[0] if len(offers) == 1 else None
        return found

    def __repr__(self) -> str:
        return f"<Site {self.name!r} of {self.federation.name!r}: {', '.join(sorted(n for n, _ in self.adapters))}>"


class FederatedSites:
    """Named sites and the operations that each of them offers: a federation, apart from its files."""

    def __init__(
        self,
        name: str,
        *,
        api_version: str = "0.0.1",
        description: str = "",
        packages: tuple[str, ...] | None = None,
        compat: bool = False,
    ) -> None:
        self.name = name
        self.api_version = api_version
        self.description = description
        if isinstance(packages, str):
            raise TypeError(f"packages must be a tuple of names, such as ({packages!r},), not a string")
        self.packages: tuple[str, ...] | None = None if packages is None else tuple(packages)
        self.compat = compat
        self.sites: dict[str, Site] = {}
        self.revision: int = 0
        """The number of changes to its sites and operations: connected sessions reload code when it changes."""
        self.callee: Callable[[Adapter], Any] | None = None
        """The ``callee`` of new adapters. For tests."""
        self.operations: Operations = Operations()
        self.info: dict[str, Any] = {}
        """Further information from its file."""
        self.provision: dict[str, Any] = {}
        """The deployment section of its file; kept for other tools."""
        self.files: tuple[str, ...] = ()
        """The paths of the files that it was read from: the main file first, then the files that it refers to."""
        self.models: Models = Models({})
        """The schemas that its file names; ``models.declared`` holds them as JSON schemas."""
        self.schemas: Namespace[Any] = Namespace("schema", self.models)
        """The same by attributes: ``federation.schemas.tasks.State(value=1.5)``."""

    def changed(self) -> None:
        """Record a change: connected sessions use it from their next job on."""
        self.revision += 1

    def declare(
        self, name: str, signature: Callable[..., Any] | Signature, /, *, declaration: Declaration | None = None
    ) -> Operation[..., Any]:
        """Declare an operation for which sites have adapters: its parameters and its return type.

        Args:
            name: its name; dots group operations: ``federation.operations.array.Create``.
            signature: a signature, or a function that has it and is never called.
            declaration: the declaration from a federation file.
        """
        if name in self.operations:
            raise ValueError(f"federation {self.name!r} has an operation {name!r} already")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"an operation's name must be identifiers with dots between them, not {name!r}")
        if isinstance(signature, Signature):
            plain = without_code(name, signature, "" if declaration is None else declaration.documentation)
        else:
            plain, signature = stand_in(name, signature), declared_by(signature)
            plain.__name__ = name.rpartition(".")[2]
        check_parameters(name, signature, RESERVED if declaration is None else frozenset({"site", "provider"}))
        operation: Operation[..., Any] = Operation(name, plain, signature, declaration=declaration)
        self.operations[name] = operation
        operation.changed = self.changed
        self.changed()
        return operation

    def site(
        self,
        name: str,
        *,
        workers: int | tuple[int, int] | None = None,
        threads: int = 8,
        idle_after: float = IDLE_AFTER,
        gpus: int = 0,
        memory: int | str | None = None,
        impl: ClassPath | type[Any] | None = None,
        cache: CacheConfig | None = None,
        vault: Any = None,
        send_cost: Mapping[str, SendCost] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Site:
        """Add a site.

        Args:
            name: an identifier.
            workers: the maximum number of worker processes, by default the number of cores; or two numbers, such as
                ``(1, 8)``: the first is the number of workers that take jobs and are kept; further ones, up to the
                second number, only run calls. All workers start when they are needed.
            threads: the maximum number of synchronous operations that run at the same time in one worker.
            idle_after: the number of seconds without calls after which a worker that takes no jobs ends.
            gpus: the number of GPUs for operations with ``gpus=``.
            memory: the memory for operations with ``memory=``: a number of bytes, or a text such as ``"64GiB"``; by
                default the memory of its machine or control group.
            impl: the class of the object that adapters get as ``site``; by default a plain one.
            cache: the location of cached values; by default ``TryFromCache`` keeps them in memory.
            vault: the vault of its secrets: a :class:`~dfm_async.federation.VaultConfig`, or an object with
                ``secret_for_key``; by default its environment.
            send_cost: the cost of sending to other sites.
            info: a text for users.
        """
        if not name.isidentifier():
            raise ValueError(f"a site's name must be an identifier, not {name!r}")
        if name in self.sites:
            raise ValueError(f"federation {self.name!r} has a site {name!r} already")
        check_workers(workers, idle_after)
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads!r}")
        found = self.sites[name] = Site(self, name, workers=workers, threads=threads, idle_after=idle_after)
        found.capacity = SiteCapacity(
            cpus=found.capacity.cpus,
            memory=None if memory is None else parse_bytes(memory),
            gpus=whole("gpus", gpus, least=0),
        )
        found.impl = impl
        found.cache = cache
        found.vault = VaultConfig() if vault is None else vault
        found.send_cost = dict(send_cost or {})
        found.info = dict(info or {})
        self.changed()
        return found

    def __repr__(self) -> str:
        sites = ", ".join(f"{site.name}({len(site.adapters)})" for site in self.sites.values())
        return f"<Federation {self.name!r} {self.api_version}: {sites or 'no sites'}>"
