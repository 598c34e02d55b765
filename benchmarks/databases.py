"""A PostgreSQL server for one benchmark, started as the tests start theirs, or the note that there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import postgres


@contextmanager
def server() -> Iterator[postgres.PostgresServer | None]:
    """Run a server on a Unix socket in a temporary directory; give None if PostgreSQL is not installed."""
    try:
        postgres.program("initdb")
    except AssertionError as error:
        print(f"note: the rows of PostgreSQL are left out: {error}", file=sys.stderr)
        yield None
        return
    with postgres.running_server() as found:
        yield found
