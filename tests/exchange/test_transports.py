"""The table of transports for programs."""

from __future__ import annotations

import pytest

from dfm_async.exchange.transports import TRANSPORTS, load


@pytest.mark.parametrize("name", TRANSPORTS)
def test_functions_of_a_transport_exist(name: str) -> None:
    row = TRANSPORTS[name]
    named = [function for function in (row.listen, row.connect, row.site, row.agent) if function]
    assert len(named) == 2
    assert all(callable(load(function)) for function in named)
