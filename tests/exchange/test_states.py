"""The states of one exchange: which follows from which, and that final states stay."""

from __future__ import annotations

import pytest

from dfm_async.exchange.task import FINAL, Exchange, ExchangeState

S = ExchangeState

WAY = (S.OFFERED, S.ACCEPTED, S.RESULT_OFFERED, S.RESULT_ACCEPTED, S.TRANSFERRING, S.SETTLED)

LEGAL = {
    S.OFFERED: {S.ACCEPTED, S.REJECTED, S.FAILED, S.ABORTED},
    S.ACCEPTED: {S.RESULT_OFFERED, S.FAILED, S.ABORTED},
    S.RESULT_OFFERED: {S.RESULT_ACCEPTED, S.REJECTED, S.FAILED, S.ABORTED},
    S.RESULT_ACCEPTED: {S.TRANSFERRING, S.SETTLED, S.REJECTED, S.FAILED, S.ABORTED},
    S.TRANSFERRING: {S.SETTLED, S.REJECTED, S.FAILED, S.ABORTED},
    S.SETTLED: set(),
    S.REJECTED: set(),
    S.FAILED: set(),
    S.ABORTED: set(),
}


def at(state: ExchangeState) -> Exchange:
    """An exchange that has come to a state on its way."""
    exchange = Exchange("t")
    for step in WAY[: WAY.index(state) + 1] if state in WAY else (state,):
        exchange.advance(step)
    assert exchange.state is state
    return exchange


@pytest.mark.parametrize("before", S, ids=lambda state: state.name)
def test_a_state_follows_only_from_those_before_it(before: ExchangeState) -> None:
    for after in S:
        exchange = at(before)
        assert exchange.ended is (before in FINAL)
        if after in LEGAL[before]:
            assert exchange.advance(after, "why")
            assert (exchange.state, exchange.reason) == (after, "why")
        elif before in FINAL or (after in WAY and WAY.index(after) <= WAY.index(before)):
            assert not exchange.advance(after, "why"), "a message that came twice, or too late, changes nothing"
            assert (exchange.state, exchange.reason) == (before, "")
        else:
            with pytest.raises(ValueError, match=f"{before.value} cannot become {after.value}"):
                exchange.advance(after)
            assert exchange.state is before


@pytest.mark.parametrize("state", WAY)
def test_a_state_that_was_passed_was_reached(state: ExchangeState) -> None:
    exchange = at(state)
    assert [exchange.has(other) for other in WAY] == [WAY.index(other) <= WAY.index(state) for other in WAY]


def test_a_failed_exchange_has_reached_no_earlier_state() -> None:
    exchange = at(S.TRANSFERRING)
    exchange.advance(S.FAILED, "stalled")
    assert exchange.has(S.FAILED)
    assert not exchange.has(S.ACCEPTED)


def test_the_repr_of_an_exchange_names_its_state_and_reason() -> None:
    exchange = at(S.OFFERED)
    assert repr(exchange) == "<Exchange t offered>"
    exchange.advance(S.REJECTED, "no room")
    assert repr(exchange) == "<Exchange t rejected: no room>"
