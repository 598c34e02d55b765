"""Each site is a pool of worker processes on this machine.

Worker processes import modules of this package, but not the target itself: it is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_async.targets.local.target import LocalTarget

__all__ = ["LocalTarget"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("dfm_async.targets.local.target"), name)
    raise AttributeError(f"module 'dfm_async.targets.local' has no attribute {name!r}")
