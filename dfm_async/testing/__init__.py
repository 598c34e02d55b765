"""Tools for tests of applications: fakes, faults, gates, virtual time, leak checks, and fixtures for pytest.

The names are loaded when they are first used: pytest loads this package in every run, also where it is not needed.
"""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.testing.board import override as override
    from dfm_async.testing.clock import VirtualClock as VirtualClock
    from dfm_async.testing.clock import virtual_time as virtual_time
    from dfm_async.testing.fakes import Call as Call
    from dfm_async.testing.fakes import Fake as Fake
    from dfm_async.testing.fakes import raises as raises
    from dfm_async.testing.fakes import returns as returns
    from dfm_async.testing.faults import Fault as Fault
    from dfm_async.testing.faults import Faults as Faults
    from dfm_async.testing.gates import Gate as Gate
    from dfm_async.testing.leaks import no_leaks as no_leaks
