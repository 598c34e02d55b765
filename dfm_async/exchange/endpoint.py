"""One end of a connection, as far as both ends are alike: heartbeats, messages that must be answered, large parts.

Pure: events come in by method calls, effects are collected in :attr:`Endpoint.effects`, and the clock is injected. A
:class:`~dfm_async.exchange.connection.Connection` carries the effects out, and calls :meth:`Endpoint.wake` in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dfm_async.exchange.options import ExchangeOptions
from dfm_async.exchange.program_messages import Beat, Chunk, Message, TransferReport, Withdrawn
from dfm_async.exchange.progress import ProgressTracker, TransferState
from dfm_async.exchange.transfers import Download, MemorySink, OutgoingTransfer, Sink

_HEARTBEATS: Final = 3
"""The number of heartbeats per heartbeat timeout of the other side: one or two may be late."""
_CONNECTION: Final = frozenset({Beat, Chunk, TransferReport, Withdrawn})
"""The messages that are about the connection itself."""
_RETRIES: Final = 3
"""The number of times that chunks are requested again if ``max_resends`` is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeTraits:
    """What a transport can do.

    Attributes:
        reliable: whether all that is sent arrives unchanged, as long as the connection lasts. If not, messages are
            sent again until they are answered, and chunks carry checksums.
        shows_progress: whether large parts are transferred in chunks; else they are inside the messages.
        has_metrics: whether metrics can be sent.
    """

    reliable: bool = True
    shows_progress: bool = True
    has_metrics: bool = True


