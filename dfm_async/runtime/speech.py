"""What the calls of a job say while they run, told to the application a few times per second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.runtime.paced import Paced
from dfm_async.wire import messages as msg

if TYPE_CHECKING:
    from dfm_async.runtime.job import SiteJob

__all__ = ["Speech"]

_PAUSE: Final = 0.05
"""How many seconds lie between reports."""
_BATCH: Final = 1_000
"""So many reports of metrics do not wait for the pause."""


class Speech:
    """Gathers reports of one job at one location. Of each call's progress only the last counts; of metrics, all do."""

    __slots__ = ("_job", "_paced", "_reports")

    def __init__(self, job: SiteJob) -> None:
        self._job = job
        self._reports: dict[tuple[str, Frame], tuple[str, Frame, float, float | None, str]] = {}
        self._paced = Paced(_PAUSE, self._send)

    def progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Takes a report, and sends it at the end of this turn of the loop, or when the pause is over."""
        self._reports[node, frame] = (node, frame, done, total, note)
        self._paced.soon()

    def metrics(self, node: str, frame: Frame, values: dict[str, Scalar], step: int | None) -> None:
        """The same for metrics; many of them are sent at once."""
        outbox = self._job.outbox
        if outbox.add_metrics(node, frame, values, step) >= _BATCH:
            outbox.send_metrics()
        else:
            self._paced.soon()

    def flush(self) -> None:
        """Sends what there is, without regard to the pause: something ends that the reports must not come after."""
        self._paced.now()

    def _send(self) -> bool:
        job = self._job
        sent = job.outbox.send_metrics()
        if self._reports and not job.stopping:
            reports, self._reports = list(self._reports.values()), {}
            job.runtime.report(msg.ProgressMade(job.number, job.at, reports))
            sent = True
        return sent
