"""Each site is a pool of worker processes on this machine.

Worker processes import modules of this package, but not the target itself: it is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_async.results.record import JobRecord
    from dfm_async.targets.local.execution import JobExecution
    from dfm_async.targets.local.runner import FederationRunner

__all__ = ["FederationRunner", "JobExecution", "JobRecord"]

_HOMES = {
    "FederationRunner": "dfm_async.targets.local.runner",
    "JobExecution": "dfm_async.targets.local.execution",
    "JobRecord": "dfm_async.results.record",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dfm_async.targets.local' has no attribute {name!r}")
