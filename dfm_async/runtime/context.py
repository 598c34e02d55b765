"""What an operation can know about the call that it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar

from dfm_async.model.ids import Frame

__all__ = ["OperationContext", "current_context", "enter"]

_current: ContextVar[OperationContext | None] = ContextVar("dfm_async_context", default=None)


class OperationContext:
    """The call that an operation serves. An operation gets it by a parameter named ``context``, or by asking.

    Attributes:
        job_id: the job.
        site: the site that the operation runs at.
        operation: the operation's name.
        node: the label of the node in the pipeline.
        frame: the execution that the call belongs to.
        attempt: which try this is, counted from 1.
    """

    __slots__ = ("attempt", "frame", "job_id", "node", "operation", "site")

    def __init__(self, job_id: str, site: str, operation: str, node: str, frame: Frame, attempt: int) -> None:
        self.job_id = job_id
        self.site = site
        self.operation = operation
        self.node = node
        self.frame = frame
        self.attempt = attempt

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds the job, the site, the frame, the node and the operation to every record."""
        extra = {
            "job": self.job_id,
            "site": self.site,
            "frame": self.frame,
            "node": self.node,
            "operation": self.operation,
        }
        return logging.LoggerAdapter(logging.getLogger(f"dfm_async.site.{self.site}"), extra)

    def __repr__(self) -> str:
        return f"<OperationContext {self.node} at {self.site!r}, job {self.job_id}, frame {self.frame}>"


def enter(context: OperationContext) -> Callable[[], None]:
    """Makes a context the current one; the function that it gives back undoes that."""
    token = _current.set(context)
    return lambda: _current.reset(token)


def current_context() -> OperationContext:
    """Gives the context of the call that is running.

    Raises:
        LookupError: no operation is running here.
    """
    found = _current.get()
    if found is None:
        raise LookupError("no operation of a pipeline is running here")
    return found
