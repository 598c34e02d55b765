"""The bare mechanism of FLARE: a job that sends plain aux messages from one site to another, one per token.

It runs in the same federation as ours and lasts as long as the benchmark, which tells it by commands what to send.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from dfm_async.flare import LocalFlare

FROM, TO = "a", "b"
SITE = "benchmarks.flare_raw_site"
"""What runs there; it needs nvflare, which takes long to load."""
WAIT = 120.0


class RawJob:
    """The job, as the benchmark sees it.

    Args:
        flare: the federation.
    """

    def __init__(self, flare: LocalFlare) -> None:
        from dfm_async.targets.flare.admin import Admin

        self._admin = Admin(flare.startup_kit, flare.user)
        self.job_id = ""
        self.started = 0.0
        """How many seconds it took from its submission until both sites were there."""

    async def __aenter__(self) -> Self:
        await self._admin.open(30)
        with tempfile.TemporaryDirectory(prefix="dfm-bench-") as folder:
            _write_job(Path(folder) / "job")
            start = time.perf_counter()
            self.job_id = await self._admin.submit(Path(folder) / "job")
        await self._started()
        self.started = time.perf_counter() - start
        await self.seconds(4, 100)
        return self

    async def _started(self) -> None:
        from dfm_async.errors import FlareError

        while True:  # FLARE has no other sign: a command to a job that is not up yet is not answered
            try:
                if (await self._admin.command(self.job_id, {}))["sites"] >= 2:
                    return
            except (FlareError, KeyError, TypeError):
                pass
            await asyncio.sleep(0.1)

    async def command(self, _: int = 0) -> None:
        """Sends a command that does nothing."""
        await self._admin.command(self.job_id, {})

    async def __aexit__(self, *_: object) -> None:
        await self._admin.abort(self.job_id)
        await self._admin.close()

    async def seconds(self, n: int, size: int, at_once: int = 1, kind: str = "aux") -> float:
        """Sends n messages of this size from site a to site b, so many at a time; gives the seconds for one.

        They are aux messages, or packets of FLARE's cells (``cell``), which those are made of.
        """
        data = {"n": n, "size": size, "at_once": at_once, "kind": kind}
        answer = await self._admin.command(self.job_id, data, WAIT)
        return float(answer["seconds"]) / n


def _write_job(folder: Path) -> None:
    app = folder / "app"
    (app / "config").mkdir(parents=True)
    (app / "custom").mkdir()
    (app / "custom" / "brings_code.txt").write_text("Its classes are those of the benchmarks.\n")
    sites = ["server", FROM, TO]
    meta = {"name": "raw", "resource_spec": {}, "min_clients": 2, "deploy_map": {"app": sites}}
    common: dict[str, Any] = {
        "format_version": 2,
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }
    server = {**common, "workflows": [{"id": "raw", "path": f"{SITE}.RawController", "args": {}}]}
    executor = {"path": f"{SITE}.RawExecutor", "args": {}}
    client = {**common, "executors": [{"tasks": ["raw"], "executor": executor}]}
    (folder / "meta.json").write_text(json.dumps(meta))
    (app / "config" / "config_fed_server.json").write_text(json.dumps(server))
    (app / "config" / "config_fed_client.json").write_text(json.dumps(client))
