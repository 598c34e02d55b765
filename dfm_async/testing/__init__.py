"""Tools for tests of applications: fakes, faults, gates, virtual time, leak checks, and fixtures for pytest.

The names are loaded when they are first used: pytest loads this package in every run, also where nobody needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_async.testing.clock import VirtualClock, virtual_time
    from dfm_async.testing.fakes import Call, Fake, raises, returns
    from dfm_async.testing.faults import Fault, Faults
    from dfm_async.testing.gates import Gate
    from dfm_async.testing.leaks import no_leaks
    from dfm_async.testing.overrides import override

__all__ = [
    "Call",
    "Fake",
    "Fault",
    "Faults",
    "Gate",
    "VirtualClock",
    "no_leaks",
    "override",
    "raises",
    "returns",
    "virtual_time",
]

_HOMES = {
    "Call": "fakes",
    "Fake": "fakes",
    "Fault": "faults",
    "Faults": "faults",
    "Gate": "gates",
    "VirtualClock": "clock",
    "no_leaks": "leaks",
    "override": "overrides",
    "raises": "fakes",
    "returns": "fakes",
    "virtual_time": "clock",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
