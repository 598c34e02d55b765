"""The workers of a site that are bound to GPUs: each sees only those that its calls were granted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

import msgspec

from dfm_async.wire import messages as msg
from dfm_async.workers.site_worker import SiteWorker

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs which a process may use."""


def visible_devices(gpus: tuple[int, ...]) -> str:
    """Return the value of the environment variable for the GPUs with these indexes, counted among those we see."""
    ours = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return ",".join(ours[index] if index < len(ours) else str(index) for index in gpus)


class _Use(msgspec.Struct, eq=False):
    """A call that has GPUs, or waits until their worker is ready."""

    user: SiteWorker
    """The worker that has its net."""
    granted: msg.PermitGranted
    answered: bool = False


class GpuWorkers:
    """Starts a worker for each set of GPUs when it is first needed, and ends it when another set needs one of them.

    A GPU is granted to one call at a time, so that a worker has one call at a time, too.

    Args:
        start: starts a worker for a set of GPUs, after other workers have ended.
        idle: the number of seconds after which a worker ends that has no calls.
    """

    def __init__(self, start: Callable[[tuple[int, ...], list[SiteWorker]], SiteWorker], idle: float) -> None:
        self._start = start
        self._idle = idle
        self._workers: dict[tuple[int, ...], SiteWorker] = {}
        self._uses: dict[SiteWorker, _Use] = {}
        """For each worker, the call that it runs."""
        self._ending: list[SiteWorker] = []

    def __contains__(self, worker: SiteWorker) -> bool:
        """Return whether a worker is bound to GPUs."""
        return worker in self._workers.values() or worker in self._uses or worker in self._ending

    def place(self, user: SiteWorker, granted: msg.PermitGranted) -> None:
        """Answer the call of a worker as soon as the worker that has its GPUs is ready."""
        gpus = granted.gpus
        worker = self._workers.get(gpus)
        if worker is None or worker.retired or worker.ended.done():
            before = [other for bound, other in list(self._workers.items()) if not set(bound).isdisjoint(gpus)]
            for other in before:
                self._end(other)
            self._ending = [other for other in self._ending if not other.ended.done()]
            worker = self._workers[gpus] = self._start(gpus, list(self._ending))
        worker.lent = True
        use = self._uses[worker] = _Use(user, granted)
        found = worker
        worker.ready.add_done_callback(lambda ready: self._ready(found, use, ready))

    def _ready(self, worker: SiteWorker, use: _Use, ready: asyncio.Future[None]) -> None:
        if self._uses.get(worker) is use and ready.exception() is None:  # else nobody waits, or its end is noted
            _answer(use, worker=worker.address)

    def left(self, user: SiteWorker, number: int) -> None:
        """Note that a call has returned its permit: its worker is free."""
        for worker, use in list(self._uses.items()):
            if use.user is user and use.granted.number == number:
                del self._uses[worker]
                worker.lent = False
                worker.end_if_retired()
                asyncio.get_running_loop().call_later(self._idle, self._end_idle, worker)

    def user_gone(self, user: SiteWorker) -> None:
        """Note that a worker has ended: nobody waits for its calls any longer."""
        for worker, use in list(self._uses.items()):
            if use.user is user:
                self.left(user, use.granted.number)
                self._forget(worker)
                worker.kill("the worker whose call it ran has ended")

    def gone(self, worker: SiteWorker, code: int | None) -> None:
        """Note that a worker that was bound to GPUs has ended, and notify the one whose call it ran."""
        use = self._uses.pop(worker, None)
        self._forget(worker)
        self._ending = [other for other in self._ending if other is not worker]
        if use is None:
            return
        if use.answered:
            if use.user.channel is not None:
                use.user.channel.send(msg.WorkerGone(worker.address, worker.lost(code).detail, code))
        elif worker.address:  # it was ready, and has ended before it got the call
            self.place(use.user, use.granted)
        else:
            _answer(use, error=str(worker.ready.exception()))

    def stuck(self, worker: SiteWorker) -> None:
        """End a worker whose call was abandoned."""
        self._uses.pop(worker, None)
        self._forget(worker)
        worker.kill("a call on it was abandoned")

    def outdate(self, grace: float) -> None:
        """Replace all workers by others with newer code: idle ones at once, others when their calls have ended."""
        for worker in list(self._workers.values()):
            worker.outdate(grace)

    def _forget(self, worker: SiteWorker) -> None:
        """Start another worker for its GPUs from now on, once it has ended."""
        for gpus, found in list(self._workers.items()):
            if found is worker:
                del self._workers[gpus]
                if not worker.ended.done():
                    self._ending.append(worker)

    def _end_idle(self, worker: SiteWorker) -> None:
        if worker in self._workers.values() and worker not in self._uses:
            self._end(worker)

    def _end(self, worker: SiteWorker) -> None:
        """End an idle worker."""
        self._forget(worker)
        worker.outdated = True  # it ends by itself, and is not killed
        if not worker.retired:
            worker.retire()
        worker.end_if_retired()


def _answer(use: _Use, **answer: str) -> None:
    use.answered = True
    if use.user.channel is not None:
        use.user.channel.send(msgspec.structs.replace(use.granted, **answer))
