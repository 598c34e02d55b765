"""Operations that hang. Every worker imports this module, so it imports little."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dfm_async import Federation
from dfm_async.runtime.threads import ABANDONED_LIMIT
from tests.support.pipelines import pipeline_of

fed = Federation("hanging")
lab = fed.site("lab", threads=2)
desk = fed.site("desk", threads=2)


def hang(gate: str) -> None:
    """Hangs until the gate is opened, as a socket without a timeout does: opening a FIFO waits for the other end."""
    os.close(os.open(gate, os.O_RDONLY))


def hang_or_return(x: int, gate: str, hanging: int) -> int:
    if x < hanging:
        hang(gate)
    return x


work = lab.operation(hang_or_return, name="work", deadline=0.4)
other = lab.operation(hang_or_return, name="other", deadline=0.4)
apart = lab.operation(hang_or_return, name="apart", deadline=0.4, in_process=True)
unlimited = lab.operation(hang_or_return, name="unlimited")
at_home = desk.operation(hang_or_return, name="at_home", deadline=0.4)


@lab.operation(deadline=0.4, name="Body")
class Body:
    def body(self, x: int, gate: str, hanging: int) -> int:
        return hang_or_return(x, gate, hanging)


@lab.operation(deadline=0.4, name="Closed")
class Closed:
    def body(self, x: int, gate: str, hanging: int) -> int:
        return hang_or_return(x, gate, hanging)

    def close(self) -> None:
        """Is called when the job has ended, also while a call hangs."""


@lab.operation(deadline=0.4)
def lazily(x: int, gate: str, hanging: int) -> Any:
    """A coroutine from a plain function: the deadline goes on."""
    if x < hanging:
        hang(gate)

    async def later() -> int:
        return x

    return later()


@lab.operation
def steps(x: int, gate: str, hanging: int) -> Iterator[int]:
    yield 0
    if x < hanging:
        hang(gate)
    yield 1


@lab.operation(deadline=0.4)
def written(values: Iterator[int], gate: str, path: str) -> None:
    """Writes how its input ended, in the end; hangs after the first element if it gets a gate."""
    end = "all"
    try:
        for _ in values:
            if gate:
                hang(gate)
    except RuntimeError as error:
        end = str(error)
    Path(f"{path}-new").write_text(end)
    Path(f"{path}-new").rename(path)


@lab.operation
def thousand() -> Iterator[int]:
    yield from range(1000)


@lab.operation
def quick(x: int) -> int:
    return x


@lab.operation
def held(started: str, gate: str) -> int:
    os.close(os.open(started, os.O_WRONLY))
    hang(gate)
    return os.getpid()


@lab.operation
def held_steps(started: str, gate: str) -> Iterator[int]:
    os.close(os.open(started, os.O_WRONLY))
    hang(gate)
    yield 1


@lab.operation
def pid() -> int:
    return os.getpid()


quickly = pipeline_of(quick, "x")
where = pipeline_of(pid)
holds = pipeline_of(held, "started", "gate")
holds_in_steps = pipeline_of(held_steps, "started", "gate")


@lab.operation(name="Slow")
class Slow:
    """A constructor that hangs: it runs on the loop of the worker, which does not respond until it is killed."""

    def __init__(self) -> None:
        hang(os.environ["HANGING_GATE"])

    def body(self, x: int) -> int:
        return x


many = Federation("many")


@many.site("lab", threads=ABANDONED_LIMIT).operation(deadline=0.4)
def stuck(gate: str) -> None:
    hang(gate)


sticks = pipeline_of(stuck, "gate")


@lab.operation(deadline=0.2)
async def blocks(x: int) -> int:
    """Blocks the event loop of its site, as a call of a synchronous library does."""
    hang(os.environ["HANGING_GATE"])
    return x


@lab.operation(deadline=0.2, name="SlowToBegin")
class SlowToBegin:
    def __init__(self) -> None:
        hang(os.environ["HANGING_GATE"])

    def body(self, x: int) -> int:
        return x
