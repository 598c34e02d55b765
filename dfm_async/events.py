"""What the log of a job holds, and what its operations do."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.model.events import Activity as Activity
    from dfm_async.model.events import CallMade as CallMade
    from dfm_async.model.events import Event as Event
    from dfm_async.model.events import EventSent as EventSent
    from dfm_async.model.events import Failure as Failure
    from dfm_async.model.events import FailureHandled as FailureHandled
    from dfm_async.model.events import FrameCompleted as FrameCompleted
    from dfm_async.model.events import Metrics as Metrics
    from dfm_async.model.events import NodeActivity as NodeActivity
    from dfm_async.model.events import Progress as Progress
    from dfm_async.model.events import Result as Result
    from dfm_async.model.events import StatusChanged as StatusChanged
    from dfm_async.model.events import WaitBegan as WaitBegan
    from dfm_async.model.events import WaitEnded as WaitEnded
    from dfm_async.model.events import WorkerNotice as WorkerNotice
    from dfm_async.model.info import FailedSet as FailedSet
    from dfm_async.model.info import WaitInfo as WaitInfo
    from dfm_async.model.replies import Replies as Replies
