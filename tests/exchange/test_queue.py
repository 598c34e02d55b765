"""Messages in folders: order, waiting, taking back, peers that vanish, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import asyncinotify
import hypothesis
import pytest
from hypothesis import strategies as st

from dfm_async.base.tasks import in_thread
from dfm_async.exchange.filepipe import queue as module
from dfm_async.exchange.filepipe.queue import DirectoryQueue, MessageName, Received, Side, format_name

T = TypeVar("T")

LARGE = 3 * module._INLINE


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = _opened()
    yield
    assert not _opened() - before


def _opened() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself is closed by now
            found[os.readlink(path)] += 1
    return Counter({name: count for name, count in found.items() if "inotify" in name or "/REQ." in name})


@pytest.fixture(params=["watched", "unwatched"])
async def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With a kernel that watches, nobody may depend on looking by himself."""
    if request.param == "unwatched":
        monkeypatch.setattr(module, "_is_available", False)
        monkeypatch.setattr(module, "_UNWATCHED", 0.01)
    else:
        monkeypatch.setattr(module, "_WATCHED", 600.0)
    return bool(request.param == "watched")


@pytest.fixture
async def program(watched: bool, tmp_path: Path) -> AsyncIterator[DirectoryQueue]:
    async with DirectoryQueue(tmp_path / "pipe", "task", Side.ACTIVE) as queue:
        yield queue


@pytest.fixture
async def site(program: DirectoryQueue, tmp_path: Path) -> AsyncIterator[DirectoryQueue]:
    async with DirectoryQueue(tmp_path / "pipe", "task", Side.PASSIVE) as queue:
        yield queue


def new(topic: str = "train") -> MessageName:
    return MessageName(topic, str(uuid.uuid4()))


def files(queue: DirectoryQueue) -> list[str]:
    return sorted(f"{path.parent.name}/{path.name}" for path in queue._path.glob("*/*"))


