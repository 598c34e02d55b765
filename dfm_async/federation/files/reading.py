"""Reads ``federation.dfm.yaml``: everything that is wrong with it is found at once, and nothing is imported."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from dfm_async.federation.files.adapters import class_path, read_adapter
from dfm_async.federation.files.documents import REF, Documents
from dfm_async.federation.files.operations import read_operation, signature_of
from dfm_async.federation.files.schemas import SchemaReader, is_path
from dfm_async.federation.files.values import FileValue, Reader, if_given, number, one_of, positive
from dfm_async.federation.operation import Operation
from dfm_async.federation.schemas import REF_START
from dfm_async.federation.site import FederatedSites, Site
from dfm_async.model.call_limits import parse_bytes
from dfm_async.model.resources import CacheConfig, ClassPath, SendCost, VaultConfig, allowed, refusal

_KEYS: Final = ("dfm", "info", "provision", "schemas", "operations", "sites")
_FILE_VAULT: Final = "file"
_VAULTS: Final = ("environment", _FILE_VAULT, "keyring")
_OUR_VAULTS: Final = "dfm_async.site.vaults"
_FILE_SYSTEMS: Final = "fsspec"
"""What the caller of ``from_yaml(packages=...)`` names to let a file choose a vault, or a directory for the cache."""
FORMAT: Final = "1.0.0"
VERSION: Final = re.compile(r"\d{1,9}\.\d{1,9}\.\d{1,9}", re.ASCII)
_OPERATION: Final = "#/operations/"
_APPLICATION: Final = "home"
"""The application's site as sessions call it by default: sending to it costs, too, but no file declares it."""


def read_federation(path: str | os.PathLike[str], federation: FederatedSites) -> None:
    """Read the file of a federation into an empty one. A FederationError lists everything that is wrong."""
    with _uncollected():
        documents = Documents(path, confined=federation.packages is not None)
        with documents.reading() as value:
            _FederationReader(documents, federation).read(value)
    federation.files = tuple(documents.files)


