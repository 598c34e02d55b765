"""The directory in which a site keeps files between jobs, on any file system that fsspec supports."""

from __future__ import annotations

import os
import pathlib
import urllib.parse
from typing import TYPE_CHECKING, Final

from dfm_async.model.resources import CacheConfig

if TYPE_CHECKING:
    from upath import UPath

LOCAL: Final = frozenset({"file", "local"})
"""The names that fsspec has for the disk of this machine."""
VALUES: Final = ".values"
"""The directory of the values of ``TryFromCache``."""


def cache_storage(
    config: CacheConfig, federation: str, site: str, subpath: str | None = None, *, compat: bool = False
) -> UPath:
    """Return the directory in which the code of a site may keep files, or a path inside it. It is created.

    With ``compat``, it is the directory that DFM would use, as the same kind of path: one for all sites, as a ``file:``
    URL.

    Raises:
        ValueError: the subpath leads out of the directory, or the file system is unknown.
        OSError: it cannot be created.
    """
    return _directory(config, federation, site, _checked(subpath), compat)


def value_storage(config: CacheConfig, federation: str, site: str) -> UPath:
    """Return the directory of the values of ``TryFromCache``: one for each site, also if sites share a directory."""
    return _directory(config, federation, site, [VALUES, _file_name(federation), _file_name(site)])


def _directory(config: CacheConfig, federation: str, site: str, parts: list[str], compat: bool = False) -> UPath:
    from upath import UPath

    base = _base(config, federation, site, compat)
    if config.protocol in LOCAL and not config.storage_options and not compat:
        path = UPath(base, *parts)
    else:
        path = UPath(base, *parts, protocol=config.protocol, **config.storage_options)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _base(config: CacheConfig, federation: str, site: str, compat: bool) -> str:
    if config.base_path is not None:
        return os.path.expanduser(config.base_path) if config.protocol in LOCAL else config.base_path
    if compat:
        return str(_user_cache() / _file_name(federation))
    own = pathlib.PurePosixPath("dfm_async", _file_name(federation), _file_name(site))
    return str(_user_cache() / own) if config.protocol in LOCAL else f"/{own}"


def _user_cache() -> pathlib.Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return pathlib.Path(named) if os.path.isabs(named) else pathlib.Path.home() / ".cache"


def _file_name(name: str) -> str:
    quoted = urllib.parse.quote(name, safe="")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def _checked(subpath: str | os.PathLike[str] | None) -> list[str]:
    text = os.fspath(subpath or "")
    if not text:
        return []
    path = pathlib.PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or "\\" in text or "\0" in text or "://" in text or "::" in text:
        raise ValueError(f"a path inside the cache directory is relative and has no '..': {text!r} is not")
    if path.parts[:1] == (VALUES,):
        raise ValueError(f"{VALUES!r} in the cache directory belongs to TryFromCache; choose another name")
    return list(path.parts)
