"""What the program's end of a connection decides: which task is next, when a result has arrived, when tasks end.

Pure: events in, effects out; see :mod:`dfm_async.exchange.endpoint`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from dfm_async.base.containers import BoundedDict
from dfm_async.errors import AgentClosed, CallStateError, PeerGone, ResultNotDelivered, TransferFailed
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.endpoint import Endpoint, PipeTraits
from dfm_async.exchange.options import AgentOptions
from dfm_async.exchange.progress import Verdict
from dfm_async.exchange.task import Exchange, ExchangeState, Task, new_id
from dfm_async.exchange.transfers import Download, OutgoingTransfer
from dfm_async.exchange.value_codec import Encoded

LAST_MESSAGE: Final = 0.2
"""When a wait for a result is abandoned, how long the site's last message is still waited for, in seconds."""
_QUEUED: Final = 16
"""How many tasks may wait; the site gives one at a time, so more than one is unusual."""
_REMEMBERED: Final = 64
_RECEIVER: Final = "program"

_Reason: TypeAlias = Literal["ended", "aborted", "peer gone", "closed here"]


class DecodeTask(msgspec.Struct, frozen=True):
    """Effect: a task has arrived with all its parts. Call ``task_decoded`` or ``refuse_task``."""

    offer: msg.TaskOffer
    parts: Mapping[int, memoryview]


@dataclass(slots=True)
class _Current:
    """A task that must be answered."""

    task: Task
    receivers: Sequence[str]
    exchange: Exchange


@dataclass(slots=True)
class _ResultDelivery:
    """A result in flight to the site."""

    current: _Current
    tx: str
    upload: OutgoingTransfer | None
    settled: msg.Settled | None = None
    abandoned: str = ""
    """Why it is abandoned; empty if it is not."""
    give_up_at: float = math.inf
    ended: bool = False
    error: Exception | None = None


