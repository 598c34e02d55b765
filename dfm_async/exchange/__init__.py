"""Programs outside the federation: they take tasks from a site, and hand back results.

The program's side is :class:`FlareAgent` (or :mod:`dfm_async.exchange.sync`, without an event loop), the site's side
is :class:`LauncherExecutor`. :class:`Program` makes an operation of a pipeline out of a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names

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
    "dfm_async.exchange.agent": ("FlareAgent",),
    "dfm_async.exchange.bootstrap": ("Bootstrap", "read_bootstrap"),
    "dfm_async.exchange.executor": ("LauncherExecutor",),
    "dfm_async.exchange.launcher": ("Invitation", "Launcher", "ProgramState", "ProgramStatus"),
    "dfm_async.exchange.options": ("AgentOptions", "ExecutorOptions"),
    "dfm_async.exchange.program": ("Program",),
    "dfm_async.exchange.progress": ("ProgressTracker",),
    "dfm_async.exchange.site_end": ("OfferedResult",),
    "dfm_async.exchange.states": ("ExchangeState",),
    "dfm_async.exchange.subprocess_launcher": ("SubprocessLauncher",),
    "dfm_async.exchange.task": ("Model", "Task", "TaskResult"),
    "dfm_async.exchange.values": ("Encoded", "PlainCodec", "ValueCodec"),
}
__getattr__, __dir__ = lazy_names(__name__, globals(), _HOMES)