async def waiting_for(queue: DirectoryQueue, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A call that waits for changes of the folders."""
    task = asyncio.create_task(call)
    await waiting(queue)
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a call, and wait until it has ended."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def waiting(queue: DirectoryQueue) -> None:
    """Lets the loop run until somebody waits for changes."""
    while queue._watch is None or not queue._watch.changed:  # noqa: ASYNC110 - nothing tells, and it is a few turns
        await asyncio.sleep(0)


# both ways


async def test_messages_go_both_ways(program: DirectoryQueue, site: DirectoryQueue) -> None:
    request = new()
    sent = await site.put(request, [b"do ", bytearray(b"th"), memoryview(b"is")])
    assert await program.get() == Received(request, b"do this")
    assert await sent.gone()
    reply = MessageName("train", "r1", request.id)
    await program.put(reply, [])
    assert await site.get() == Received(reply, b"")
    assert files(site) == []


async def test_the_folders_are_those_of_the_peer(program: DirectoryQueue, tmp_path: Path) -> None:
    assert sorted(path.name for path in (tmp_path / "pipe" / "task").iterdir()) == ["t", "x", "y"]
    for path in (tmp_path / "pipe", *(tmp_path / "pipe").glob("**/")):
        assert path.stat().st_mode & 0o777 == 0o700
    name = new()
    await program.put(name, [b"x"])
    assert files(program) == [f"y/REQ.train.{name.id}"]
    assert (tmp_path / "pipe" / "task" / "y" / f"REQ.train.{name.id}").stat().st_mode & 0o777 == 0o600


async def test_large_messages_and_buffers_of_any_element_pass(program: DirectoryQueue, site: DirectoryQueue) -> None:
    data = os.urandom(4 * 2**20)
    name = new()
    sent = await site.put(name, [data[:100], memoryview(data)[100:], memoryview(bytes(8)).cast("i")])
    assert await program.get() == Received(name, data + bytes(8))
    assert await sent.gone()
    assert files(program) == []


# order


async def test_the_peer_sees_that_order_too(program: DirectoryQueue) -> None:
    """It sorts by times as floats."""
    names = [new() for _ in range(300)]
    for name in names:
        await program.put(name, [])
    paths = list(program._outbox.iterdir())
    assert len({os.path.getmtime(path) for path in paths}) == len(paths)
    assert [path.name for path in sorted(paths, key=os.path.getmtime)] == [format_name(name) for name in names]


async def test_the_clock_may_go_back(program: DirectoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2_000_000_000_000_000_000, 1_000_000_000_000_000_000])
    monkeypatch.setattr("dfm_async.exchange.filepipe.queue.time.time_ns", lambda: next(times))
    names = [new(), new()]
    for name in names:
        await program.put(name, [])
    first, second = (program._outbox / format_name(name) for name in names)
    assert first.stat().st_mtime_ns == 2_000_000_000_000_000_000
    assert os.path.getmtime(first) < os.path.getmtime(second) < os.path.getmtime(first) + 1


async def test_messages_of_the_same_time_come_by_name(program: DirectoryQueue) -> None:
    for letter in "cab":
        path = program._inbox / f"REQ.t.{letter}"
        path.touch()
        os.utime(path, ns=(1_000, 1_000))
    (program._inbox / "REQ.t.0").touch()
    assert [(await program.get()).name.id for _ in range(4)] == ["a", "b", "c", "0"]


@hypothesis.given(st.lists(st.sampled_from(["put", "put large", "get", "take back"]), max_size=30))
async def test_whatever_is_not_taken_back_comes_once_and_in_order(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with DirectoryQueue(root, "c", Side.PASSIVE) as site, DirectoryQueue(root, "c", Side.ACTIVE) as program:
            there: list[Any] = []
            for step in steps:
                if step.startswith("put"):
                    there.append(await site.put(new(), [bytes(LARGE if "large" in step else 1)]))
                elif there and step == "get":
                    sent = there.pop(0)
                    assert (await program.get()).name == sent.name
                    assert await sent.gone()
                    assert not sent.take_back()
                elif there:
                    sent = there.pop(len(there) // 2)
                    assert sent.take_back()
                    assert not await sent.gone()
            assert len(files(site)) == len(there)


# waiting


async def test_messages_wake_waiting_calls_in_order(program: DirectoryQueue, site: DirectoryQueue) -> None:
    getting = [asyncio.create_task(program.get()) for _ in range(3)]
    await waiting(program)
    names = [new() for _ in range(3)]
    for name in names:
        await site.put(name, [bytes(LARGE)])
    async with asyncio.timeout(10):
        assert [received.name for received in await asyncio.gather(*getting)] == names


async def test_a_look_of_one_waiter_does_not_take_the_news_from_another(
    program: DirectoryQueue, site: DirectoryQueue
) -> None:
    outgoing = await program.put(new(), [b"x"])
    getting = await waiting_for(program, program.get())
    name = new()
    await site.put(name, [b"x"])
    program.catch_up()  # before the loop has told of the new file
    async with asyncio.timeout(10):
        assert (await getting).name == name
    assert outgoing.take_back()


async def test_messages_are_found_by_polling_if_the_kernel_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What another host does in a shared folder is found by looking."""
    monkeypatch.setattr(module, "_WATCHED", 0.01)
    async with DirectoryQueue(tmp_path, "c", Side.ACTIVE) as queue:
        assert queue._watch is not None
        assert queue._watch._inotify is not None
        for watched in queue._watch._inotify.watches:
            asyncinotify._ffi.libc.inotify_add_watch(
                queue._watch._inotify.fd, bytes(watched.path), asyncinotify.Mask.ATTRIB
            )
        getting = await waiting_for(queue, queue.get())
        os.rename(_written(queue, "REQ.t.1"), queue._inbox / "REQ.t.1")
        async with asyncio.timeout(10):
            assert (await getting).name.id == "1"
            sent = await queue.put(new(), [b"x"])
            going = await waiting_for(queue, sent.gone())
            next(queue._outbox.iterdir()).unlink()
            assert await going


def _written(queue: DirectoryQueue, name: str) -> Path:
    path = queue._temporary / name
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize("call", ["inotify_init1", "inotify_add_watch"])
async def test_no_watcher_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(asyncinotify._ffi.libc, call, fail)
    async with DirectoryQueue(tmp_path, "c", Side.ACTIVE) as queue:
        assert queue._watch is not None
        assert queue._watch._inotify is None
        getting = await waiting_for(queue, queue.get())
        os.rename(_written(queue, "REQ.t.1"), queue._inbox / "REQ.t.1")
        async with asyncio.timeout(10):
            assert (await getting).data == b"x"
    assert "max_user_instances" in caplog.text


# what else is in the folders


async def test_a_file_that_vanishes_is_skipped(program: DirectoryQueue) -> None:
    for letter in "ab":
        (program._inbox / f"REQ.t.{letter}").write_text(letter)
    assert program._list()
    (program._inbox / "REQ.t.a").unlink()
    assert (await program.get()).name.id == "b"


async def test_other_things_are_left_where_they_are(
    program: DirectoryQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (program._inbox / "REQ.link.1").symlink_to(secret)
    (program._inbox / "REQ.folder.1").mkdir()
    (program._inbox / "notes.txt").touch()
    os.mkfifo(program._inbox / "REQ.fifo.1")
    for number in range(2):
        (program._inbox / f"REQ.t.{number}").touch()
        assert (await program.get()).name.topic == "t"
    assert len(files(program)) == 4
    assert sorted(record.getMessage().split(" ")[0].rsplit("/", 1)[1] for record in caplog.records) == [
        "REQ.fifo.1",
        "REQ.folder.1",
        "REQ.link.1",
        "notes.txt",
    ]


async def test_a_link_in_the_place_of_a_message_is_not_followed(program: DirectoryQueue, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = program._inbox / "REQ.t.1"
    path.touch()
    assert program._list()
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        await program.get()


async def test_a_message_of_the_same_name_is_not_overwritten(program: DirectoryQueue) -> None:
    name = new()
    _written(program, format_name(name))
    with pytest.raises(FileExistsError):
        await program.put(name, [b"y"])
    assert (program._temporary / format_name(name)).read_bytes() == b"x"


# what becomes of a message


@pytest.mark.parametrize("fate", ["read", "cancelled", "taken back"])
async def test_gone_waits_until_a_message_was_read_or_taken_back(
    program: DirectoryQueue, site: DirectoryQueue, fate: str
) -> None:
    sent = await program.put(new(), [b"x"])
    going = await waiting_for(program, sent.gone())
    assert not going.done()
    if fate == "cancelled":
        await cancelled(going)
    else:
        if fate == "read":
            await site.get()
        else:
            assert sent.take_back()
        async with asyncio.timeout(10):
            assert await going is (fate == "read")
    assert files(program) == []
    assert sent.take_back() is (fate != "read")


async def test_a_message_that_was_deleted_was_not_read(
    program: DirectoryQueue, site: DirectoryQueue, watched: bool
) -> None:
    """The peer clears the folders between two tasks. Only the kernel can tell that from reading."""
    sent = await program.put(new(), [b"x"])
    next(program._outbox.iterdir()).unlink()
    assert await sent.gone() is not watched  # before the loop has told of it
    sent = await program.put(new(), [b"x"])
    going = await waiting_for(program, sent.gone())
    next(program._outbox.iterdir()).unlink()
    async with asyncio.timeout(10):
        assert await going is not watched


async def test_a_message_that_is_cleared_while_it_is_written(
    program: DirectoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module._write_somewhere

    async def write(*args: Any) -> None:
        await original(*args)
        next(program._temporary.iterdir()).unlink()

    monkeypatch.setattr(module, "_write_somewhere", write)
    sent = await program.put(new(), [b"x"])
    assert not await sent.gone()
    assert sent.take_back()


async def test_sent_messages_that_nobody_holds_are_forgotten(program: DirectoryQueue, site: DirectoryQueue) -> None:
    await program.put(new(), [b"x"])
    await site.get()
    assert not program._sent


# cancelling and failing


async def _blocked(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> tuple[threading.Event, threading.Event]:
    """Holds a call up in its thread: gives an event that tells that it is there, and one that lets it go on."""
    entered, released = threading.Event(), threading.Event()
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any) -> Any:
        entered.set()
        released.wait(10)
        return original(*args)

    monkeypatch.setattr(owner, name, call)
    return entered, released


async def _until(event: threading.Event) -> None:
    await in_thread(lambda: event.wait(10), "test")


async def test_a_put_that_is_cancelled_leaves_nothing(program: DirectoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, released = await _blocked(monkeypatch, module, "_write")
    putting = asyncio.create_task(program.put(new(), [bytes(LARGE)]))
    await _until(entered)
    await cancelled(putting)
    assert files(program) == []
    released.set()
    for thread in threading.enumerate():
        if thread.name == "dfm-filepipe-write":
            thread.join(10)
    assert files(program) == []


async def test_a_write_that_nobody_wants_ends_early() -> None:
    with tempfile.NamedTemporaryFile() as target:
        file = module._open(Path(target.name), os.O_WRONLY, "wb")
        unwanted = threading.Event()
        unwanted.set()
        module._write(file, [memoryview(bytes(LARGE))], unwanted)
        assert file.closed
        assert os.path.getsize(target.name) == 0


@pytest.mark.parametrize("size", [1, LARGE])
async def test_a_full_disk(program: DirectoryQueue, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def fail(file: Any, *_: object) -> None:
        file.close()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module, "_write", fail)
    with pytest.raises(OSError, match="full"):
        await program.put(new(), [bytes(size)])
    assert files(program) == []


async def test_a_message_whose_reading_is_cancelled_comes_again(
    program: DirectoryQueue, site: DirectoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = new()
    await site.put(name, [bytes(LARGE)])
    await site.put(new(), [b"next"])
    entered, released = await _blocked(monkeypatch, program, "_read")
    getting = asyncio.create_task(program.get())
    await _until(entered)
    await cancelled(getting)
    released.set()
    assert await program.get() == Received(name, bytes(LARGE))
    assert (await program.get()).data == b"next"
    assert files(program) == []


async def test_a_get_that_is_cancelled_while_it_waits_takes_nothing(
    program: DirectoryQueue, site: DirectoryQueue
) -> None:
    getting = await waiting_for(program, program.get())
    await cancelled(getting)
    name = new()
    await site.put(name, [b"x"])
    async with asyncio.timeout(10):
        assert (await program.get()).name == name


# a peer that is gone


async def test_removed_folders_are_noticed(program: DirectoryQueue) -> None:
    getting = await waiting_for(program, program.get())
    shutil.rmtree(program._path)
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionResetError, match="removed"):
            await getting
    with pytest.raises(ConnectionResetError):
        await program.get()
    with pytest.raises(ConnectionResetError):
        await program.put(new(), [b"x"])


async def test_a_message_in_removed_folders_was_not_read(program: DirectoryQueue, watched: bool) -> None:
    sent = await program.put(new(), [b"x"])
    going = await waiting_for(program, sent.gone())
    shutil.rmtree(program._path)
    async with asyncio.timeout(10):
        if watched:
            assert not await going
        else:
            with pytest.raises(ConnectionResetError):
                await going
    assert sent.take_back()


async def test_folders_that_were_made_anew_are_those_of_another_peer(
    program: DirectoryQueue, watched: bool, tmp_path: Path
) -> None:
    shutil.rmtree(program._path)
    async with DirectoryQueue(tmp_path / "pipe", "task", Side.PASSIVE) as other:
        await other.put(new(), [b"x"])
        program.catch_up()
        if watched:
            with pytest.raises(ConnectionResetError):
                await program.get()


async def test_one_folder_is_enough(program: DirectoryQueue) -> None:
    """Without a place to move it to, a message would be looked at for ever."""
    (program._inbox / "REQ.t.1").touch()
    program._temporary.rmdir()
    with pytest.raises(ConnectionResetError):
        program._take()
    with pytest.raises(ConnectionResetError):
        await program.get()


# opening and closing


async def test_closing_ends_every_wait(program: DirectoryQueue) -> None:
    sent = await program.put(new(), [b"x"])
    tasks = [asyncio.create_task(program.get()), asyncio.create_task(sent.gone())]
    await waiting(program)
    await program.close()
    async with asyncio.timeout(10):
        for task in tasks:
            with pytest.raises(ConnectionAbortedError):
                await task
    with pytest.raises(ConnectionAbortedError):
        await program.put(new(), [])
    await program.close()


async def test_iterating_ends_with_the_queue(program: DirectoryQueue, site: DirectoryQueue) -> None:
    names = [new(), new()]
    for name in names:
        await site.put(name, [])
    found = []
    async for received in program:
        found.append(received.name)
        if len(found) == 2:
            await program.close()
    assert found == names


async def test_closing_while_a_message_is_read(
    program: DirectoryQueue, site: DirectoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.put(new(), [bytes(LARGE)])
    entered, released = await _blocked(monkeypatch, program, "_read")
    getting = asyncio.create_task(program.get())
    await _until(entered)
    getting.cancel()
    closing = asyncio.create_task(program.close())
    released.set()
    await closing
    assert getting.cancelled()
    assert files(program) == []


async def test_what_was_made_is_removed(tmp_path: Path) -> None:
    queue = DirectoryQueue(tmp_path / "a" / "b", "c", Side.ACTIVE)
    queue.open()
    (queue._inbox / "REQ.t.1").touch()
    await queue.close(remove=True)
    assert list(tmp_path.iterdir()) == []


async def test_what_others_have_made_is_kept(tmp_path: Path) -> None:
    first = DirectoryQueue(tmp_path / "a", "c", Side.ACTIVE)
    first.open()
    second = DirectoryQueue(tmp_path / "a", "c", Side.PASSIVE)
    second.open()
    third = DirectoryQueue(tmp_path / "a", "d", Side.ACTIVE)
    third.open()
    await second.close(remove=True)
    assert first._inbox.is_dir()
    await first.close(remove=True)
    assert not first._path.exists()
    assert third._inbox.is_dir()
    await third.close()
    assert third._inbox.is_dir()


async def test_a_queue_is_opened_once(program: DirectoryQueue, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        program.open()
    unopened = DirectoryQueue(tmp_path, "c", Side.ACTIVE)
    with pytest.raises(ConnectionAbortedError):
        await unopened.get()
    await unopened.close(remove=True)


@pytest.mark.parametrize("channel", ["", ".", "..", "a/b", "/", "a\0"])
def test_channels_are_folders_of_their_own(tmp_path: Path, channel: str) -> None:
    with pytest.raises(ValueError, match="channel"):
        DirectoryQueue(tmp_path, channel, Side.ACTIVE)
