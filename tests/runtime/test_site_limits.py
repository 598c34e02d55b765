"""Which calls of a site may start: how many at the same time, how often, and with what."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dfm_async.model.call_limits import CallLimits, SiteCapacity, bytes_text, parse_bytes, parse_rate
from dfm_async.model.stats import SiteStats
from dfm_async.runtime.site_limits import AllowedCall, SiteLimits

CAPACITY = SiteCapacity(cpus=4, memory=1000, gpus=2)


class Site:
    """A site whose calls are numbers; the time passes when the test says so."""

    def __init__(self, capacity: SiteCapacity = CAPACITY) -> None:
        self.limits: SiteLimits[Any] = SiteLimits(capacity)
        self.now = 0.0

    def request(
        self,
        call: Any,
        limits: CallLimits,
        *,
        job: str = "job",
        priority: int = 0,
        operation: str = "op",
        key: str = "",
    ) -> list[Any]:
        found = self.limits.request(call, job, priority, operation, key, limits, self.now)
        return [grant.call for grant in found]

    def leave(self, call: Any) -> list[Any]:
        return [grant.call for grant in self.limits.leave(call, self.now)]

    def grants(self, call: Any) -> list[AllowedCall[Any]]:
        return self.limits.leave(call, self.now)

    def wait(self) -> list[Any]:
        """Let the time pass until something may start."""
        assert self.limits.due is not None
        self.now = self.limits.due
        return [grant.call for grant in self.limits.tick(self.now)]

    def waiting(self) -> dict[str, int]:
        return SiteStats(limits=self.limits.stats()).waiting


def test_a_limit_counts_calls_at_the_same_time() -> None:
    site, two = Site(), CallLimits(limit=2)
    assert [site.request(n, two) for n in range(4)] == [[0], [1], [], []]
    assert site.waiting() == {"limit": 2}
    assert site.leave(1) == [2]
    assert site.leave(1) == []
    assert site.leave(0) == [3]


def test_a_key_counts_each_value_on_its_own() -> None:
    site, one = Site(), CallLimits(limit=1, key="customer")
    assert site.request("a1", one, key="a") == ["a1"]
    assert site.request("a2", one, key="a") == []
    assert site.request("b1", one, key="b") == ["b1"]
    assert site.leave("a1") == ["a2"]


def test_a_rate_spaces_starts_evenly_after_a_burst() -> None:
    site, often = Site(), CallLimits(rate="10/s")
    started = [call for n in range(14) for call in site.request(n, often)]
    assert started == list(range(10)), "one second's worth may start at once"
    assert site.waiting() == {"rate": 4}
    times = []
    while started[-1] != 13:
        started += site.wait()
        times.append(site.now)
    assert times == pytest.approx([0.1, 0.2, 0.3, 0.4])
    for call in range(14):
        site.leave(call)
    site.wait()
    assert site.limits.due is None, "nothing is kept for an operation without calls"
    assert not any(found.operation for found in site.limits.stats())


def test_a_slow_rate_allows_no_burst() -> None:
    site, seldom = Site(), CallLimits(rate="2/min")
    assert site.request(1, seldom) == [1]
    assert site.request(2, seldom) == []
    assert site.leave(1) == [], "the rate counts starts, however short the calls are"
    assert site.wait() == [2]
    assert site.now == pytest.approx(30.0)


def test_jobs_take_turns_and_priority_counts() -> None:
    site, one = Site(), CallLimits(limit=1)
    assert site.request("running", one, job="batch") == ["running"]
    for n in range(3):
        site.request(f"batch {n}", one, job="batch")
    site.request("small", one, job="small")
    site.request("urgent", one, job="urgent", priority=5)
    order, last = [], "running"
    while found := site.leave(last):
        (last,) = found
        order.append(last)
    assert order == ["urgent", "batch 0", "small", "batch 1", "batch 2"]


def test_a_large_demand_is_not_overtaken_for_ever() -> None:
    site = Site()
    small, large = CallLimits(cpus=1), CallLimits(cpus=4)
    assert [site.request(n, small, operation="small") for n in range(4)] == [[0], [1], [2], [3]]
    assert site.request("large", large, operation="large") == []
    assert site.request(4, small, operation="small") == []
    assert [site.leave(n) for n in range(3)] == [[], [], []], "the free processors are reserved"
    assert site.leave(3) == ["large"]
    assert site.leave("large") == [4]


def test_operations_take_turns_with_shared_resources() -> None:
    site, gpu = Site(SiteCapacity(cpus=1, memory=1, gpus=1)), CallLimits(gpus=1)
    assert site.request("a0", gpu, operation="a") == ["a0"]
    for n in range(1, 5):
        site.request(f"a{n}", gpu, operation="a")
    site.request("b", gpu, operation="b")
    assert site.leave("a0") == ["a1"]
    assert site.leave("a1") == ["b"], "although all calls of the other operation came first"
    assert site.waiting() == {"gpus": 3}


def test_grants_name_gpus_and_what_was_waited_for() -> None:
    site, one, two = Site(), CallLimits(gpus=1), CallLimits(gpus=2)
    assert site.limits.request("x", "job", 0, "one", "", one, 0.0) == [AllowedCall("x", (0,))]
    assert site.limits.request("y", "job", 0, "one", "", one, 0.0) == [AllowedCall("y", (1,))]
    site.request("both", two, operation="two")
    site.request("z", one, operation="one")
    assert site.grants("x") == []
    assert site.grants("y") == [AllowedCall("both", (0, 1), "gpus")]
    assert site.grants("both") == [AllowedCall("z", (1,), "gpus")], "the set that was used last"


def test_a_call_that_needs_more_than_there_is_is_refused() -> None:
    site = Site()
    with pytest.raises(ValueError, match=r"operation 'op' needs gpus=3, and the site has 2\. Ask for fewer"):
        site.request(1, CallLimits(gpus=3))
    with pytest.raises(ValueError, match="needs memory=2KiB, and the site has 1000B"):
        site.request(1, CallLimits(memory=2048))
    measured = SiteCapacity(memory=24_684_084 << 10)
    assert (measured.lacks(CallLimits(memory=1 << 40)) or "").startswith(
        "needs memory=1TiB, and the site has 23.54GiB."
    )


def test_a_call_that_waits_no_longer_frees_what_it_has_reserved() -> None:
    site = Site()
    site.request("holds", CallLimits(cpus=3), operation="a")
    site.request("large", CallLimits(cpus=4), operation="b")
    assert site.request("small", CallLimits(cpus=1), operation="c") == []
    assert site.leave("large") == ["small"]


def test_limits_that_change_count_for_the_next_calls() -> None:
    site = Site()
    assert site.request(1, CallLimits(limit=1)) == [1]
    assert site.request(2, CallLimits(limit=1)) == []
    assert site.request(3, CallLimits(limit=3)) == [2, 3]


def test_more_capacity_lets_calls_start() -> None:
    site = Site()
    for n in range(3):
        site.request(n, CallLimits(gpus=1))
    found = site.limits.resize(SiteCapacity(cpus=4, memory=1000, gpus=4), site.now)
    assert [(grant.call, grant.gpus) for grant in found] == [(2, (2,))]


@pytest.mark.parametrize(
    ("text", "expected"), [("10/s", 10), ("0.5/s", 0.5), ("30/min", 0.5), (" 7200 / h ", 2), (".5/s", 0.5)]
)
def test_rates_are_parsed(text: str, expected: float) -> None:
    assert parse_rate(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["10", "0/s", "-1/s", "10/day", "fast", "", 10, None, "1e3/s"])
def test_other_rates_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="such as '10/s'"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "expected"), [("8GiB", 8 << 30), ("1.5 GB", 1_500_000_000), (512, 512), ("7B", 7)])
def test_sizes_are_parsed(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert parse_bytes(bytes_text(expected)) == expected


@pytest.mark.parametrize("text", ["8", "GiB", 0, -1, True, 1.5, "0B", "8 gib", None])
def test_other_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="such as '8GiB'"):
        parse_bytes(text)


def test_limits_are_merged_with_those_before() -> None:
    before = CallLimits.parse({"limit": 4, "rate": " 10 / s", "key": "customer"})
    assert before == CallLimits(limit=4, rate="10/s", key="customer")
    assert CallLimits.parse({"limit": 2}, before) == CallLimits(limit=2, rate="10/s", key="customer")
    assert CallLimits.parse({"limit": None, "rate": None, "key": None}, before) is None
    assert CallLimits.parse({"limit": None}) is None


@pytest.mark.parametrize("given", [{"limit": 0}, {"cpus": 1.5}, {"gpus": True}, {"key": ""}, {"key": "x", "cpus": 1}])
def test_wrong_limits_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        CallLimits.parse(given)


OPERATIONS = {
    "alone": CallLimits(limit=1),
    "few": CallLimits(limit=2, cpus=1),
    "each": CallLimits(limit=1, key="who"),
    "often": CallLimits(rate="5/s"),
    "seldom": CallLimits(rate="30/min", key="who", gpus=1),
    "small": CallLimits(cpus=1),
    "large": CallLimits(cpus=4, memory=600),
    "gpu": CallLimits(gpus=1, memory=300),
    "gpus": CallLimits(gpus=2),
}


class Limits(RuleBasedStateMachine):
    """Never over a limit, nothing lost, and everything is granted in the end."""

    @initialize()
    def begin(self) -> None:
        self.site = Site()
        self.calls = 0
        self.waiting: dict[int, tuple[str, str, str]] = {}
        self.running: dict[int, tuple[str, str, tuple[int, ...]]] = {}
        self.starts: dict[tuple[str, str], list[float]] = {}

    def _granted(self, grants: list[AllowedCall[int]]) -> None:
        for grant in grants:
            operation, key, _ = self.waiting.pop(grant.call)
            self.running[grant.call] = (operation, key, grant.gpus)
            assert len(grant.gpus) == OPERATIONS[operation].gpus
            self.starts.setdefault((operation, key), []).append(self.site.now)

    @rule(
        operation=st.sampled_from(sorted(OPERATIONS)),
        who=st.sampled_from("ab"),
        job=st.sampled_from("xyz"),
        count=st.integers(1, 4),
    )
    def request(self, operation: str, who: str, job: str, count: int) -> None:
        limits, key = OPERATIONS[operation], who if OPERATIONS[operation].key else ""
        for _ in range(count):
            self.calls += 1
            self.waiting[self.calls] = (operation, key, job)
            self._granted(
                self.site.limits.request(self.calls, job, ord(job) % 2, operation, key, limits, self.site.now)
            )

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted([*self.running, *self.waiting])))
        self.running.pop(call, None)
        self.waiting.pop(call, None)
        self._granted(self.site.limits.leave(call, self.site.now))

    @rule(seconds=st.floats(0.01, 3.0))
    def wait(self, seconds: float) -> None:
        end = self.site.now + seconds
        while (due := self.site.limits.due) is not None and due <= end:
            self.site.now = max(self.site.now, due)
            self._granted(self.site.limits.tick(self.site.now))
        self.site.now = end

    @invariant()
    def nothing_exceeds_its_limit(self) -> None:
        if not hasattr(self, "site"):
            return
        counts = Counter((operation, key) for operation, key, _ in self.running.values())
        for (operation, _), count in counts.items():
            assert count <= (OPERATIONS[operation].limit or count)
        for name in ("cpus", "memory", "gpus"):
            used = sum(getattr(OPERATIONS[operation], name) for operation, _, _ in self.running.values())
            assert used <= getattr(CAPACITY, name)
        gpus = [index for _, _, indexes in self.running.values() for index in indexes]
        assert len(gpus) == len(set(gpus))
        for (operation, _), starts in self.starts.items():
            limits = OPERATIONS[operation]
            for first, start in enumerate(starts):
                within = len([other for other in starts[first:] if other - start < 1.0])
                assert within <= limits.burst + limits.per_second

    @invariant()
    def no_call_waits_without_a_reason(self) -> None:
        if hasattr(self, "site") and not self.running and self.waiting:
            assert self.site.limits.due is not None
        if hasattr(self, "site"):
            assert sum(self.site.waiting().values()) == len(self.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "site"):
            return
        for _ in range(10_000):
            if not self.running and not self.waiting:
                break
            if self.running:
                call = min(self.running)
                del self.running[call]
                self._granted(self.site.limits.leave(call, self.site.now))
            else:
                self.wait(max(0.0, (self.site.limits.due or 0.0) - self.site.now))
        assert not self.waiting, "every call is granted in the end"
        while self.site.limits.due is not None:
            self.wait(self.site.limits.due - self.site.now)
        assert not any(found.operation or found.used for found in self.site.limits.stats())


TestLimits = Limits.TestCase
