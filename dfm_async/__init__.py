"""Asyncio-native data pipelines over a federation of sites.

The public names are loaded when they are first used: a worker process needs only a few of them, and starts faster.
"""

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names
from dfm_async.rendering import provide as _provide

if TYPE_CHECKING:
    from dfm_async.deploy.local import LocalFlare
    from dfm_async.errors import (
        AgentClosed,
        BadResult,
        BadTask,
        CallStateError,
        ConversionError,
        DecodingError,
        DeploymentError,
        DfmError,
        EncodingError,
        ExchangeError,
        FederationError,
        FlareError,
        FobsError,
        HandshakeRefused,
        HttpCallFailed,
        JobAborted,
        JobExists,
        JobFailed,
        JobInterrupted,
        JobNotFound,
        JobOwned,
        LaunchFailed,
        LoadingError,
        OperationFailed,
        ParameterError,
        PartialError,
        PeerGone,
        PipelineDenied,
        PipelineError,
        PlaceholderError,
        ProgramExited,
        ProgramFailed,
        QueueFull,
        ResultNotDelivered,
        ResultsExpired,
        ResultsUnread,
        SecretError,
        SessionClosed,
        ShippingError,
        StoreError,
        StreamOverrun,
        TaskAborted,
        TaskRejected,
        TransferFailed,
        WorkerLost,
    )
    from dfm_async.exchange.agent import FlareAgent
    from dfm_async.exchange.executor import LauncherExecutor
    from dfm_async.exchange.program import Program
    from dfm_async.exchange.subprocess_launcher import SubprocessLauncher
    from dfm_async.federation.bindings import (
        Const,
        ExposedParameter,
        FromParam,
        FromProvider,
        FromSecrets,
        FromSite,
    )
    from dfm_async.federation.federation import Federation
    from dfm_async.federation.operation import Operation
    from dfm_async.federation.site import Site
    from dfm_async.model.activity import Activity, CallMade, NodeActivity
    from dfm_async.model.events import (
        Event,
        Failure,
        FrameCompleted,
        Metrics,
        Progress,
        Result,
        StatusChanged,
        WorkerNotice,
    )
    from dfm_async.model.flare import FlareOptions
    from dfm_async.model.http import HttpOptions
    from dfm_async.model.info import JobInfo
    from dfm_async.model.limits import ResultLimits
    from dfm_async.model.options import LocalOptions
    from dfm_async.model.policies import Cost, RetryPolicy
    from dfm_async.model.resources import CacheConfig, ClassPath, SendCost, VaultConfig
    from dfm_async.model.results import Results
    from dfm_async.model.stats import LaneStats, SessionStats, SiteStats, Traffic, WorkerStats
    from dfm_async.model.status import JobStatus
    from dfm_async.pipeline.builder import ForEach, If, PlaceParam, Repeat, TryFromCache, Yield, collect
    from dfm_async.pipeline.expressions import Advise
    from dfm_async.pipeline.pipeline import Pipeline
    from dfm_async.pipeline.statements import BestOf
    from dfm_async.planner.plan import Plan
    from dfm_async.planner.profile import Profile
    from dfm_async.rendering import Renderer as _Renderer
    from dfm_async.runtime.context import OperationContext, current_context
    from dfm_async.session.callbacks import (
        CallbackDispatcher,
        LoopDispatcher,
        ManualDispatcher,
        OtherLoopDispatcher,
    )
    from dfm_async.session.job import Job
    from dfm_async.session.session import Session
    from dfm_async.version import __version__ as __version__


__all__ = [
    "Activity",
    "Advise",
    "AgentClosed",
    "BadResult",
    "BadTask",
    "BestOf",
    "CacheConfig",
    "CallMade",
    "CallStateError",
    "CallbackDispatcher",
    "ClassPath",
    "Const",
    "ConversionError",
    "Cost",
    "DecodingError",
    "DeploymentError",
    "DfmError",
    "EncodingError",
    "Event",
    "ExchangeError",
    "ExposedParameter",
    "Failure",
    "Federation",
    "FederationError",
    "FlareAgent",
    "FlareError",
    "FlareOptions",
    "FobsError",
    "ForEach",
    "FrameCompleted",
    "FromParam",
    "FromProvider",
    "FromSecrets",
    "FromSite",
    "HandshakeRefused",
    "HttpCallFailed",
    "HttpOptions",
    "If",
    "Job",
    "JobAborted",
    "JobExists",
    "JobFailed",
    "JobInfo",
    "JobInterrupted",
    "JobNotFound",
    "JobOwned",
    "JobStatus",
    "LaneStats",
    "LaunchFailed",
    "LauncherExecutor",
    "LoadingError",
    "LocalFlare",
    "LocalOptions",
    "LoopDispatcher",
    "ManualDispatcher",
    "Metrics",
    "NodeActivity",
    "Operation",
    "OperationContext",
    "OperationFailed",
    "OtherLoopDispatcher",
    "ParameterError",
    "PartialError",
    "PeerGone",
    "Pipeline",
    "PipelineDenied",
    "PipelineError",
    "PlaceParam",
    "PlaceholderError",
    "Plan",
    "Profile",
    "Program",
    "ProgramExited",
    "ProgramFailed",
    "Progress",
    "QueueFull",
    "Repeat",
    "Result",
    "ResultLimits",
    "ResultNotDelivered",
    "Results",
    "ResultsExpired",
    "ResultsUnread",
    "RetryPolicy",
    "SecretError",
    "SendCost",
    "Session",
    "SessionClosed",
    "SessionStats",
    "ShippingError",
    "Site",
    "SiteStats",
    "StatusChanged",
    "StoreError",
    "StreamOverrun",
    "SubprocessLauncher",
    "TaskAborted",
    "TaskRejected",
    "Traffic",
    "TransferFailed",
    "TryFromCache",
    "VaultConfig",
    "WorkerLost",
    "WorkerNotice",
    "WorkerStats",
    "Yield",
    "collect",
    "current_context",
]

