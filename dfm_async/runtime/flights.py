"""Work that several calls want at the same time, done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar, cast

from dfm_async.errors import LoadingError

__all__ = ["Flights"]

T = TypeVar("T")


class Flights:
    """What is under way. Whoever comes in the meantime gets the same result, or the same error."""

    __slots__ = ("_under_way",)

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def join(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Does the work, or waits for whoever does it. If they are cancelled, the next one does it."""
        while (flight := self._under_way.get(key)) is not None:
            await asyncio.wait([flight])
            if not flight.cancelled():
                error = flight.exception()
                if isinstance(error, LoadingError):  # each gets its own: raising one adds to its traceback
                    raise LoadingError(*error.args) from error.__cause__
                return cast("T", flight.result())
        flight = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            found = await work()
        except Exception as error:
            flight.set_exception(error)
            flight.exception()  # perhaps nobody else waits
            raise
        except BaseException:
            flight.cancel()
            raise
        else:
            flight.set_result(found)
            return found
        finally:
            del self._under_way[key]
