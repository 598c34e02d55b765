"""One blocking call in a thread of its own.

``anyio.to_thread`` and the loop's executor keep their threads for the next call; here none may be left behind, and
loading the former would take a tenth of the time to the first result.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Runs a call in a new thread and waits for it. Cancelling the wait does not stop the call."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type] # of the type that the call returns

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except StopIteration as caught:  # no future takes one: the wait would never end
            error = RuntimeError("the call raised StopIteration")
            error.__cause__ = caught
        except BaseException as caught:  # noqa: BLE001 - raised again where it is waited for
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"dfm-{name}", daemon=True).start()
    return await future
