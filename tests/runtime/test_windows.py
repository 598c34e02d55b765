"""Nothing runs further ahead than its window, in elements and in bytes."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, Session
from dfm_async.engine import frames
from dfm_async.engine.frames import FrameLedger
from dfm_async.runtime.sources import ThreadSource
from dfm_async.runtime.threads import Threads
from dfm_async.wire.codec import Codec
from tests.support.pipelines import pipeline_of

MIB = 1 << 20


class Made:
    """An iterator that counts what it has made, and tells when it was last held up."""

    def __init__(self, element: Any, count: int) -> None:
        self.element = element
        self.count = count
        self.made = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            self.made += 1
            yield self.element


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "as it is"])
async def test_a_thread_is_not_many_large_elements_ahead(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = threading.Event()
    wait = ThreadSource._wait_for_room

    def waits(self: ThreadSource, produced: int) -> None:
        if not self._has_room(produced):
            held_up.set()
        wait(self, produced)

    monkeypatch.setattr(ThreadSource, "_wait_for_room", waits)
    made = Made(np.zeros(MIB // 2), 200)  # 4 MiB each: four of them are the window
    source = ThreadSource(Threads(1, "test"), iter(made), contextvars.Context(), "made")
    if packed:
        source.transform = Codec.for_processes().pack
    got = 0
    while found := await source.get(256):
        got += len(found)
        assert len(found) <= 5
        assert made.made <= got + 6
        if got < 100 and not got % 10:
            held_up.clear()
            await asyncio.to_thread(held_up.wait, 10)
            assert made.made <= got + 6
    assert got == 200
    assert source._bytes_produced == source._bytes_taken
    await source.wait_ended()


async def test_a_thread_is_not_held_up_by_one_element_that_is_too_large() -> None:
    made = Made(np.zeros(4 * MIB), 3)
    source = ThreadSource(Threads(1, "test"), iter(made), contextvars.Context(), "made")
    got = 0
    while found := await source.get(256):
        got += len(found)
    assert got == 3
    await source.wait_ended()


async def test_parameter_sets_in_flight_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation("f")
    site = federation.site("s")

    @site.operation
    def size_of(values: Any) -> int:
        return len(values)

    pipeline = pipeline_of(size_of, "values")

    monkeypatch.setattr(frames, "_WINDOW_BYTES", 10_000)
    most = 0
    take = FrameLedger.take

    def takes(self: FrameLedger, *, allow_new: bool) -> Any:
        nonlocal most
        batches = take(self, allow_new=allow_new)
        most = max(most, sum(self._weights.values()))
        return batches

    monkeypatch.setattr(FrameLedger, "take", takes)
    sizes = [5000] * 20 + [30_000] + [10] * 500 + [30_000, 5000]
    async with Session(federation, target="inline") as session:
        job = await session.execute(pipeline, [{"values": b"x" * size} for size in sizes])
        found = {result.frame[0]: result.value async for result in job}
    assert [found[index] for index in range(len(sizes))] == sizes
    assert most == 30_000, "a single one that is too large still passes, but nothing heavy beside it"
