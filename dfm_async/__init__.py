"""Asyncio-native data pipelines over a federation of sites.

The names that most programs need. Everything else is in public modules by theme, such as ``dfm_async.errors``.
"""

from dfm_async.base.lazy import lazy_imports as _lazy_imports
from dfm_async.base.rendering import Renderer as _Renderer
from dfm_async.base.rendering import provide as _provide

_MOVED = {
    "dfm_async.callbacks": "CallbackDispatcher LoopDispatcher ManualDispatcher OtherLoopDispatcher",
    "dfm_async.errors": """
        AgentClosed BadResult BadTask CallStateError ConversionError DecodingError DeploymentError EncodingError
        ExchangeError FederationError FlareError FobsError HandshakeRefused HttpCallFailed JobExists JobInterrupted
        JobOwned LaunchFailed LoadingError PartialError PeerGone PipelineDenied PlaceholderError ProgramExited
        ProgramFailed QueueFull ResultNotDelivered ResultsExpired ResultsUnread SecretError ShippingError StoreError
        StreamOverrun TaskAborted TaskRejected TransferFailed""",
    "dfm_async.events": "Activity CallMade FrameCompleted Metrics NodeActivity",
    "dfm_async.exchange": "SubprocessLauncher",
    "dfm_async.federation": """
        CacheConfig ClassPath Const Cost ExposedParameter FromParam FromProvider FromSecrets FromSite HttpOptions
        SendCost VaultConfig""",
    "dfm_async.flare": "LocalFlare",
    "dfm_async.planning": "Plan Profile",
    "dfm_async.stats": "LaneStats SessionStats SiteStats Traffic WorkerStats",
}
"""Names that can still be imported from here in this release."""

with _lazy_imports(__name__, moved=_MOVED):
    from dfm_async.errors import DfmError as DfmError
    from dfm_async.errors import JobAborted as JobAborted
    from dfm_async.errors import JobFailed as JobFailed
    from dfm_async.errors import JobNotFound as JobNotFound
    from dfm_async.errors import OperationFailed as OperationFailed
    from dfm_async.errors import ParameterError as ParameterError
    from dfm_async.errors import PipelineError as PipelineError
    from dfm_async.errors import SessionClosed as SessionClosed
    from dfm_async.errors import WorkerLost as WorkerLost
    from dfm_async.exchange.agent import FlareAgent as FlareAgent
    from dfm_async.exchange.executor import LauncherExecutor as LauncherExecutor
    from dfm_async.exchange.program import Program as Program
    from dfm_async.federation.federation import Federation as Federation
    from dfm_async.federation.operation import Operation as Operation
    from dfm_async.federation.site import Site as Site
    from dfm_async.language.builder import Advise as Advise
    from dfm_async.language.builder import ForEach as ForEach
    from dfm_async.language.builder import If as If
    from dfm_async.language.builder import PlaceParam as PlaceParam
    from dfm_async.language.builder import Repeat as Repeat
    from dfm_async.language.builder import Sleep as Sleep
    from dfm_async.language.builder import TryFromCache as TryFromCache
    from dfm_async.language.builder import Wait as Wait
    from dfm_async.language.builder import Yield as Yield
    from dfm_async.language.builder import collect as collect
    from dfm_async.language.builder import gather as gather
    from dfm_async.language.pipeline import Pipeline as Pipeline
    from dfm_async.language.statements import BestOf as BestOf
    from dfm_async.model.events import Event as Event
    from dfm_async.model.events import Failure as Failure
    from dfm_async.model.events import Progress as Progress
    from dfm_async.model.events import Result as Result
    from dfm_async.model.events import Results as Results
    from dfm_async.model.events import StatusChanged as StatusChanged
    from dfm_async.model.events import WorkerNotice as WorkerNotice
    from dfm_async.model.flare import FlareOptions as FlareOptions
    from dfm_async.model.info import FailureInfo as FailureInfo
    from dfm_async.model.info import JobInfo as JobInfo
    from dfm_async.model.options import LocalOptions as LocalOptions
    from dfm_async.model.options import ResultLimits as ResultLimits
    from dfm_async.model.policies import RetryPolicy as RetryPolicy
    from dfm_async.model.replies import Reply as Reply
    from dfm_async.model.status import JobStatus as JobStatus
    from dfm_async.runtime.context import OperationContext as OperationContext
    from dfm_async.runtime.context import current_context as current_context
    from dfm_async.session.job import Job as Job
    from dfm_async.session.session import Session as Session
    from dfm_async.version import __version__ as __version__


@_provide
def _renderer() -> _Renderer:
    from dfm_async.display.renderer import NotebookRenderer

    return NotebookRenderer()
