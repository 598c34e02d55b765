"""Blocks do not overlap, are freed when nobody needs them any more, and arrive as what was put into them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dfm_async.errors import EncodingError
from dfm_async.wire import memory
from dfm_async.wire.codec import Broken, Codec, Packed, weight
from dfm_async.wire.memory import LARGE, Arena, Block, Loans, Payload, size_of
from dfm_async.wire.messages import Memory, Message, ResultBatch, Tokens
from tests.wire.ends import End, connected
from tests.wire.shapes import Plain, Point, same, values

PAGE = 4096

# the allocator


class Allocator(RuleBasedStateMachine):
    """Blocks come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(64 * PAGE)
        self.blocks: list[Block] = []

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return the offsets and lengths of the free ranges, with those of blocks that were dropped."""
        assert self.arena.used <= self.arena.limit  # takes back the dropped blocks
        return [(start, self.arena._lengths[start]) for start in self.arena._starts]

    @rule(size=st.integers(1, 20 * PAGE))
    def allocate(self, size: int) -> None:
        block = self.arena.allocate(size)
        if block is None:
            longest = max((length for _, length in self.free_ranges()), default=0)
            assert longest < size, "there was room"
        else:
            block.buffer[:] = bytes([len(self.blocks) % 251]) * size
            assert block.size == size
            self.blocks.append(block)

    @rule(index=st.integers(0, 100))
    def drop(self, index: int) -> None:
        if self.blocks:
            del self.blocks[index % len(self.blocks)]

    @invariant()
    def every_byte_belongs_to_one(self) -> None:
        taken = [(block.offset, -(-block.size // PAGE) * PAGE) for block in self.blocks]
        ranges = sorted(taken + self.free_ranges())
        position = 0
        for start, length in ranges:
            assert start == position
            position += length
        assert position == self.arena.limit
        assert self.arena.used == sum(length for _, length in taken)

    @invariant()
    def free_ranges_are_joined(self) -> None:
        free = self.free_ranges()
        assert all(a + length < b for (a, length), (b, _) in itertools.pairwise(free))

    def teardown(self) -> None:
        self.blocks.clear()
        assert self.free_ranges() == [(0, self.arena.limit)]


TestAllocator = Allocator.TestCase


def allocated(arena: Arena, size: int = PAGE) -> Block:
    block = arena.allocate(size)
    assert block is not None
    return block


def in_threads(work: Callable[[int], None]) -> None:
    """Run work in four threads at the same time."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_lowest_room_is_used_first() -> None:
    arena = Arena(10 * PAGE)
    blocks = [allocated(arena) for _ in range(3)]
    del blocks[:2]
    assert allocated(arena, 2 * PAGE).offset == 0


def test_threads_get_different_blocks() -> None:
    arena = Arena(256 * PAGE)
    found: list[Block] = []

    def take(_number: int) -> None:
        for _ in range(60):
            found.append(allocated(arena))
            arena.allocate(PAGE)  # and gone at once

    in_threads(take)
    assert len({block.offset for block in found}) == len(found) == 240
    found.clear()
    assert arena.used == 0


def test_the_pages_of_an_empty_arena_are_given_back() -> None:
    arena = Arena(64 * PAGE)
    block = allocated(arena, 32 * PAGE)
    block.buffer[:] = b"x" * block.size
    file = arena.identity()[1]
    arena.trim()
    assert os.fstat(file).st_blocks * 512 == 32 * PAGE, "it is in use"
    del block
    arena.trim()
    assert os.fstat(file).st_blocks == 0


async def test_an_arena_that_rests_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_IDLE", 0.01)
    arena = Arena(64 * PAGE)
    trimmed = asyncio.Event()
    monkeypatch.setattr(arena, "trim", trimmed.set)
    loop = asyncio.get_running_loop()
    block = arena.allocate(PAGE)
    arena.rest(loop)
    assert arena._timer is None, "it is in use"
    del block
    arena.rest(loop)
    arena.allocate(PAGE)  # used in the meantime: it waits once more
    async with asyncio.timeout(10):
        await trimmed.wait()
    assert arena._timer is None


def test_without_shared_memory_everything_travels_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    codec = Codec.for_processes(Arena())
    array = np.arange(LARGE)
    payload = codec.payload([codec.pack(array)])
    assert isinstance(payload, bytes)
    assert same(codec.loads_batch(payload), [array])


def test_an_arena_closes_its_file() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena(64 * PAGE)
    arena.allocate(1)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del arena
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_block_is_lent_once_per_message() -> None:
    arena, loans = Arena(64 * PAGE), Loans()
    block = allocated(arena)
    offset = block.offset
    loans.lend([block])
    loans.lend([block])
    del block
    loans.give_back([offset])
    assert arena.used == PAGE
    loans.give_back([offset, offset, 12345])
    assert arena.used == 0
    assert len(loans) == 0


