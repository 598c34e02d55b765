"""Applications that speak to the hub by app commands, and those that speak through a gateway."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import logging
from typing import Any, Final

from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.application import Application
from dfm_async.targets.flare.gateway import TOGETHER
from dfm_async.targets.flare.hub import Hub
from dfm_async.targets.flare.node import Node
from dfm_async.targets.flare.parts import together

__all__ = ["Commands", "GatewayPorts"]

_log = logging.getLogger(__name__)

_LONGEST: Final = 0.1
"""For how many seconds a command may wait for something to say: FLARE serves one at a time, for all users."""
_PATIENCE: Final = 4.0
"""For how many seconds a command waits for the loop."""


class Commands:
    """Serves app commands: each brings what the application has to say, and takes what there is for it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, _Question] = {}

    def __call__(self, data: Any) -> dict[str, Any]:
        """Serves one command, in a thread of FLARE's. It waits a moment, if asked to, for something to say."""
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._serve, data, answer)
        return answer.result(_PATIENCE)

    def _serve(self, data: Any, answer: concurrent.futures.Future[dict[str, Any]]) -> None:
        try:
            session = str(data["session"])
            if "attach" in data:
                answer.set_result(self._attach(session, base64.b64decode(data["attach"])))
                return
            app = self._hub.application(session)
            if app is None or app.connection:  # it is gone, or speaks through the gateway now
                answer.set_result({"gone": True})
                return
            app.duplex.take(base64.b64decode(data["packet"]))
            self._answer(session, app, answer, min(float(data.get("wait", 0.0)), _LONGEST))
        except Exception as error:  # noqa: BLE001 - told to whoever has sent it: other users wait for their turn
            if not answer.done():
                answer.set_exception(error)

    def _attach(self, session: str, data: bytes) -> dict[str, Any]:
        attach = fm.decode_attach(data)
        if attach.session != session:
            raise ValueError("another session speaks")
        attached = self._hub.attach(attach)
        app = self._hub.application(session)
        if app is not None and not attached.refused:
            app.connection = ""
            app.duplex.answer_by(lambda: self._wake(session))
            app.duplex.release(attach.have)
            self._hub.absent(app)  # until the next command comes
        return {"attached": base64.b64encode(fm.encode(attached)).decode()}

    def _answer(self, session: str, app: Application, answer: Any, wait: float) -> None:
        former = self._waiting.pop(session, None)
        if former is not None:
            former.reply()
        question = _Question(app, answer)
        if app.duplex.waiting or wait <= 0:
            question.reply()
        else:
            question.timer = self._loop.call_later(wait, self._wake, session)
            self._waiting[session] = question
        self._hub.absent(app)

    def _wake(self, session: str) -> None:
        question = self._waiting.pop(session, None)
        if question is not None:
            self._loop.call_soon(question.reply)  # with all that is said in this turn of the loop

    def close(self) -> None:
        """Answers those that wait."""
        for session in list(self._waiting):
            self._waiting.pop(session).reply()


class _Question:
    """A command that waits for its answer."""

    def __init__(self, app: Application, answer: concurrent.futures.Future[dict[str, Any]]) -> None:
        self._app = app
        self._answer = answer
        self.timer: asyncio.TimerHandle | None = None

    def reply(self) -> None:
        """Answers with what there is."""
        if self.timer is not None:
            self.timer.cancel()
        if not self._answer.done():
            packet = self._app.duplex.pull()
            more = self._app.duplex.backlog > len(packet)
            self._answer.set_result({"packet": base64.b64encode(packet).decode(), "more": more})


class GatewayPorts:
    """The applications at the gateway of the homesite, by the connections that they have there.

    Args:
        hub: what they speak to.
        node: the way to the gateway.
        homesite: the site whose gateway this is: no other may speak for applications.
    """

    def __init__(self, hub: Hub, node: Node, homesite: str) -> None:
        self._hub = hub
        self._node = node
        self._homesite = homesite
        self._sessions: dict[str, Application] = {}

    def receive(self, peer: str, message: fm.AppBytes | fm.AppGone) -> None:
        """Takes what comes from a gateway."""
        if peer != self._homesite:
            _log.warning("site %s speaks for an application, which only %s may do", peer, self._homesite)
        elif isinstance(message, fm.AppGone):
            app = self._sessions.pop(message.app, None)
            if app is not None:
                self._hub.detach(app, message.app)
        else:
            self._take(message)

    def _take(self, message: fm.AppBytes) -> None:
        packets = iter(message.data)
        try:
            if message.app not in self._sessions:
                self._attach(message.app, next(packets))
            app = self._sessions.get(message.app)
            for packet in packets:
                if app is not None:
                    app.duplex.take(packet)
        except (ValueError, StopIteration) as error:
            _log.warning("an application at the gateway cannot be understood, and is let go: %s", error)
            self.let_go(message.app)

    def _attach(self, connection: str, data: bytes) -> None:
        attach = fm.decode_attach(data)
        attached = self._hub.attach(attach)
        waiting: list[bytes] = []

        def flush() -> None:
            for found in together(waiting, TOGETHER):
                self._node.send(self._homesite, fm.AppBytes(connection, found))
            waiting.clear()

        def push(packet: bytes) -> None:
            if not waiting:  # those of one turn of the loop go together
                asyncio.get_running_loop().call_soon(flush)
            waiting.append(packet)

        push(fm.encode(attached))
        app = self._hub.application(attach.session)
        if app is not None and not attached.refused:
            self._sessions[connection] = app
            app.connection = connection
            app.duplex.attach(push, attach.have)

    def let_go(self, connection: str) -> None:
        """Ends a connection at the gateway: what was for it did not arrive."""
        self._node.send(self._homesite, fm.AppGone(connection))
        app = self._sessions.pop(connection, None)
        if app is not None:
            self._hub.detach(app, connection)

    def lost(self) -> None:
        """The homesite was lost, and its gateway with it."""
        sessions, self._sessions = self._sessions, {}
        for connection, app in sessions.items():
            self._hub.detach(app, connection)
