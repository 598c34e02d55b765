"""Measure or sample jobs: a profile gets the spans of the jobs that are executed while it is open."""

from __future__ import annotations

from typing import Generic, TypeVar

from dfm_async.engine.job_table import JobControl
from dfm_async.planning.profile import Profile
from dfm_async.telemetry.cpu_profile import CpuProfile
from dfm_async.telemetry.spans import APPLICATION, Span
from dfm_async.telemetry.traces import Traces

P = TypeVar("P", bound=Profile | CpuProfile)


class SessionProfile:
    """Everything that a session has measured, and the profiles that are open. It is a sink of spans."""

    def __init__(self, traces: Traces, homesite: str) -> None:
        self._traces = traces
        self._homesite = homesite
        self._all = Profile()
        self._open: list[Profile | CpuProfile] = []
        self._jobs: dict[str, list[Profile | CpuProfile]] = {}
        """The measured jobs that have not ended, and their profiles."""

    def measured(self) -> Profile:
        """Return what was measured so far."""
        self._traces.flush()
        return self._all

    @property
    def measuring(self) -> bool:
        """Whether jobs that begin now are measured."""
        return bool(self._open) and any(isinstance(profile, Profile) for profile in self._open)

    @property
    def sampling(self) -> bool:
        """Whether calls of jobs that begin now are sampled."""
        return bool(self._open) and any(isinstance(profile, CpuProfile) for profile in self._open)

    def watch(self, coordinator: JobControl) -> None:
        """Measure a job that begins, if a profile is open."""
        if self._open and coordinator.trace is not None:
            self._jobs[coordinator.record.job_id] = [self._all, *self._open]

    def enter(self, profile: Profile | CpuProfile) -> None:
        """Open a profile."""
        self._open.append(profile)
        self._traces.add(self)

    def leave(self, profile: Profile | CpuProfile) -> None:
        """Close a profile for further jobs; those that it measures are measured to their ends."""
        self._open = [other for other in self._open if other is not profile]
        self._traces.flush()
        self._settle()

    def _settle(self) -> None:
        if not self._open and not self._jobs:
            self._traces.remove(self)

    # as a sink

    def open(self) -> None:
        """Do nothing: the session begins."""

    def close(self) -> None:
        """Do nothing: the session has ended."""

    def write(self, spans: list[Span]) -> None:
        """Measure the spans of its jobs."""
        for span in spans:
            job = str(span.attributes.get("dfm.job"))
            profiles = self._jobs.get(job)
            if profiles is None:
                continue
            if span.name == "dfm.job":
                del self._jobs[job]
                continue
            for sampled in profiles:
                if isinstance(sampled, CpuProfile):
                    sampled.add(span)
            if span.status == "ok":
                self._measure(span, [profile for profile in profiles if isinstance(profile, Profile)])
        self._settle()

    def _measure(self, span: Span, profiles: list[Profile]) -> None:
        found = span.attributes
        seconds = max(span.end - span.start, 0) / 1e9
        if span.name == "dfm.hop":
            source, target = (self._site(str(found[end])) for end in ("dfm.from", "dfm.to"))
            if source != target:
                for profile in profiles:
                    profile.add_send(source, target, float(found["dfm.bytes"]), seconds)
        elif span.name == "dfm.operation" and "dfm.bytes_out" in found:
            provider = str(found["dfm.provider"]) if "dfm.provider" in found else None
            given, made = float(found.get("dfm.bytes_in", 0)), float(found["dfm.bytes_out"])
            for profile in profiles:
                profile.add_call(span.process, str(found["dfm.operation"]), provider, given, seconds, made)

    def _site(self, process: str) -> str:
        return self._homesite if process == APPLICATION else process


class Profiling(Generic[P]):
    """Measure the jobs that are executed while it is entered: ``with session.profile() as profile``."""

    def __init__(self, session: SessionProfile, profile: P) -> None:
        self._session = session
        self._profile = profile
        self._entered = False

    def __enter__(self) -> P:
        if self._entered:
            raise RuntimeError("a profile is entered once; call session.profile() again for another one")
        self._entered = True
        self._session.enter(self._profile)
        return self._profile

    def __exit__(self, *_: object) -> None:
        self._session.leave(self._profile)

    async def __aenter__(self) -> P:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
