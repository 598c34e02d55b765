"""Programs outside the federation: they take tasks from a site, and hand back results.

The program's side is :class:`FlareAgent` (or :mod:`dfm_async.exchange.sync`, without an event loop), the site's side
is :class:`LauncherExecutor`. :class:`Program` makes an operation of a pipeline out of a program.
"""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.exchange.agent import FlareAgent as FlareAgent
    from dfm_async.exchange.bootstrap import Bootstrap as Bootstrap
    from dfm_async.exchange.bootstrap import read_bootstrap as read_bootstrap
    from dfm_async.exchange.executor import LauncherExecutor as LauncherExecutor
    from dfm_async.exchange.filepipe.transport import FilePipeTransport as FilePipeTransport
    from dfm_async.exchange.launcher import Launcher as Launcher
    from dfm_async.exchange.launcher import SubprocessLauncher as SubprocessLauncher
    from dfm_async.exchange.options import AgentOptions as AgentOptions
    from dfm_async.exchange.options import ExecutorOptions as ExecutorOptions
    from dfm_async.exchange.program import Program as Program
    from dfm_async.exchange.program_connection import OfferedResult as OfferedResult
    from dfm_async.exchange.progress import ProgressTracker as ProgressTracker
    from dfm_async.exchange.task import ExchangeState as ExchangeState
    from dfm_async.exchange.task import Model as Model
    from dfm_async.exchange.task import ProgramState as ProgramState
    from dfm_async.exchange.task import ProgramStatus as ProgramStatus
    from dfm_async.exchange.task import Task as Task
    from dfm_async.exchange.task import TaskResult as TaskResult
    from dfm_async.exchange.transports import Invitation as Invitation
    from dfm_async.exchange.value_codec import Encoded as Encoded
    from dfm_async.exchange.value_codec import PlainCodec as PlainCodec
    from dfm_async.exchange.value_codec import ValueCodec as ValueCodec
