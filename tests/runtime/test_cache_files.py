"""Files of a cache: what is damaged counts as missing, limits hold, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.federation import CacheConfig
from dfm_async.site.cache_files import (
    BlobDirectory,
    CacheFiles,
    LocalDirectory,
    NoRoom,
    RemoteDirectory,
    WriteAbandoned,
    open_files,
)
from dfm_async.site.cache_storage import VALUES, cache_storage


class Clock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def wanted() -> bool:
    return False


def files_of(
    directory: BlobDirectory, clock: Clock | None = None, *, max_bytes: int = 10_000, max_age: float | None = None
) -> CacheFiles:
    return CacheFiles(directory, max_bytes=max_bytes, max_age=max_age, clock=clock or Clock())


def value_of(files: CacheFiles, key: bytes) -> bytes | None:
    found = files.read(key)
    return None if found is None else bytes(found[0])


def all_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.fixture(params=["disk", "fsspec", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobDirectory]:
    if request.param == "disk":
        yield LocalDirectory(tmp_path)
        return
    filesystem = fsspec.filesystem("memory" if request.param == "memory" else "file")
    yield RemoteDirectory(filesystem, f"{tmp_path}/values")
    if filesystem.exists(str(tmp_path)):
        filesystem.rm(str(tmp_path), recursive=True)


def test_a_value_is_read_as_it_was_written(directory: BlobDirectory) -> None:
    files = files_of(directory)
    assert value_of(files, b"k") is None
    files.write(b"k", b"first", wanted)
    files.write(b"k", b"second", wanted)
    files.write(b"empty", b"", wanted)
    assert value_of(files, b"k") == b"second"
    assert value_of(files, b"empty") == b""
    assert value_of(files_of(directory), b"k") == b"second"


def test_limits_of_age_and_size_hold_on_every_file_system(directory: BlobDirectory) -> None:
    clock = Clock()
    files = files_of(directory, clock, max_bytes=1000, max_age=100)
    for number in range(20):
        files.write(b"%d" % number, bytes(200), wanted)
        assert sum(entry.size for entry in directory.entries()) <= 1000
    assert value_of(files, b"19") == bytes(200)
    clock.now += 100
    assert value_of(files, b"19") is None


def test_a_value_that_was_used_stays_and_others_make_room(tmp_path: Path) -> None:
    files = files_of(LocalDirectory(tmp_path), max_bytes=1000)
    for key in (b"a", b"b", b"c"):
        files.write(key, bytes(250), wanted)
    assert value_of(files, b"a") is not None
    files.write(b"d", bytes(250), wanted)
    assert [key for key in (b"a", b"b", b"c", b"d") if value_of(files, key) is not None] == [b"a", b"c", b"d"]


def test_a_value_larger_than_all_that_may_be_kept_is_refused(tmp_path: Path) -> None:
    files = files_of(LocalDirectory(tmp_path), max_bytes=1000)
    files.write(b"small", bytes(500), wanted)
    with pytest.raises(NoRoom, match="1000"):
        files.write(b"large", bytes(1000), wanted)
    assert value_of(files, b"small") is not None


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "read", "look"]), st.integers(0, 12), st.integers(0, 400)), max_size=60
    )
)
def test_files_keep_their_limit_and_return_the_last_value(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("values")
    directory, clock = LocalDirectory(root), Clock()
    files = files_of(directory, clock, max_bytes=1000)
    expected: dict[bytes, bytes] = {}
    for step, number, size in steps:
        key = b"%d" % number
        if step == "write":
            value = bytes([number]) * size
            files.write(key, value, wanted)
            expected[key] = value
            assert value_of(files, key) == value
        elif step == "read":
            assert value_of(files, key) in (None, expected.get(key))
        else:  # another process opens the same directory
            files = files_of(directory, clock, max_bytes=1000)
        assert sum(path.stat().st_size for path in all_files(root)) <= 1000


@given(st.data())
def test_a_file_that_is_cut_or_changed_counts_as_missing_and_is_removed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("values")
    files = files_of(LocalDirectory(root))
    files.write(b"key", b"the value", wanted)
    (path,) = all_files(root)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert value_of(files, b"key") is None
    assert all_files(root) == []


def test_what_is_no_file_is_left_alone_and_not_waited_for(tmp_path: Path) -> None:
    files = files_of(LocalDirectory(tmp_path))
    files.write(b"key", b"value", wanted)
    (path,) = all_files(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert value_of(files, b"key") is None


def test_abandoned_write_leaves_nothing(directory: BlobDirectory) -> None:
    files = files_of(directory, max_bytes=100_000_000)
    asked: list[None] = []

    def after_a_while() -> bool:
        asked.append(None)
        return len(asked) > 5

    with pytest.raises(WriteAbandoned):
        while True:
            files.write(b"key", bytes(20_000_000), after_a_while)
    if isinstance(directory, LocalDirectory):
        assert all_files(directory._new) == []


def test_many_threads_and_two_caches_of_one_directory_never_read_a_torn_value(tmp_path: Path) -> None:
    caches = [files_of(LocalDirectory(tmp_path), max_bytes=60_000) for _ in range(2)]

    def work(seed: int) -> None:
        files = caches[seed % 2]
        for number in range(60):
            key = b"%d" % ((number * 7 + seed) % 5)
            if number % 3:
                found = value_of(files, key)
                assert found is None or (len(set(found)) == 1 and len(found) in (1000, 9000))
            else:
                files.write(key, bytes([seed]) * (1000 if seed % 3 else 9000), wanted)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(8)]:
            done.result()
    assert all_files(tmp_path / "new") == []


WRITER = """
import pathlib, sys
from dfm_async.site.cache_files import LocalDirectory
from dfm_async.site.cache_files import CacheFiles

