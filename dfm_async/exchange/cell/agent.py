"""The agent in a job of NVFLARE 2.9: ``nvflare.client`` in threads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, cast

from dfm_async.base.installation import install_hint
from dfm_async.errors import HandshakeRefused
from dfm_async.exchange import messages as msg
from dfm_async.exchange.options import AgentOptions
from dfm_async.exchange.pipes.base import Receiver
from dfm_async.exchange.task import OK, Model
from dfm_async.exchange.tasks import OwnedTasks
from dfm_async.runtime.once import in_thread

try:
    import nvflare.client as flare
    from nvflare.apis.analytix import AnalyticsDataType
    from nvflare.client.cell.bootstrap import BOOTSTRAP_FILE_ENV_VAR, BootstrapKey, read_bootstrap_config

    from dfm_async.exchange.cell.models import CellCodec, from_fl_model, to_fl_model
except ImportError as error:
    raise ImportError(f"a job of NVFLARE 2.9 needs it here too: {install_hint('flare')}") from error

if TYPE_CHECKING:
    from dfm_async.exchange.agent import FlareAgent

__all__ = ["ClientApiPipe", "agent_of_cell_api"]

_log = logging.getLogger(__name__)


def agent_of_cell_api(kind: type[FlareAgent], options: AgentOptions | None, **rest: Any) -> FlareAgent:
    """Makes an agent that talks through ``nvflare.client``, which finds its site by itself.

    Raises:
        HandshakeRefused: the bootstrap file cannot be read.
    """
    # NVFLARE has signs of life of its own, and tells how they end.
    options = options or AgentOptions(heartbeat_timeout=0)

    def connect() -> ClientApiPipe:
        pipe = ClientApiPipe()
        pipe.start()
        return pipe

    agent = kind(None, options, **{"codec": CellCodec(), **rest}, pipe=connect)
    path = os.environ[BOOTSTRAP_FILE_ENV_VAR]
    try:
        config = read_bootstrap_config(path)
        # A program that attaches learns its job later, from its site.
        agent.site, agent.job = str(config[BootstrapKey.SITE_NAME]), str(config.get(BootstrapKey.JOB_ID) or "")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HandshakeRefused(f"{path} cannot be read as a bootstrap file of NVFLARE: {error!r}") from error
    return agent


class ClientApiPipe:
    """The program's end of a connection through ``nvflare.client``, of which there is one per process."""

    can_resend = False
    shows_progress = False
    silence = 0.0
    has_metrics = True

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._early: list[msg.Message] = []
        self._tasks = OwnedTasks()
        self._measuring = asyncio.Lock()
        self._answered = threading.Semaphore(0)
        self._closing: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._lost: str | None = None

    def start(self) -> None:
        """Begins to take tasks, in a thread."""
        threading.Thread(target=self._receive, name="dfm-nvflare-client", daemon=True).start()

    def _receive(self) -> None:
        """Takes one task after the other. Receiving and sending must not happen at the same time."""
        try:
            flare.init()
            for number in itertools.count(1):
                model = flare.receive()
                if model is None:
                    self._post(msg.End("the site has ended the exchange"))
                    return
                offer = msg.TaskOffer(
                    f"task-{number}",
                    str(flare.get_task_name()),
                    cast("bytes", from_fl_model(model)),
                    [],
                    model.current_round,
                    model.total_rounds,
                    [],
                )
                self._post(offer)
                self._answered.acquire()
        except Exception as error:  # noqa: BLE001 - whatever NVFLARE raises: there will be no more tasks
            self._post(msg.Abort(f"{type(error).__name__}: {error}"))

    def _post(self, message: msg.Message) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, message)

    def _deliver(self, message: msg.Message) -> None:
        if self._receiver is None:
            self._early.append(message)
        elif self._lost is None:
            self._receiver.received(message, 0)

    # Pipe

    def open(self, receiver: Receiver) -> None:
        """Names who takes what comes."""
        self._receiver = receiver
        early, self._early = self._early, []
        for message in early:
            receiver.received(message, 0)

    def send(self, message: msg.Message, data: memoryview | None = None) -> None:
        """Says the same in NVFLARE's words, as far as it has some."""
        del data
        if self._closing is not None:
            return
        if isinstance(message, msg.ResultOffer):
            self._tasks.start(self._submit(message), f"sending the result of {message.task}")
        elif isinstance(message, msg.Metrics):
            self._tasks.start(self._measure(message), "sending metrics")

    async def _submit(self, offer: msg.ResultOffer) -> None:
        data: Any = offer.data
        try:
            if offer.rc != OK or not isinstance(data, Model):
                # NVFLARE 2.9 has no word for a task that failed: only a program that ends.
                reason = offer.reason or f"the task ended with {offer.rc}"
                await in_thread(flare.shutdown, "nvflare-shutdown")
                self._deliver(msg.ResultAnswer(offer.task, offer.result, True))
                self._deliver(msg.Abort(f"NVFLARE 2.9 knows no failed tasks, so the exchange was ended: {reason}"))
                return
            await in_thread(lambda: flare.send(to_fl_model(data)), "nvflare-send")
        except Exception as error:  # noqa: BLE001 - whatever NVFLARE raises, it was not delivered
            self._deliver(msg.ResultAnswer(offer.task, offer.result, False, f"{type(error).__name__}: {error}"))
        else:
            self._deliver(msg.ResultAnswer(offer.task, offer.result, True))
        finally:
            self._answered.release()

    async def _measure(self, metrics: msg.Metrics) -> None:
        record: Any = metrics.data
        more = {} if metrics.step is None else {"global_step": metrics.step}

        def log() -> None:
            for name, value in record.items():
                flare.log(name, value, AnalyticsDataType.SCALAR, **more)

        try:
            async with self._measuring:  # one after the other: they would overtake each other
                await in_thread(log, "nvflare-log")
        except Exception:  # noqa: BLE001 - whatever NVFLARE raises; the rest of the metrics must not wait for these
            _log.exception("metrics were not taken by NVFLARE")
        finally:
            self._deliver(msg.MetricTaken(metrics.number))

    async def drain(self) -> None:
        """There is nothing to wait for: NVFLARE keeps what is sent."""

    def close(self) -> None:
        """Says what was to be said, and ends the connection."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="closing nvflare.client")

    def abort(self) -> None:
        """Ends the connection."""
        self.close()

    async def _close(self) -> None:
        try:
            await self._tasks.wait()
            # Without it, the interpreter would wait for NVFLARE's threads at its end.
            await in_thread(flare.shutdown, "nvflare-shutdown")
        finally:
            self._lost = "the connection was closed"
            self._answered.release()
            if not self._ended.done():
                self._ended.set_result(None)
            if self._receiver is not None:
                self._receiver.lost(self._lost)

    async def wait_closed(self) -> None:
        """Waits until the connection has ended."""
        await asyncio.shield(self._ended)
