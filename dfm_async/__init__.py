"""Asyncio-native data pipelines over a federation of sites."""

from dfm_async.errors import (
    DfmError,
    EncodingError,
    JobAborted,
    JobFailed,
    JobNotFound,
    OperationFailed,
    ParameterError,
    PipelineError,
    ResultsExpired,
    ResultsUnread,
    SessionClosed,
    ShippingError,
    StreamOverrun,
    WorkerLost,
)
from dfm_async.federation.federation import Federation, Site
from dfm_async.federation.operation import Operation
from dfm_async.model.events import Event, Failure, FrameCompleted, Result, StatusChanged
from dfm_async.model.limits import Cost, ResultLimits, RetryPolicy
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.pipeline.builder import ForEach, If, PlaceParam, Repeat, TryFromCache, Yield, collect
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.pipeline.statements import BestOf
from dfm_async.planner.plan import Plan
from dfm_async.runtime.context import OperationContext, current_context
from dfm_async.session.callbacks import (
    CallbackDispatcher,
    LoopDispatcher,
    ManualDispatcher,
    OtherLoopDispatcher,
)
from dfm_async.session.job import Job
from dfm_async.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "BestOf",
    "CallbackDispatcher",
    "Cost",
    "DfmError",
    "EncodingError",
    "Event",
    "Failure",
    "Federation",
    "ForEach",
    "FrameCompleted",
    "If",
    "Job",
    "JobAborted",
    "JobFailed",
    "JobNotFound",
    "JobStatus",
    "LocalOptions",
    "LoopDispatcher",
    "ManualDispatcher",
    "Operation",
    "OperationContext",
    "OperationFailed",
    "OtherLoopDispatcher",
    "ParameterError",
    "Pipeline",
    "PipelineError",
    "PlaceParam",
    "Plan",
    "Repeat",
    "Result",
    "ResultLimits",
    "ResultsExpired",
    "ResultsUnread",
    "RetryPolicy",
    "Session",
    "SessionClosed",
    "ShippingError",
    "Site",
    "StatusChanged",
    "StreamOverrun",
    "TryFromCache",
    "WorkerLost",
    "Yield",
    "collect",
    "current_context",
]
