"""Packets between the processes of a host job, by FLARE's cells."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Final

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.message import Message

from dfm_async.targets.flare.link import Undelivered
from dfm_async.targets.flare.node import HostNode

_CHANNEL: Final = "dfm_async"
_PACKET: Final = "packet"
_TRY: Final = 10.0
"""The timeout of one attempt to deliver a packet, in seconds; large ones get longer."""
_SLOWEST: Final = 1024 * 1024
"""The lowest rate of a large packet, in bytes per second."""
_THREADS: Final = 128
"""The number of packets in flight to all peers together: each has its window, and one that does not answer must not
hold up the others."""


class CellWire:
    """Carries packets by FLARE's cells, which neither authenticate nor hide them from programs on the same machine.

    Args:
        cell: the cell of this process.
        job_id: the FLARE job.
        timeout: the number of seconds for which packets are retried; there must be time for a second attempt.
    """

    def __init__(self, cell: Any, job_id: str, timeout: float) -> None:
        self._try = min(_TRY, timeout / 2)
        self._cell = cell
        self._job_id = job_id
        self._node: HostNode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="dfm-wire")
        cell.core_cell.register_request_cb(_CHANNEL, _PACKET, self._packet)

    def open(self, node: HostNode) -> None:
        """Take packets for a node from now on."""
        self._node = node
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Take no further packet."""
        self._loop = self._node = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def carry(self, peer: str, packet: bytes) -> bytes:
        """Hand a packet to a peer; return its answer.

        Raises:
            Undelivered: it may not have it.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._carry, f"{peer}.{self._job_id}", packet)
        except RuntimeError as error:  # no further thread: this process ends
            raise Undelivered(str(error)) from error

    def _carry(self, target: str, packet: bytes) -> bytes:
        # As one frame: a packet is small enough, and FLARE's streams would only add to it.
        reply = self._cell.core_cell.send_request(
            channel=_CHANNEL,
            topic=_PACKET,
            target=target,
            request=Message({}, packet),
            timeout=self._try + len(packet) / _SLOWEST,
            optional=True,
        )
        if reply is None:
            raise Undelivered("FLARE returned no answer")
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        why = reply.get_header(MessageHeaderKey.ERROR, "")
        if code != CellReturnCode.OK:
            raise Undelivered(f"FLARE returned {code!r}{': ' * bool(why)}{why}")
        answer = reply.payload
        if not isinstance(answer, bytes | bytearray | memoryview):
            raise Undelivered("the answer is not bytes")
        return bytes(answer)

    def _packet(self, message: Message) -> Message:
        """Take a packet, in a thread of FLARE's; its sender waits until our loop has it."""
        loop, node = self._loop, self._node
        peer, _, job_id = str(message.get_header(MessageHeaderKey.ORIGIN, "")).rpartition(".")
        if loop is None or node is None or job_id != self._job_id:
            return _reply(CellReturnCode.SERVICE_UNAVAILABLE, "not ready")
        payload = message.payload  # untrusted: the sender has chosen its type
        if not isinstance(payload, bytes | bytearray | memoryview):
            return _reply(CellReturnCode.INVALID_REQUEST, "a packet must be bytes")
        taken: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def take() -> None:
            try:
                taken.set_result(node.take(peer, payload if isinstance(payload, bytes) else bytes(payload)))
            except BaseException as error:  # noqa: BLE001 - reported to the sender
                taken.set_exception(error)

        try:
            loop.call_soon_threadsafe(take)
            return _reply(CellReturnCode.OK, "", taken.result(self._try))
        except Exception as error:  # noqa: BLE001 - reported to the sender
            return _reply(CellReturnCode.PROCESS_EXCEPTION, f"{type(error).__name__}: {error}")


def _reply(code: str, error: str, answer: bytes | None = None) -> Message:
    headers = {MessageHeaderKey.RETURN_CODE: code}
    if error:
        headers[MessageHeaderKey.ERROR] = error
    return Message(headers, answer)
