"""Measure jobs: a profile gets the spans of the jobs that are executed while it is open."""

from __future__ import annotations

from dfm_async.engine.jobs import JobControl
from dfm_async.planning.profile import Profile
from dfm_async.telemetry.spans import APPLICATION, Span
from dfm_async.telemetry.traces import Traces


class SessionProfile:
    """Everything that a session has measured, and the profiles that are open. It is a sink of spans."""

    def __init__(self, traces: Traces, homesite: str) -> None:
        self._traces = traces
        self._homesite = homesite
        self._all = Profile()
        self._open: list[Profile] = []
        self._jobs: dict[str, list[Profile]] = {}
        """The measured jobs that have not ended, and their profiles."""

    def measured(self) -> Profile:
        """Return what was measured so far."""
        self._traces.flush()
        return self._all

    @property
    def measuring(self) -> bool:
        """Whether jobs that begin now are measured."""
        return bool(self._open)

    def watch(self, coordinator: JobControl) -> None:
        """Measure a job that begins, if a profile is open."""
        if self._open and coordinator.trace is not None:
            self._jobs[coordinator.record.job_id] = [self._all, *self._open]

    def enter(self, profile: Profile) -> None:
        """Open a profile."""
        self._open.append(profile)
        self._traces.add(self)

    def leave(self, profile: Profile) -> None:
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
            elif span.status == "ok":
                self._measure(span, profiles)
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


class Profiling:
    """Measure the jobs that are executed while it is entered: ``with session.profile() as profile``."""

    def __init__(self, session: SessionProfile) -> None:
        self._session = session
        self._profile: Profile | None = None

    def __enter__(self) -> Profile:
        if self._profile is not None:
            raise RuntimeError("a profile is entered once; call session.profile() again for another one")
        self._profile = Profile()
        self._session.enter(self._profile)
        return self._profile

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._session.leave(self._profile)

    async def __aenter__(self) -> Profile:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