_HOMES = {
    "dfm_async.deploy.local": ("LocalFlare",),
    "dfm_async.errors": (
        "AgentClosed",
        "BadResult",
        "BadTask",
        "CallStateError",
        "ConversionError",
        "DecodingError",
        "DeploymentError",
        "DfmError",
        "EncodingError",
        "ExchangeError",
        "FederationError",
        "FlareError",
        "FobsError",
        "HandshakeRefused",
        "HttpCallFailed",
        "JobAborted",
        "JobExists",
        "JobFailed",
        "JobInterrupted",
        "JobNotFound",
        "JobOwned",
        "LaunchFailed",
        "LoadingError",
        "OperationFailed",
        "ParameterError",
        "PartialError",
        "PeerGone",
        "PipelineDenied",
        "PipelineError",
        "PlaceholderError",
        "ProgramExited",
        "ProgramFailed",
        "QueueFull",
        "ResultNotDelivered",
        "ResultsExpired",
        "ResultsUnread",
        "SecretError",
        "SessionClosed",
        "ShippingError",
        "StoreError",
        "StreamOverrun",
        "TaskAborted",
        "TaskRejected",
        "TransferFailed",
        "WorkerLost",
    ),
    "dfm_async.exchange.agent": ("FlareAgent",),
    "dfm_async.exchange.executor": ("LauncherExecutor",),
    "dfm_async.exchange.program": ("Program",),
    "dfm_async.exchange.subprocess_launcher": ("SubprocessLauncher",),
    "dfm_async.federation.bindings": (
        "Const",
        "ExposedParameter",
        "FromParam",
        "FromProvider",
        "FromSecrets",
        "FromSite",
    ),
    "dfm_async.federation.federation": ("Federation",),
    "dfm_async.federation.operation": ("Operation",),
    "dfm_async.federation.site": ("Site",),
    "dfm_async.model.activity": ("Activity", "CallMade", "NodeActivity"),
    "dfm_async.model.events": (
        "Event",
        "Failure",
        "FrameCompleted",
        "Metrics",
        "Progress",
        "Result",
        "StatusChanged",
        "WorkerNotice",
    ),
    "dfm_async.model.flare": ("FlareOptions",),
    "dfm_async.model.info": ("JobInfo",),
    "dfm_async.model.limits": ("ResultLimits",),
    "dfm_async.model.options": ("LocalOptions",),
    "dfm_async.model.http": ("HttpOptions",),
    "dfm_async.model.policies": ("Cost", "RetryPolicy"),
    "dfm_async.model.resources": ("CacheConfig", "ClassPath", "SendCost", "VaultConfig"),
    "dfm_async.model.results": ("Results",),
    "dfm_async.model.stats": ("LaneStats", "SessionStats", "SiteStats", "Traffic", "WorkerStats"),
    "dfm_async.model.status": ("JobStatus",),
    "dfm_async.pipeline.builder": ("ForEach", "If", "PlaceParam", "Repeat", "TryFromCache", "Yield", "collect"),
    "dfm_async.pipeline.expressions": ("Advise",),
    "dfm_async.pipeline.pipeline": ("Pipeline",),
    "dfm_async.pipeline.statements": ("BestOf",),
    "dfm_async.planner.plan": ("Plan",),
    "dfm_async.planner.profile": ("Profile",),
    "dfm_async.runtime.context": ("OperationContext", "current_context"),
    "dfm_async.session.callbacks": ("CallbackDispatcher", "LoopDispatcher", "ManualDispatcher", "OtherLoopDispatcher"),
    "dfm_async.session.job": ("Job",),
    "dfm_async.session.session": ("Session",),
    "dfm_async.version": ("__version__",),
}
__getattr__, __dir__ = lazy_names(__name__, globals(), _HOMES)


@_provide
def _renderer() -> "_Renderer":
    from dfm_async.display.renderer import NotebookRenderer

    return NotebookRenderer()
