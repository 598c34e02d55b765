"""Keeps jobs in a file: what was submitted, every event of their logs, and who owns them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfm_async.base.installation import install_hint
from dfm_async.errors import StoreError

if TYPE_CHECKING:
    from dfm_async.store.base import Store

__all__ = ["open_store"]

_FORMS = "Write sqlite:///jobs.db for a relative path, sqlite:////var/lib/jobs.db for an absolute one"


def open_store(url: str) -> Store:
    """Makes the store that a URL names; its ``open()`` opens it.

    Args:
        url: ``sqlite:///`` and the path of the file: ``sqlite:///jobs.db``, ``sqlite:////var/lib/jobs.db``.

    Raises:
        StoreError: it is no such URL, or the extra ``sqlite`` is not installed.
    """
    scheme, separator, path = url.partition(":///")
    if not separator or scheme != "sqlite":
        raise StoreError(url, "this is no URL of a store", _FORMS)
    if not path:
        raise StoreError(url, "this URL names no file", _FORMS)
    if path == ":memory:":
        raise StoreError(url, "a store in memory would be gone with its process", _FORMS)
    if "?" in path or "#" in path:
        raise StoreError(url, "a URL of a store takes no options", _FORMS)
    try:
        from dfm_async.store.sqlite import SqliteStore  # whoever has no store does not load the database
    except ModuleNotFoundError as error:
        if error.name != "aiosqlite":
            raise
        raise StoreError(url, "a store needs aiosqlite", install_hint("sqlite")) from error

    return SqliteStore(path)
