"""Programs outside the federation: they take tasks from a site, and hand back results.

The program's side is :class:`FlareAgent` (or :mod:`dfm_async.exchange.sync`, without an event loop), the site's side
is :class:`LauncherExecutor`. :class:`Program` makes an operation of a pipeline out of a program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_async.exchange.agent import FlareAgent
    from dfm_async.exchange.bootstrap import Bootstrap, read_bootstrap
    from dfm_async.exchange.executor import LauncherExecutor
    from dfm_async.exchange.launcher import Invitation, Launcher, ProgramState, ProgramStatus
    from dfm_async.exchange.options import AgentOptions, ExecutorOptions
    from dfm_async.exchange.program import Program
    from dfm_async.exchange.progress import ProgressTracker
    from dfm_async.exchange.site_end import OfferedResult
    from dfm_async.exchange.states import ExchangeState
    from dfm_async.exchange.subprocess_launcher import SubprocessLauncher
    from dfm_async.exchange.task import Model, Task, TaskResult
    from dfm_async.exchange.values import Encoded, PlainCodec, ValueCodec

__all__ = [
    "AgentOptions",
    "Bootstrap",
    "Encoded",
    "ExchangeState",
    "ExecutorOptions",
    "FlareAgent",
    "Invitation",
    "Launcher",
    "LauncherExecutor",
    "Model",
    "OfferedResult",
    "PlainCodec",
    "Program",
    "ProgramState",
    "ProgramStatus",
    "ProgressTracker",
    "SubprocessLauncher",
    "Task",
    "TaskResult",
    "ValueCodec",
    "read_bootstrap",
]

# A program needs the agent and nothing of the executor, and it waits for what is imported here: so all are lazy.
_HOMES = {
    "AgentOptions": "options",
    "Bootstrap": "bootstrap",
    "Encoded": "values",
    "ExchangeState": "states",
    "ExecutorOptions": "options",
    "FlareAgent": "agent",
    "Invitation": "launcher",
    "Launcher": "launcher",
    "LauncherExecutor": "executor",
    "Model": "task",
    "OfferedResult": "site_end",
    "PlainCodec": "values",
    "Program": "program",
    "ProgramState": "launcher",
    "ProgramStatus": "launcher",
    "ProgressTracker": "progress",
    "SubprocessLauncher": "subprocess_launcher",
    "Task": "task",
    "TaskResult": "task",
    "ValueCodec": "values",
    "read_bootstrap": "bootstrap",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
