"""A connection by files, as NVFLARE 2.5 to 2.8 has it: the same messages as over a socket, translated."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from pathlib import Path
from typing import Final

from dfm_async.base.tasks import in_thread
from dfm_async.base.text import install_hint
from dfm_async.errors import FobsError
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.endpoint import PipeTraits
from dfm_async.exchange.filepipe.fobs_format import Dialect
from dfm_async.exchange.filepipe.queue import DirectoryQueue, MessageInFlight, Received, Side
from dfm_async.exchange.filepipe.translate import BEAT, Channel, Outgoing, ProgramSide, SiteSide
from dfm_async.exchange.nvflare import NvflarePipe, unreadable

try:
    from dfm_async.exchange.filepipe import fobs
except ImportError as error:
    raise ImportError(f"programs of NVFLARE 2.5 to 2.8 need an extra here: {install_hint('filepipe')}") from error

_log = logging.getLogger(__name__)

_FLUSH: Final = 1.0
"""How long closing waits until what is queued is written, in seconds."""
_INLINE: Final = 1024 * 1024
"""Larger messages are decoded in a thread."""


class FilePipe(NvflarePipe):
    """One end of a connection by files.

    Args:
        root: the folder of both channels.
        side: which end this is.
        metrics: whether there is a channel for metrics.
        metrics_matter: whether the loss of that channel ends the connection.
        silence: how long the other side accepts that nothing is sent, in seconds; 0 means for ever.
        translator: what messages are in files; by default without names of the site and the job.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        side: Side,
        *,
        metrics: bool = True,
        metrics_matter: bool = False,
        silence: float = 0.0,
        translator: SiteSide | None = None,
    ) -> None:
        super().__init__()
        self.silence = silence
        self.traits = PipeTraits(shows_progress=False, has_metrics=metrics)
        self._metrics_matter = metrics_matter
        self._translator = translator or (SiteSide() if side is Side.PASSIVE else ProgramSide())
        self._side = side
        self._root = Path(root)
        self._queues: dict[Channel, DirectoryQueue] = {"task": DirectoryQueue(self._root, "task", side)}
        if metrics:
            self._queues["metric"] = DirectoryQueue(self._root, "metric", side)
        self._beats: dict[Channel, MessageInFlight] = {}
        self._out: deque[Outgoing] = deque()
        self._more = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._dialect = Dialect.V2_7
        self._open_tasks = 0

    def start(self) -> None:
        """Make the folders, and begin to read and write."""
        for channel, queue in self._queues.items():
            queue.open()
            self.tasks.spawn(self._read(channel, queue), f"reading {channel} files")
        self.tasks.spawn(self._write(), "writing files")
        if self._side is Side.ACTIVE:
            self.send(msg.Beat())  # the protocol's hello

    # Pipe

    def send(self, message: msg.Message, data: memoryview | None = None) -> None:
        """Queue the files that mean the same."""
        del data
        if self.lost is None and self.closing is None:
            files = self._translator.outgoing(message)
            for item in files:
                if item.channel in self._queues:
                    self._out.append(item)
            if not files and isinstance(message, msg.ProgramMetrics):  # there is nothing in them that could be taken
                self.deliver(msg.MetricTaken(message.number))
            if self._out:
                self._written.clear()
                self._more.set()

    async def drain(self) -> None:
        """Wait until everything is written."""
        if self.lost is None:
            await self._written.wait()

    async def finish(self, flush: bool) -> None:
        """Write what is queued, and remove the folders at the site's end."""
        if flush and self.lost is None:
            try:
                async with asyncio.timeout(_FLUSH):
                    await self._written.wait()
            except TimeoutError:
                _log.warning("the last messages could not be written to %s", self._root)
        await self.tasks.close()
        for queue in self._queues.values():
            await queue.close(remove=self._side is Side.PASSIVE)

    def lose(self, reason: str) -> None:
        """Take note that the connection has ended, and notify the receiver."""
        self._written.set()
        super().lose(reason)

    # reading

    async def _read(self, channel: Channel, queue: DirectoryQueue) -> None:
        try:
            async for received in queue:
                await self._take(channel, received)
                await asyncio.sleep(0)  # there may be thousands, and nothing else would happen meanwhile
        except ConnectionResetError as error:
            if channel == "metric":
                _log.warning("the channel for metrics was lost: %s", error)
                if self._metrics_matter:
                    self.lose(f"the channel for metrics was lost: {error}")
            elif self._side is Side.ACTIVE and not self._open_tasks:
                # A stock executor sends END for a tenth of a second, then removes the folder.
                self.deliver(msg.EndOfTasks("the site has removed the folder"))
            else:
                self.lose(str(error))
        except OSError as error:
            self.lose(f"the files of the channel {channel} cannot be read: {error}")

    async def _take(self, channel: Channel, received: Received) -> None:
        try:
            data = received.data
            if len(data) > _INLINE:
                value = await in_thread(lambda: fobs.loads(data), "filepipe-decode")
            else:
                value = fobs.loads(data)
            self._dialect = fobs.dialect_of(data)
            message = self._translator.incoming(channel, received.name, value)
        except (FobsError, ValueError) as error:
            # It cannot be answered: the protocol has no message for that. The other side must not wait for ever.
            reason = f"a message about {received.name.topic} cannot be read: {unreadable(error)}"
            _log.warning("%s", reason)
            if channel == "task":
                self.deliver(msg.Abort(reason))
                self.send(msg.Abort(reason))
            return
        if message is not None:
            self._open_tasks += isinstance(message, msg.TaskOffer)
            self.deliver(message)

    # writing

    async def _write(self) -> None:
        try:
            while True:
                while self._out:
                    item = self._out.popleft()
                    await self._put(item)
                    await asyncio.sleep(0)
                self._written.set()
                self._more.clear()
                await self._more.wait()
        except (ConnectionResetError, ConnectionAbortedError) as error:
            if self._side is Side.PASSIVE or self._open_tasks:
                self.lose(str(error))
            self._written.set()

    async def _put(self, item: Outgoing) -> None:
        beat = item.name.topic == BEAT
        if beat and (last := self._beats.get(item.channel)) is not None and not last.settled:
            return  # the last one was not read yet: another means no more
        try:
            buffers = fobs.dump_buffers(item.value, dialect=self._dialect)
            sent = await self._queues[item.channel].put(item.name, buffers)
        except (ConnectionResetError, ConnectionAbortedError):
            raise
        except (FobsError, ValueError, OSError) as error:  # its content, its name, or a disk that is full
            _log.warning("a message about %s cannot be written: %s", item.name.topic, error)
            if item.refused is not None:
                self.deliver(_because(item.refused, f"it cannot be written: {error}"))
            return
        if beat:
            self._beats[item.channel] = sent
        elif item.taken is not None:
            self.tasks.spawn(self._follow(item, sent), f"{item.name.topic} in flight")

    async def _follow(self, item: Outgoing, sent: MessageInFlight) -> None:
        """Return what became of a file, when it is gone."""
        try:
            taken = await sent.gone()
        except (ConnectionResetError, ConnectionAbortedError) as error:
            self.lose(str(error))
            return
        found = item.taken if taken else item.refused
        if isinstance(found, msg.ResultAnswer):
            self._open_tasks -= 1
        if found is not None:
            self.deliver(found)


def _because(message: msg.Message, reason: str) -> msg.Message:
    if isinstance(message, msg.TaskAnswer):
        return msg.TaskAnswer(message.task, False, reason)
    if isinstance(message, msg.ResultAnswer):
        return msg.ResultAnswer(message.task, message.result, False, reason)
    return message
