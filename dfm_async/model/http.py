"""How HTTP services are asked. Plain data."""

from __future__ import annotations

import msgspec

from dfm_async.model.policies import RetryPolicy

__all__ = ["HttpOptions"]


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an HTTP service is asked.

    Attributes:
        timeout: how many seconds one try may take, from the connection to the end of the answer.
        connect_timeout: how many of them the connection may take.
        retry: how often it is asked again, and after which pauses. That is done if it could not be reached; and, for
            methods that do no harm if they run twice, if the connection broke, or it did not answer in time, or with
            429, 500, 502, 503 or 504. If the service names a longer pause (``Retry-After``), that counts; but one
            longer than ``max_backoff`` is not waited for.
        retry_unsafe: treat also POST and PATCH as methods that do no harm if they run twice.
        max_bytes: how large an answer may be, unpacked.
        proxy: the address of a proxy. The environment is not looked at.
    """

    timeout: float = 30.0
    connect_timeout: float = 10.0
    retry: RetryPolicy = RetryPolicy(attempts=3, backoff=0.5, max_backoff=60.0)
    retry_unsafe: bool = False
    max_bytes: int = 64 * 1024 * 1024
    proxy: str | None = None

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.connect_timeout <= 0:
            raise ValueError("timeout and connect_timeout must be positive")
        if self.max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, not {self.max_bytes}")
