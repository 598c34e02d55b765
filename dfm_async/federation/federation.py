"""Federations: named sites and their operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from dfm_async.base.rendering import Shown
from dfm_async.federation.code import check_parameters, declared_by, stand_in, without_code
from dfm_async.federation.namespace import Namespace, Operations
from dfm_async.federation.operation import RESERVED, Adapter, Declaration, Operation, Signature
from dfm_async.federation.schemas import Models
from dfm_async.federation.site import Site
from dfm_async.model.call_limits import LimitOptions, SiteCapacity, parse_bytes
from dfm_async.model.checks import whole
from dfm_async.model.http import HttpOptions
from dfm_async.model.pool_size import IDLE_AFTER, check_workers
from dfm_async.model.resources import CacheConfig, ClassPath, SendCost, VaultConfig

if TYPE_CHECKING:
    from upath import UPath

    from dfm_async.language.pipeline import Pipeline

P = ParamSpec("P")
R = TypeVar("R")


class Federation(Shown):
    """Named sites and the operations that each of them offers.

    Args:
        name: the name of the federation.
        api_version: the version of its operations; a pipeline for another major version is rejected.
        description: a text for users.
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

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, packages: tuple[str, ...] | None = None, compat: bool = False
    ) -> Federation:
        """Read a federation from its file, ``federation.dfm.yaml``. Nothing is imported or run.

        Args:
            path: the file. Files that it refers to are read as well.
            packages: the packages that classes may come from; None means all but the standard library. Name them
                for a file that you do not trust: it is then also confined to its own folder, and can choose a
                vault, a directory for its cache or an HTTP service only if ``"dfm_async.site.vaults"``, ``"fsspec"``
                or ``"dfm_async.site.http"`` are among them.
            compat: provide the names of nv_dfm_core that adapters import, where it is not installed.

        Raises:
            FederationError: something is wrong with the file; lists everything, with file, line and key.
        """
        from dfm_async.federation.files.reading import read_federation  # only needed for files

        return read_federation(path, packages=packages, compat=compat)

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the federation as the text of a file that :meth:`from_yaml` reads.

        Code is named by its path: each adapter must be a class at the top of a module.

        Args:
            path: a file to which the text is also written.

        Raises:
            FederationError: something cannot be written to a file, such as a function; lists everything.
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
        """Declare an operation for which sites have adapters: its parameters and its return type.

        Args:
            name: its name; dots group operations: ``federation.operations.array.Create``.
            signature: a function with that signature, which is never run; or the signature.
            declaration: its declaration in a file.
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
        **limits: Unpack[LimitOptions],
    ) -> tuple[Operation[..., Any], ...]:
        """Add the operations of an HTTP service that an OpenAPI document describes. A site sends the requests.

        Each operation is named after its ``operationId``: ``federation.operations.pets.ListPets``. Its parameters are
        those of the path, the query, headers and cookies, and the properties of the body.

        Args:
            document: the file, in YAML or JSON, which may refer to others; or its content.
            site: the site that sends the requests.
            name: the prefix of the names of the operations; by default the title of the document.
            provider: the group of adapters that they belong to.
            base_url: the address of the service; by default the first of the document's servers.
            auth: for security schemes of the document, the keys of the secrets in the site's vault.
            operations: the ids of the operations to add; by default all.
            options: timeouts, retries and limits.
            limits: the limits of each operation at the site, as :meth:`Site.operation` takes them.

        Raises:
            FederationError: something is wrong with the document; lists everything, with file, line and key.
            ValueError: the site does not exist, an operation exists already, or a limit is invalid.
        """
        from dfm_async.federation.openapi.document import add_document  # only needed for services

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
            limits=limits,
        )

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
            gpus: the number of GPUs for operations that need some.
            memory: the memory for operations that declare their need: a number of bytes, or a text such as ``"64GiB"``;
                by default the memory of its machine or control group.
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

    @overload
    def pipeline(self, function: Callable[P, R], /) -> Pipeline[P, R]: ...
    @overload
    def pipeline(self, /, *, name: str | None = None) -> Callable[[Callable[P, R]], Pipeline[P, R]]: ...
    def pipeline(self, function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
        """Turn a function into a pipeline: ``@federation.pipeline``.

        The function is called immediately, with placeholders, to record its statements, as a ``with Pipeline(...)``
        block does. Its parameters are those of the pipeline, with their types and defaults, its docstring is the
        description, and the value that it returns is the result, which :meth:`Session.run` returns.

        Args:
            function: the function.
            name: the name of the pipeline; by default the function's.

        Raises:
            PipelineError: a statement is wrong, or a parameter is not used.
            TypeError: it is not a plain function, or has parameters such as ``*args``.
        """
        from dfm_async.language.functions import pipeline_of

        return (lambda found: pipeline_of(found, name)) if function is None else pipeline_of(function, name)

    def load_pipeline(self, path: str | os.PathLike[str] | UPath) -> Pipeline:
        """Read a pipeline from a JSON file, or from a URL of fsspec; in the format of DFM or of this library.

        Class names in it are looked up among the operations of this federation; nothing is imported.

        Raises:
            PipelineError: the file does not contain a pipeline for this federation; lists all problems with their
                locations.
        """
        from dfm_async.federation.dfm_json import load_pipeline

        return load_pipeline(path, self)

    def save_pipeline(self, pipeline: Pipeline, path: str | os.PathLike[str] | UPath) -> None:
        """Write a pipeline as DFM's JSON; :meth:`~dfm_async.Pipeline.save_to_file` writes the format of this library.

        Args:
            pipeline: the pipeline.
            path: a file, whose folders are created, or a URL of fsspec such as ``s3://bucket/pipeline.json``.

        Raises:
            PipelineError: with everything that DFM cannot express.
        """
        from dfm_async.federation.dfm_json import save_pipeline

        save_pipeline(pipeline, path, self)

    def pipeline_from_dfm(self, data: Mapping[str, Any] | str | bytes) -> Pipeline:
        """Create a pipeline from DFM's JSON: the text, or the data.

        Raises:
            PipelineError: lists all problems with their locations.
        """
        from dfm_async.federation.dfm_json import parse_pipeline, read_pipeline

        return parse_pipeline(data, self) if isinstance(data, (str, bytes)) else read_pipeline(data, self)

    def pipeline_to_dfm(self, pipeline: Pipeline) -> dict[str, Any]:
        """Return a pipeline as the data of DFM's JSON.

        Raises:
            PipelineError: with everything that DFM cannot express.
        """
        from dfm_async.federation.dfm_json import write_pipeline

        return write_pipeline(pipeline, self)

    def __repr__(self) -> str:
        sites = ", ".join(f"{site.name}({len(site.adapters)})" for site in self.sites.values())
        return f"<Federation {self.name!r} {self.api_version}: {sites or 'no sites'}>"
