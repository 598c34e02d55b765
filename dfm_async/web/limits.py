"""What a service takes from its clients, and gives to them, at most."""

from __future__ import annotations

import msgspec

__all__ = ["WebLimits"]


class WebLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a service takes from its clients, and gives to them, at most. All defaults are good ones."""

    body_bytes: int = 1024 * 1024
    """How many bytes the body of a request may have."""
    body_seconds: float = 30.0
    """How many seconds the body of a request may take to come."""
    upload_bytes: int = 64 * 1024 * 1024
    """How many bytes of bodies are held at the same time, of all clients together."""
    uploads_per_principal: int = 200
    """How many requests with a body one principal may have under way."""
    inputs_per_job: int = 20
    """How many requests may wait until a job has room for their parameter sets."""
    json_depth: int = 64
    """How deeply lists and objects may be nested in a request."""
    jobs_per_principal: int = 100
    """How many jobs of one principal may be under way."""
    idle_jobs_per_principal: int = 20
    """How many jobs of one principal may wait for inputs without any work."""
    streams_per_principal: int = 500
    """How many streams one principal may have open."""
    streams: int = 1000
    """How many streams may be open in all."""
    page_size: int = 1000
    """How many jobs or records one page may have."""
    stall: float = 30.0
    """For how many seconds a client may take nothing of what is written to it; then its stream ends."""
    heartbeat: float = 15.0
    """After how many seconds without an event a stream says that it is alive."""
    retry: float = 2.0
    """After how many seconds a client is asked to come back."""
    record_bytes: int = 4 * 1024 * 1024
    """How many bytes of JSON one record may have; of larger values only a summary is sent."""
    array_items: int = 10_000
    """How many elements of an array are sent as lists; of larger ones only a summary is sent."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a positive number, not {value!r}")