# the codec

BIG = LARGE // 8


def pooled() -> tuple[Codec, Arena]:
    arena = Arena(64 * 1024 * 1024)
    return Codec.for_processes(arena), arena


LARGE_VALUES: list[Any] = [
    np.arange(BIG),
    np.arange(BIG, dtype=">i8"),
    np.asfortranarray(np.arange(2 * BIG).reshape(2, BIG)),
    np.zeros(BIG // 4, dtype=np.dtype([("a", "i1"), ("b", "f8"), ("c", "M8[s]", (2,))], align=True)),
    np.full(BIG, np.datetime64("2024-02-29", "D")),
    np.array(["ab", "c"] * BIG),
    b"abc" * LARGE,
    bytearray(b"xyz" * LARGE),
    [np.arange(BIG), (1, np.ones(BIG)), {"a": b"q" * LARGE}],
    (np.arange(BIG), 7),
    Point({1: np.arange(BIG)}, (bytearray(LARGE),)),
    [b"y" * LARGE] * 9,
    ["small", b"small", np.arange(3)],
]


@pytest.mark.parametrize("value", LARGE_VALUES, ids=lambda value: type(value).__name__)
def test_large_values_arrive_as_what_they_were(value: Any) -> None:
    codec, arena = pooled()
    payload = codec.payload([codec.pack(value)])
    arrived = codec.loads_batch(payload)
    assert same(arrived, [value])
    del arrived, payload
    assert arena.used == 0


def test_a_strided_view_goes_into_a_block_as_the_array_that_it_shows() -> None:
    codec, arena = pooled()
    view = np.arange(16 * BIG).reshape(8, 2 * BIG)[::2, ::-2]
    payload = codec.payload(codec.pack(view))
    assert arena.used >= view.nbytes
    assert codec.loads(payload).tolist() == view.tolist()


def test_large_buffers_of_pickled_objects_go_into_blocks() -> None:
    codec, arena = pooled()
    arrays = [np.arange(BIG), np.arange(5), np.ones((3, BIG), order="F")]
    value = Plain(arrays)
    payload = codec.payload(codec.pack(value))
    assert isinstance(payload, Payload)
    assert len(payload.data) < 10_000
    assert len(payload.blocks) == 2
    arrived = codec.loads(payload)
    assert all(map(same, arrived.value, arrays))
    assert not any(array.flags.writeable for array in arrived.value)
    del payload
    assert arena.used > 0
    kept = arrived.value[2][1:2]
    del arrived
    assert arena.used == 3 * LARGE, "a view of it is still there"
    del kept
    assert arena.used == 0


@pytest.mark.parametrize("count", [3, BIG], ids=["small", "large"])
@pytest.mark.parametrize("make", [np.arange, lambda n: np.array([{1}] * n, dtype=object)], ids=["numbers", "objects"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "in the message"])
def test_arrays_arrive_read_only(shared: bool, make: Callable[[int], Any], count: int) -> None:
    codec = pooled()[0] if shared else Codec.for_processes()
    array = codec.loads(codec.payload(codec.pack(make(count))))
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = array[1]
    if array.dtype != object:  # those are its own
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    copied = array.copy()
    copied[0] = copied[1]


def test_a_snapshot_is_a_copy_and_frees_its_blocks() -> None:
    codec, arena = pooled()
    array = np.zeros(BIG)
    packed = codec.pack([array, b"x" * LARGE])
    array[:] = 1
    assert codec.loads(codec.payload(packed))[0].sum() == 0
    assert arena.used == 2 * LARGE
    del packed
    assert arena.used == 0


def test_what_cannot_be_packed_frees_its_blocks() -> None:
    codec, arena = pooled()
    with pytest.raises(EncodingError, match=r"value\[1\]"):
        codec.pack([np.arange(BIG), threading.Lock()])
    gc.collect()
    assert arena.used == 0
    assert codec.pack([1, {"a": 2}]) == [1, {"a": 2}], "nothing of it sticks to the next value"


def test_when_there_is_no_room_values_travel_in_the_message() -> None:
    codec = Codec.for_processes(Arena(2 * LARGE))
    batch = [np.arange(BIG) + i for i in range(4)]
    packed = [codec.pack(array) for array in batch]
    payload = codec.payload(packed)
    assert isinstance(payload, Payload)
    assert len(payload.blocks) == 2
    assert len(payload.data) > 2 * LARGE
    assert same(codec.loads_batch(payload), batch)


def test_only_a_payload_can_hold_what_is_in_shared_memory() -> None:
    codec, _ = pooled()
    with pytest.raises(TypeError, match="shared memory"):
        codec.encode(np.arange(BIG))
    assert same(codec.plain.loads(codec.plain.encode(np.arange(BIG))), np.arange(BIG))


def test_a_block_that_the_message_does_not_have_breaks_only_its_value() -> None:
    codec, _ = pooled()
    payload = codec.payload([codec.pack(np.arange(BIG)), codec.pack(b"x" * LARGE), 3])
    assert isinstance(payload, Payload)
    del payload.blocks[0]
    found = codec.loads_batch(payload)
    assert isinstance(found[0], Broken)
    assert found[1:] == [b"x" * LARGE, 3]


def test_threads_that_pack_at_the_same_time_do_not_mix_their_blocks() -> None:
    codec, arena = pooled()
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(30):
            array = np.full(BIG, number * 1000 + i)
            packed = codec.pack([array, "small"])
            if len(packed.blocks) != 1 or not (codec.plain is not codec and packed.size == array.nbytes):
                wrong.append(packed)

    in_threads(work)
    assert not wrong
    assert arena.used == 0


@given(values)
def test_a_codec_with_an_arena_carries_everything_that_others_do(value: Any) -> None:
    codec = Codec.for_programs(Arena(PAGE))
    assert same(codec.loads(codec.payload(codec.pack(value))), value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(BIG),
        b"x" * 5000,
        "y" * 5000,
        [1] * 5000,
        ["abc"] * 5000,
        [{"a": i, "b": "text"} for i in range(5000)],
        {f"{i}": i for i in range(5000)},
        (np.arange(BIG), {"x": [bytearray(9000)]}),
        Plain(b"z" * 9000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_heavy_values_are_weighed_about_right(value: Any) -> None:
    for codec in (Codec.for_processes(), pooled()[0]):
        packed = codec.pack(value)
        assert isinstance(packed, Packed)
        assert weight(packed) == pytest.approx(size_of(codec.payload(packed)), rel=8)
        assert weight(packed) > size_of(codec.payload(packed)) / 2


@pytest.mark.parametrize("value", [1, None, "text", b"bytes", [1, 2, 3], {"a": {"b": "c"}}, (1, 2), np.arange(5)])
def test_small_values_weigh_nothing(value: Any) -> None:
    assert weight(pooled()[0].pack(value)) == 0


# between two ends


class SharingEnd(End):
    """An end with its own arena."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(64 * 1024 * 1024)
        self.codec = Codec.for_processes(self.arena)
        self._about_memory = self.channel._about_memory
        self.channel._about_memory = self._about  # type: ignore[method-assign]

    def _about(self, message: Any) -> None:
        self._about_memory(message)
        self.changed.set()

    def send(self, *values: Any) -> None:
        payload = self.codec.payload([self.codec.pack(value) for value in values])
        self.channel.send(ResultBatch(1, 0, [], payload, []))

    async def next(self) -> Any:
        await self.until(lambda: self.got)
        return self.got.pop(0)

    async def values(self) -> list[Any]:
        return self.codec.loads_batch((await self.next()).payload)

    async def emptied(self) -> None:
        """Waits until nobody holds anything of the arena."""
        await self.until(lambda: not self.arena.used)


async def test_large_values_cross_without_their_bytes_and_come_back_when_they_are_gone() -> None:
    async with connected(SharingEnd) as (a, b):
        a.send(np.arange(BIG), 1, np.ones(BIG))
        found = await b.values()
        assert same(found, [np.arange(BIG), 1, np.ones(BIG)])
        assert b.channel.bytes_in < 1000
        kept = found[0][5:]
        del found
        await a.until(lambda: a.arena.used == LARGE)
        assert kept[0] == 5
        del kept
        await a.emptied()
        assert len(a.channel._loans) == 0


async def test_blocks_of_bytes_and_of_dropped_messages_are_given_back_at_once() -> None:
    async with connected(SharingEnd) as (a, b):
        a.send(np.arange(BIG))
        await b.next()  # and dropped
        await a.emptied()
        a.send(b"x" * LARGE, bytearray(b"y" * LARGE))
        found = await b.values()
        await a.emptied()
        assert found == [b"x" * LARGE, bytearray(b"y" * LARGE)]


async def test_both_ends_can_lend() -> None:
    async with connected(SharingEnd) as (a, b):
        for _ in range(50):
            a.send(np.arange(BIG))
            b.send(np.ones(BIG))
            assert (await b.values())[0][3] == 3
            assert (await a.values())[0][3] == 1
        await a.emptied()
        await b.emptied()


async def test_one_snapshot_can_be_sent_twice() -> None:
    async with connected(SharingEnd) as (a, b):
        packed = a.codec.pack(np.arange(BIG))
        for at in range(2):
            a.channel.send(Tokens(1, at, [], a.codec.payload([packed, packed])))
        del packed
        first, second = await b.values(), await b.values()
        del first
        b.send("wait")
        await a.next()
        assert a.arena.used == LARGE
        assert same(second, [np.arange(BIG)] * 2)
        del second
        await a.emptied()


async def test_what_arrived_stays_valid_when_its_sender_is_gone() -> None:
    async with connected(SharingEnd) as (a, b):
        a.send(np.arange(BIG))
        found = await b.values()
        a.channel.close()
        await b.until(lambda: b.lost)
    arena = a.arena
    del a
    assert arena.used == 0, "there is nobody who could give it back"
    del arena
    gc.collect()
    assert found[0].sum() == BIG * (BIG - 1) // 2


async def test_what_a_peer_held_is_free_when_it_is_lost() -> None:
    async with connected(SharingEnd) as (a, b):
        a.send(np.arange(BIG))
        found = await b.values()
        assert a.arena.used == LARGE
        b.channel.close()
        await a.until(lambda: a.lost)
        assert a.arena.used == 0
        a.send(np.arange(BIG))
        assert a.arena.used == 0, "what is sent to nobody is not held for it"
        del found


async def test_leases_end_in_other_threads_too() -> None:
    async with connected(SharingEnd) as (a, b):
        a.send(*(np.arange(BIG) for _ in range(20)))
        found = await b.values()
        thread = threading.Thread(target=found.clear)
        thread.start()
        await a.emptied()
        thread.join()


async def test_leases_can_end_after_their_loop() -> None:
    def run() -> list[Any]:
        async def read() -> list[Any]:
            async with connected(SharingEnd) as (a, b):
                a.send(np.arange(BIG))
                found = await b.values()
                b.channel._peer.close = lambda: None  # type: ignore[union-attr, method-assign]
                return found

        return asyncio.run(read())

    found = await asyncio.to_thread(run)
    assert found[0][1] == 1
    found.clear()  # the loop is closed: nothing is raised, nobody is notified


async def test_memory_that_cannot_be_opened_breaks_only_the_values_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Arena.identity
    monkeypatch.setattr(Arena, "identity", lambda self: (*identity(self)[:4], 1))  # another file has this number now
    async with connected(SharingEnd) as (a, b):
        a.send(np.arange(BIG), "small")
        found = await b.values()
        assert isinstance(found[0], Broken)
        assert "shared memory" in str(found[0].error)
        assert "another file is there" in str(found[0].error)
        assert found[1] == "small"
        await a.emptied()
        b.send("still connected")
        assert await a.values() == ["still connected"]


@pytest.fixture(params=["not reaped", "reaped"])
def dead(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if request.param == "reaped":
            process.wait()
        yield process.pid


async def test_messages_of_a_dead_peer_end_with_its_memory(monkeypatch: pytest.MonkeyPatch, dead: int) -> None:
    identity = Arena.identity
    monkeypatch.setattr(Arena, "identity", lambda self: (dead, *identity(self)[1:]))
    async with connected(SharingEnd) as (a, b):
        a.send("before")
        a.send(np.arange(BIG), "small")  # as if it had died since
        a.send("no memory needed")  # it must not be taken for all that the dead one had to say
        await b.until(lambda: b.lost)
        assert await b.values() == ["before"]
        assert not b.got


async def test_a_message_about_memory_that_was_not_announced_ends_the_connection() -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    async with connected(SharingEnd) as (a, b):
        a.channel._arena = a.arena  # as if it had been
        a.send(np.arange(BIG))
        await b.until(lambda: b.lost)
        assert not b.got
    asyncio.get_running_loop().set_exception_handler(None)
    assert reported


async def test_the_arena_is_announced_once_and_those_who_use_the_channel_do_not_see_it() -> None:
    async with connected(SharingEnd) as (a, b):
        sent: list[type] = []
        queue = a.channel._queue

        def queued(message: Message) -> None:
            sent.append(type(message))
            queue(message)

        a.channel._queue = queued  # type: ignore[method-assign]
        for _ in range(3):
            a.send(np.arange(BIG))
            assert isinstance(await b.next(), ResultBatch)
        await a.emptied()
        assert sent == [Memory, ResultBatch, ResultBatch, ResultBatch]
        assert not a.got
        assert not b.got


def test_arrays_that_came_from_elsewhere_can_be_pickled_and_copied() -> None:
    codec, _ = pooled()
    array = codec.loads(codec.payload(codec.pack(np.arange(BIG))))
    assert same(pickle.loads(pickle.dumps(array)), np.arange(BIG))
    again = codec.loads(codec.payload(codec.pack(array)))
    assert same(again, np.arange(BIG))
