"""What the operations of a job do, counted: a state that is looked at, not a history that is read."""

from __future__ import annotations

import msgspec

from dfm_async.model.ids import Frame

__all__ = ["Activity", "CallMade", "NodeActivity"]


class NodeActivity(msgspec.Struct, frozen=True):
    """How often the operation of a node was called, since the job began. Calls that were cut short are not counted.

    Attributes:
        node: the label of the node.
        site: the site that it runs at.
        started: how many calls have begun, every attempt counted.
        done: how many have returned.
        failed: how many have raised.
    """

    node: str
    site: str
    started: int
    done: int
    failed: int

    @property
    def running(self) -> int:
        """How many calls are under way."""
        return self.started - self.done - self.failed


class CallMade(msgspec.Struct, frozen=True, gc=False):
    """A call that has ended.

    Attributes:
        node: the label of its node.
        site: the site that it ran at.
        frame: the execution that it belongs to.
        attempt: which try it was, counted from 1.
        start: when it began, in seconds since 1970, by the clock of its site.
        end: when it ended.
        failed: whether it raised.
    """

    node: str
    site: str
    frame: Frame
    attempt: int
    start: float
    end: float
    failed: bool


class Activity(msgspec.Struct, frozen=True):
    """What has changed since the reader looked last; the first one tells everything.

    Attributes:
        nodes: the nodes that were called since then, with their totals.
        calls: calls that have ended since then. They are a sample of bounded size: the newest ones.
        left_out: how many calls of the job are counted in its nodes, but were never among ``calls``.
    """

    nodes: tuple[NodeActivity, ...]
    calls: tuple[CallMade, ...]
    left_out: int
