"""The URLs of stores."""

from __future__ import annotations

from typing import Final

from dfm_async.base.text import install_hint
from dfm_async.errors import StoreError
from dfm_async.store.base import Store

_FORMS: Final = (
    "Write sqlite:///jobs.db for a relative path, sqlite:////var/lib/jobs.db for an absolute one, or "
    "postgresql://user@host/database"
)
_POSTGRES: Final = ("postgresql", "postgres")


def open_store(url: str, *, schema: str = "dfm_async") -> Store:
    """Return the store that a URL names; its ``open()`` opens it.

    Args:
        url: ``sqlite:///`` and the path of the file: ``sqlite:///jobs.db``, ``sqlite:////var/lib/jobs.db``. Or the URL
            of a PostgreSQL database in the form of libpq: ``postgresql://user@host/database``.
        schema: the schema in a PostgreSQL database.

    Raises:
        StoreError: the URL is not valid, or the extra ``sqlite`` or ``postgres`` is not installed.
    """
    if url.partition("://")[0] in _POSTGRES:
        return _postgres_store(url, schema)
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


def _postgres_store(url: str, schema: str) -> Store:
    try:
        from dfm_async.store.postgres import PostgresStore  # only sessions with such a store load the database
    except ImportError as error:  # psycopg also raises it if libpq is missing
        if error.name is not None and not error.name.startswith("psycopg"):
            raise
        scheme = url.partition("://")[0]
        raise StoreError(f"{scheme}://...", "a store in PostgreSQL needs psycopg", install_hint("postgres")) from error
    return PostgresStore(url, schema=schema)
