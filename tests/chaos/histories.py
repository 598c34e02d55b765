"""What clients of replicas did and saw, and whether that can be true of jobs that are each run once. Pure.

Every parameter set of a job has a number of its own, and yields ``RESULTS`` values: the number, their index, a text
that was drawn by a call, and the event that the set has waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

RESULTS = 3
"""The number of results of a parameter set."""


class Outcome(Enum):
    """What a client knows about an operation."""

    DONE = "done"
    REFUSED = "refused"
    """It had no effect, and never will have."""
    UNKNOWN = "unknown"
    """There was no answer: it may have had an effect, or have it later."""


@dataclass(frozen=True)
class Seen:
    """One event of a job, as a client has read it."""

    offset: int
    text: str
    """The whole event, to compare it."""
    result: tuple[int, int] | None = None
    """The number of the parameter set and the index of the value, if it is a result."""
    drawn: str = ""
    """What was drawn for the parameter set."""
    event: int = 0
    """The event that the parameter set has taken."""


@dataclass
class SentEvent:
    """An event that a client has sent. Of its times, only the order matters."""

    value: int
    began: float
    ended: float = float("inf")
    outcome: Outcome = Outcome.UNKNOWN


@dataclass
class JobHistory:
    """What happened to one job."""

    recorded: bool = False
    """Whether its calls are recorded, so that none is repeated whose value was used."""

    submitted: Outcome = Outcome.DONE
    sent: list[tuple[int, Outcome]] = field(default_factory=list)
    """The parameter sets, by their numbers."""
    stopped: list[Outcome] = field(default_factory=list)
    cancelled: list[Outcome] = field(default_factory=list)
    resumed: list[Outcome] = field(default_factory=list)
    events: list[SentEvent] = field(default_factory=list)
    """The events that were sent to its only parameter set, which takes one."""
    reads: list[list[Seen]] = field(default_factory=list)
    """What each reader has seen, from the first event on, over all its connections."""
    ends: list[str] = field(default_factory=list)
    """The last status of the job, at each replica."""
    logs: list[list[Seen]] = field(default_factory=list)
    """The whole log of the job at the end, at each replica."""


@dataclass(frozen=True)
class Commit:
    """The moment when a replica has written some jobs."""

    at: float
    owner: int
    jobs: Sequence[str]


@dataclass(frozen=True)
class Death:
    """The moment when a replica was killed, and the jobs that it ran."""

    at: float
    owner: int
    jobs: Sequence[str]


def takeovers(deaths: Sequence[Death], commits: Sequence[Commit], owners: Mapping[str, int]) -> dict[str, float]:
    """Return after how many seconds jobs of killed replicas were first written by another one; infinite if never.

    Jobs that a replica has ended with its last commit, as its killer was looking, have it as their last owner.
    """
    found: dict[str, float] = {}
    for death in deaths:
        for job in death.jobs:
            later = (
                each.at for each in commits if each.at > death.at and each.owner != death.owner and job in each.jobs
            )
            after = next(later, None)
            if after is not None or owners[job] != death.owner:
                found[f"{job} of {death.owner}"] = float("inf") if after is None else after - death.at
    return found


def problems(job: JobHistory) -> list[str]:
    """Return everything about a job that must not be."""
    if job.submitted is not Outcome.DONE:
        return []
    found: list[str] = []
    if not job.ends or len(set(job.ends)) > 1:
        return [f"the replicas disagree about its end: {job.ends}"]
    (end,) = set(job.ends)
    wanted = Outcome.DONE in job.stopped or any(outcome is not Outcome.REFUSED for outcome in job.cancelled)
    if end not in ("finished", "aborted") and wanted:
        found.append(f"it was stopped or cancelled, but is {end}")
    if end == "aborted" and all(outcome is Outcome.REFUSED for outcome in job.cancelled):
        found.append("it is aborted, but nobody has cancelled it")
    if end == "finished" and all(outcome is Outcome.REFUSED for outcome in job.stopped):
        found.append("it is finished, but nobody has closed its inputs")
    for at, log in enumerate(job.logs):
        found += [f"log {at}: {problem}" for problem in _log_problems(log)]
    if any(log != job.logs[0] for log in job.logs):
        found.append("the replicas have different logs")
    for at, read in enumerate(job.reads):
        found += [f"reader {at}: {problem}" for problem in _read_problems(read, job.logs[0])]
    return found + _result_problems(job, end) + _value_problems(job)


def _log_problems(log: list[Seen]) -> list[str]:
    offsets = [seen.offset for seen in log]
    if offsets != list(range(len(log))):
        return [f"its offsets have gaps or repetitions: {offsets}"]
    counts = Counter(seen.result for seen in log if seen.result is not None)
    return [f"result {result} is there {count} times" for result, count in counts.items() if count > 1]


def _read_problems(read: list[Seen], log: list[Seen]) -> list[str]:
    offsets = [seen.offset for seen in read]
    if offsets != list(range(len(read))):
        return [f"the offsets that it was given have gaps or repetitions: {offsets}"]
    if len(read) > len(log):
        return [f"it has read {len(read)} events, but {len(log)} are left"]
    changed = [seen.offset for seen, kept in zip(read, log, strict=False) if seen != kept]
    return [f"events that it has read are others now: {changed}"] if changed else []


def _result_problems(job: JobHistory, end: str) -> list[str]:
    found: list[str] = []
    results: dict[int, set[int]] = {}
    for seen in job.logs[0] if job.logs else []:
        if seen.result is not None:
            results.setdefault(seen.result[0], set()).add(seen.result[1])
    outcomes: dict[int, list[Outcome]] = {}
    for number, outcome in job.sent:  # one that was refused may have been sent again
        outcomes.setdefault(number, []).append(outcome)
    for number in results.keys() - outcomes.keys():
        found.append(f"there are results of set {number}, which nobody has sent")
    for number, attempts in outcomes.items():
        indexes = results.get(number, set())
        if indexes and all(outcome is Outcome.REFUSED for outcome in attempts):
            found.append(f"there are results of set {number}, which was refused")
        if end == "finished" and Outcome.DONE in attempts and len(indexes) < RESULTS:
            found.append(f"set {number} was accepted, but has the results {sorted(indexes)}")
        if end == "finished" and 0 < len(indexes) < RESULTS:
            found.append(f"set {number} has the results {sorted(indexes)} only")
    return found


def _value_problems(job: JobHistory) -> list[str]:
    results = [seen for seen in job.logs[0] if seen.result is not None] if job.logs else []
    drawn: dict[int, set[str]] = {}
    for seen in results:
        assert seen.result is not None
        drawn.setdefault(seen.result[0], set()).add(seen.drawn)
    found = [
        f"a recorded call of set {number} was repeated: {sorted(texts)}"
        for number, texts in drawn.items()
        if job.recorded and len(texts) > 1
    ]
    taken = {seen.event for seen in results}
    if len(taken) > 1:
        found.append(f"its parameter set has taken several events: {sorted(taken)}")
    for value in taken if job.events else ():
        sent = [event for event in job.events if event.value == value]
        if all(event.outcome is Outcome.REFUSED for event in sent):
            found.append(f"it has taken the event {value}, which was {'refused' if sent else 'never sent'}")
            continue
        began = min(event.began for event in sent)
        lost = [event.value for event in job.events if event.outcome is Outcome.DONE and event.ended < began]
        if lost:
            found.append(f"it has taken the event {value}, but {lost} were accepted before that was sent")
    return found
