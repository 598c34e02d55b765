"""The life of one exchange: which state follows from which, and that none is left that is final."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.exchange.states import FINAL, Exchange, ExchangeState

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


def test_accepted_does_not_mean_transferred() -> None:
    exchange = at(S.RESULT_ACCEPTED)
    assert not exchange.ended
    assert not exchange.has(S.TRANSFERRING)
    assert not exchange.has(S.SETTLED)


@pytest.mark.parametrize("state", WAY)
def test_a_state_that_was_passed_was_reached(state: ExchangeState) -> None:
    exchange = at(state)
    assert [exchange.has(other) for other in WAY] == [WAY.index(other) <= WAY.index(state) for other in WAY]


def test_an_exchange_that_failed_is_not_said_to_have_come_far() -> None:
    exchange = at(S.TRANSFERRING)
    exchange.advance(S.FAILED, "stalled")
    assert exchange.has(S.FAILED)
    assert not exchange.has(S.ACCEPTED)


def test_an_exchange_tells_where_it_stands_and_why() -> None:
    exchange = at(S.OFFERED)
    assert repr(exchange) == "<Exchange t offered>"
    exchange.advance(S.REJECTED, "no room")
    assert repr(exchange) == "<Exchange t rejected: no room>"


@given(st.lists(st.sampled_from(S), max_size=12))
def test_no_sequence_leaves_a_final_state_or_goes_back(states: list[ExchangeState]) -> None:
    exchange = Exchange("t")
    for state in states:
        before, reason = exchange.state, exchange.reason
        try:
            moved = exchange.advance(state, state.name)
        except ValueError:
            moved = False
        if not moved:
            assert (exchange.state, exchange.reason) == (before, reason)
            continue
        assert exchange.state is state
        assert before not in FINAL
        assert state in FINAL or WAY.index(state) > WAY.index(before)


@given(st.lists(st.sampled_from(WAY), max_size=12))
def test_advancing_twice_is_the_same_as_once(states: list[ExchangeState]) -> None:
    once, twice = Exchange("t"), Exchange("t")
    for state in states:
        for exchange, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                with contextlib.suppress(ValueError):
                    exchange.advance(state)
    assert once.state is twice.state
