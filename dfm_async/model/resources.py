"""What a site has besides operations: where its cache is, who keeps its secrets, what sending costs. Plain data."""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec

from dfm_async.model.checks import FINITE, check_number, whole

_OURS: Final = "dfm_async"
_OFFERED: Final = "dfm_async.site"  # the package of ours whose classes a federation may name


class _SiteData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


def refusal(path: str, packages: tuple[str, ...] | None, *, in_file: bool = False) -> str | None:
    """Return why a class with such a path may not be used; None if it may.

    A federation may come from an untrusted file. So a path never leads into the standard library, and in this package
    only to the classes that it offers. ``packages`` limits paths to the packages that it names; in a file that
    includes the classes of this one, which can send data away or read secrets.
    """
    module, _, name = path.rpartition(".")
    top = module.partition(".")[0]
    if not module or not all(part.isidentifier() for part in path.split(".")):
        return "is not a path of a class: use its module and its name, such as 'pkg.mod.Class'"
    if top in sys.stdlib_module_names or top == "__main__":
        return "belongs to the standard library, whose classes cannot be used by path: write your own class"
    if top == _OURS:
        ours = (module == _OFFERED or module.startswith(f"{_OFFERED}.")) and not name.startswith("_")
        if not ours:
            return "is a part of dfm_async that is not offered here"
        if not in_file:
            return None
    if not allowed(module, packages):
        listed = ", ".join(packages or ()) or "none"
        return f"is of no package that the federation allows (it allows: {listed}): add it to packages="
    return None


def allowed(module: str, packages: tuple[str, ...] | None) -> bool:
    """Return whether a module belongs to one of the packages; None means all packages."""
    return packages is None or any(module == package or module.startswith(f"{package}.") for package in packages)


class ClassPath(_SiteData, frozen=True):
    """A class that is imported at the site, when it is needed there, and not before.

    Attributes:
        path: its module and name, such as ``"minifed.lib.Square"``.
        args: constant arguments of its constructor.
    """

    path: str
    args: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if "." not in self.path or not all(part.isidentifier() for part in self.path.split(".")):
            raise ValueError(f"a class is named by its module and its name, such as 'pkg.mod.Class', not {self.path!r}")


class SendCost(_SiteData, frozen=True, kw_only=True):
    """What sending to another site costs: ``fixed_time + bytes / bandwidth`` seconds.

    Attributes:
        fixed_time: seconds for each value.
        bandwidth: bytes per second; None means that the size does not matter.
    """

    fixed_time: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_number("fixed_time", self.fixed_time, most=FINITE)
        if self.bandwidth is not None:
            check_number("bandwidth", self.bandwidth, positive=True)


class CacheConfig(_SiteData, frozen=True, kw_only=True):
    """Where a site keeps what it caches: a directory of any file system that fsspec knows.

    Attributes:
        protocol: the file system, such as ``"file"``, ``"memory"`` or ``"s3"``.
        storage_options: what fsspec needs to open it.
        base_path: the directory; by default one of the user's cache directory, named after the federation and the
            site.
        max_bytes: how much ``TryFromCache`` keeps there at most; the least recently used make room.
        max_age: after how many seconds a value counts as missing; None means never.
    """

    protocol: str = "file"
    storage_options: dict[str, Any] = {}
    base_path: str | None = None
    max_bytes: int = 1024**3
    max_age: float | None = None

    def __post_init__(self) -> None:
        whole("max_bytes", self.max_bytes)
        if self.max_age is not None:
            check_number("max_age", self.max_age, positive=True)
        if self.base_path is None and self.protocol not in ("file", "local", "memory"):
            raise ValueError(f"a cache on {self.protocol!r} needs a base_path, such as 'bucket/directory'")

    def __repr__(self) -> str:
        # The options may hold credentials: they are named, not shown.
        options = f", storage_options=<{', '.join(self.storage_options)}>" if self.storage_options else ""
        return (
            f"CacheConfig(protocol={self.protocol!r}{options}, base_path={self.base_path!r}, "
            f"max_bytes={self.max_bytes}, max_age={self.max_age})"
        )


class VaultConfig(_SiteData, frozen=True, kw_only=True):
    """Who keeps the secrets of a site.

    Attributes:
        path: "environment", "file", "keyring", or the path of a class with a method ``secret_for_key(key)``; None
            means the environment.
        args: the arguments of its constructor.
    """

    path: str | None = None
    args: dict[str, Any] = {}

    def __repr__(self) -> str:
        # The same here.
        arguments = f", args=<{', '.join(self.args)}>" if self.args else ""
        return f"VaultConfig(path={self.path!r}{arguments})"


class ProviderConfig(_SiteData, frozen=True, kw_only=True):
    """A group of adapters at a site, which share an object.

    Attributes:
        impl: the class of that object; None means one without attributes of its own.
        info: what people should know of it.
    """

    impl: Any = None  # ClassPath, or a class that is there already
    info: dict[str, Any] = {}


class SiteConfig(_SiteData, frozen=True, kw_only=True):
    """What the code at a site can use; it travels to the processes of the site.

    Attributes:
        federation: the name of the federation.
        homesite: the name of the application's own site.
        api_version: the version of its operations.
        impl: the class of the object that adapters get as ``site``: a :class:`ClassPath`, or a class.
        providers: the groups of adapters.
        cache: where cached values are. None: ``TryFromCache`` keeps them in the memory of the site.
        vault: who keeps the secrets: a :class:`VaultConfig`, or an object with ``secret_for_key``.
        packages: the packages that classes may come from; None means all but the standard library.
        compat: whether names of nv_dfm_core that adapters import are provided, if it is not installed.
    """

    federation: str = ""
    homesite: str = ""
    api_version: str = ""
    impl: Any = None
    providers: dict[str, ProviderConfig] = {}
    cache: CacheConfig | None = None
    vault: Any = VaultConfig()
    packages: tuple[str, ...] | None = None
    compat: bool = False

    def __repr__(self) -> str:
        # A vault may be any object, and show in its own text what it keeps.
        vault = self.vault if isinstance(self.vault, VaultConfig) else f"<{type(self.vault).__qualname__}>"
        return (
            f"SiteConfig(federation={self.federation!r}, homesite={self.homesite!r}, impl={self.impl!r}, "
            f"providers={list(self.providers)}, cache={self.cache!r}, vault={vault!r}, packages={self.packages!r})"
        )
