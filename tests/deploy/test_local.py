"""A real federation on this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dfm_async.errors import DeploymentError
from dfm_async.flare import LocalFlare


async def test_local_sites_start_and_stop_on_loopback_and_leave_nothing(tmp_path: Path) -> None:
    # One federation for all of it: each takes seconds.
    async with LocalFlare.up(["alpha", "server"], tmp_path, allow_code=True) as flare:
        started = flare.pids
        assert set(started) == {"server", "home", "alpha"}
        assert (flare.startup_kit / "startup" / "fed_admin.json").is_file()
        listening = {
            connection.laddr.ip
            for pid in started.values()
            for connection in psutil.Process(pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}

        await flare.kill_client("alpha")
        assert set(flare.pids) == {"server", "home"}
        with pytest.raises(DeploymentError, match="the client runs already, as process"):
            await flare.start_client("home")
        with pytest.raises(DeploymentError, match=r"no client 'server' \(there are: home, alpha"):
            await flare.kill_client("server")
        await flare.start_client("alpha")
        assert flare.pids["alpha"] != started["alpha"]
        last = flare.pids
    assert not any(psutil.pid_exists(pid) for pid in [*started.values(), *last.values()])
    assert [path.name for path in tmp_path.iterdir()] == ["kits"]


async def test_clients_of_unknown_sites_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="there is no client for 'lab'"):
        async with LocalFlare.up(["alpha"], tmp_path, clients=["alpha", "lab"]):
            pass