files = CacheFiles(LocalDirectory(pathlib.Path(sys.argv[1])), max_bytes=10**9, max_age=None)

def hold() -> bool:
    global asked
    asked += 1
    if asked == 6:
        print("writing", flush=True)
        sys.stdin.read()
    return False

asked = 0
files.write(b"key", bytes(50_000_000), hold)
"""


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        files = files_of(LocalDirectory(tmp_path))
        files.write(b"other", b"1", wanted)
        assert len(all_files(tmp_path / "new")) == 1
        assert value_of(files, b"key") is None
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(all_files(tmp_path / "new")) == 1
    files_of(LocalDirectory(tmp_path)).write(b"other", b"2", wanted)
    assert all_files(tmp_path / "new") == []
    assert value_of(files, b"key") is None


def test_sites_that_share_a_directory_do_not_share_values(tmp_path: Path) -> None:
    config = CacheConfig(base_path=str(tmp_path))
    open_files(config, "fed", "a").write(b"k", b"of a", wanted)
    assert value_of(open_files(config, "fed", "b"), b"k") is None
    assert value_of(open_files(config, "other", "a"), b"k") is None
    assert value_of(open_files(config, "fed", "a"), b"k") == b"of a"


# directories


def test_storage_is_in_the_directory_of_the_user_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_storage(CacheConfig(), "my fed/../x", "site", "models/small")
    assert path.is_dir()
    assert Path(path.path) == tmp_path / "dfm_async" / "my%20fed%2F..%2Fx" / "site" / "models" / "small"
    assert Path(cache_storage(CacheConfig(), "..", "site").path) == tmp_path / "dfm_async" / "%2E%2E" / "site"


@pytest.mark.parametrize("subpath", ["..", "a/../..", "/etc", "a\\..\\b", "s3://bucket", "a\0b", f"{VALUES}/x"])
def test_a_subpath_cannot_leave_the_directory(tmp_path: Path, subpath: str) -> None:
    with pytest.raises(ValueError, match="cache directory"):
        cache_storage(CacheConfig(base_path=str(tmp_path)), "fed", "site", subpath)
    assert list(tmp_path.iterdir()) == []


def test_storage_can_be_on_any_file_system(tmp_path: Path) -> None:
    config = CacheConfig(protocol="memory", base_path=f"{tmp_path}/cache")
    path = cache_storage(config, "fed", "site", "sub")
    (path / "file").write_text("text")
    assert fsspec.filesystem("memory").cat_file(f"{tmp_path}/cache/sub/file") == b"text"
    path.fs.rm(str(tmp_path), recursive=True)


def test_options_of_a_storage_are_named_but_not_shown() -> None:
    config = CacheConfig(protocol="s3", base_path="bucket/x", storage_options={"key": "AKIA", "secret": "hunter2"})
    assert "hunter2" not in repr(config)
    assert "AKIA" not in repr(config)
    assert "secret" in repr(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"protocol": "s3"}, "base_path"), ({"max_bytes": 0}, "max_bytes"), ({"max_age": 0}, "max_age")],
)
def test_invalid_cache_configuration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**options)


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    files = files_of(LocalDirectory(tmp_path))
    files.write(b"k", b"old", wanted)
    asked, go_on = threading.Event(), threading.Event()

    def hold() -> bool:
        asked.set()
        go_on.wait()
        return False

    writer = threading.Thread(target=files.write, args=(b"k", b"new", hold))
    writer.start()
    asked.wait()
    assert value_of(files, b"k") == b"old"
    go_on.set()
    writer.join()
    assert value_of(files, b"k") == b"new"
