"""Elements of a generator that two processes record: one was stopped, and the other has resumed its job meanwhile."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.runtime.recorded import RecordedSource, Recording
from dfm_async.site.checkpoints import Checkpoints
from dfm_async.wire.codec import Codec


class Producer:
    """A source of numbered elements which name their process."""

    def __init__(self, name: str, start: int, end: int) -> None:
        self.transform: Any = None
        self._left = [f"{name}{number}" for number in range(start, end)]

    async def get(self, limit: int) -> list[Any]:
        found, self._left = self._left[:limit], self._left[limit:]
        return [self.transform(value) for value in found]

    async def aclose(self) -> None:
        self._left.clear()

    async def wait_ended(self) -> None:
        pass


async def opened(checkpoints: Checkpoints, name: str, count: int, resumes: bool) -> RecordedSource:
    """Begin the call in a process, as after a restart."""
    recording = Recording(checkpoints.of("job"), Codec.for_store(), "node", (0,))
    found = await recording.checkpoints.find("node", (0,))
    assert not isinstance(found, bytes)
    if found is not None:
        recording.count, recording.ended = found.count, found.ended
    recording.resumed = resumes and found is not None
    start = recording.count if recording.resumed else 0
    return RecordedSource(recording, None if recording.ended else Producer(name, start, count))


@given(
    count=st.integers(0, 9),
    reads=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=12),
    begins=st.integers(0, 12),
    resumes=st.booleans(),
)
async def test_all_readers_get_the_elements_that_were_recorded_first(
    count: int, reads: list[tuple[bool, int]], begins: int, resumes: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stopped, resumed = (Checkpoints(folder, "lab", 1 << 20) for _ in range(2))
        try:
            sources = [await opened(stopped, "a", count, resumes)]
            got: list[list[Any]] = [[], []]
            for other, limit in [(False, limit) for _, limit in reads[:begins]]:
                got[other] += await sources[other].get(limit)
            sources.append(await opened(resumed, "b", count, resumes))
            for other, limit in reads[begins:]:
                got[other] += await sources[other].get(limit)
            for other in (False, True):
                while found := await sources[other].get(4):
                    got[other] += found
            later = await opened(resumed, "c", count, resumes)
            kept: list[Any] = []
            while found := await later.get(4):
                kept += found
        finally:
            await stopped.close()
            await resumed.close()
    assert [int(value[1:]) for value in kept] == list(range(count))
    assert got == [kept, kept]
    assert not any(value.startswith("c") for value in kept)


async def test_elements_are_not_recorded_twice_if_a_reader_is_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    checkpoints = Checkpoints(str(tmp_path), "lab", 1 << 20)
    try:
        source = await opened(checkpoints, "a", 5, resumes=False)
        record = type(checkpoints.of("job")).record_elements

        async def cancelled(*args: Any) -> Any:
            await record(*args)
            raise RuntimeError("cancelled here")

        with monkeypatch.context() as patch:
            patch.setattr(type(checkpoints.of("job")), "record_elements", cancelled)
            with pytest.raises(RuntimeError, match="cancelled here"):
                await source.get(3)
        assert [await source.get(3), await source.get(3), await source.get(3)] == [["a0", "a1", "a2"], ["a3", "a4"], []]
    finally:
        await checkpoints.close()