def _only_names(name: str, schemas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a schema is only a reference to another one that is a reference again, in a cycle."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        ref = schemas.get(name, {}).get(REF)
        if ref is None:
            return False
        name = ref.removeprefix(REF_START)
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: everything that is made here stays, and collecting takes a third of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _FederationReader:
    """Reads a file into a federation that is empty so far."""

    def __init__(self, documents: Documents, federation: FederatedSites) -> None:
        self._documents = documents
        self._federation = federation
        self._packages = federation.packages
        self._adapters: dict[tuple[int, str | None, tuple[str, ...]], dict[str, Any]] = {}

    def read(self, value: FileValue) -> None:
        if not isinstance(value.node.value, dict):
            what = "is empty" if value.missing else f"holds {value.kind}"
            value.problem(f"the file {what}; it must be a mapping with the keys {', '.join(_KEYS)}")
            return
        fields = value.fields("a federation", _KEYS)
        if "dfm" not in fields:
            value.problem(f"'dfm' is missing: the version of the format, {FORMAT}")
        elif fields["dfm"].node.value != FORMAT:
            fields["dfm"].problem(f"dfm must be {FORMAT}, the version of the format, not {fields['dfm'].kind}")
        if "info" not in fields or fields["info"].missing:
            fields.get("info", value).problem("'info' is missing: it has api-version and code-package")
        else:
            self._info(fields["info"])
        if "provision" in fields:
            self._federation.provision = fields["provision"].plain_mapping("provision")
        schemas = self._schemas(fields.get("schemas"))
        if "operations" in fields:
            self._operations(fields["operations"], schemas)
        if "sites" in fields:
            self._sites(fields["sites"])

    def _info(self, info: FileValue) -> None:
        federation = self._federation
        given: dict[str, FileValue] = {}
        for name, part in info.mapping("info"):
            plain = name.replace("-", "_")
            if plain in given:
                info.problem_at_key(name, f"duplicate key, also written as {given[plain].key!r}")
            elif plain in ("api_version", "code_package", "description"):
                given[plain] = part
            else:
                federation.info[name] = part.plain()
        if "code_package" in given:
            federation.name = given["code_package"].identifier("code-package") or ""
        elif isinstance(info.node.value, dict):
            info.problem("'code-package' is missing: the package of the federation's code, and its name")
        if "api_version" in given:
            version = given["api_version"]
            federation.api_version = str(version.node.value)
            if not isinstance(version.node.value, str) or not VERSION.fullmatch(version.node.value):
                version.problem(f"api-version must be three numbers, such as 0.1.0, not {version.kind}")
        elif isinstance(info.node.value, dict):
            info.problem("'api-version' is missing: the version of the operations, such as 0.1.0")
        if "description" in given and not given["description"].missing:
            federation.description = given["description"].text("description") or ""

    # schemas and operations

    def _schemas(self, value: FileValue | None) -> SchemaReader:
        named: dict[str, FileValue] = {}
        names: dict[int, str] = {}
        for name, part in self._documents.entries(value, "schemas") if value is not None else ():
            if not is_path(name):
                part.problem(f"a schema's name must be identifiers with dots between them, not {name!r}")
                continue
            named[name] = part
            names[id(part.node)] = name
        for name, part in named.items():
            found = self._documents.referred(part) if part.only(REF) else None
            if found is not None and names.setdefault(id(found.node), name) == name:
                named[name] = found  # it has no other name, and may refer to itself
        reader, declared = SchemaReader(self._documents, names), self._federation.models.declared
        for name, part in named.items():
            declared[name] = reader.schema(part)
        for name, part in named.items():
            if _only_names(name, declared):
                part.problem("this reference refers to itself")
        return reader

    def _operations(self, value: FileValue, schemas: SchemaReader) -> None:
        federation = self._federation
        for name, part in self._documents.entries(value, "operations"):
            found = self._documents.follow(part)
            if not is_path(name):
                part.problem(f"an operation's name must be identifiers with dots between them, not {name!r}")
            elif found is not None:
                declaration = read_operation(found, self._documents, schemas)
                federation.declare(name, signature_of(declaration, federation.models), declaration=declaration)

    # sites

    def _sites(self, value: FileValue) -> None:
        costs: list[tuple[Site, FileValue]] = []
        for full, part in self._documents.entries(value, "sites"):
            found = self._documents.follow(part)
            name, at, domain = full.partition("@")
            if not name.isidentifier() or (at and not domain):
                part.problem(f"a site's name must be an identifier, or identifier@domain, not {full!r}")
            elif name in self._federation.sites:
                part.problem(f"duplicate site {name!r}: the part after @ does not count")
            elif found is not None:
                site, cost = self._site(found, name)
                if cost is not None:
                    costs.append((site, cost))
        for site, cost in costs:  # only now all sites are known
            site.send_cost = self._send_cost(cost)

    def _site(self, value: FileValue, name: str) -> tuple[Site, FileValue | None]:
        readers: dict[str, Reader] = {
            "info": FileValue.plain_mapping,
            "impl": if_given(self._class),
            "cache_config": lambda at, _: (None if at.missing else self._cache(at),),
            "secrets_vault": if_given(lambda at, _: self._vault(at)),
            "send_cost": _as_it_is,
            "interface": _as_it_is,
            "providers": _as_it_is,
            "workers": if_given(_workers),
            "threads": if_given(_count),
            "idle_after": if_given(number),
            "gpus": if_given(lambda at, key: at.number(key, whole=True)),
            "memory": if_given(_memory),
        }
        given = value.read("a site", readers)
        own, providers, send_cost = (given.pop(key, None) for key in ("interface", "providers", "send_cost"))
        (cache,) = given.pop("cache_config", (CacheConfig(),))  # as in DFM, a site has a cache on disk by default
        site = self._federation.site(name, cache=cache, vault=given.pop("secrets_vault", None), **given)
        interfaces = [] if providers is None else self._providers(providers, site)
        if own is not None:
            self._interface(own, site, None)
        for provider, interface in interfaces:
            self._interface(interface, site, provider)
        return site, send_cost

    def _class(self, value: FileValue, what: str) -> ClassPath | None:
        return class_path(value, what, self._packages)

    def _providers(self, value: FileValue, site: Site) -> list[tuple[str | None, FileValue]]:
        interfaces: list[tuple[str | None, FileValue]] = []
        for name, part in self._documents.entries(value, "providers"):
            found = self._documents.follow(part)
            if not name.isidentifier():
                part.problem(f"a provider's name must be an identifier, not {name!r}")
            elif found is not None:
                readers = {"info": FileValue.plain_mapping, "impl": if_given(self._class), "interface": _as_it_is}
                given = found.read("a provider", readers)
                if "interface" in given:
                    interfaces.append((name, given.pop("interface")))
                site.provider(name, **given)
        return interfaces

    def _interface(self, value: FileValue, site: Site, provider: str | None) -> None:
        known = site.federation.operations
        for key, part in self._documents.entries(value, "an interface"):
            name = key.removeprefix(_OPERATION).replace("~1", "/").replace("~0", "~")
            found = self._documents.follow(part)
            operation = known.get(name) if key.startswith(_OPERATION) else None
            if operation is None:
                if not key.startswith(_OPERATION):
                    hint = f"; write '{_OPERATION}{key}'" if key in known else ""
                    part.problem(f"an interface has keys such as '{_OPERATION}array.Create', not {key!r}{hint}")
                else:
                    part.problem(f"unknown operation {name!r}; {one_of(name, list(known))}")
            if found is None:
                continue
            options = dict(self._adapter(found, operation, tuple(site.providers)))
            code = options.pop("code", None)
            if code is not None and operation is not None:
                try:
                    site.adapt(name, code, provider=provider, **options)
                except (TypeError, ValueError) as error:  # such as more GPUs than the site has
                    found.problem(str(error))

    def _adapter(
        self, value: FileValue, operation: Operation[..., Any] | None, providers: tuple[str, ...]
    ) -> dict[str, Any]:
        """Read an adapter, once for all the sites that refer to it."""
        key = (id(value.node), None if operation is None else operation.name, providers)
        if key not in self._adapters:
            parameters = operation.signature.parameters.parameters if operation is not None else ()
            self._adapters[key] = read_adapter(value, parameters, providers, self._packages)
        return self._adapters[key]

    def _cache(self, value: FileValue) -> CacheConfig:
        readers: dict[str, Reader] = {
            "protocol": FileValue.text,
            "storage_options": FileValue.plain_mapping,
            "base_path": FileValue.text,
            "max_bytes": lambda at, name: at.number(name, positive=True, whole=True),
            "max_age": positive,
        }
        try:
            config = CacheConfig(**value.read("cache_config", {key: if_given(readers[key]) for key in readers}))
        except ValueError as error:
            value.problem(str(error))
            return CacheConfig()
        own = config.base_path is None and config.protocol in ("file", "local")
        if not own and config.protocol != "memory" and not allowed(_FILE_SYSTEMS, self._packages):
            value.problem(
                f"a cache in a directory of its own is not allowed: add {_FILE_SYSTEMS!r} to packages=, or leave out "
                "protocol and base_path"
            )
        return config

    def _vault(self, value: FileValue) -> VaultConfig:
        fields = value.fields("secrets_vault", ("path", "args"))
        args = fields["args"].plain_mapping("args") if "args" in fields else {}
        path = None
        if "path" in fields and not fields["path"].missing:
            path = fields["path"].text("path")
            if path is not None and path not in _VAULTS:
                wrong = refusal(path, self._packages, in_file=True)
                if wrong is not None:
                    known = ", ".join(_VAULTS)
                    fields["path"].problem(f"{path!r} {wrong}. A vault is {known}, or a class with secret_for_key")
        by_default = path in (None, "environment") and not args
        if path in (None, *_VAULTS) and not by_default and not allowed(_OUR_VAULTS, self._packages):
            value.problem(f"a vault with arguments is not allowed: add {_OUR_VAULTS!r} to packages=, or leave it out")
        if path == _FILE_VAULT and isinstance(args.get("path"), str):
            args["path"] = _beside(fields["args"], args["path"])
        return VaultConfig(path=path, args=args)

    def _send_cost(self, value: FileValue) -> dict[str, SendCost]:
        sites = self._federation.sites
        found: dict[str, SendCost] = {}
        for full, part in value.mapping("send_cost"):
            name = full.partition("@")[0]
            if name not in sites and name != _APPLICATION:
                value.problem_at_key(full, f"unknown site {name!r}; {one_of(name, list(sites))}")
                continue
            readers = {"fixed_time": number, "bandwidth": if_given(positive)}
            found[name] = SendCost(**part.read("a send cost", readers))
        return found


def _memory(value: FileValue, _what: str) -> int | None:
    try:
        return parse_bytes(value.node.value)
    except ValueError as error:
        value.problem(str(error))
        return None


def _workers(value: FileValue, what: str) -> int | tuple[int, int] | None:
    """Read a number of workers, or two of them: the smallest and the largest."""
    if not isinstance(value.node.value, list):
        return _count(value, what)
    found = [_count(end, what) for end in value.items(what)]
    ends = [end for end in found if end is not None]
    if len(found) != 2 or (len(ends) == 2 and ends[0] > ends[1]):
        value.problem(f"{what} must be a whole number, or the smallest and the largest one as in [1, 8]")
        return None
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _count(value: FileValue, what: str) -> int | None:
    found = value.number(what, positive=True, whole=True)
    return None if found is None else int(found)


def _as_it_is(value: FileValue, _what: str) -> FileValue:
    return value


def _beside(value: FileValue, path: str) -> str:
    """Return a path relative to the folder of the file that holds it: workers may run elsewhere."""
    return path if path.startswith("~") else os.path.abspath(os.path.join(value.document.folder, path))
