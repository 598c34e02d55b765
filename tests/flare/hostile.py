"""A program that speaks to the host job of a site in the name of another participant.

``python -m tests.flare.hostile URL CELL ORIGIN TARGET KIT`` connects to the port of a FLARE client, as any program on
its machine can, and sends greetings to the process ``TARGET`` of a host job, as if they came from ``ORIGIN``: the first
ones without a startup kit, the others with that of a site.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.message import Message

from dfm_async.targets.flare.authentication import Credentials
from dfm_async.targets.flare.link import _GREETING, _encoder, _Greeting


def greeting(kit: str, origin: str, target: str) -> bytes:
    """A greeting in the name of another, with the certificate that there is; else something that looks like one."""
    peer, _, job = target.rpartition(".")
    content = _encoder.encode(_Greeting((2**63, 1)))  # later than any honest link
    if not kit:
        return _GREETING + _encoder.encode([content, bytes(32), [b"no certificate"], bytes(256)])
    credentials = Credentials.load(Path(kit) / "startup", Path(kit).name, job)
    credentials.name = origin.rpartition(".")[0]
    return _GREETING + credentials.greet(peer, content).greeting


def main() -> None:
    url, name, origin, target, kit = sys.argv[1:]
    original = Message.add_headers

    def add_headers(message: Any, headers: dict[str, Any]) -> None:
        if MessageHeaderKey.ORIGIN in headers:
            headers = {**headers, MessageHeaderKey.ORIGIN: origin}
        original(message, headers)

    Message.add_headers = add_headers
    cell = CoreCell(name, None, False, {}, parent_url=url)
    cell.start()
    # A few may be lost when the program ends.
    for packet in [greeting("", origin, target)] * 5 + [greeting(kit, origin, target)] * 15:
        code = CellReturnCode.TARGET_UNREACHABLE
        while code == CellReturnCode.TARGET_UNREACHABLE:  # the cell does not tell when it is connected
            reply = cell.send_request("dfm_async", "packet", target, Message({}, packet), timeout=0.2, optional=True)
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        print(code)
    sys.stdout.flush()
    os._exit(0)  # FLARE leaves threads behind


if __name__ == "__main__":
    main()