class AgentMachine(Endpoint):
    """The program's end of a connection.

    Args:
        options: how long to wait for what.
        traits: what the transport can do.
        clock: returns the time, in seconds.
        silence: how long the site accepts that nothing is sent, in seconds; 0 means for ever.
        launch_once: whether the program serves many tasks.
    """

    def __init__(
        self,
        options: AgentOptions,
        traits: PipeTraits,
        clock: Callable[[], float],
        silence: float = 0.0,
        *,
        launch_once: bool = True,
    ) -> None:
        super().__init__(options, traits, clock, silence)
        self._options = options
        self._launch_once = launch_once
        self._queue: deque[_Current] = deque()
        self._pulled: dict[str, msg.TaskOffer] = {}
        """Tasks whose large parts are being pulled."""
        self._answers: BoundedDict[str, msg.TaskAnswer | None] = BoundedDict(_REMEMBERED)
        self._current: _Current | None = None
        self._answering: _Current | None = None
        self._delivery: _ResultDelivery | None = None
        self._closed: AgentClosed | None = None
        self._ending: AgentClosed | None = None
        self._metrics_sent = 0
        self._metrics_taken = 0

    # tasks

    @property
    def closed(self) -> AgentClosed | None:
        """Why there are no more tasks; None while there may be. Tasks that are queued come before the end."""
        if self._closed is not None:
            return self._closed
        return None if self._has_work else self._ending

    @property
    def stopped(self) -> AgentClosed | None:
        """Why nothing can be sent any longer; None while it can. Other than :attr:`closed`, an END does not count."""
        return self._closed

    @property
    def ending(self) -> bool:
        """Whether the site has ended the exchange: it may not read any longer."""
        return self._ending is not None

    @property
    def current(self) -> Task | None:
        """The task that must be answered."""
        return self._current.task if self._current is not None else None

    @property
    def _has_work(self) -> bool:
        """Whether there are tasks that were given to the program before an end."""
        return bool(self._queue or self._pulled or self._current or self._answering)

    def next_task(self) -> Task | None:
        """Take the next task; None if none has come.

        Raises:
            AgentClosed: there will be no more.
            CallStateError: the last task is not answered.
        """
        self.check_open()
        if self._current is not None:
            raise CallStateError("get_task", f"task {self._current.task} is not answered: call submit_result first")
        if self._answering is not None:
            raise CallStateError("get_task", f"the result of task {self._answering.task} is still being delivered")
        if self._queue:
            self._current = self._queue.popleft()
            return self._current.task
        if self._ending is not None and not self._pulled:
            self._closed = self._ending
            self.check_open()
        return None

    def check_open(self) -> None:
        """Raise if the agent is closed.

        Raises:
            AgentClosed: a new one for each caller: one that is raised twice would keep the frames of both.
        """
        if self._closed is not None:
            raise AgentClosed(self._closed.reason, self._closed.detail)

    def _task_offered(self, offer: msg.TaskOffer) -> None:
        if offer.task in self._answers:  # it came again: so does the answer, when there is one
            answer = self._answers[offer.task]
            if answer is not None:
                self.send(answer)
            return
        self._answers[offer.task] = None
        if self._closed is not None or self._ending is not None:
            self.refuse_task(offer, "the program takes no more tasks")
        elif len(self._queue) >= _QUEUED:
            self.refuse_task(offer, f"{_QUEUED} tasks are waiting already")
        elif offer.parts:
            try:
                download = self.download(offer.task, offer.parts, _RECEIVER)
            except TransferFailed as error:
                self.refuse_task(offer, str(error))
            else:
                self._pulled[offer.task] = offer
                self.pull(download)
        else:
            self.effects.append(DecodeTask(offer, {}))

    def download_ended(self, download: Download) -> None:
        """Take a task whose large parts have arrived."""
        offer = self._pulled[download.tx]
        if download.error is not None:
            self.refuse_task(offer, str(download.error))
        else:
            self.effects.append(DecodeTask(offer, download.data))

    def task_decoded(self, offer: msg.TaskOffer, task: Task) -> None:
        """Queue a task, and accept it."""
        self._pulled.pop(offer.task, None)
        exchange = Exchange(offer.task)
        exchange.advance(ExchangeState.ACCEPTED)
        self._queue.append(_Current(task, offer.receivers, exchange))
        self._answer(offer, "")

    def refuse_task(self, offer: msg.TaskOffer, problem: str) -> None:
        """Refuse a task."""
        self._pulled.pop(offer.task, None)
        self._answer(offer, problem)

    def _answer(self, offer: msg.TaskOffer, problem: str) -> None:
        answer = self._answers[offer.task] = msg.TaskAnswer(offer.task, not problem, problem)
        self.send(answer)

    # results

    def begin_answer(self) -> Task:
        """Take the current task to answer it; call :meth:`end_answer` in any case.

        Raises:
            CallStateError: there is no task to answer.
            AgentClosed: there never will be one.
        """
        current, self._current = self._current, None
        if current is None:
            self.check_open()
            raise CallStateError("submit_result", "there is no task: call get_task first")
        self._answering = current
        return current.task

    def end_answer(self) -> None:
        """End the answer: the next task can be taken. A result that is still in flight was cancelled."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None and not delivery.ended:
            self._end_delivery(delivery, ExchangeState.ABORTED, "it was cancelled")
        self._answering = None
        if not self._launch_once and self._closed is None:
            self._ending = AgentClosed("ended", "the program serves one task")

    def submit(self, encoded: Encoded, rc: str, reason: str) -> None:
        """Offer the result of the task that is being answered; :meth:`delivered` returns whether it has arrived."""
        current = self._answering
        assert current is not None  # noqa: S101 - begin_answer was called
        tx = new_id()
        upload = self.upload(tx, encoded.parts, current.receivers) if encoded.parts else None
        self._delivery = _ResultDelivery(current, tx, upload)
        current.exchange.advance(ExchangeState.RESULT_OFFERED)
        parts = [(number, len(data)) for number, data in encoded.parts.items()]
        limit = self._options.submit_result_timeout
        if not self.traits.shows_progress:
            limit = max(limit, self._options.download_complete_timeout)
        self.request(
            tx,
            msg.ResultOffer(current.task.id, tx, rc, encoded.data, parts, reason),
            limit,
            f"the site did not accept the result of task {current.task}: that",
        )

    def delivered(self) -> bool:
        """Whether the result has arrived.

        Raises:
            ResultNotDelivered: it never will; says how far it came, and why no further.
            TimeoutError: the site did not accept it in time.
        """
        delivery = self._delivery
        if delivery is not None and delivery.error is not None:
            raise delivery.error
        return delivery is None or delivery.ended

    @property
    def unanswered(self) -> bool:
        """Whether the site has neither accepted nor refused the result."""
        delivery = self._delivery
        return delivery is not None and delivery.current.exchange.state is ExchangeState.RESULT_OFFERED

    @property
    def delivering(self) -> bool:
        """Whether a result is in flight."""
        return self._delivery is not None and not self._delivery.ended

    def _result_answered(self, answer: msg.ResultAnswer) -> None:
        # Nothing about this task is in flight any longer: it may be given again.
        self._answers.pop(answer.task, None)
        delivery = self._delivery
        # An answer that comes twice must not be taken for that of the next result.
        if delivery is None or answer.result != delivery.tx or not self.answered(delivery.tx):
            return
        if not answer.accepted:
            self._end_delivery(delivery, ExchangeState.REJECTED, answer.reason)
            return
        delivery.current.exchange.advance(ExchangeState.RESULT_ACCEPTED)
        if delivery.upload is None:
            self._end_delivery(delivery, ExchangeState.SETTLED)
            return
        delivery.current.exchange.advance(ExchangeState.TRANSFERRING)
        self._liveness.payload_begins()  # the site may be busy with decoding it
        self._check_delivery()
        self.due = min(self.due, self.next_time())

    def request_failed(self, key: str, error: TimeoutError | None) -> None:
        """End a result that was not accepted in time, or whose site is gone."""
        delivery = self._delivery
        if delivery is None or delivery.tx != key:
            return
        if error is not None:
            self._end_delivery(delivery, ExchangeState.FAILED, str(error), error)
            delivery.error = error
        else:
            reason = self.gone or ""
            self._end_delivery(delivery, ExchangeState.FAILED, reason, PeerGone(reason))

    def _end_delivery(
        self, delivery: _ResultDelivery, state: ExchangeState, reason: str = "", cause: Exception | None = None
    ) -> None:
        exchange = delivery.current.exchange
        if exchange.state is ExchangeState.TRANSFERRING:
            self._liveness.payload_ends()
        exchange.advance(state, reason)
        delivery.ended = True
        if state is not ExchangeState.SETTLED:
            delivery.error = ResultNotDelivered(delivery.current.task.id, exchange.state.value, reason)
            delivery.error.__cause__ = cause
        self.answered(delivery.tx)
        self.withdraw(delivery.tx)

    def upload_changed(self, upload: OutgoingTransfer) -> None:
        """Check whether the result has arrived."""
        self._check_delivery()

    def check_time(self) -> None:
        """Check whether the result takes too long."""
        self._check_delivery()

    def next_time(self) -> float:
        """Return when the result takes too long."""
        delivery = self._delivery
        if delivery is None or delivery.ended or delivery.upload is None or self.unanswered:
            return math.inf
        until = self._decide(delivery, delivery.upload)[1]
        return min(delivery.give_up_at, math.inf if until is None else until)

    def _decide(self, delivery: _ResultDelivery, upload: OutgoingTransfer) -> tuple[Verdict, float | None, str]:
        settled = delivery.settled
        found = upload.tracker.decide(settled is not None, settled.status if settled is not None else None)
        reason = settled.reason if settled is not None and settled.reason else found.reason
        return found.verdict, found.until, reason

    def _check_delivery(self) -> None:
        """End the delivery if its large parts have arrived everywhere, or never will."""
        delivery = self._delivery
        if delivery is None or delivery.ended or delivery.upload is None or self.unanswered:
            return
        tracker = delivery.upload.tracker
        verdict, _, reason = self._decide(delivery, delivery.upload)
        if verdict is Verdict.WAIT and delivery.abandoned:
            if tracker.complete:  # only the site's last message is missing
                verdict = Verdict.SUCCESS
            elif self.clock() >= delivery.give_up_at:
                tracker.abandon()
                verdict, reason = Verdict.FAILURE, f"it was abandoned: {delivery.abandoned}"
        if verdict is not Verdict.WAIT:
            state = ExchangeState.SETTLED if verdict is Verdict.SUCCESS else ExchangeState.FAILED
            self._end_delivery(delivery, state, reason)

    # metrics

    @property
    def metrics_missing(self) -> int:
        """How many metrics the site has not taken yet."""
        return self._metrics_sent - self._metrics_taken

    def may_log(self) -> bool:
        """Whether metrics can be sent now.

        Raises:
            AgentClosed: the connection has ended.
        """
        self.check_open()
        return self.metrics_missing < self._options.metric_queue

    def log(self, data: bytes, step: int | None) -> None:
        """Send metrics."""
        self._metrics_sent += 1
        self.send(msg.ProgramMetrics(self._metrics_sent, data, step))

    # messages and the end

    def handle(self, message: msg.Message) -> None:
        """Take a message of the site."""
        if isinstance(message, msg.TaskOffer):
            self._task_offered(message)
        elif isinstance(message, msg.ResultAnswer):
            self._result_answered(message)
        elif isinstance(message, msg.Settled):
            delivery = self._delivery
            if delivery is not None and message.tx == delivery.tx and delivery.settled is None:
                delivery.settled = message
                self._check_delivery()
        elif isinstance(message, msg.MetricTaken):
            self._metrics_taken = max(self._metrics_taken, min(message.number, self._metrics_sent))
        elif isinstance(message, msg.EndOfTasks):
            self._stop("ended", message.reason)
        elif isinstance(message, msg.Abort):
            self._stop("aborted", message.reason)

    def peer_gone(self, reason: str) -> None:
        """Stop: the site is gone."""
        self._stop("peer gone", reason)

    def stop(self, message: msg.EndOfTasks | msg.Abort) -> None:
        """Notify the site that this end stops, and stop. A result in flight is abandoned, unless it has arrived."""
        if self._closed is None:
            self.send(message)
            self._stop("closed here", message.reason if isinstance(message, msg.Abort) else "")

    def _stop(self, reason: _Reason, detail: str) -> None:
        closed = AgentClosed(reason, detail)
        if reason == "ended":
            self._ending = self._ending or closed  # what is queued comes first
            return
        if reason == "peer gone" and self._ending is not None and not self._has_work:
            closed = self._ending  # the site sent END before
        if self._closed is None:
            self._closed = closed
            self._queue.clear()
        delivery = self._delivery
        if delivery is None or delivery.ended:
            return
        if self.unanswered:
            self._end_delivery(delivery, ExchangeState.ABORTED, str(closed), closed)
        elif not delivery.abandoned:
            delivery.abandoned = str(closed)
            delivery.give_up_at = self.clock() + LAST_MESSAGE
            self._check_delivery()
            self.due = min(self.due, self.next_time())
