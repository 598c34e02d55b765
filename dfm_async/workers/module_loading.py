"""Modules of users in the processes of a site: their import must not open sessions."""

from __future__ import annotations

import asyncio.runners
import contextlib
import importlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Final

from dfm_async.errors import DfmError

_UNGUARDED: Final = (
    "their module runs jobs when it is imported, and worker processes import it. "
    "Put this code under 'if __name__ == \"__main__\":'"
)

_loading = False
"""Whether this process loads the operations of a worker, or the modules of all."""
_not_preloaded: tuple[str, BaseException] | None = None
"""The first module that could not be preloaded, and why."""


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Load operations in a worker. Meanwhile, no session can start workers: they would load the same, endlessly.

    Raises:
        DfmError: a module runs an event loop when it is imported.
    """
    global _loading
    _loading = True
    try:
        yield
    except RuntimeError as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == asyncio.runners.__file__:
            raise DfmError(_UNGUARDED) from error
        raise
    finally:
        _loading = False


def check_not_loading() -> None:
    """Check that this process may start workers.

    Raises:
        DfmError: it is one that loads modules for a worker.
    """
    if _loading:
        raise DfmError(_UNGUARDED)


def preload(names: Sequence[str]) -> None:
    """Import modules for all workers. One that cannot be found is reported by the workers that need it."""
    global _not_preloaded
    for name in names:
        try:
            with loading():
                importlib.import_module(name)
        except ImportError:
            pass
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever importing the user's code raises
            _not_preloaded = _not_preloaded or (name, error)


def check_preloaded() -> None:
    """Check that the modules could be imported for all workers.

    Raises:
        DfmError: one of them raised.
    """
    if _not_preloaded is not None:
        name, error = _not_preloaded
        problem = f"preload= names the module {name!r}, which cannot be imported: {type(error).__name__}: {error}"
        raise DfmError(problem) from error
