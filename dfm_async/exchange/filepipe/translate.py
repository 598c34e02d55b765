"""What our messages are in NVFLARE's file protocol, at either end. Pure: messages in, messages out."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.filepipe.models import Shareable, metrics_from_dxo, metrics_to_dxos, shareable_of, task_of
from dfm_async.exchange.filepipe.queue import MessageName
from dfm_async.exchange.nvflare import task_headers
from dfm_async.exchange.task import OK, Model

Channel: TypeAlias = Literal["task", "metric"]
_CHANNELS: Final[tuple[Channel, ...]] = ("task", "metric")

BEAT: Final = "_HEARTBEAT_"
_ABORT: Final = "_ABORT_"
_END: Final = "_END_"
_GONE: Final = "_PEER_GONE_"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A file to be written.

    Attributes:
        channel: where.
        name: its name.
        value: what is in it.
        taken: the message that it means when the peer takes it.
        refused: the message that it means when the peer deletes it unread, or None if that does not matter.
    """

    channel: Channel
    name: MessageName
    value: Any
    taken: msg.Message | None = None
    refused: msg.Message | None = None


def _new_id() -> str:
    return str(uuid.uuid4())


def _signal(message: msg.Message) -> list[Outgoing] | None:
    """Return the files of a message that both ends send in the same way."""
    if isinstance(message, msg.Beat):
        return [Outgoing(channel, MessageName(BEAT, _new_id()), "") for channel in _CHANNELS]
    if isinstance(message, msg.EndOfTasks):
        return [Outgoing("task", MessageName(_END, _new_id()), message.reason or "end")]
    if isinstance(message, msg.Abort):
        return [Outgoing("task", MessageName(_ABORT, _new_id()), message.reason or "abort")]
    return None


_SIGNALS: Final[dict[str, Callable[[str], msg.Message]]] = {
    BEAT: lambda _: msg.Beat(),
    _END: msg.EndOfTasks,
    _ABORT: msg.Abort,
    _GONE: msg.Abort,
}


def _read_signal(channel: Channel, name: MessageName, value: Any) -> msg.Message | None:
    """Return the message of a file that both ends read in the same way; None if it is another one."""
    make = _SIGNALS.get(name.topic)
    if make is None:
        return None
    # The threads for metrics stop with their process; only the task channel says how that ended.
    return make(value if isinstance(value, str) else "") if channel == "task" else msg.Beat()


class SiteSide:
    """The passive end: the site gives tasks, and takes results.

    Args:
        site: the name of the site.
        job: the job.
        submit_model: the name of tasks that ask for a model.
    """

    def __init__(self, site: str = "", job: str = "", submit_model: str = "") -> None:
        self._site = site or "site"
        self._job = job or "job"
        self._submit_model = submit_model
        self._numbers = itertools.count(1)

    def outgoing(self, message: msg.Message) -> list[Outgoing]:
        """Return the files that mean the same as a message; none, if it need not be sent."""
        found = _signal(message)
        if found is not None:
            return found
        if not isinstance(message, msg.TaskOffer):
            return []  # answers: what is gone was taken
        value = cast("Model | Shareable | None", cast("object", message.data))
        task = task_of(value)
        task.headers.update({"__task_id__": message.task, "__task_name__": message.name})
        model = None if isinstance(value, Shareable) else value
        asks = value is model and message.name == self._submit_model
        task.headers.update(task_headers(model, self._site, self._job, submit_model=asks))
        if message.round is not None:
            task.headers["current_round"] = message.round
        if message.total_rounds is not None:
            task.headers["num_rounds"] = message.total_rounds
        return [
            Outgoing(
                "task",
                MessageName(message.name, message.task),
                task,
                msg.TaskAnswer(message.task, True),
                msg.TaskAnswer(message.task, False, "the program deleted the task unread"),
            )
        ]

    def incoming(self, channel: Channel, name: MessageName, value: Any) -> msg.Message | None:
        """Return the message that means the same as a file.

        Raises:
            ValueError: no message corresponds to the file.
        """
        found = _read_signal(channel, name, value)
        if found is not None:
            return found
        if channel == "metric":
            values, step = metrics_from_dxo(value)
            return msg.ProgramMetrics(next(self._numbers), cast("bytes", values), step)
        if name.request is None or not isinstance(value, Shareable):
            raise ValueError(f"{name.topic} is not a result")
        rc = str(value.headers.get("__rc__", OK))
        return msg.ResultOffer(name.request, name.id, rc, cast("bytes", value), [])


class ProgramSide:
    """The active end: the program takes tasks, and gives results."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def outgoing(self, message: msg.Message) -> list[Outgoing]:
        """Return the files that mean the same as a message; none, if it need not be sent."""
        found = _signal(message)
        if found is not None:
            return found
        if isinstance(message, msg.ProgramMetrics):
            dxos = metrics_to_dxos(cast("Any", message.data), message.step)
            files = [Outgoing("metric", MessageName("metric", _new_id()), dxo) for dxo in dxos]
            if files:
                last, taken = files[-1], msg.MetricTaken(message.number)
                files[-1] = Outgoing(last.channel, last.name, last.value, taken, taken)
            return files
        if not isinstance(message, msg.ResultOffer):
            return []
        result = shareable_of(cast("Model | Shareable | None", cast("object", message.data or None)))
        result.headers["__rc__"] = message.rc
        topic = self._names.pop(message.task, message.task)
        return [
            Outgoing(
                "task",
                MessageName(topic, message.result, message.task),
                result,
                msg.ResultAnswer(message.task, message.result, True),
                msg.ResultAnswer(message.task, message.result, False, "the site deleted the result unread"),
            )
        ]

    def incoming(self, channel: Channel, name: MessageName, value: Any) -> msg.Message | None:
        """Return the message that means the same as a file.

        Raises:
            ValueError: no message corresponds to the file.
        """
        found = _read_signal(channel, name, value)
        if found is not None:
            return found
        if channel == "metric":
            return None
        if name.request is not None or not isinstance(value, Shareable):
            raise ValueError(f"{name.topic} is not a task")
        headers = value.headers
        self._names = {name.id: name.topic}
        return msg.TaskOffer(
            task=name.id,
            name=name.topic,
            data=cast("bytes", value),
            parts=[],
            round=_number(headers.get("current_round")),
            total_rounds=_number(headers.get("num_rounds")),
            receivers=[],
        )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
