"""Federations and their sites, written in Python."""

from __future__ import annotations

import functools
import inspect
import os
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from dfm_async.federation.bindings import Binding, FromProvider
from dfm_async.federation.external import body_of, declared_by, stand_in
from dfm_async.federation.namespace import Namespace, Operations
from dfm_async.federation.operation import (
    GENERATORS,
    RESERVED,
    Adapter,
    Declaration,
    ExternalCode,
    Operation,
    Signature,
    advisor_of,
)
from dfm_async.federation.placed import PlacedOperation
from dfm_async.federation.schemas import Models
from dfm_async.model.http import HttpOptions
from dfm_async.model.policies import Cost, RetryPolicy
from dfm_async.model.resources import CacheConfig, ClassPath, ProviderConfig, SendCost, SiteConfig, VaultConfig
from dfm_async.rendering import Shown

if TYPE_CHECKING:
    from dfm_async.pipeline.pipeline import Pipeline

__all__ = ["Federation", "Site"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


_Later: TypeAlias = Coroutine[Any, Any, Any] | AsyncIterator[Any] | Iterator[Any]
"""What a call returns whose value comes later. In a pipeline the call stands for that value, so checkers see Any."""


class _Decorator(Protocol):
    """What ``site.operation(...)`` gives when it is called with options only."""

    @overload
    def __call__(self, code: type[Any], /) -> Operation[..., Any]: ...
    @overload
    def __call__(self, code: Callable[P, _Later], /) -> Operation[P, Any]: ...
    @overload
    def __call__(self, code: Callable[P, R], /) -> Operation[P, R]: ...


class Federation(Shown):
    """Named sites and the operations that each of them offers.

    Args:
        name: what the federation is called.
        api_version: the version of its operations; a pipeline for another major version is refused.
        description: what people should know of it.
        packages: the packages that classes which are named by a path may come from; None means all but the standard
            library.
        compat: provide the names of nv_dfm_core that adapters import, where it is not installed.
    """

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
            raise TypeError(f"packages must be a tuple of names, such as ({packages!r},), not a text")
        self.packages = None if packages is None else tuple(packages)
        self.compat = compat
        self.sites: dict[str, Site] = {}
        self.operations = Operations()
        self.info: dict[str, Any] = {}
        """Other things that its file says of it."""
        self.provision: dict[str, Any] = {}
        """How it is deployed; kept for others."""
        self.models = Models({})
        """The schemas that its file names; ``models.declared`` holds them as they stand there."""
        self.schemas: Namespace[Any] = Namespace("schema", self.models)
        """The same by attributes: ``federation.schemas.tasks.State(value=1.5)``."""

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, packages: tuple[str, ...] | None = None, compat: bool = False
    ) -> Federation:
        """Reads a federation from its file, ``federation.dfm.yaml``. Nothing is imported or run.

        Args:
            path: the file. What it refers to is read, too.
            packages: the packages that classes may come from; None means all but the standard library.
            compat: provide the names of nv_dfm_core that adapters import, where it is not installed.

        Raises:
            FederationError: something is wrong with the file; lists everything, with file, line and key.
        """
        from dfm_async.federation.files.reading import read_federation  # whoever has no files does not need it

        return read_federation(path, packages=packages, compat=compat)

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """The federation as the text of a file that :meth:`from_yaml` reads.

        Code is named by its path: each adapter must be a class at the top of a module.

        Args:
            path: where the text is written, too.

        Raises:
            FederationError: something cannot be said in a file, such as a function; lists everything.
            OSError: the file cannot be written.
        """
        from dfm_async.federation.files.writing import write_federation

        text = write_federation(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    def declare(
        self, name: str, signature: Callable[..., Any] | Signature, /, *, declaration: Declaration | None = None
    ) -> Operation[..., Any]:
        """Declares an operation for which sites have adapters: what it takes and returns.

        Args:
            name: its name; dots group operations: ``federation.operations.array.Create``.
            signature: a function with that signature, which is never run; or the signature.
            declaration: what a file says of it.
        """
        if name in self.operations:
            raise ValueError(f"federation {self.name!r} has an operation {name!r} already")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"an operation's name must be identifiers with dots between them, not {name!r}")
        if isinstance(signature, Signature):
            plain = _declared_function(name, signature, "" if declaration is None else declaration.documentation)
        else:
            plain, signature = stand_in(name, signature), declared_by(signature)
            plain.__name__ = name.rpartition(".")[2]
        _check(name, signature, RESERVED if declaration is None else frozenset({"site", "provider"}))
        operation: Operation[..., Any] = Operation(name, plain, signature, declaration=declaration)
        self.operations[name] = operation
        return operation

    def add_openapi(
        self,
        document: str | os.PathLike[str] | Mapping[str, Any],
        /,
        *,
        site: Site | str,
        name: str | None = None,
        provider: str | None = None,
        base_url: str | None = None,
        auth: Mapping[str, str] | None = None,
        operations: Collection[str] | None = None,
        options: HttpOptions | None = None,
    ) -> tuple[Operation[..., Any], ...]:
        """Adds the operations of an HTTP service that an OpenAPI document describes. A site asks the service.

        Each is named after its ``operationId``: ``federation.operations.pets.ListPets``. Its parameters are those of
        the path, the query, headers and cookies, and the properties of the body.

        Args:
            document: the file, in YAML or JSON, which may refer to others; or what stands in it.
            site: the site that asks the service.
            name: what the names of the operations begin with; by default the title of the document.
            provider: the group of adapters that they belong to.
            base_url: the address of the service; by default the first of the document's servers.
            auth: for security schemes of the document, the keys of the secrets in the site's vault.
            operations: the ids of the operations that are wanted; by default all.
            options: timeouts, retries and limits.

        Raises:
            FederationError: something is wrong with the document; lists everything, with file, line and key.
            ValueError: the site does not exist, or an operation is there already.
        """
        from dfm_async.federation.openapi.adding import add_document  # whoever has no services does not need it

        found = self.sites.get(site) if isinstance(site, str) else site
        if found is None or self.sites.get(found.name) is not found:
            known = ", ".join(self.sites) or "none"
            raise ValueError(f"federation {self.name!r} has no site {site!r} (it has: {known})")
        return add_document(
            self,
            document,
            site=found,
            name=name,
            provider=provider,
            base_url=base_url,
            auth=auth or {},
            operations=operations,
            options=options or HttpOptions(),
        )

    def site(
        self,
        name: str,
        *,
        workers: int | None = None,
        threads: int = 8,
        impl: ClassPath | type[Any] | None = None,
        cache: CacheConfig | None = None,
        vault: Any = None,
        send_cost: Mapping[str, SendCost] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Site:
        """Adds a site.

        Args:
            name: an identifier.
            workers: how many worker processes it has at most on the local target; by default one per lane.
            threads: how many synchronous operations run at the same time in one worker.
            impl: the class of the object that adapters get as ``site``; by default a plain one.
            cache: where it keeps cached values; by default ``TryFromCache`` keeps them in memory.
            vault: who keeps its secrets: a :class:`~dfm_async.VaultConfig`, or an object with ``secret_for_key``; by
                default its environment.
            send_cost: what sending to other sites costs.
            info: what people should know of it.
        """
        if not name.isidentifier():
            raise ValueError(f"a site's name must be an identifier, not {name!r}")
        if name in self.sites:
            raise ValueError(f"federation {self.name!r} has a site {name!r} already")
        if (workers is not None and workers < 1) or threads < 1:
            raise ValueError(f"site {name!r} needs at least one worker and one thread")
        found = self.sites[name] = Site(self, name, workers=workers, threads=threads)
        found.impl = impl
        found.cache = cache
        found.vault = VaultConfig() if vault is None else vault
        found.send_cost = dict(send_cost or {})
        found.info = dict(info or {})
        return found

    def load_pipeline(self, path: str | os.PathLike[str]) -> Pipeline:
        """Reads a pipeline from a JSON file: DFM's, in both variants, or our own.

        Class names in it are looked up among the operations of this federation; nothing is imported.

        Raises:
            PipelineError: the file does not hold a pipeline for this federation; with everything that is wrong, and
                where in the file.
        """
        from dfm_async.federation.dfm_json import load_pipeline

        return load_pipeline(path, self)

    def save_pipeline(self, pipeline: Pipeline, path: str | os.PathLike[str]) -> None:
        """Writes a pipeline to a file as DFM's JSON; :meth:`~dfm_async.Pipeline.save_to_file` writes our own.

        Raises:
            PipelineError: with everything that DFM has no words for.
        """
        from dfm_async.federation.dfm_json import save_pipeline

        save_pipeline(pipeline, path, self)

    def pipeline_from_dfm(self, data: Mapping[str, Any] | str | bytes) -> Pipeline:
        """Makes a pipeline of DFM's JSON: the text, or the data that it holds.

        Raises:
            PipelineError: with everything that is wrong, and where.
        """
        from dfm_async.federation.dfm_json import parse_pipeline, read_pipeline

        return parse_pipeline(data, self) if isinstance(data, (str, bytes)) else read_pipeline(data, self)

    def pipeline_to_dfm(self, pipeline: Pipeline) -> dict[str, Any]:
        """Gives a pipeline as the data of DFM's JSON.

        Raises:
            PipelineError: with everything that DFM has no words for.
        """
        from dfm_async.federation.dfm_json import write_pipeline

        return write_pipeline(pipeline, self)

    def __repr__(self) -> str:
        sites = ", ".join(f"{site.name}({len(site.adapters)})" for site in self.sites.values())
        return f"<Federation {self.name!r} {self.api_version}: {sites or 'no sites'}>"


class Site:
    """A place where data is, with the operations that it offers. Made by :meth:`Federation.site`."""

    def __init__(self, federation: Federation, name: str, *, workers: int | None, threads: int) -> None:
        self.federation = federation
        self.name = name
        self.workers = workers
        self.threads = threads
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
        """What the code at this site can use, as it travels to the processes of the site."""
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
        """The operations of this site: a call of one is fixed to the site, and may pass what the site adds."""
        known = self.federation.operations
        here = dict.fromkeys(name for name, _ in self.adapters)
        return Namespace("operation", {name: PlacedOperation(known[name], self) for name in here})

    def provider(
        self, name: str, impl: ClassPath | type[Any] | None = None, *, info: Mapping[str, Any] | None = None
    ) -> ProviderConfig:
        """Adds a group of adapters, which share an object.

        Args:
            name: an identifier; it is an attribute of the site object.
            impl: the class of the object; it is built with ``site=`` and its constant arguments.
            info: what people should know of it.
        """
        if not name.isidentifier():
            raise ValueError(f"a provider's name must be an identifier, not {name!r}")
        if name in self.providers:
            raise ValueError(f"site {self.name!r} has a provider {name!r} already")
        found = self.providers[name] = ProviderConfig(impl=impl, info=dict(info or {}))
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
        """Offers an operation with a class whose arguments need not be those of the operation.

        Args:
            operation: the operation, or its name.
            code: the class with a ``body``, or its path.
            bind: where each argument of ``body`` comes from; by default all are the operation's, by their names.
            is_async: whether ``body`` is awaited; by default the code shows it, and a path is.
            description: what people should know of it.
            returns: the type of its result here, if it is more special than the operation's.
            options: ``provider``, ``cost``, ``retry``, ``deadline`` and ``args``, as for :meth:`operation`.
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
        provider = options.get("provider")
        if provider is not None and provider not in self.providers:
            self.provider(provider)
        if isinstance(code, ClassPath) and is_async is None:
            is_async = True
        self._offer(
            name,
            found,
            code,
            found.signature,
            bind=bind,
            is_async=is_async,
            description=description,
            returns=returns,
            adapted=True,
            **options,
        )
        found.expose(self.adapters[name, provider].exposed)

    @overload
    def operation(self, code: Operation[P, R], /) -> Operation[P, R]: ...
    @overload
    def operation(self, code: type[Any], /) -> Operation[..., Any]: ...
    @overload
    def operation(self, code: Callable[P, _Later], /) -> Operation[P, Any]: ...
    @overload
    def operation(self, code: Callable[P, R], /) -> Operation[P, R]: ...
    @overload
    def operation(
        self,
        code: Any,
        /,
        *,
        name: str | None = None,
        provider: str | None = None,
        retry: RetryPolicy | None = None,
        deadline: float | None = None,
        cost: Cost | None = None,
        in_process: bool = False,
        args: Mapping[str, Any] | None = None,
        program: ExternalCode | None = None,
    ) -> Operation[..., Any]: ...
    @overload
    def operation(
        self,
        /,
        *,
        name: str | None = None,
        provider: str | None = None,
        retry: RetryPolicy | None = None,
        deadline: float | None = None,
        cost: Cost | None = None,
        in_process: bool = False,
        args: Mapping[str, Any] | None = None,
        program: ExternalCode | None = None,
    ) -> _Decorator: ...
    def operation(self, code: Any = None, /, **options: Any) -> Any:  # noqa: D417 - the options are described
        """Offers a function, a class or object with a ``body`` method, or another site's operation, at this site.

        Works as a bare decorator, as a decorator with options, and as a call.

        Args:
            code: the function, class, object or operation.
            name: the operation's name; by default the function's.
            provider: the group of adapters that this one belongs to.
            retry: how often a failed call is tried again.
            deadline: how many seconds one try may take.
            cost: what the planner should reckon with.
            in_process: run it in a process of its own, away from the site's event loop.
            args: constructor arguments, if the code is a class.
            program: an external program that does the work. The function only declares what it takes and returns, and
                is never run; streams come to the program as lists, and defaults are passed to it.
        """
        if code is None:
            return lambda found: self.operation(found, **options)
        name = options.pop("name", None)
        program = options.get("program")
        if isinstance(code, Operation):
            if program is None and code.program is not None:
                options["program"] = code.program
            self._offer(code.name if name is None else name, code, code.code, code.signature, **options)
            return code
        signature = _signature(code, program)
        chosen = name or getattr(code, "__name__", None)
        if chosen is None:
            raise TypeError(f"{code!r} has no name of its own: pass name=")
        _check(chosen, signature)
        plain = _plain(code, options.get("args")) if program is None else stand_in(chosen, code)
        operation: Operation[..., Any] = Operation(chosen, plain, signature, program)
        self._offer(chosen, operation, code, signature, **options)
        return operation

    def implements(
        self, operation: Operation[..., Any], /, **options: Any
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Offers an operation that another site defined, with other code. Takes the options of :meth:`operation`."""
        if not isinstance(operation, Operation):
            raise TypeError(f"implements() takes an operation, not {operation!r}")

        def register(code: Callable[P, R]) -> Callable[P, R]:
            signature = _signature(code, options.get("program"))
            theirs, ours = operation.signature.parameters.parameters, signature.parameters.parameters
            if list(theirs) != list(ours):
                raise TypeError(
                    f"{getattr(code, '__name__', code)}{signature.parameters} does not implement "
                    f"{operation.name}{operation.signature.parameters}: the parameters differ"
                )
            self._offer(operation.name, operation, code, signature, **options)
            return code

        return register

    def _offer(
        self,
        name: str,
        operation: Operation[..., Any],
        code: Any,
        signature: Signature,
        *,
        provider: str | None = None,
        retry: RetryPolicy | None = None,
        deadline: float | None = None,
        cost: Cost | None = None,
        in_process: bool = False,
        args: Mapping[str, Any] | None = None,
        program: ExternalCode | None = None,
        bind: Mapping[str, Binding] | None = None,
        is_async: bool | None = None,
        description: str = "",
        returns: str | None = None,
        adapted: bool = False,
    ) -> None:
        known = self.federation.operations.get(name)
        if known is not None and known is not operation and not _same_source(known, operation):
            raise ValueError(
                f"federation {self.federation.name!r} has an operation {name!r} already; use "
                f"@{self.name}.implements(...) for other code, or name= for another operation"
            )
        if deadline is not None and deadline <= 0:
            raise ValueError(f"the deadline of operation {name!r} must be positive, not {deadline}")
        if program is not None:
            if in_process or args is not None:
                what = "in_process=True, because it has a process of its own" if in_process else "args="
                raise TypeError(f"operation {name!r} is an external program: it does not take {what}")
            code, args = body_of(program, signature), {"program": program, "operation": name}
        adapter = Adapter(
            operation=name,
            code=code,
            args=dict(args or {}),
            provider=provider,
            retry=retry,
            deadline=deadline,
            cost=cost,
            in_process=in_process,
            declared=signature if program is not None or adapted else None,
            external=program is not None,
            is_async=is_async,
            bindings=bind,
            description=description,
            returns=returns,
            advisors=ChainMap({}, operation.advisors),
        )
        if ((retry is not None and retry.tries_again) or deadline is not None) and adapter.kind in GENERATORS:
            raise TypeError(
                f"operation {name!r} is a generator: retry and deadline need one that returns, because the elements "
                "that a generator has yielded may be consumed already. RetryPolicy(attempts=1, on_worker_lost=n) works"
            )
        self.federation.operations[name] = operation
        self.adapters[name, provider] = adapter

    def advisor(
        self, operation: Operation[..., Any], field: str, order: int = -1, *, provider: str | None = None
    ) -> Callable[[F], F]:
        """Makes a function the advisor of a parameter at this site: ``(value, context) -> AdvisedValue``.

        Args:
            operation: an operation that the site offers.
            field: the parameter that it speaks for.
            order: when it is asked, as with :func:`~dfm_async.discovery.field_advisor`.
            provider: the provider whose operation it is.
        """
        adapter = self.adapter(operation.name, provider)
        if adapter is None:
            raise ValueError(f"site {self.name!r} does not offer operation {operation.name!r}")

        def add(function: F) -> F:
            adapter.advisors[field] = advisor_of(operation, field, order, function)
            return function

        return add

    def adapter(self, operation: str, provider: str | None) -> Adapter | None:
        """Finds the code for an operation; without a provider, the site's own or else the only provider's."""
        found = self.adapters.get((operation, provider))
        if found is None and provider is None:
            offers = [adapter for (name, _), adapter in self.adapters.items() if name == operation]
            return offers[0] if len(offers) == 1 else None
        return found

    def __repr__(self) -> str:
        return f"<Site {self.name!r} of {self.federation.name!r}: {', '.join(sorted(n for n, _ in self.adapters))}>"


def _check(name: str, signature: Signature, reserved: frozenset[str] = RESERVED) -> None:
    taken = reserved & set(signature.parameters.parameters)
    if taken:
        raise TypeError(
            f"operation {name!r} has a parameter named {sorted(taken)[0]!r}, which means something else in a "
            "pipeline; rename it"
        )


def _declared_function(name: str, signature: Signature, description: str) -> Callable[..., Any]:
    """What is called outside a pipeline: has the name, signature and text of a declared operation."""

    def run(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"{name!r} is declared without code: it runs only in a pipeline, at the sites that offer it")

    run.__name__ = run.__qualname__ = name.rpartition(".")[2]
    run.__doc__ = description
    run.__module__ = name.rpartition(".")[0]
    run.__signature__ = signature.parameters  # type: ignore[attr-defined]
    return run


def _signature(code: Any, program: ExternalCode | None) -> Signature:
    if program is not None:
        return declared_by(code)
    function = code if inspect.isroutine(code) or not hasattr(code, "body") else code.body
    return Signature.of(function, bound=isinstance(code, type))


def _plain(code: Any, args: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The function that runs when an operation is called outside a pipeline."""
    if isinstance(code, type):

        def run(*call_args: Any, **call_kwargs: Any) -> Any:
            return code(**(args or {})).body(*call_args, **call_kwargs)

        body = code.body  # type: ignore[attr-defined]
        functools.update_wrapper(run, body, assigned=("__doc__", "__annotations__"), updated=())
        del run.__wrapped__  # type: ignore[attr-defined] # its first parameter is the object, which callers do not pass
        run.__name__, run.__qualname__, run.__module__ = code.__name__, code.__qualname__, code.__module__
        parameters = inspect.signature(body).parameters.values()
        run.__signature__ = inspect.Signature(list(parameters)[1:])  # type: ignore[attr-defined]
        run.__dfm_code__ = code  # type: ignore[attr-defined] # what travels to workers
        return run
    return code if inspect.isroutine(code) or not hasattr(code, "body") else code.body  # type: ignore[no-any-return]


def _same_source(a: Operation[..., Any], b: Operation[..., Any]) -> bool:
    """Tells whether one replaces the other: a notebook cell that was run again."""
    keys = [(getattr(o.code, "__module__", None), getattr(o.code, "__qualname__", None)) for o in (a, b)]
    return keys[0] == keys[1] and keys[0][1] is not None
