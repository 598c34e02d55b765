"""A connection by files, as NVFLARE 2.5 to 2.8 has it: the same messages as over a socket, translated."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from pathlib import Path
from typing import Final

from dfm_async.base.installation import install_hint
from dfm_async.errors import FobsError
from dfm_async.exchange import messages as msg
from dfm_async.exchange.filepipe.queue import DirectoryQueue, Received, Sent, Side
from dfm_async.exchange.filepipe.sections import Dialect
from dfm_async.exchange.filepipe.translate import BEAT, Channel, Outgoing, ProgramSide, SiteSide, Translator
from dfm_async.exchange.nvflare import unreadable
from dfm_async.exchange.pipes.base import Receiver
from dfm_async.exchange.tasks import OwnedTasks
from dfm_async.runtime.once import in_thread

try:
    from dfm_async.exchange.filepipe import fobs
except ImportError as error:
    raise ImportError(f"programs of NVFLARE 2.5 to 2.8 need an extra here: {install_hint('filepipe')}") from error

__all__ = ["FilePipe"]

_log = logging.getLogger(__name__)

_FLUSH: Final = 1.0
"""How long closing waits until what is queued is written, in seconds."""
_INLINE: Final = 1024 * 1024
"""Larger messages are decoded in a thread."""


class FilePipe:
    """One end of a connection by files.

    Args:
        root: the folder of both channels.
        side: which end this is.
        metrics: whether there is a channel for metrics.
        metrics_matter: whether the loss of that channel ends the connection.
        silence: how long the other side accepts that nothing is said, in seconds; 0 means for ever.
        translator: what messages are in files; by default without names of the site and the job.
    """

    can_resend = False
    shows_progress = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        side: Side,
        *,
        metrics: bool = True,
        metrics_matter: bool = False,
        silence: float = 0.0,
        translator: Translator | None = None,
    ) -> None:
        self.silence = silence
        self.has_metrics = metrics
        self._metrics_matter = metrics_matter
        self._translator = translator or (SiteSide() if side is Side.PASSIVE else ProgramSide())
        self._side = side
        self._root = Path(root)
        self._queues: dict[Channel, DirectoryQueue] = {"task": DirectoryQueue(self._root, "task", side)}
        if metrics:
            self._queues["metric"] = DirectoryQueue(self._root, "metric", side)
        self._beats: dict[Channel, Sent] = {}
        self._out: deque[Outgoing] = deque()
        self._more = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._receiver: Receiver | None = None
        self._early: list[msg.Message] = []
        self._dialect = Dialect.V2_7
        self._tasks = OwnedTasks()
        self._closing: asyncio.Task[None] | None = None
        self._lost: str | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open_tasks = 0

    def start(self) -> None:
        """Makes the folders, and begins to read and write."""
        for channel, queue in self._queues.items():
            queue.open()
            self._tasks.start(self._read(channel, queue), f"reading {channel} files")
        self._tasks.start(self._write(), "writing files")
        if self._side is Side.ACTIVE:
            self.send(msg.Beat())  # the protocol's hello

    # Pipe

    def open(self, receiver: Receiver) -> None:
        """Names who takes what comes."""
        self._receiver = receiver
        early, self._early = self._early, []
        for message in early:
            receiver.received(message, 0)
        if self._lost is not None:
            receiver.lost(self._lost)

    def send(self, message: msg.Message, data: memoryview | None = None) -> None:
        """Queues the files that say the same."""
        del data
        if self._lost is None and self._closing is None:
            files = self._translator.outgoing(message)
            for item in files:
                if item.channel in self._queues:
                    self._out.append(item)
            if not files and isinstance(message, msg.Metrics):  # there is nothing in them that could be taken
                self.deliver(msg.MetricTaken(message.number))
            if self._out:
                self._written.clear()
                self._more.set()

    async def drain(self) -> None:
        """Waits until everything is written."""
        if self._lost is None:
            await self._written.wait()

    def close(self) -> None:
        """Writes what is queued, and ends the connection."""
        self._end(_FLUSH)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._end(0)

    def _end(self, flush: float) -> None:
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(flush), name="closing a connection by files")

    async def _close(self, flush: float) -> None:
        try:
            if flush and self._lost is None:
                try:
                    async with asyncio.timeout(flush):
                        await self._written.wait()
                except TimeoutError:
                    _log.warning("what was said last could not be written to %s", self._root)
            await self._tasks.close()
            for queue in self._queues.values():
                await queue.close(remove=self._side is Side.PASSIVE)
        finally:
            self._set_lost("the connection was closed")
            if not self._ended.done():
                self._ended.set_result(None)

    async def wait_closed(self) -> None:
        """Waits until the connection has ended."""
        await asyncio.shield(self._ended)

    # reading

    async def _read(self, channel: Channel, queue: DirectoryQueue) -> None:
        try:
            async for received in queue:
                await self._take(channel, received)
                await asyncio.sleep(0)  # there may be thousands, and nothing else would happen meanwhile
        except ConnectionResetError as error:
            if channel == "metric":
                _log.warning("the channel for metrics is gone: %s", error)
                if self._metrics_matter:
                    self._set_lost(f"the channel for metrics is gone: {error}")
            elif self._side is Side.ACTIVE and not self._open_tasks:
                # A stock executor says END for a tenth of a second, then removes the folder.
                self.deliver(msg.End("the site has removed the folder"))
            else:
                self._set_lost(str(error))
        except OSError as error:
            self._set_lost(f"the files of the channel {channel} cannot be read: {error}")

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
            # It cannot be answered: the protocol has no word for it. The other side must not wait for ever.
            reason = f"a message about {received.name.topic} cannot be read: {unreadable(error)}"
            _log.warning("%s", reason)
            if channel == "task":
                self.deliver(msg.Abort(reason))
                self.send(msg.Abort(reason))
            return
        if message is not None:
            self._open_tasks += isinstance(message, msg.TaskOffer)
            self.deliver(message)

    def deliver(self, message: msg.Message) -> None:
        """Hands a message to whoever takes what comes."""
        if self._receiver is None:
            self._early.append(message)
        else:
            self._receiver.received(message, 0)

    def _set_lost(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._written.set()
            if self._receiver is not None:
                self._receiver.lost(reason)

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
                self._set_lost(str(error))
            self._written.set()

    async def _put(self, item: Outgoing) -> None:
        beat = item.name.topic == BEAT
        if beat and (last := self._beats.get(item.channel)) is not None and not last.settled:
            return  # the last one was not read yet: another says no more
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
            self._tasks.start(self._follow(item, sent), f"{item.name.topic} on its way")

    async def _follow(self, item: Outgoing, sent: Sent) -> None:
        """Tells what became of a file, when it is gone."""
        try:
            taken = await sent.gone()
        except (ConnectionResetError, ConnectionAbortedError) as error:
            self._set_lost(str(error))
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
