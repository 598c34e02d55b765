"""The FLARE job that carries ours: a folder with configuration, and no code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dfm_async.model.flare import FlareOptions

__all__ = ["CARRIES_CODE", "carrier_name", "write_job"]

CARRIES_CODE: Final = "dfm_async_carries_code.txt"
"""A file that makes FLARE ask each site whether this user may bring code."""
_TASK: Final = "dfm_async"


def carrier_name(options: FlareOptions) -> str:
    """What the carrier of a user's jobs is called. It carries the jobs of all federations of theirs."""
    user = "".join(letter if letter.isalnum() or letter in "-_.@" else "-" for letter in options.user)
    return f"dfm-async-{options.code}-{user}"


def write_job(folder: Path, name: str, sites: Sequence[str], options: FlareOptions) -> None:
    """Writes the folder of a carrier for these sites."""
    app = folder / "app"
    (app / "config").mkdir(parents=True)
    meta: dict[str, Any] = {
        "name": name,
        "resource_spec": {},
        "min_clients": 1 if sites else 0,
        "mandatory_clients": [],
        "deploy_map": {"app": ["server", *sites]},
    }
    args = {"patience": options.delivery_timeout, "linger": options.linger}
    server = {
        "format_version": 2,
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "hub", "path": "dfm_async.targets.flare.components.HubController", "args": args}],
    }
    client = {
        "format_version": 2,
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "executors": [
            {
                "tasks": [_TASK],
                "executor": {
                    "path": "dfm_async.targets.flare.components.SiteExecutor",
                    "args": {"patience": args["patience"]},
                },
            }
        ],
    }
    _write(folder / "meta.json", meta)
    _write(app / "config" / "config_fed_server.json", server)
    _write(app / "config" / "config_fed_client.json", client)
    if options.code == "travels":
        (app / "custom").mkdir()
        (app / "custom" / CARRIES_CODE).write_text("The applications of this job bring the code of their operations.\n")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
