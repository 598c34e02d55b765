"""Signs of life: when one is due, and when the other side counts as gone (3.1.2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.exchange.liveness import Check, Liveness


def liveness(interval: float = 5, timeout: float = 60) -> Liveness:
    return Liveness(interval, timeout, 100)


def test_the_clock_starts_when_the_connection_does() -> None:
    assert liveness().check(100) == Check(beat=False, gone=False, wake=105)
    assert liveness().silence(107) == 7


def test_a_sign_of_life_is_due_after_the_interval() -> None:
    found = liveness()
    assert not found.check(104.9).beat
    assert found.check(105).beat


def test_any_message_that_is_said_counts_as_a_sign_of_life() -> None:
    found = liveness()
    found.said(104)
    assert found.check(105) == Check(beat=False, gone=False, wake=109)


def test_the_other_side_is_gone_after_the_timeout_and_not_before() -> None:
    found = liveness()
    assert not found.check(159.9).gone
    assert found.check(160).gone


def test_any_message_that_is_heard_counts_as_a_sign_of_life() -> None:
    found = liveness()
    found.heard(150)
    assert not found.check(209).gone
    assert found.check(210).gone
    assert found.silence(210) == 60


def test_what_is_said_here_is_no_sign_of_the_other_side() -> None:
    found = liveness()
    found.said(159)
    assert found.check(160).gone


def test_timeout_0_never_gives_up_but_goes_on_to_give_signs() -> None:
    found = liveness(timeout=0)
    check = found.check(1e9)
    assert check.beat
    assert not check.gone


def test_no_verdict_while_a_payload_moves() -> None:
    found = liveness()
    found.payload_begins()
    assert not found.check(1000).gone
    assert found.check(1000).beat, "this side still gives signs of life"


def test_the_time_counts_from_the_end_of_the_payload() -> None:
    found = liveness()
    found.payload_begins()
    found.payload_ends(1000)
    assert not found.check(1059).gone
    assert found.check(1060).gone


def test_no_verdict_until_the_last_of_several_payloads_has_ended() -> None:
    found = liveness()
    found.payload_begins()
    found.payload_begins()
    found.payload_ends(1000)
    assert not found.check(2000).gone
    found.payload_ends(2000)
    assert not found.check(2059).gone
    assert found.check(2060).gone


def test_it_wakes_for_whatever_is_due_first() -> None:
    found = Liveness(50, 60, 100)
    found.said(120)
    assert found.check(130).wake == 160, "the verdict"
    found.heard(140)
    assert found.check(150).wake == 170, "the sign of life"


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["heard", "said", "begin", "end", "check"]), st.floats(0, 100)), max_size=30
)


@given(ACTIONS, st.sampled_from([0.0, 6.0, 60.0]))
def test_gone_means_silence_for_the_timeout_with_no_payload_since(
    actions: list[tuple[str, float]], timeout: float
) -> None:
    found, now, moving = Liveness(5, timeout, 0), 0.0, 0
    since = 0.0
    for action, wait in actions:
        now += wait
        if action == "heard":
            found.heard(now)
            since = now
        elif action == "said":
            found.said(now)
        elif action == "begin":
            found.payload_begins()
            moving += 1
        elif action == "end" and moving:
            found.payload_ends(now)
            moving -= 1
            since = now
        check = found.check(now)
        assert check.gone == (timeout > 0 and not moving and now - since >= timeout)
        assert check.wake > now, "it would look again and again"
        if check.beat:
            found.said(now)
