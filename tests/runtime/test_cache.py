"""TryFromCache with files: values outlive sessions, are computed once, and trouble with files stops no job."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dfm_async import (
    Federation,
    ForEach,
    JobStatus,
    LocalOptions,
    OperationContext,
    Pipeline,
    PlaceParam,
    RetryPolicy,
    Session,
    TryFromCache,
    Yield,
)
from dfm_async.federation import CacheConfig
from tests.conftest import Connect
from tests.support.pipelines import yielding
from tests.support.sessions import first_value


def federation(cache: CacheConfig | None, workers: int | None = None) -> Federation:
    fed = Federation("cached")
    lab = fed.site("lab", cache=cache, workers=workers)

    @lab.operation
    def compute(key: Any, log: str) -> Any:
        """Notes that it was called."""
        with open(log, "a") as file:
            print(key, file=file)
        return {"key": key, "data": b"x" * 100, "where": ("a", "tuple")}

    @lab.operation
    def pattern(log: str) -> Any:
        """Gives what only pickle can hold."""
        with open(log, "a") as file:
            print("pattern", file=file)
        return re.compile("1/3")

    @lab.operation
    def text_of(value: Any) -> str:
        return value.pattern if isinstance(value, re.Pattern) else str(value)

    @lab.operation
    def remember(name: str, text: str, context: OperationContext) -> str:
        """Uses the directory itself."""
        file = context.cache_storage("notes/today") / name
        if not file.exists():
            file.write_text(text)
        return str(file.read_text())

    return fed


def cached(fed: Federation, log: Path) -> Pipeline:
    with Pipeline("cached") as pipeline:
        with TryFromCache(key=("compute", PlaceParam("key", multiuse=True))) as found:
            found.store(fed.operations["compute"](PlaceParam("key", multiuse=True), str(log)))
        Yield(found)
    return pipeline


async def values(connect: Connect, fed: Federation, pipeline: Pipeline, params: Any = {}) -> list[Any]:  # noqa: B006
    async with connect(fed) as session:
        job = await session.execute(pipeline, params)
        found = [result.value for result in await job.collect()]
        assert await job is JobStatus.FINISHED
        return found


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def all_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def warned(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "dfm_async.runtime.cache"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def on_disk(tmp_path: Path) -> CacheConfig:
    return CacheConfig(base_path=str(tmp_path / "cache"))


@pytest.fixture
def fed(on_disk: CacheConfig) -> Federation:
    """A federation whose site keeps values on the disk."""
    return federation(on_disk)


async def test_a_value_outlives_the_session_that_computed_it(connect: Connect, fed: Federation, log: Path) -> None:
    first = await values(connect, fed, cached(fed, log), {"key": "a"})
    second = await values(connect, fed, cached(fed, log), {"key": "a"})
    assert first == second == [{"key": "a", "data": b"x" * 100, "where": ("a", "tuple")}]
    assert lines(log) == ["a"]


async def test_keys_that_are_equal_find_the_same_value(connect: Connect, fed: Federation, log: Path) -> None:
    await values(connect, fed, cached(fed, log), {"key": {"a": 1, "b": {2, 3}}})
    await values(connect, fed, cached(fed, log), {"key": {"b": {3, 2}, "a": 1}})
    await values(connect, fed, cached(fed, log), {"key": {"a": 1, "b": [2, 3]}})
    assert len(lines(log)) == 2


async def test_concurrent_misses_of_jobs_and_workers_run_the_body_once(
    connect: Connect, on_disk: CacheConfig, log: Path
) -> None:
    fed = federation(on_disk, workers=2)
    with Pipeline("many") as pipeline, ForEach([0] * 10):
        with TryFromCache(key="k", site="lab") as found:
            found.store(fed.operations["compute"]("k", str(log)))
        Yield(found)
    async with connect(fed) as session:
        jobs = [await session.execute(pipeline) for _ in range(4)]
        for job in jobs:
            assert len(await job.collect()) == 10
    assert lines(log) == ["k"]


async def test_values_can_be_kept_on_any_file_system(log: Path, tmp_path: Path) -> None:
    fed = federation(CacheConfig(protocol="memory", base_path=f"{tmp_path}/cache"))
    for _ in range(2):
        async with Session(fed, target="inline") as session:
            job = await session.execute(cached(fed, log), {"key": "a"})
            (result,) = await job.collect()
            assert result.value["key"] == "a"
    assert lines(log) == ["a"]
    filesystem = fsspec.filesystem("memory")
    assert len(filesystem.find(f"{tmp_path}/cache")) == 1
    filesystem.rm(str(tmp_path), recursive=True)


async def test_a_value_that_is_too_old_is_computed_again(connect: Connect, log: Path, tmp_path: Path) -> None:
    fed = federation(CacheConfig(base_path=str(tmp_path / "cache"), max_age=0.001))
    async with connect(fed) as session:
        for _ in range(2):
            job = await session.execute(cached(fed, log), {"key": "a"})
            await job.collect()
            await asyncio.sleep(0.01)  # it grows old
    assert lines(log) == ["a", "a"]


async def test_unstorable_value_is_computed_once_per_session(
    connect: Connect, fed: Federation, log: Path, tmp_path: Path
) -> None:
    with Pipeline("pattern") as pipeline, ForEach([0, 1, 2]):
        with TryFromCache(key="k") as found:
            found.store(fed.operations["pattern"](str(log)))
        Yield(fed.operations["text_of"](found))
    assert await values(connect, fed, pipeline) == ["1/3"] * 3
    assert lines(log) == ["pattern"]
    assert all_files(tmp_path / "cache") == []
    assert await values(connect, fed, pipeline) == ["1/3"] * 3
    assert lines(log) == ["pattern"] * 2


async def test_block_that_keeps_nothing_in_files_is_logged_once(
    fed: Federation, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Pipeline("pattern") as pipeline, ForEach([0, 1, 2]) as number:
        with TryFromCache(key=("k", number)) as found:
            found.store(fed.operations["pattern"](str(log)))
        Yield(fed.operations["text_of"](found))
    async with Session(fed, target="inline") as session:
        await (await session.execute(pipeline)).collect()
    (record,) = warned(caplog)
    assert "TryFromCache#1 at site lab is not kept in files" in record.getMessage()
    assert "re.Pattern" in record.getMessage()


@pytest.fixture
def unusable(tmp_path: Path) -> Path:
    """A place that no directory can be made at, for root neither."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "cache"


