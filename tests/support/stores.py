"""Files of stores."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any


def execute_sql(path: Path, *statements: str) -> list[Any]:
    """Change a store from another connection; return the rows of the last statement."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as connection:
        return [connection.execute(statement).fetchall() for statement in statements][-1]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let another connection write to a store: the store cannot be written to meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
