"""Hears that the server is asked to end, before it waits for open connections to close."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["heard_signals"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def heard_signals(call: Callable[[], None]) -> Iterator[None]:
    """Has something called on the loop when the process is asked to end, besides what is done about it anyway.

    Servers end the lifespan only when all connections have closed, so that an open stream would hold up the end for
    ever. A signal that nobody handles is left alone, and so is everything outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, tuple[Any, Any]] = {}
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            ours = _handler(loop, call, handler)
            signal.signal(number, ours)
            before[number] = (ours, handler)
    try:
        yield
    finally:
        for number, (ours, handler) in before.items():
            if signal.getsignal(number) is ours:  # else somebody else has taken over
                signal.signal(number, handler)


def _handler(
    loop: asyncio.AbstractEventLoop, call: Callable[[], None], before: Callable[[int, FrameType | None], Any]
) -> Callable[[int, FrameType | None], Any]:
    def handle(number: int, frame: FrameType | None) -> Any:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)
        return before(number, frame)

    return handle
