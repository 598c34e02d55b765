"""Federations: named sites and their operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from dfm_async.base.rendering import Shown
from dfm_async.federation.operation import Operation
from dfm_async.federation.site import FederatedSites, Site
from dfm_async.model.call_limits import LimitOptions
from dfm_async.model.http import HttpOptions

if TYPE_CHECKING:
    from upath import UPath

    from dfm_async.language.pipeline import Pipeline

P = ParamSpec("P")
R = TypeVar("R")


class Federation(FederatedSites, Shown):
    """The sites that work together, and the operations that they offer.

    Args:
        name: the name of the federation.
        api_version: the version of its operations; a pipeline for another major version is rejected.
        description: a text for users.
        packages: the packages from which class paths may import; None means all packages, but never the standard
            library.
        compat: provide the names of nv_dfm_core that adapters import, where it is not installed.
    """

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], *, packages: tuple[str, ...] | None = None, compat: bool = False
    ) -> Federation:
        """Read a federation from its file, ``federation.dfm.yaml``. Nothing is imported or run.

        Args:
            path: the file. Files that it refers to are read as well.
            packages: the packages from which class paths may import; None means all packages, but never the standard
                library. Pass it for a file that you do not trust: such a file cannot refer to other folders, and can
                choose a vault, a directory for its cache or an HTTP service only if ``"dfm_async.site.vaults"``,
                ``"fsspec"`` or ``"dfm_async.site.http"`` is listed.
            compat: provide the names of nv_dfm_core that adapters import, where it is not installed.

        Raises:
            FederationError: the file is invalid; lists all problems, with file, line and key.
        """
        from dfm_async.federation.files.reading import read_federation  # only needed for files

        federation = cls("", packages=packages, compat=compat)
        read_federation(path, federation)
        return federation

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the federation as the text of a file that :meth:`from_yaml` reads.

        The file refers to code by its path, so each adapter must be a top-level class of a module.

        Args:
            path: a file to which the text is also written.

        Raises:
            FederationError: a part cannot be written to a file, such as a function; lists all such parts.
            OSError: the file cannot be written.
        """
        from dfm_async.federation.files.writing import write_federation

        text = write_federation(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

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
            provider: the group of adapters that the operations belong to.
            base_url: the address of the service; by default the first of the document's servers.
            auth: the key of the secret in the site's vault, for each security scheme of the document.
            operations: the ids of the operations to add; by default all.
            options: timeouts, retries and limits.
            limits: the limits of each operation at the site, as :meth:`Site.operation` takes them.

        Raises:
            FederationError: the document is invalid; lists all problems, with file, line and key.
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
        """Read a pipeline from a JSON file or an fsspec URL, in the format of DFM or of this library.

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
            path: a file, whose folders are created, or an fsspec URL such as ``s3://bucket/pipeline.json``.

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
