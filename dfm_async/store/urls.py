"""The URLs of stores."""

from __future__ import annotations

from typing import Final

from dfm_async.base.text import install_hint
from dfm_async.errors import StoreError
from dfm_async.store.base import Store

_FORMS: Final = "Write sqlite:///jobs.db for a relative path, sqlite:////var/lib/jobs.db for an absolute one"


def open_store(url: str) -> Store:
    """Return the store that a URL names; its ``open()`` opens it.

    Args:
        url: ``sqlite:///`` and the path of the file: ``sqlite:///jobs.db``, ``sqlite:////var/lib/jobs.db``.

    Raises:
        StoreError: the URL is not valid, or the extra ``sqlite`` is not installed.
    """
    scheme, separator, path = url.partition(":///")
    if not separator or scheme != "sqlite":
        raise StoreError(url, "this is not a store URL", _FORMS)
    if not path:
        raise StoreError(url, "this URL names no file", _FORMS)
    if path == ":memory:":
        raise StoreError(url, "a store in memory would end with its process", _FORMS)
    if "?" in path or "#" in path:
        raise StoreError(url, "a store URL takes no options", _FORMS)
    try:
        from dfm_async.store.sqlite import SqliteStore  # sessions without a store do not load the database
    except ModuleNotFoundError as error:
        if error.name != "aiosqlite":
            raise
        raise StoreError(url, "a store needs aiosqlite", install_hint("sqlite")) from error

    return SqliteStore(path)
