"""Makes a site hostile: its part of a host job sends packets in the name of another participant.

They go over FLARE's own connection of the site, with its valid tokens. It begins when a test writes the name to pretend
and the target into the named pipe ``HOSTILE_PIPE``, and writes what became of it beside that.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any


def attack(pipe: Path, kit: str) -> None:
    words: list[str] = []
    while len(words) != 2:  # another process of the site may have taken them
        words = pipe.read_text().split()
    origin, target = words
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.message import Message

    from dfm_async.targets.flare.cell_wire import CellWire
    from tests.flare.hostile import greeting

    packet = greeting(kit, origin, target)
    original = Message.add_headers

    def add_headers(message: Any, headers: dict[str, Any]) -> None:
        if message.payload is packet and MessageHeaderKey.ORIGIN in headers:
            headers = {**headers, MessageHeaderKey.ORIGIN: origin}
        original(message, headers)

    Message.add_headers = add_headers
    (wire,) = [found for found in gc.get_objects() if isinstance(found, CellWire)]
    reply = wire._cell.core_cell.send_request(
        "dfm_async", "packet", target, Message({}, packet), timeout=2.0, optional=True
    )
    pipe.with_name("answer").write_text(str(reply.get_header(MessageHeaderKey.RETURN_CODE)))


if "nvflare.private.fed.app.client.worker_process" in sys.orig_argv and "HOSTILE_PIPE" in os.environ:
    arguments = (Path(os.environ["HOSTILE_PIPE"]), sys.orig_argv[sys.orig_argv.index("-m", 3) + 1])
    threading.Thread(target=attack, args=arguments, daemon=True).start()
