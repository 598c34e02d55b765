"""The hub's ends of the transports: app commands, and the gateway of the homesite."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any, Final

from dfm_async.base.signals import Signal
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.gateway import AppBatches
from dfm_async.targets.flare.hub import Hub
from dfm_async.targets.flare.hub_job import Application
from dfm_async.targets.flare.node import HostNode

_log = logging.getLogger(__name__)

_LONGEST: Final = 0.1
"""The longest wait of a command for messages, in seconds: FLARE serves one at a time, for all users."""
_TIMEOUT: Final = 4.0
"""The number of seconds that a command waits for the loop."""


class CommandEndpoint:
    """Serves app commands: each brings messages of the application, and its answer those for it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, Signal] = {}
        """Wakes the command of a session that waits for messages."""

    def __call__(self, data: Any) -> dict[str, Any]:
        """Serve one command, in a thread of FLARE's. It may wait a moment for messages."""
        return asyncio.run_coroutine_threadsafe(self._serve(data), self._loop).result(_TIMEOUT)

    async def _serve(self, data: Any) -> dict[str, Any]:
        session = str(data["session"])
        if "attach" in data:
            return self._attach(session, base64.b64decode(data["attach"]))
        app = self._hub.application(session)
        if app is None or app.connection:  # it is gone, or uses the gateway now
            return {"gone": True}
        stream, wait = app.stream, min(float(data.get("wait", 0.0)), _LONGEST)
        stream.take(base64.b64decode(data["packet"]))
        self._hub.begin_absence(app)
        self._wake(session)  # an earlier command, which nobody waits for any longer
        if not stream.waiting and wait > 0:
            signal = self._waiting[session] = Signal()
            await signal.wait(self._loop.time() + wait)
            if self._waiting.get(session) is signal:
                del self._waiting[session]
        packet = stream.pull()
        return {"packet": base64.b64encode(packet).decode(), "more": stream.backlog > len(packet)}

    def _attach(self, session: str, data: bytes) -> dict[str, Any]:
        attach = fm.decode_attach(data)
        if attach.session != session:
            raise ValueError(f"the command of session {session!r} attaches session {attach.session!r}")
        attached = self._hub.attach(attach)
        app = self._hub.application(session)
        if app is not None and not attached.refused:
            app.connection = ""
            app.stream.attach_pull(lambda: self._wake(session))
            app.stream.release(attach.have)
            self._hub.begin_absence(app)  # until the next command comes
        return {"attached": base64.b64encode(fm.encode(attached)).decode()}

    def _wake(self, session: str) -> None:
        signal = self._waiting.pop(session, None)
        if signal is not None:
            signal.notify()

    def close(self) -> None:
        """Answer the commands that wait."""
        for session in list(self._waiting):
            self._wake(session)


class GatewayEndpoint:
    """The applications at the gateway of the homesite, by the connections that they have there.

    Args:
        hub: the hub.
        node: sends messages to the gateway.
        homesite: the site of the gateway: no other may send messages of applications.
    """

    def __init__(self, hub: Hub, node: HostNode, homesite: str) -> None:
        self._hub = hub
        self._node = node
        self._homesite = homesite
        self._sessions: dict[str, Application] = {}

    def receive(self, peer: str, message: fm.AppBytes | fm.AppGone) -> None:
        """Receive a message of a gateway."""
        if peer != self._homesite:
            _log.warning("site %s sends messages of an application, which only %s may do", peer, self._homesite)
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
                    app.stream.take(packet)
        except (ValueError, StopIteration) as error:
            _log.warning("an application at the gateway is disconnected: cannot decode its messages: %s", error)
            self.disconnect(message.app)

    def _attach(self, connection: str, data: bytes) -> None:
        attach = fm.decode_attach(data)
        attached = self._hub.attach(attach)
        messages = AppBatches(connection, lambda batch: self._node.send(self._homesite, batch))
        messages.add(fm.encode(attached))
        app = self._hub.application(attach.session)
        if app is not None and not attached.refused:
            self._sessions[connection] = app
            app.connection = connection
            app.stream.attach(messages.add, attach.have)

    def disconnect(self, connection: str) -> None:
        """End a connection at the gateway whose messages did not arrive."""
        self._node.send(self._homesite, fm.AppGone(connection))
        app = self._sessions.pop(connection, None)
        if app is not None:
            self._hub.detach(app, connection)

    def lost(self) -> None:
        """Note that the homesite was lost, and its gateway with it."""
        sessions, self._sessions = self._sessions, {}
        for connection, app in sessions.items():
            self._hub.detach(app, connection)
