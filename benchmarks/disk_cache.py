"""What it costs to find a value in the files of a cache.

``hit`` asks the cache of a site for a key that is not in memory: it reads the file in a thread, compares the key and
the checksum, notes that the value was used, and rebuilds it. ``raw`` reads a file of the same size in a thread of
asyncio's own, and does nothing else. ``memory`` is the same hit when the value is in memory already.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Block, Figure, Options, Target, interleave, main
from dfm_async.federation import CacheConfig
from dfm_async.runtime.cache import CachedFiles, SiteCache
from dfm_async.wire.codec import Codec

SIZES = {"1 KiB": 1024, "1 MiB": 1024**2, "32 MiB": 32 * 1024**2}


async def _hit(cache: SiteCache, key: str) -> None:
    hit, value = await cache.look_up(key, wait=True)
    assert hit
    assert len(value) == SIZES[key]


async def _store(cache: SiteCache, key: str, value: Any) -> None:
    _, ticket = await cache.look_up(key, wait=True)
    data = cache.keep(ticket, value, "benchmark")
    assert data is not None
    await cache.write(ticket, data, "benchmark")


def _blocks(cache: SiteCache, folder: Path, size: str, n: int) -> dict[str, Block]:
    async def hit() -> float:
        start = time.perf_counter()
        for _ in range(n):
            cache._values.clear()
            await _hit(cache, size)
        return (time.perf_counter() - start) / n

    async def memory() -> float:
        await _hit(cache, size)
        start = time.perf_counter()
        for _ in range(n):
            await _hit(cache, size)
        return (time.perf_counter() - start) / n

    async def raw() -> float:
        start = time.perf_counter()
        for _ in range(n):
            await asyncio.to_thread((folder / size).read_bytes)
        return (time.perf_counter() - start) / n

    return {f"hit {size}": hit, f"memory {size}": memory, f"raw {size}": raw}


async def run(options: Options) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = CachedFiles(CacheConfig(base_path=f"{folder}/cache"), "benchmark", "site")
        cache = SiteCache(Codec.for_processes(), stored)
        blocks: dict[str, Block] = {}
        for size, count in SIZES.items():
            value = os.urandom(count)
            (folder / size).write_bytes(value)
            await _store(cache, size, value)
            blocks |= _blocks(cache, folder, size, options.size(20 if count > 2**20 else 200))
        found = await interleave(blocks, options.repeats)
        cache.close()
    return [
        Figure(
            f"hit of {size} in a file",
            "ms",
            found[f"hit {size}"] * 1e3,
            {"raw": found[f"raw {size}"] * 1e3, "memory": found[f"memory {size}"] * 1e3},
            Target(4, "raw"),
        )
        for size in SIZES
    ]


if __name__ == "__main__":
    main("disk_cache", __doc__, run)
