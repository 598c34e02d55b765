"""A stream that is left early keeps none of its elements, not even until the next garbage collection."""

from __future__ import annotations

import contextvars
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dfm_async.runtime.job_streams import _RemoteSource
from dfm_async.runtime.sources import ThreadSource
from dfm_async.runtime.streams import LocalStream
from dfm_async.runtime.threads import Threads


class Element:
    """Something that weak references can refer to."""


class Elements:
    """Makes elements, and counts those that are alive."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Element]] = []

    def make(self, count: int) -> Iterator[Element]:
        for _ in range(count):
            element = Element()
            self._made.append(weakref.ref(element))
            yield element
            del element

    @property
    def alive(self) -> int:
        return sum(made() is not None for made in self._made)


@pytest.fixture
def elements() -> Iterator[Elements]:
    gc.disable()
    yield Elements()
    gc.enable()


class AtOnce:
    """A source that has all its elements at once."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    async def get(self, limit: int) -> list[Any]:
        found, self._found = self._found[:limit], self._found[limit:]
        return found

    async def aclose(self) -> None: ...

    async def wait_ended(self) -> None: ...


def never(error: BaseException) -> Any:
    raise AssertionError("nothing fails here") from error


async def test_a_closed_subscription_keeps_no_elements(elements: Elements) -> None:
    subscription = LocalStream("made", AtOnce(list(elements.make(5))), 1, never).subscribe()
    await anext(subscription)
    assert elements.alive == 4
    subscription.close()
    assert elements.alive == 0


async def test_a_closed_source_in_a_thread_keeps_no_elements(elements: Elements) -> None:
    threads = Threads(1, "test")
    source = ThreadSource(threads, elements.make(5), contextvars.Context(), "made")
    await source.get(1)
    await source.get(1)  # the window has grown: the thread need not wait any more
    await source.wait_ended()
    assert elements.alive == 3
    await source.aclose()
    assert elements.alive == 0
    threads.close()


async def test_a_released_source_at_another_site_keeps_no_elements(elements: Elements) -> None:
    job: Any = SimpleNamespace(outbox=SimpleNamespace(send=lambda *_: None), number=1, at=0)
    source = _RemoteSource(job, {}, 0, 0)
    source.arrived(list(elements.make(5)), 100, False, None)
    await source.get(1)
    assert elements.alive == 4
    source.release(True)
    assert elements.alive == 0
    assert await source.get(1) == []
