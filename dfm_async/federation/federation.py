"""Federations: named sites and their operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from dfm_async.federation.code import check_parameters, without_code
from dfm_async.federation.external import declared_by, stand_in
from dfm_async.federation.namespace import Namespace, Operations
from dfm_async.federation.operation import (
    RESERVED,
    Adapter,
    Declaration,
    Operation,
    Signature,
)
from dfm_async.federation.schemas import Models
from dfm_async.federation.site import Site
from dfm_async.model.http import HttpOptions
from dfm_async.model.resources import CacheConfig, ClassPath, SendCost, VaultConfig
from dfm_async.rendering import Shown

if TYPE_CHECKING:
    from upath import UPath

    from dfm_async.pipeline.pipeline import Pipeline

__all__ = ["Federation"]


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
        self.revision = 0
        """How often its sites or operations have changed: connected sessions see by it that they need other code."""
        self.callee: Callable[[Adapter], Any] | None = None
        """What ``callee`` of new adapters is. For tests."""
        self.operations = Operations()
        self.info: dict[str, Any] = {}
        """Other things that its file says of it."""
        self.provision: dict[str, Any] = {}
        """How it is deployed; kept for others."""
        self.files: tuple[str, ...] = ()
        """The paths of the files that it was read from: its own first, then those that it refers to."""
        self.models = Models({})
        """The schemas that its file names; ``models.declared`` holds them as they stand there."""
        self.schemas: Namespace[Any] = Namespace("schema", self.models)
        """The same by attributes: ``federation.schemas.tasks.State(value=1.5)``."""

    def changed(self) -> None:
        """Has sessions that are connected take over what is new with their next job."""
        self.revision += 1

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, packages: tuple[str, ...] | None = None, compat: bool = False
    ) -> Federation:
        """Reads a federation from its file, ``federation.dfm.yaml``. Nothing is imported or run.

        Args:
            path: the file. What it refers to is read, too.
            packages: the packages that classes may come from; None means all but the standard library. Name them
                for a file that you do not trust: it is then also confined to its own folder, and can choose a
                vault, a directory for its cache or an HTTP service only if ``"dfm_async.site.vaults"``, ``"fsspec"``
                or ``"dfm_async.site.http"`` are among them.
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
        self.changed()
        return found

    def load_pipeline(self, path: str | os.PathLike[str] | UPath) -> Pipeline:
        """Reads a pipeline from a JSON file, or from a URL of fsspec: DFM's, in both variants, or our own.

        Class names in it are looked up among the operations of this federation; nothing is imported.

        Raises:
            PipelineError: the file does not hold a pipeline for this federation; with everything that is wrong, and
                where in the file.
        """
        from dfm_async.federation.dfm_json import load_pipeline

        return load_pipeline(path, self)

    def save_pipeline(self, pipeline: Pipeline, path: str | os.PathLike[str] | UPath) -> None:
        """Writes a pipeline as DFM's JSON; :meth:`~dfm_async.Pipeline.save_to_file` writes our own.

        Args:
            pipeline: the pipeline.
            path: a file, whose folders are made, or a URL of fsspec such as ``s3://bucket/pipeline.json``.

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
