"""Tools for tests of applications: fakes, faults, gates, virtual time, leak checks, and fixtures for pytest.

The names are loaded when they are first used: pytest loads this package in every run, also where nobody needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names

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
    "dfm_async.testing.clock": ("VirtualClock", "virtual_time"),
    "dfm_async.testing.fakes": ("Call", "Fake", "raises", "returns"),
    "dfm_async.testing.faults": ("Fault", "Faults"),
    "dfm_async.testing.gates": ("Gate",),
    "dfm_async.testing.leaks": ("no_leaks",),
    "dfm_async.testing.overrides": ("override",),
}
__getattr__, __dir__ = lazy_names(__name__, globals(), _HOMES)
