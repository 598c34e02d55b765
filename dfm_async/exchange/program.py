"""Operations of a site that are external programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dfm_async.errors import ProgramFailed
from dfm_async.exchange.executor import LauncherExecutor
from dfm_async.exchange.launcher import SubprocessLauncher, check_environment, check_grace, command_line
from dfm_async.exchange.nvflare import ParamsExchange, ParamsFormat, ParamsTransfer
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.task import Task
from dfm_async.exchange.transports import TRANSPORTS, Invitation, TransportName, site_transport
from dfm_async.model.checks import whole
from dfm_async.runtime.context import OperationContext, call_started
from dfm_async.wire.worker_output import LogRecord

_ROUNDS: Final = ("round", "total_rounds")
_TRANSPORTS: Final = {name: row for name, row in TRANSPORTS.items() if not row.in_process}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An external program as an operation: ``@site.operation(program=Program(argv=[...]))``.

    Every call becomes a task, whose data are the arguments by name; ``round`` and ``total_rounds`` among them are also
    those of the task. The result that the program submits is the value of the call. Metrics and progress become events
    of the job, output becomes log records, and the end of the job ends the program.

    Attributes:
        argv: the program and its arguments; a string is split as a shell would, but no shell runs it.
        launch_once: whether one process serves all calls of a job, one after the other; else every call gets a new one.
        processes: the number of calls of a job that run at the same time, each in a separate process.
        environment: variables in addition to those of the site's worker.
        cwd: the folder to start it in.
        shutdown_timeout: the number of seconds that the program has to end after a request, and again after SIGTERM.
        task: the name of its tasks; by default the name of the operation. Results of tasks called ``validate`` must
            have metrics, and of ``submit_model`` a model, unless ``options`` has other names for these. With the
            transports for NVFLARE, operations that have none of the three names give ``train`` tasks.
        transport: how site and program communicate. ``nvflare-2.8`` and ``nvflare-2.9`` are for unmodified scripts that
            use ``nvflare.client`` of that version (2.5 to 2.8 by files, in the folder ``cwd``; 2.9 needs the extra
            ``flare``). Such a program takes one argument, a ``Model`` or a mapping of parameters, besides ``round`` and
            ``total_rounds``, and its value is a ``Model``. With no argument, it gets a model without parameters.
        site_name: the name of the site as the program sees it, where that must be another one than the site's own,
            such as ``site-1``.
        params_exchange_format: what a script of NVFLARE works with: ``pytorch`` for PyTorch and Lightning,
            ``keras_layer_weights`` for Keras. NVFLARE's client converts in the program; here, arrays are numpy's.
        params_transfer_type: ``DIFF`` lets NVFLARE's client send differences, where the script sends parameters.
        options: timeouts, limits and the names of tasks; by default, all names are allowed.
    """

    argv: Sequence[str | os.PathLike[str]] | str
    launch_once: bool = True
    processes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | os.PathLike[str] | None = None
    shutdown_timeout: float = 5.0
    task: str | None = None
    transport: TransportName = "unix"
    site_name: str | None = None
    params_exchange_format: ParamsFormat = "numpy"
    params_transfer_type: ParamsTransfer = "FULL"
    options: ExecutorOptions = field(default_factory=ExecutorOptions)

    def __post_init__(self) -> None:
        # Here, and not where the program is launched: that is another process, and later.
        command_line(self.argv)
        check_environment(self.environment)
        check_grace(self.shutdown_timeout)
        if not isinstance(self.launch_once, bool):
            raise TypeError(f"launch_once must be True or False, not {self.launch_once!r}")
        whole("processes", self.processes)
        if self.cwd is not None and not isinstance(self.cwd, (str, os.PathLike)):
            raise TypeError(f"cwd must be the path of a folder, not {self.cwd!r}")
        if self.task is not None and (not isinstance(self.task, str) or not self.task):
            raise TypeError(f"task must be a name that is not empty, not {self.task!r}")
        if self.transport not in _TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(_TRANSPORTS)}, not {self.transport!r}")
        if self.site_name is not None and (not isinstance(self.site_name, str) or not self.site_name):
            raise TypeError(f"site_name must be a name that is not empty, not {self.site_name!r}")
        params = ParamsExchange(self.params_exchange_format, self.params_transfer_type)
        if params != ParamsExchange() and not _TRANSPORTS[self.transport].models:
            raise ValueError(
                "params_exchange_format and params_transfer_type are for scripts that use nvflare.client: "
                f"set transport='nvflare-2.8' or 'nvflare-2.9', not {self.transport!r}"
            )
        if not isinstance(self.options, ExecutorOptions):
            raise TypeError(f"options must be ExecutorOptions, not {self.options!r}")
        if _TRANSPORTS[self.transport].owns_folder and self.cwd is not None and self.processes > 1:
            raise ValueError(
                "programs of NVFLARE 2.8 find their site by a file in the folder that they are started in: with cwd, "
                "there can be only one of them at a time. Leave cwd out, or processes at 1"
            )

    @property
    def body_class(self) -> type[ProgramBody]:
        """The class whose objects run the program: one per job, for all operations of a site with this program."""
        return ProgramBody


