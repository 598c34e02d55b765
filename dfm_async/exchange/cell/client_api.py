"""The agent in a job of NVFLARE 2.9: ``nvflare.client`` in threads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, cast

from dfm_async.base.tasks import in_thread
from dfm_async.base.text import install_hint
from dfm_async.errors import HandshakeRefused
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.nvflare import ModelCodec, NvflarePipe
from dfm_async.exchange.options import AgentOptions
from dfm_async.exchange.task import OK, Model

try:
    import nvflare.client as flare
    from nvflare.apis.analytix import AnalyticsDataType
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.client.cell.bootstrap import BOOTSTRAP_FILE_ENV_VAR, BootstrapKey, read_bootstrap_config
except ImportError as error:
    raise ImportError(f"a job of NVFLARE 2.9 needs it here too: {install_hint('flare')}") from error

if TYPE_CHECKING:
    from dfm_async.exchange.agent import FlareAgent

_log = logging.getLogger(__name__)


def agent_from_environment(kind: type[FlareAgent], options: AgentOptions | None, **rest: Any) -> FlareAgent:
    """Make an agent that talks through ``nvflare.client``, which finds its site by itself.

    Raises:
        HandshakeRefused: the bootstrap file cannot be read.
    """
    # NVFLARE has heartbeats of its own, and reports how they end.
    options = options or AgentOptions(heartbeat_timeout=0)

    def connect() -> ClientApiPipe:
        pipe = ClientApiPipe()
        pipe.start()
        return pipe

    agent = kind(None, options, **{"codec": ModelCodec(), **rest}, pipe=connect)
    path = os.environ[BOOTSTRAP_FILE_ENV_VAR]
    try:
        config = read_bootstrap_config(path)
        # A program that attaches learns its job later, from its site.
        agent.site, agent.job = str(config[BootstrapKey.SITE_NAME]), str(config.get(BootstrapKey.JOB_ID) or "")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HandshakeRefused(f"{path} cannot be read as a bootstrap file of NVFLARE: {error!r}") from error
    return agent


class ClientApiPipe(NvflarePipe):
    """The program's end of a connection through ``nvflare.client``, of which there is one per process."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._measuring = asyncio.Lock()
        self._answered = threading.Semaphore(0)

    def start(self) -> None:
        """Begin to take tasks, in a thread."""
        threading.Thread(target=self._receive, name="dfm-nvflare-client", daemon=True).start()

    def _receive(self) -> None:
        """Take one task after the other. Receiving and sending must not happen at the same time."""
        try:
            flare.init()
            for number in itertools.count(1):
                model = flare.receive()
                if model is None:
                    self._post(msg.EndOfTasks("the site has ended the exchange"))
                    return
                offer = msg.TaskOffer(
                    task=f"task-{number}",
                    name=str(flare.get_task_name()),
                    data=cast("bytes", _from_fl_model(model)),
                    parts=[],
                    round=model.current_round,
                    total_rounds=model.total_rounds,
                    receivers=[],
                )
                self._post(offer)
                self._answered.acquire()
        except Exception as error:  # noqa: BLE001 - whatever NVFLARE raises: there will be no more tasks
            self._post(msg.Abort(f"{type(error).__name__}: {error}"))

    def _post(self, message: msg.Message) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.deliver, message)

    def send(self, message: msg.Message, data: memoryview | None = None) -> None:
        """Say the same in NVFLARE's words, as far as it has some."""
        del data
        if self.closing is not None:
            return
        if isinstance(message, msg.ResultOffer):
            self.tasks.spawn(self._submit(message), f"sending the result of {message.task}")
        elif isinstance(message, msg.ProgramMetrics):
            self.tasks.spawn(self._measure(message), "sending metrics")

    async def _submit(self, offer: msg.ResultOffer) -> None:
        data: Any = offer.data
        try:
            if offer.rc != OK or not isinstance(data, Model):
                # NVFLARE 2.9 has no word for a task that failed: only a program that ends.
                reason = offer.reason or f"the task ended with {offer.rc}"
                await in_thread(flare.shutdown, "nvflare-shutdown")
                self.deliver(msg.ResultAnswer(offer.task, offer.result, True))
                self.deliver(msg.Abort(f"NVFLARE 2.9 knows no failed tasks, so the exchange was ended: {reason}"))
                return
            await in_thread(lambda: flare.send(_to_fl_model(data)), "nvflare-send")
        except Exception as error:  # noqa: BLE001 - whatever NVFLARE raises, it was not delivered
            self.deliver(msg.ResultAnswer(offer.task, offer.result, False, f"{type(error).__name__}: {error}"))
        else:
            self.deliver(msg.ResultAnswer(offer.task, offer.result, True))
        finally:
            self._answered.release()

    async def _measure(self, metrics: msg.ProgramMetrics) -> None:
        record: Any = metrics.data
        more = {} if metrics.step is None else {"global_step": metrics.step}

        def log() -> None:
            for name, value in record.items():
                flare.log(name, value, AnalyticsDataType.SCALAR, **more)

        try:
            async with self._measuring:  # one after the other: they would overtake each other
                await in_thread(log, "nvflare-log")
        except Exception:  # noqa: BLE001 - whatever NVFLARE raises; the rest of the metrics must not wait for these
            _log.exception("metrics were not accepted by NVFLARE")
        finally:
            self.deliver(msg.MetricTaken(metrics.number))

    async def finish(self, flush: bool) -> None:
        """Send what is queued, in any case, and end NVFLARE's threads."""
        try:
            await self.tasks.wait()
            # Without it, the interpreter would wait for NVFLARE's threads at its end.
            await in_thread(flare.shutdown, "nvflare-shutdown")
        finally:
            self._answered.release()


def _from_fl_model(found: Any) -> Model:
    """Read what ``nvflare.client`` has received."""
    diff = found.params_type is not None and str(found.params_type.value) == "DIFF"
    start = {} if found.start_round is None else {"start_round": found.start_round}
    return Model(
        params=found.params,
        metrics=found.metrics,
        params_type="DIFF" if diff else "FULL",
        meta={**(found.meta or {}), **start},
    )


def _to_fl_model(model: Model) -> Any:
    """Turn a model into what ``nvflare.client`` sends."""
    kind = None if model.params is None else ParamsType.DIFF if model.params_type == "DIFF" else ParamsType.FULL
    return FLModel(
        params=None if model.params is None else dict(model.params),
        params_type=kind,
        metrics=None if model.metrics is None else dict(model.metrics),
        meta=dict(model.meta),
    )
