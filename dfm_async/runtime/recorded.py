"""The elements of a generator that are recorded: those of an earlier run come first, and are not produced again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dfm_async.errors import StoreError
from dfm_async.model.ids import Frame
from dfm_async.runtime.operation_errors import is_our_cancellation
from dfm_async.runtime.sources import AsyncSource, IteratorCancelled, Source
from dfm_async.wire.codec import Broken, Codec, Packed

if TYPE_CHECKING:
    from dfm_async.site.checkpoints import JobCheckpoints, RecordedElements

RESUME_FROM: Final = "resume_from"
"""The parameter of operations that can begin after the elements that are recorded."""


class Recording(msgspec.Struct, eq=False):
    """Where the elements of one call are recorded, and what an earlier run has recorded.

    Attributes:
        checkpoints: the checkpoints of the job.
        codec: encodes the elements.
        node: the node of the call.
        frame: the frame of the call.
        count: how many elements are recorded.
        ended: whether these are all elements.
        resumed: whether the call begins after these elements; else it produces them again, and they are skipped.
    """

    checkpoints: JobCheckpoints
    codec: Codec
    node: str
    frame: Frame
    count: int = 0
    ended: bool = False
    resumed: bool = False


class _Element:
    """An element as its reader gets it, and as it is recorded."""

    __slots__ = ("packed", "value")

    def __init__(self, value: Any, packed: Any) -> None:
        self.value = value
        self.packed = packed

    @property
    def nbytes(self) -> int:
        """The number of its bytes, if it is large."""
        return self.packed.size if type(self.packed) is Packed else 0


class RecordedSource:
    """Record the elements of another source before they are read.

    Elements are encoded when they are produced, and written in the batches in which they are read. A reader gets a
    batch when it is committed. If another process has recorded elements meanwhile, the reader gets those.

    Args:
        recording: where they are recorded.
        producer: the other source; None if all elements are recorded.
    """

    def __init__(self, recording: Recording, producer: Any) -> None:
        self.producer: Source | None = producer
        self.transform: Callable[[Any], Any] | None = None
        """Applied to each element for its reader."""
        self._recording = recording
        self._position = 0
        """How many elements have come: from the file, or to it."""
        self._skip = 0 if recording.resumed else recording.count
        self._uncommitted: list[_Element] | None = None
        self._ready: deque[Any] = deque()
        self._ended = False
        if producer is not None:
            producer.transform = self._encoded

    def _encoded(self, value: Any) -> _Element:
        pack, transform = self._recording.codec.pack, self.transform
        packed = pack(value)
        if transform is None:
            return _Element(value, packed)
        return _Element(packed if transform == pack else transform(value), packed)

    async def get(self, limit: int) -> list[Any]:
        """Wait for elements, and return at most ``limit`` of them; none at the end.

        Raises:
            StoreError: they cannot be recorded, or what is recorded cannot be read.
            BaseException: what the iterator raised.
        """
        while not self._ready and not self._ended:
            if self._position < self._recording.count:
                await self._recall()
            elif self.producer is None or self._recording.ended:
                self._ended = True
            else:
                await self._produce(self.producer, limit)
        return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]

    async def _recall(self) -> None:
        """Read elements that an earlier run has recorded."""
        recording = self._recording
        batches = await recording.checkpoints.elements(recording.node, recording.frame, self._position)
        for first, data in batches:
            if first > self._position:
                break
            if self._position >= recording.count:
                break  # another process has recorded more meanwhile; that is noticed when ours records the same
            for value in recording.codec.loads_batch(data)[self._position - first :]:
                if isinstance(value, Broken):
                    raise value.error
                self._ready.append(value if self.transform is None else self.transform(value))
                self._position += 1
        if not self._ready:
            which = f"element {self._position} of {recording.node} in frame {list(recording.frame)}"
            raise StoreError(
                "the checkpoints", f"{which} is missing", "Restore the file from a copy, or forget the job"
            )

    async def _produce(self, producer: Source, limit: int) -> None:
        """Get elements from the iterator, and record them. What was not recorded is kept if this is cancelled."""
        if self._uncommitted is None:
            found = await self._produced(producer, limit)
            if skipped := min(self._skip, len(found)):
                self._skip -= skipped
                del found[:skipped]
                if not found:
                    return
            if self._ended:  # it was closed meanwhile
                return
            self._uncommitted = found
        recording, new = self._recording, self._uncommitted
        data = recording.codec.dumps([element.packed for element in new]) if new else b""
        record = recording.checkpoints.record_elements
        other = await record(recording.node, recording.frame, self._position, len(new), data)
        if other is not None:
            self._adopt(other, new)
            return
        self._uncommitted = None
        self._position += len(new)
        self._ended = self._ended or not new
        self._ready.extend(element.value for element in new)

    def _adopt(self, other: RecordedElements, new: list[_Element]) -> None:
        """Go on behind the elements that another process has recorded, and drop those that are in their place here."""
        self._recording.count, self._recording.ended = other.count, other.ended
        replaced = other.count - self._position
        if new and replaced >= len(new):
            self._uncommitted, self._skip = None, replaced - len(new)
        else:
            self._uncommitted = new[replaced:]

    @staticmethod
    async def _produced(producer: Source, limit: int) -> list[Any]:
        try:
            return await producer.get(limit)
        except asyncio.CancelledError as error:
            if isinstance(producer, AsyncSource) and not is_our_cancellation(error):
                raise IteratorCancelled from error  # it has passed through the iterator, which has ended with it
            raise

    async def aclose(self) -> None:
        """End the other source, and drop what was not read."""
        self._ended = True
        self._ready.clear()
        if self.producer is not None:
            await self.producer.aclose()

    async def wait_ended(self) -> None:
        """Wait until no code of the other source runs any longer."""
        if self.producer is not None:
            await self.producer.wait_ended()
