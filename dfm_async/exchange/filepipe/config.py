"""The file by which NVFLARE tells a program how to reach its site."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.errors import HandshakeRefused
from dfm_async.exchange.nvflare import ParamsExchange

__all__ = ["API_TYPE", "CONFIG_FILE", "ClientConfig", "client_config", "read_client_config"]

API_TYPE: Final = "CLIENT_API_TYPE"
"""The environment variable that says how the program reaches its site."""
EX_PROCESS: Final = "EX_PROCESS_API"
CONFIG_FILE: Final = "config/client_api_config.json"
_FILE_PIPE: Final = "nvflare.fuel.utils.pipe.file_pipe.FilePipe"


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a program must know.

    Attributes:
        root: the folder of the pipes.
        site: the name of the site.
        job: the job.
        metrics: whether there is a channel for metrics.
        launch_once: whether the program serves many tasks.
        heartbeat_timeout: how long the site may say nothing, in seconds; 0 means for ever.
        submit_result_timeout: how long the site may take to read a result, in seconds.
    """

    root: str
    site: str = ""
    job: str = ""
    metrics: bool = False
    launch_once: bool = False
    heartbeat_timeout: float = 60.0
    submit_result_timeout: float = 300.0


def client_config(
    config: ClientConfig,
    params: ParamsExchange,
    *,
    train: str,
    evaluate: str,
    submit_model: str,
    train_with_evaluation: bool,
) -> bytes:
    """Writes what a stock program reads."""

    def pipe(**more: Any) -> dict[str, Any]:
        return {"CLASS_NAME": _FILE_PIPE, "ARG": {"mode": "ACTIVE", "root_path": config.root, **more}}

    found: dict[str, Any] = {
        "site_name": config.site or "site",
        "job_id": config.job or "job",
        "TASK_EXCHANGE": {
            "train_with_eval": train_with_evaluation,
            **params.config,
            "train_task_name": train,
            "eval_task_name": evaluate,
            "submit_model_task_name": submit_model,
            "pipe_channel_name": "task",
            "pipe": pipe(),
            "HEARTBEAT_TIMEOUT": config.heartbeat_timeout,
            "submit_result_timeout": config.submit_result_timeout,
            "launch_once": config.launch_once,
        },
    }
    if config.metrics:
        # The program waits until a record is read; it would look only every 0.1 s.
        found["METRICS_EXCHANGE"] = {
            "pipe_channel_name": "metric",
            "pipe": pipe(file_check_interval=0.005),
            "HEARTBEAT_TIMEOUT": config.heartbeat_timeout,
        }
    return json.dumps(found, indent=2).encode()


def read_client_config(
    path: str | os.PathLike[str] = CONFIG_FILE, environment: Mapping[str, str] | None = None
) -> ClientConfig:
    """Reads what an NVFLARE site has written for this program.

    Raises:
        HandshakeRefused: there is none, or it names another transport than files.
    """
    kind = (os.environ if environment is None else environment).get(API_TYPE)
    if kind != EX_PROCESS:
        raise HandshakeRefused(f"{API_TYPE} is {kind!r}: an NVFLARE site that launches programs sets {EX_PROCESS!r}")
    try:
        found = json.loads(Path(path).read_bytes())
        task = found["TASK_EXCHANGE"]
        pipe = task["pipe"]
        if pipe["CLASS_NAME"] != _FILE_PIPE:
            raise HandshakeRefused(f"{path} names {pipe['CLASS_NAME']}, but only {_FILE_PIPE} is supported")
        metric = found.get("METRICS_EXCHANGE")
        return ClientConfig(
            root=str(pipe["ARG"]["root_path"]),
            site=str(found.get("site_name", "")),
            job=str(found.get("job_id", "")),
            metrics=metric is not None and metric["pipe"]["ARG"]["root_path"] == pipe["ARG"]["root_path"],
            launch_once=bool(task.get("launch_once", False)),
            heartbeat_timeout=float(task.get("HEARTBEAT_TIMEOUT", 60)),
            submit_result_timeout=float(task.get("submit_result_timeout", 300)),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HandshakeRefused(f"{path} cannot be read as a configuration of NVFLARE: {error!r}") from error
