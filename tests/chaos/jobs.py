"""One random job of a round: what it is, what becomes of it, and whether that is right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dfm_async import (
    Event,
    Failure,
    JobStatus,
    Pipeline,
    PipelineError,
    Result,
    ResultLimits,
    RetryPolicy,
    StatusChanged,
    WorkerLost,
)
from dfm_async.events import FailureHandled, FrameCompleted
from dfm_async.planning.prepare import prepare
from tests.chaos.operations import fed, functions, random_pipeline
from tests.chaos.values import comparable
from tests.reference import Outcome, interpret

Kind = Literal["result", "lost", "error", "worker lost", "call lost"]
Fact = tuple[Kind, str, tuple[int, ...], Any]
"""What the log of a job tells of its work, in a form that can be counted."""


@dataclass
class Spec:
    """What a job is, and what is done to it."""

    job_id: str
    pipeline: Pipeline
    sets: list[dict[str, Any]]
    feed: Literal["list", "stream", "open"]
    execute: dict[str, Any]
    """Options of the call."""
    slow: float
    """How many seconds its reader rests after some events."""
    leaves: int | None
    """After how many events its reader leaves, and comes back."""
    impatient: float | None
    """After how many seconds the caller of execute is cancelled."""
    cancel: tuple[float, float] | None
    """After how many seconds the job is cancelled, and with what grace."""

    @property
    def survives(self) -> bool:
        """Whether it may lose more workers than a round has faults."""
        policy = self.execute.get("retry")
        return policy is not None and policy.on_worker_lost == 100

    def __str__(self) -> str:
        told = {name: value for name, value in self.__dict__.items() if name != "pipeline"}
        return f"{told}\n{self.pipeline}"


@dataclass
class Story:
    """What became of a job."""

    spec: Spec
    submitted: bool = False
    sent_all: bool = False
    """Whether all its parameter sets were taken."""
    cancelled: bool = False
    status: JobStatus = JobStatus.UNKNOWN
    cause: BaseException | None = None
    reason: str | None = None
    events: list[tuple[int, Any]] = field(default_factory=list)
    """Offsets, and what was read there."""
    cut: bool = False
    """Whether its reader could not go on, because the session was closed."""
    late: bool = False
    """Whether its first events were gone, which had no results in them, before anybody could read them."""

    def saw(self, event: Event) -> None:
        """Notes an event; large values are not kept."""
        self.events.append((event.offset, _note(event)))


def _note(event: Event) -> Any:
    if isinstance(event, Result):
        return ("result", event.place, event.frame, comparable(event.value))
    if isinstance(event, Failure):
        if not event.frame:
            return f"the job itself failed: {event.error}"
        if event.place is None:
            return ("worker lost" if of_worker(event) else "error", event.node, event.frame, None)
        return ("lost", event.place, event.frame, None)
    if isinstance(event, FailureHandled) and event.type_name.endswith("WorkerLost"):
        return ("call lost", event.node, event.frame, None)
    if isinstance(event, (FrameCompleted, StatusChanged)):
        return event
    return type(event).__name__


def of_worker(failure: Failure) -> bool:
    """Return whether an operation failed because the worker that ran it was lost; its job goes on."""
    return str(getattr(failure.error, "type_name", "")).endswith("WorkerLost")


def random_spec(rng: random.Random, name: str, *, stored: bool) -> Spec:
    """Draws a job."""
    reliable = rng.random() < 0.7
    while True:
        pipeline = random_pipeline(rng, reliable=reliable)
        try:
            prepare(pipeline, fed, "home")
            break
        except PipelineError:
            continue  # the maker collects whatever it finds
    execute: dict[str, Any] = {"job_id": name}
    if rng.random() < 0.6:
        execute["retry"] = RetryPolicy(on_worker_lost=rng.choice([1, 3, 100]))
    if rng.random() < 0.15:
        execute["deadline"] = rng.uniform(0.05, 1.5)
    if rng.random() < 0.1:
        execute["on_error"] = "stop"
    if rng.random() < 0.4:
        execute["options"] = _random_limits(rng, stored=stored)
    execute["priority"] = rng.choice([0, 0, 1])
    execute["concurrency"] = rng.choice([None, None, 1, 2])
    return Spec(
        job_id=name,
        pipeline=pipeline,
        sets=[{"x": rng.randint(0, 9), "y": rng.randint(0, 9)} for _ in range(rng.randint(0, 8))],
        feed=rng.choice(["list", "list", "stream", "open"]),
        execute=execute,
        slow=rng.choice([0.0, 0.0, 0.002, 0.01]),
        leaves=rng.choice([None, 3, 20]),
        impatient=rng.uniform(0.0, 0.3) if rng.random() < 0.1 else None,
        cancel=(rng.uniform(0.0, 1.5), rng.choice([0.0, 0.1, 1.0])) if rng.random() < 0.15 else None,
    )


def _random_limits(rng: random.Random, *, stored: bool) -> ResultLimits:
    overflow: Any = rng.choice(["block", "block", "block", "fail"] + ["spill"] * 3 * stored)
    return ResultLimits(
        max_items=rng.choice([2, 10, 50]),
        max_bytes=rng.choice([1, 3, 128]) << 20,
        window=rng.choice([1, 5, 20]),
        window_bytes=rng.choice([1, 32]) << 20,
        overflow=overflow,
    )


# what must hold


def check_story(story: Story, *, faults: bool, closed: bool) -> None:
    """Checks what was read of a job that has ended."""
    spec, text = story.spec, f"{story.spec}\n{story.status} {story.reason} {story.cause!r}"
    offsets = [offset for offset, _ in story.events]
    first = offsets[0] if story.late and offsets else 0
    assert offsets == list(range(first, first + len(offsets))), f"offsets are not contiguous: {offsets}\n{text}"
    assert story.status.ended, f"not ended\n{text}"
    notes = [note for _, note in story.events]
    if not story.cut:
        assert notes, f"an empty log\n{text}"
        assert isinstance(notes[-1], StatusChanged), f"the log ends with {notes[-1]}\n{text}"
        assert notes[-1].status is story.status, f"the log ends with {notes[-1]}\n{text}"
    facts = Counter(note for note in notes if isinstance(note, tuple))
    lost = any(kind == "worker lost" for kind, *_ in facts)
    hit = {frame[0] for kind, _, frame, _ in facts if kind in ("worker lost", "call lost")}
    if hit:
        assert faults, f"nobody has touched a worker\n{text}"
        assert not spec.survives, f"these were not run again: {hit}\n{text}"
    done = [note.frame[0] for note in notes if isinstance(note, FrameCompleted)]
    assert len(set(done)) == len(done), f"parameter sets were completed more than once: {done}\n{text}"
    expected = facts_of(interpret(spec.pipeline, functions, spec.sets))
    _check_hit(_of_sets(facts, hit), _of_sets(expected, hit), text)
    facts, expected = (found - _of_sets(found, hit) for found in (facts, expected))
    assert not (more := facts - expected), f"repeated, or wrong: {more}\n{text}"
    complete = Counter({fact: n for fact, n in expected.items() if fact[2][0] in set(done)})
    assert not (less := complete - facts), f"done, but these did not come: {less}\n{text}"
    failing = lost or any(fact[0] == "error" for fact in expected)
    # Without a call that is handled, others may fail; or a worker was lost in what was not read.
    unsure = (bool(hit) and not lost) or (story.cut and faults)
    _check_status(story, expected, facts, done, text, failing=None if unsure else failing)
    if story.status is JobStatus.ABORTED:
        _check_reason(story, faults=faults, closed=closed, text=text)


def _of_sets(facts: Counter[Fact], sets: set[int]) -> Counter[Fact]:
    return Counter({fact: n for fact, n in facts.items() if fact[2][0] in sets})


def _check_hit(facts: Counter[Fact], expected: Counter[Fact], text: str) -> None:
    """Check parameter sets with a call that was lost: what they yield may be missing, but does not come twice."""
    found, known = (
        Counter((fact[1], fact[2]) for fact in all_of.elements() if fact[0] in ("result", "lost"))
        for all_of in (facts, expected)
    )
    assert not (more := found - known), f"repeated after the loss of a worker: {more}\n{text}"


def _check_status(
    story: Story,
    expected: Counter[Fact],
    facts: Counter[Fact],
    done: Iterable[int],
    text: str,
    *,
    failing: bool | None,
) -> None:
    spec = story.spec
    limits = spec.execute.get("options")
    stops = spec.execute.get("on_error") == "stop" or (limits is not None and limits.overflow == "fail")
    if story.status is JobStatus.FINISHED or (story.status is JobStatus.FAILED and not stops):
        assert failing in (None, story.status is JobStatus.FAILED), text
        assert story.sent_all, f"ended before all parameter sets came\n{text}"
        if not story.cut:
            assert facts == expected, f"missing: {expected - facts}\n{text}"
        if not story.cut and not story.late:
            assert sorted(done) == list(range(len(spec.sets))), text


def _check_reason(story: Story, *, faults: bool, closed: bool, text: str) -> None:
    spec = story.spec
    if isinstance(story.cause, WorkerLost) or "a worker of site" in (story.reason or ""):  # stored are only words
        assert faults, f"nobody has touched a worker\n{text}"
        return
    known = [
        story.cancelled and story.reason == "cancelled",
        "deadline" in spec.execute and "deadline" in (story.reason or ""),
        closed and "the session" in (story.reason or ""),
    ]
    assert any(known), f"aborted for no reason\n{text}"


def facts_of(outcome: Outcome) -> Counter[Fact]:
    """What a job without any trouble tells."""
    facts: Counter[Fact] = Counter(
        ("result", place, frame, comparable(value)) for place, frame, value in outcome.results
    )
    facts.update(("lost", place, frame, None) for place, frame in outcome.lost)
    facts.update(("error", node, frame, None) for node, frame in outcome.errors)
    return facts
