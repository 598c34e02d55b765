"""What our messages are in NVFLARE's file protocol, at either end. Pure: messages in, messages out."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

from dfm_async.exchange import messages as msg
from dfm_async.exchange.filepipe.models import metrics_from_dxo, metrics_to_dxos, shareable_of, task_of
from dfm_async.exchange.filepipe.names import MessageName
from dfm_async.exchange.filepipe.values import Shareable
from dfm_async.exchange.nvflare import task_headers
from dfm_async.exchange.task import OK, Model

__all__ = ["BEAT", "Outgoing", "ProgramSide", "SiteSide", "Translator"]

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
        taken: what the peer has said by taking it.
        refused: what it has said by deleting it unread, or None if that does not matter.
    """

    channel: Channel
    name: MessageName
    value: Any
    taken: msg.Message | None = None
    refused: msg.Message | None = None


class Translator(Protocol):
    """Translates at one end."""

    def outgoing(self, message: msg.Message) -> list[Outgoing]:
        """The files that say the same as a message; none, if there is no need to say it."""
        ...

    def incoming(self, channel: Channel, name: MessageName, value: Any) -> msg.Message | None:
        """The message that says the same as a file.

        Raises:
            ValueError: there is none.
        """
        ...


def _new_id() -> str:
    return str(uuid.uuid4())


def _signal(message: msg.Message) -> list[Outgoing] | None:
    """What both ends say in the same way."""
    if isinstance(message, msg.Beat):
        return [Outgoing(channel, MessageName(BEAT, _new_id()), "") for channel in _CHANNELS]
    if isinstance(message, msg.End):
        return [Outgoing("task", MessageName(_END, _new_id()), message.reason or "end")]
    if isinstance(message, msg.Abort):
        return [Outgoing("task", MessageName(_ABORT, _new_id()), message.reason or "abort")]
    return None


def _read_signal(name: MessageName, value: Any) -> msg.Message | None:
    text = value if isinstance(value, str) else ""
    if name.topic == BEAT:
        return msg.Beat()
    if name.topic == _END:
        return msg.End(text)
    if name.topic in (_ABORT, _GONE):
        return msg.Abort(text)
    return None


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
        """The files that say the same as a message."""
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
        """The message that says the same as a file."""
        found = _read_signal(name, value)
        if found is not None:
            # The program's threads for metrics stop with it; only the task channel says how it ended.
            return found if channel == "task" or isinstance(found, msg.Beat) else msg.Beat()
        if channel == "metric":
            values, step = metrics_from_dxo(value)
            return msg.Metrics(next(self._numbers), cast("bytes", values), step)
        if name.request is None or not isinstance(value, Shareable):
            raise ValueError(f"{name.topic} is not a result")
        rc = str(value.headers.get("__rc__", OK))
        return msg.ResultOffer(name.request, name.id, rc, cast("bytes", value), [])


class ProgramSide:
    """The active end: the program takes tasks, and gives results."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def outgoing(self, message: msg.Message) -> list[Outgoing]:
        """The files that say the same as a message."""
        found = _signal(message)
        if found is not None:
            return found
        if isinstance(message, msg.Metrics):
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
        """The message that says the same as a file."""
        found = _read_signal(name, value)
        if found is not None:
            return found if channel == "task" or isinstance(found, msg.Beat) else msg.Beat()
        if channel == "metric":
            return None
        if name.request is not None or not isinstance(value, Shareable):
            raise ValueError(f"{name.topic} is not a task")
        headers = value.headers
        self._names = {name.id: name.topic}
        return msg.TaskOffer(
            name.id,
            name.topic,
            cast("bytes", value),
            [],
            _number(headers.get("current_round")),
            _number(headers.get("num_rounds")),
            [],
        )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
