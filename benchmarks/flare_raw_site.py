"""What FLARE runs of the bare mechanism, see ``flare_raw``: a controller, and an executor at each of two sites."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.message import Message

from benchmarks.flare_raw import FROM, TO, WAIT

RUN, TOKEN = "raw.run", "raw.token"
CHANNEL = "raw"
_READY = "raw.ready"


class RawController(Controller):  # type: ignore[misc] # nvflare has no type information
    """Tells the first site what to send."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: set[str] = set()

    def start_controller(self, fl_ctx: Any) -> None:
        engine = fl_ctx.get_engine()
        engine.register_aux_message_handler(_READY, self._is_ready)
        engine.register_app_command("dfm_async", self._command)

    def stop_controller(self, fl_ctx: Any) -> None:
        """Has nothing to stop."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        task = Task(name="raw", data=Shareable())
        self.broadcast(task=task, fl_ctx=fl_ctx, targets=None, min_responses=0, wait_time_after_min_received=0)
        ended = threading.Event()
        while not abort_signal.triggered:
            ended.wait(0.5)

    def _is_ready(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        self._ready.add(request["name"])
        return make_reply(ReturnCode.OK)

    def _command(self, topic: str, data: Any, fl_ctx: Any, *_: Any) -> dict[str, Any]:
        if not data:
            return {"sites": len(self._ready)}
        request = Shareable()
        request.update(data)
        with self._engine.new_context() as context:
            answers = self._engine.send_aux_request(
                targets=[FROM], topic=RUN, request=request, timeout=WAIT, fl_ctx=context
            )
        return {"seconds": answers[FROM]["seconds"]}


class RawExecutor(Executor):  # type: ignore[misc] # as above
    """Sends, or takes, messages."""

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        if event_type == EventType.START_RUN:
            self._engine = fl_ctx.get_engine()
            self._engine.register_aux_message_handler(RUN, self._run)
            self._engine.register_aux_message_handler(TOKEN, self._token)
            self._engine.get_cell().core_cell.register_request_cb(CHANNEL, TOKEN, _taken)
            self.job_id = fl_ctx.get_job_id()

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        request = Shareable()
        request["name"] = fl_ctx.get_identity_name()
        self._engine.send_aux_request(targets=["server"], topic=_READY, request=request, timeout=WAIT, fl_ctx=fl_ctx)
        ended = threading.Event()
        while not abort_signal.triggered:
            ended.wait(0.5)
        return make_reply(ReturnCode.OK)

    def _token(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        return make_reply(ReturnCode.OK)

    def _run(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        data = bytes(request["size"])
        seconds = _timed(self._packet if request["kind"] == "cell" else self._message, data, request)
        reply = make_reply(ReturnCode.OK)
        reply["seconds"] = seconds
        return reply

    def _packet(self, _: int, data: bytes) -> None:
        send = self._engine.get_cell().core_cell.send_request
        answer = send(
            channel=CHANNEL, topic=TOKEN, target=f"{TO}.{self.job_id}", request=Message({}, data), timeout=WAIT
        )
        if answer.get_header(MessageHeaderKey.RETURN_CODE) != CellReturnCode.OK:
            raise RuntimeError("a packet did not arrive")

    def _message(self, i: int, data: bytes) -> None:
        message = Shareable()
        message["i"], message["data"] = i, data
        with self._engine.new_context() as context:
            answers = self._engine.send_aux_request(
                targets=[TO], topic=TOKEN, request=message, timeout=WAIT, fl_ctx=context
            )
        if answers[TO].get_return_code() != ReturnCode.OK:
            raise RuntimeError(f"a message did not arrive: {answers}")


def _taken(_: Any) -> Any:
    return Message({MessageHeaderKey.RETURN_CODE: CellReturnCode.OK}, None)


def _timed(send: Callable[[int, bytes], None], data: bytes, request: Any) -> float:
    with ThreadPoolExecutor(request["at_once"]) as threads:
        start = time.perf_counter()
        for _ in threads.map(lambda i: send(i, data), range(request["n"])):
            pass
        return time.perf_counter() - start