async def test_a_directory_that_cannot_be_made_stops_no_job(connect: Connect, unusable: Path, log: Path) -> None:
    fed = federation(CacheConfig(base_path=str(unusable)))
    with Pipeline("twice") as pipeline, ForEach(["a", "a"], concurrency=1) as key:
        with TryFromCache(key=key) as found:
            found.store(fed.operations["compute"](key, str(log)))
        Yield(found["key"])
    assert await values(connect, fed, pipeline) == ["a", "a"]
    assert lines(log) == ["a"]


@pytest.mark.parametrize("secret", ["hunter2"])
async def test_file_errors_are_logged_once_and_without_the_options(
    log: Path, caplog: pytest.LogCaptureFixture, secret: str
) -> None:
    config = CacheConfig(protocol="sftp-of-nobody", base_path="x", storage_options={"password": secret})
    fed = federation(config)
    async with Session(fed, target="inline") as session:
        for key in "ab":
            job = await session.execute(cached(fed, log), {"key": key})
            await job.collect()
            assert await job is JobStatus.FINISHED
    (record,) = warned(caplog)
    assert "the cache of site lab is kept in memory only" in record.getMessage()
    assert secret not in record.getMessage()


async def test_missing_package_of_a_file_system_is_logged_with_what_to_do(
    log: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    fed = federation(CacheConfig(protocol="s3", base_path="bucket/x"))
    async with Session(fed, target="inline") as session:
        job = await session.execute(cached(fed, log), {"key": "a"})
        assert await job is JobStatus.FINISHED
    (record,) = warned(caplog)
    assert "install the package of its protocol where the site runs, such as s3fs" in record.getMessage()


async def test_a_full_disk_stops_no_job_and_leaves_no_file(
    fed: Federation, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    async with Session(fed, target="inline") as session:
        monkeypatch.setattr("dfm_async.site.cache_files._write_all", full)
        for key in "ab":
            job = await session.execute(cached(fed, log), {"key": key})
            assert len(await job.collect()) == 1
            assert await job is JobStatus.FINISHED
    assert ["No space left" in record.getMessage() for record in warned(caplog)] == [True]
    assert all_files(tmp_path / "cache") == []


async def test_a_directory_that_somebody_removes_is_made_again(
    fed: Federation, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Session(fed, target="inline") as session:
        for key in "ab":
            await (await session.execute(cached(fed, log), {"key": key}))
            assert len(all_files(tmp_path / "cache")) == 1
            shutil.rmtree(tmp_path / "cache")
    assert warned(caplog) == []


async def test_job_cancelled_during_a_write_leaves_no_file(
    fed: Federation, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dfm_async.site import cache_files

    loop, writing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    write = cache_files._write_all

    def slowly(fd: int, data: memoryview) -> None:
        loop.call_soon_threadsafe(writing.set)
        go_on.wait()
        write(fd, data)

    monkeypatch.setattr(cache_files, "_write_all", slowly)
    async with Session(fed, target="inline") as session:
        job = await session.execute(cached(fed, log), {"key": "a"})
        assert (await job.first()).value["key"] == "a"  # who reads it does not wait for the file
        await writing.wait()
        stopping = asyncio.create_task(job.cancel())
        for _ in range(50):  # turns of the loop: messages of the inline target need no more than a few
            await asyncio.sleep(0)
        go_on.set()
        await stopping
    assert job.status is JobStatus.ABORTED
    assert all_files(tmp_path / "cache") == []


async def test_worker_killed_during_a_write_leaves_no_readable_file(tmp_path: Path) -> None:
    fed = Federation("killed")
    lab = fed.site("lab", cache=CacheConfig(base_path=str(tmp_path / "cache")))
    bell, log = tmp_path / "bell", tmp_path / "log"
    os.mkfifo(bell)

    @lab.operation
    def compute(log: str, bell: str) -> bytes:
        """The first time, the worker that it runs in will stop in the middle of what it writes."""
        from dfm_async.site import cache_files

        first = not os.path.exists(log)
        with open(log, "a") as file:
            print("compute", file=file)
        write = cache_files._write_all

        def stop(fd: int, data: memoryview) -> None:
            write(fd, data[:1000])
            with open(bell, "w") as file:  # somebody hears it
                print(os.getpid(), file=file)
            threading.Event().wait()

        if first:
            cache_files._write_all = stop
        return b"x" * 100_000

    with Pipeline("killed") as pipeline:
        with TryFromCache(key="k") as found:
            found.store(compute(str(log), str(bell)))
        Yield(found)
    async with Session(fed, options=LocalOptions(lanes=1)) as session:
        job = await session.execute(pipeline, retry=RetryPolicy(on_worker_lost=1))
        os.kill(int(await asyncio.to_thread(bell.read_text)), signal.SIGKILL)
        (result,) = await job.collect()
        assert len(result.value) == 100_000
        assert await job is JobStatus.FINISHED
    assert lines(log) == ["compute", "compute"]
    assert len(all_files(tmp_path / "cache")) == 1  # and none that was half written
    async with Session(fed) as session:
        assert len(await first_value(session, pipeline)) == 100_000
    assert lines(log) == ["compute", "compute"]


async def test_a_job_has_finished_when_its_values_are_written(
    connect: Connect, fed: Federation, log: Path, tmp_path: Path
) -> None:
    async with connect(fed) as session:
        job = await session.execute(cached(fed, log), [{"key": number} for number in range(20)])
        await job.wait_until_finished()
        assert len(all_files(tmp_path / "cache")) == 20


async def test_untrusted_files_are_never_unpickled(
    on_disk: CacheConfig, fed: Federation, log: Path, tmp_path: Path, connect: Connect
) -> None:
    from dfm_async.site.cache_files import open_files
    from dfm_async.wire.codec import Codec

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "bang"),)

    key = Codec.for_untrusted().for_keys().encode(("compute", "a"))
    open_files(on_disk, "cached", "lab").write(key, Codec.for_processes().encode([Bomb()]), lambda: False)
    assert (await values(connect, fed, cached(fed, log), {"key": "a"}))[0]["key"] == "a"
    assert lines(log) == ["a"]
    assert not (tmp_path / "bang").exists()


async def test_operations_keep_files_of_their_own(connect: Connect, fed: Federation) -> None:
    pipeline = yielding(lambda: fed.operations["remember"]("note", PlaceParam("text")))
    assert await values(connect, fed, pipeline, {"text": "first"}) == ["first"]
    assert await values(connect, fed, pipeline, {"text": "second"}) == ["first"]