class ProgramBody:
    """Runs the calls of one program in one job.

    Args:
        program: the program.
    """

    reports_start = True
    """A call begins when it has a process: deadlines do not count what it waits for one."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._free = asyncio.Semaphore(program.processes)
        self._idle: list[_Runner] = []
        self._all: list[_Runner] = []

    async def body(self, context: OperationContext, **arguments: Any) -> Any:
        """Run one call."""
        program = self._program
        nvflare = _TRANSPORTS[program.transport].models
        name = program.task or context.operation
        if nvflare and program.task is None and name not in program.options.task_names:
            name = program.options.train_task_name  # else the script would take none of its branches
        data = _only(arguments) if nvflare else arguments
        task = Task(name, data, round=_number(arguments, "round"), total_rounds=_number(arguments, "total_rounds"))
        async with self._free:
            call_started(context)
            runner = self._idle.pop() if self._idle else await self._new(context)
            try:
                return await runner.run(task, context)
            finally:
                self._idle.append(runner)

    async def _new(self, context: OperationContext) -> _Runner:
        runner = _Runner(self._program, context)
        self._all.append(runner)
        await runner.executor.initialize()
        return runner

    async def aclose(self) -> None:
        """End the programs."""
        runners, self._all = self._all, []
        if runners:
            await asyncio.gather(*(runner.executor.finalize() for runner in runners))


class _Launcher(SubprocessLauncher):
    """Calls back when a process is launched.

    Args:
        launched: is called right before.
        rest: as for every launcher.
    """

    def __init__(self, launched: Callable[[], None], *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **more)
        self._launched = launched

    async def launch(self, task: Task, invitation: Invitation) -> None:
        """Start the program."""
        self._launched()
        await super().launch(task, invitation)


class _Runner:
    """One executor, and the call that it serves."""

    def __init__(self, program: Program, context: OperationContext) -> None:
        self._context = self._next = context
        launcher = _Launcher(
            self._launched,
            program.argv,
            cwd=None if _TRANSPORTS[program.transport].owns_folder else program.cwd,
            environment=program.environment,
            launch_once=program.launch_once,
            shutdown_timeout=program.shutdown_timeout,
            on_output=self._output,
        )
        self._launch_once = program.launch_once
        self.executor = LauncherExecutor(
            launcher,
            msgspec.structs.replace(program.options, other_tasks=("*",)),  # the operation's name is the task's
            transport=site_transport(
                program.transport,
                folder=program.cwd,
                params_exchange_format=program.params_exchange_format,
                params_transfer_type=program.params_transfer_type,
            ),
            site=program.site_name or context.site,
            job=context.job_id,
            on_metrics=self._metrics,
            on_progress=self._progress,
        )

    async def run(self, task: Task, context: OperationContext) -> Any:
        self._next = context
        if self._launch_once:
            self._context = context
        result = await self.executor.execute(task)
        if not result.ok:
            raise ProgramFailed(task.name, result.rc, result.reason, self.executor.status().lines)
        return result.data

    def _launched(self) -> None:
        self._context = self._next  # until then, the process of the call before may still send something

    def _output(self, record: LogRecord) -> None:
        self._context.logger.log(record.level, "%s", record.message)
        if record.traceback:
            self._context.logger.log(record.level, "%s", record.traceback)

    def _metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        self._context.metrics(values, step)

    def _progress(self, done: float, total: float | None, note: str) -> None:
        self._context.progress(done, total, note)


def _only(arguments: Mapping[str, Any]) -> Any:
    found = [value for name, value in arguments.items() if name not in _ROUNDS]
    if len(found) > 1:
        names = ", ".join(name for name in arguments if name not in _ROUNDS)
        raise TypeError(
            f"a program of NVFLARE takes one model besides round and total_rounds, but the call has {names}"
        )
    return found[0] if found else None


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    found = arguments.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) else None