class Liveness(AbstractContextManager[None]):
    """Keeps the times at which messages were sent and received.

    Any message counts as a heartbeat, in both directions. While a payload moves, or is decoded, the other end never
    counts as gone: its time starts at the end of the payload. ``with`` is for payloads that one block covers.

    Args:
        interval: how long this end may send nothing, in seconds.
        timeout: how long the other end may send nothing, in seconds; 0 means for ever.
        clock: returns the time, in seconds; must never go back.
    """

    __slots__ = ("_clock", "_interval", "_payloads", "_received", "_sent", "_timeout")

    def __init__(self, interval: float, timeout: float, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._timeout = timeout
        self._clock = clock
        self._received = self._sent = clock()
        self._payloads = 0

    def received(self) -> None:
        """Note that a message has come."""
        self._received = self._clock()

    def sent(self) -> None:
        """Note that a message was sent."""
        self._sent = self._clock()

    def payload_begins(self) -> None:
        """Note that a payload begins to move or to be decoded."""
        self._payloads += 1

    def payload_ends(self) -> None:
        """Note that a payload has ended."""
        self._payloads -= 1
        self._received = self._clock()

    def __enter__(self) -> None:
        self.payload_begins()

    def __exit__(self, *_: object) -> None:
        self.payload_ends()

    @property
    def silence(self) -> float:
        """The time since the last message was received, in seconds."""
        return self._clock() - self._received

    # Times are compared as :meth:`wake_at` computes them: rounding must not make one early, and wake at once again.

    @property
    def heartbeat_due(self) -> bool:
        """Whether this end must send a heartbeat."""
        return self._clock() >= self._sent + self._interval

    @property
    def peer_gone(self) -> bool:
        """Whether the other end has exceeded the heartbeat timeout."""
        return self._timeout > 0 and not self._payloads and self._clock() >= self._received + self._timeout

    def wake_at(self) -> float:
        """Return when to check again, after a heartbeat that is due was sent."""
        due = self._sent + self._interval
        if not self._timeout:
            return due
        return min(due, (self._clock() if self._payloads else self._received) + self._timeout)


# effects


class SendMessage(msgspec.Struct, frozen=True, gc=False):
    """Send a message."""

    message: Message


class SendChunks(msgspec.Struct, frozen=True, gc=False):
    """Send what :meth:`Endpoint.next_chunk` returns, until it returns None."""


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """End the connection at once: the other end does not react."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """A message that the other end must answer."""

    message: Message
    limit: float | None
    what: str
    upload: OutgoingTransfer | None
    resends: float
    started: float
    resend_at: float = math.inf

    @property
    def due(self) -> float:
        """When the answer is too late; later while the large parts make progress."""
        if self.limit is None:
            return math.inf
        return max(self.started, -math.inf if self.upload is None else self.upload.reported_at) + self.limit


class Endpoint:
    """One end of a connection.

    Args:
        options: how long to wait for what.
        traits: what the transport can do.
        clock: returns the time, in seconds; must never go back.
        silence: how long the other end accepts that nothing is sent, in seconds; 0 means for ever.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        traits: PipeTraits,
        clock: Callable[[], float],
        silence: float = 0.0,
    ) -> None:
        self.traits = traits
        self.clock = clock
        self.effects: deque[Any] = deque()
        """What to do, in order."""
        self.gone: str | None = None
        """Why the other end is gone; None if it is not."""
        self.silent = False
        """Whether the other end is gone because it sent no heartbeat: its process may still run."""
        self._common = options
        self._closing = False
        self._uploads: dict[str, OutgoingTransfer] = {}
        self._downloads: dict[tuple[str, str], Download] = {}
        self._requests: dict[str, _Request] = {}
        interval = options.heartbeat_interval
        if silence:
            interval = min(interval, silence / _HEARTBEATS)
        self._liveness = Liveness(interval, options.heartbeat_timeout, clock)
        self.due = self._liveness.wake_at()
        """When :meth:`wake` has to be called; it may be called earlier."""

    # what the two ends do differently

    def handle(self, message: Message) -> None:
        """Take a message that is not about the connection itself."""
        raise NotImplementedError

    def peer_gone(self, reason: str) -> None:
        """Take note that the other end is gone."""
        raise NotImplementedError

    def request_failed(self, key: str, error: TimeoutError | None) -> None:
        """Take note that a request was not answered in time, or never will be because the other end is gone (None)."""
        raise NotImplementedError

    def download_ended(self, download: Download) -> None:
        """Take note that a download is complete, or has failed."""

    def upload_changed(self, upload: OutgoingTransfer) -> None:
        """Take note of a report of a receiver."""

    def check_time(self) -> None:
        """Do what is due by now."""

    def next_time(self) -> float:
        """Return when something is due."""
        return math.inf

    # events

    def received(self, message: Message, size: int = 0) -> None:
        """Take a message; ``size`` is the number of bytes that came with a chunk."""
        self._liveness.received()
        if type(message) not in _CONNECTION:
            self.handle(message)
        elif isinstance(message, Chunk):
            download = self._downloads.get((message.tx, message.receiver))
            if download is not None:
                download.received(message, size)
                self._check_download(download)
        elif isinstance(message, TransferReport):
            upload = self._uploads.get(message.tx)
            if upload is not None:
                upload.report(message, self.clock())
                self.upload_changed(upload)
                self.due = min(self.due, self.next_time())
                if upload.has_chunks:
                    self.effects.append(SendChunks())
            elif TransferState.of(message.state) is TransferState.ACTIVE:
                self.send(Withdrawn(message.tx))
        elif isinstance(message, Withdrawn):
            self.fail_downloads(message.reason or "it is not offered any longer", "aborted", message.tx)

    def lost(self, reason: str) -> None:
        """Take note that the connection has ended."""
        if self.gone is None:
            self.gone = reason
            self.fail_downloads(reason)
            for key in list(self._requests):
                self.answered(key)
                self.request_failed(key, None)
            if not self._closing:
                self.peer_gone(reason)

    def wake(self) -> None:
        """Do what is due by now."""
        if self.gone is None:
            self._wake(self.clock())
        self.check_time()
        self.due = self._next_due()

    def _wake(self, now: float) -> None:
        if self._liveness.peer_gone:
            self.silent = True
            self.lost(f"no heartbeat for {self._liveness.silence:.1f} s")
            self.effects.append(Disconnect())
            return
        if self._liveness.heartbeat_due:
            self.send(Beat())
        for key, request in list(self._requests.items()):
            if now >= request.due:
                self.answered(key)
                self.request_failed(key, TimeoutError(f"{request.what} took longer than {request.limit:g} s"))
            elif now >= request.resend_at:
                self.send(request.message)
                request.resends -= 1
                request.resend_at = now + self._common.resend_interval if request.resends else math.inf
        for download in list(self._downloads.values()):
            download.wake()
            self._check_download(download)

    def _next_due(self) -> float:
        found = self.next_time()
        if self._closing or self.gone is not None:
            return found
        found = min(found, self._liveness.wake_at())
        for request in self._requests.values():
            found = min(found, request.due, request.resend_at)
        for download in self._downloads.values():
            found = min(found, download.wake_at())
        return found

    def close(self) -> None:
        """Send nothing any longer, and abandon what is being pulled or offered."""
        self._closing = True
        for tx in list(self._uploads):
            self.withdraw(tx)
        self.fail_downloads("the connection was closed here", "aborted")

    # sending

    def send(self, message: Message) -> None:
        """Send a message."""
        if not self._closing:
            self._liveness.sent()
            self.effects.append(SendMessage(message))

    def request(self, key: str, message: Message, limit: float | None, what: str) -> None:
        """Send a message that must be answered, again and again where it can be lost.

        Args:
            key: the id of the task or result; :meth:`answered` takes the same.
            message: the message; it has no large parts, so that it is cheap to send again.
            limit: how long the answer may take, in seconds; longer while the upload of this key makes progress.
            what: what is waited for, in words.
        """
        resends: float = 0
        if not self.traits.reliable:
            resends = math.inf if self._common.max_resends is None else self._common.max_resends
        now = self.clock()
        request = self._requests[key] = _Request(
            message=message,
            limit=limit,
            what=what,
            upload=self._uploads.get(key),
            resends=resends,
            started=now,
            resend_at=now + self._common.resend_interval if resends else math.inf,
        )
        if limit is not None:  # the other end may be busy with decoding it; the limit says for how long
            self._liveness.payload_begins()
        if self.gone is not None:
            self.answered(key)
            self.request_failed(key, None)
        else:
            self.due = min(self.due, request.due, request.resend_at)
            self.send(message)

    def answered(self, key: str) -> bool:
        """End a request. Return whether it was pending."""
        request = self._requests.pop(key, None)
        if request is not None and request.limit is not None:
            self._liveness.payload_ends()
        return request is not None

    def payload(self) -> AbstractContextManager[None]:
        """Return a context: while a payload is encoded or decoded here, silence of the other end means nothing."""
        return self._liveness

    # large parts

    def upload(self, tx: str, parts: Mapping[int, memoryview], receivers: Sequence[str]) -> OutgoingTransfer:
        """Offer large parts. The caller withdraws them."""
        tracker = ProgressTracker(idle_timeout=self._common.streaming_idle_timeout, clock=self.clock)
        found = self._uploads[tx] = OutgoingTransfer(tx, parts, receivers, tracker, checksums=not self.traits.reliable)
        return found

    def withdraw(self, tx: str) -> None:
        """Free what was offered. Receivers that do not have all of it are notified: they must not wait for it."""
        upload = self._uploads.pop(tx, None)
        if upload is not None and upload.free():
            self.send(Withdrawn(tx))

    def next_chunk(self) -> tuple[Chunk, memoryview] | None:
        """Return the next chunk to send; None if none is requested."""
        for upload in self._uploads.values():
            found = upload.next_chunk()
            if found is not None:
                self._liveness.sent()
                return found
        return None

    def download(
        self,
        tx: str,
        parts: Sequence[tuple[int, int]],
        receiver: str,
        sink: Callable[[int, int], Sink] = lambda _number, size: MemorySink(size),
    ) -> Download:
        """Prepare to pull all large parts of a task or result; :meth:`pull` begins.

        Raises:
            TransferFailed: a part does not fit.
        """
        options = self._common
        lossy = not self.traits.reliable
        return Download(
            tx,
            parts,
            receiver,
            sink,
            send=self.send,
            clock=self.clock,
            idle_timeout=options.streaming_idle_timeout,
            resend_interval=options.resend_interval if lossy else math.inf,
            retries=0 if not lossy else _RETRIES if options.max_resends is None else options.max_resends,
        )

    def pull(self, download: Download) -> None:
        """Begin a download, or resume one that was interrupted by :meth:`pause`."""
        if self._downloads.get(download.key) is download:
            return
        self._downloads[download.key] = download
        self._liveness.payload_begins()
        if self.gone is not None:
            download.fail(self.gone)
        download.start()
        self.due = min(self.due, download.wake_at())
        self._check_download(download)

    def pause(self, download: Download) -> None:
        """Interrupt a download: chunks that come are dropped until :meth:`pull` resumes it."""
        if self._downloads.get(download.key) is download:
            del self._downloads[download.key]
            self._liveness.payload_ends()

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """Return the memory for the bytes of a chunk; None if nobody waits for it."""
        download = self._downloads.get((chunk.tx, chunk.receiver))
        return download.room(chunk, size) if download is not None else None

    def fail_downloads(self, reason: str, state: str = "failed", tx: str | None = None) -> None:
        """Abandon everything that is being pulled, or that of one task or result."""
        for download in list(self._downloads.values()):
            if tx is None or download.tx == tx:
                download.fail(reason, state)
                self._check_download(download)

    def _check_download(self, download: Download) -> None:
        if download.ended and self._downloads.get(download.key) is download:
            self.pause(download)
            self.download_ended(download)
