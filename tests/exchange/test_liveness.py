"""Heartbeats: when one is due, and when the other side counts as gone (3.1.2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.exchange.endpoint import Liveness


class Timed(Liveness):
    """Liveness whose clock is set by hand."""

    def __init__(self, interval: float = 5, timeout: float = 60, now: float = 100) -> None:
        self.now = now
        super().__init__(interval, timeout, lambda: self.now)

    def at(self, now: float) -> Timed:
        self.now = now
        return self


def test_liveness_wakes_for_whatever_is_due_first() -> None:
    found = Timed(50, 60)
    found.at(120).sent()
    assert found.at(130).wake_at() == 160, "the peer may be gone"
    found.at(140).received()
    assert found.at(150).wake_at() == 170, "the heartbeat"


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["received", "sent", "begin", "end", "check"]), st.floats(0, 100)), max_size=30
)


@given(ACTIONS, st.sampled_from([0.0, 6.0, 60.0]))
def test_gone_means_silence_for_the_timeout_with_no_payload_since(
    actions: list[tuple[str, float]], timeout: float
) -> None:
    found, payloads = Timed(5, timeout, 0), 0
    received = sent = 0.0
    for action, wait in actions:
        found.now += wait
        if action == "received":
            found.received()
            received = found.now
        elif action == "sent":
            found.sent()
            sent = found.now
        elif action == "begin":
            found.payload_begins()
            payloads += 1
        elif action == "end" and payloads:
            found.payload_ends()
            payloads -= 1
            received = found.now
        assert found.silence == found.now - received
        assert found.peer_gone == (timeout > 0 and not payloads and found.now >= received + timeout)
        assert found.heartbeat_due == (found.now >= sent + 5)
        if found.heartbeat_due:
            found.sent()
            sent = found.now
        assert found.peer_gone or found.wake_at() > found.now, "it would check again and again"
