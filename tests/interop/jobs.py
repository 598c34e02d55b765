"""Jobs of NVFLARE: federated averaging whose clients launch a command line of ours. Written as plain files."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

_SINK = '''
import json
from nvflare.apis.dxo import from_shareable
from nvflare.app_common.widgets.streaming import AnalyticsReceiver


class MetricSink(AnalyticsReceiver):
    """Writes what clients measured to a file, one line each."""

    def __init__(self, path):
        super().__init__(events=["fed.analytix_log_stats"])
        self.path = path

    def initialize(self, fl_ctx):
        pass

    def finalize(self, fl_ctx):
        pass

    def save(self, fl_ctx, shareable, record_origin):
        data = from_shareable(shareable).data
        with open(self.path, "a") as file:
            record = [record_origin, data["track_key"], data["track_value"], data.get("global_step")]
            file.write(json.dumps(record) + "\\n")
'''


def client_2_8(command: str, *, launch_once: bool) -> dict[str, Any]:
    """What a client of 2.8 does: a launcher, and files for tasks and for metrics."""
    pipe = {
        "path": "nvflare.fuel.utils.pipe.file_pipe.FilePipe",
        "args": {"mode": "PASSIVE", "root_path": "{WORKSPACE}/pipe_{JOB_ID}", "file_check_interval": 0.02},
    }
    launcher = {"script": command, "launch_once": launch_once, "shutdown_timeout": 5.0}
    relay = {
        "pipe_id": "metrics_pipe",
        "event_type": "fed.analytix_log_stats",
        "heartbeat_timeout": 0,
        "read_interval": 0.05,
    }
    executor = {
        "pipe_id": "pipe",
        "launcher_id": "launcher",
        "read_interval": 0.05,
        "last_result_transfer_timeout": 30.0,
        "params_exchange_format": "numpy",
    }
    return {
        "executors": [_executor("client_api_launcher_executor.ClientAPILauncherExecutor", executor)],
        "components": [
            {"id": "pipe", **pipe},
            {"id": "metrics_pipe", **pipe},
            _part("launcher", "nvflare.app_common.launchers.subprocess_launcher.SubprocessLauncher", launcher),
            _part("metric_relay", "nvflare.app_common.widgets.metric_relay.MetricRelay", relay),
            _part(
                "config_preparer",
                "nvflare.app_common.widgets.external_configurator.ExternalConfigurator",
                {"component_ids": ["metric_relay"]},
            ),
        ],
    }


def client_2_9(command: str, *, launch_once: bool) -> dict[str, Any]:
    """What a client of 2.9 does: an executor with a process of its own."""
    executor = {
        "execution_mode": "external_process",
        "command": command,
        "launch_once": launch_once,
        "launch_timeout": 60.0,
        "shutdown_timeout": 10.0,
        "stop_grace_period": 5.0,
        "params_exchange_format": "numpy",
    }
    return {"executors": [_executor("client_api_executor.ClientAPIExecutor", executor)], "components": []}


def _executor(path: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"tasks": ["*"], "executor": {"path": f"nvflare.app_common.executors.{path}", "args": args}}


def _part(name: str, path: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "path": path, "args": args}


def _own_network() -> list[str]:
    """Return what runs a command in a network of its own, where that is allowed.

    The simulator looks for free ports and opens them later; another one beside it may take them meanwhile. A client
    that has lost its port so is never served, and the simulator never ends.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))):
        return []
    return ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "simulator"]


class RunningJob:
    """A job with two clients in the real simulator. It runs from the start; several run beside each other.

    Args:
        folder: a folder of its own.
        python: an interpreter that has NVFLARE.
        client: what the clients do.
        rounds: how many rounds there are.
    """

    def __init__(self, folder: Path, python: Path, client: dict[str, Any], *, rounds: int) -> None:
        config, custom = folder / "job" / "app" / "config", folder / "job" / "app" / "custom"
        config.mkdir(parents=True)
        custom.mkdir()
        (custom / "metric_sink.py").write_text(_SINK)
        fedavg = {"num_clients": 2, "num_rounds": rounds, "persistor_id": "persistor", "task_check_period": 0.1}
        server = {
            "format_version": 2,
            "server": {"task_request_interval": 0.1},
            "workflows": [_part("fedavg", "nvflare.app_common.workflows.fedavg.FedAvg", fedavg)],
            "components": [
                _part("persistor", "nvflare.app_common.np.np_model_persistor.NPModelPersistor", {}),
                _part("metric_sink", "metric_sink.MetricSink", {"path": "{WORKSPACE}/metrics.jsonl"}),
            ],
        }
        (config / "config_fed_server.json").write_text(json.dumps(server))
        (config / "config_fed_client.json").write_text(json.dumps({"format_version": 2, **client}))
        meta = {"name": "averaging", "resource_spec": {}, "min_clients": 2, "deploy_map": {"app": ["@ALL"]}}
        (folder / "job" / "meta.json").write_text(json.dumps(meta))
        self._work = folder / "work"
        self._log = (folder / "log.txt").open("w+")
        self._process = subprocess.Popen(
            [
                *_own_network(),
                python,
                "-m",
                "nvflare.cli",
                "simulator",
                "-w",
                self._work,
                "-n",
                "2",
                "-t",
                "2",
                folder / "job",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def ended(self) -> dict[str, Any]:
        """Waits for its end; gives the log, the model at the end, and the metrics."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=170)
        self._log.seek(0)
        if self._process.poll() is None:
            raise AssertionError(f"the simulator has not ended; its log:\n{self._log.read()}")
        metrics = self._work / "server" / "metrics.jsonl"
        model = self._work / "server" / "simulate_job" / "models" / "server.npy"
        return {
            "log": self._log.read(),
            "model": np.load(model) if model.exists() else None,
            "metrics": [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [],
        }

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._log.close()
        self._process.kill()
        self._process.wait()
