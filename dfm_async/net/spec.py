"""Nets as data: what the planner writes and a site runs.

Places and scopes are numbered over the whole plan. A *scope* is the pipeline itself (scope 0) or the body of a loop;
every place belongs to one scope and holds one token per frame of that scope. Branches and caches are not scopes: they
are *gates*, inputs whose absence of a value (:data:`~dfm_async.net.tokens.SKIPPED`) keeps a transition from firing.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from dfm_async.model.ids import Location
from dfm_async.model.policies import RetryPolicy


class _NetData(msgspec.Struct, frozen=True, tag_field="kind", array_like=False, omit_defaults=True):
    pass


# Formulas: expressions over a transition's inputs.


class NetLiteral(_NetData, frozen=True, tag="const"):
    """A literal, by its index in the net's literals."""

    literal: int


class Slot(_NetData, frozen=True, tag="slot"):
    """The value of one of the transition's inputs."""

    input: int


class Field(_NetData, frozen=True, tag="field"):
    """A field of a value: each step is ``(is_attribute, key)``."""

    base: Formula
    path: tuple[tuple[bool, Any], ...]


class Build(_NetData, frozen=True, tag="build"):
    """A list, tuple or set."""

    type: Literal["list", "tuple", "set"]
    items: tuple[Formula, ...]


class MakeDict(_NetData, frozen=True, tag="dict"):
    """A dict."""

    entries: tuple[tuple[Formula, Formula], ...]


class Compare(_NetData, frozen=True, tag="compare"):
    """``left op right``."""

    op: Literal["==", "!=", "<", "<=", ">", ">="]
    left: Formula
    right: Formula


class Combine(_NetData, frozen=True, tag="combine"):
    """``and`` or ``or`` over terms, from left to right, stopping early."""

    op: Literal["and", "or"]
    terms: tuple[Formula, ...]


class Not(_NetData, frozen=True, tag="not"):
    """``not term``."""

    term: Formula


Formula: TypeAlias = NetLiteral | Slot | Field | Build | MakeDict | Compare | Combine | Not


# Actions: what a transition does when it fires.


class Call(_NetData, frozen=True, kw_only=True, tag="call"):
    """Call an operation; its result goes to ``output``.

    Attributes:
        ended: a place that gets a token without a value when the call has ended, for what is ordered after it. A call
            that makes a stream has ended when the stream has no more elements, or no readers that need more.
        within: the number of seconds that all attempts may take together.
        fallback: the value of ``output`` if the call fails; None if it then has none.
        runs_ahead: whether a stream runs to its end without waiting for its readers, because one of them needs what is
            ordered after it.
    """

    operation: str
    provider: str | None
    args: dict[str, Formula]
    output: int
    retry: RetryPolicy | None = None
    deadline: float | None = None
    ended: int | None = None
    runs_ahead: bool = False
    fallback: Formula | None = None
    within: float | None = None


class Emit(_NetData, frozen=True, tag="emit"):
    """Send a value to the application."""

    point: int
    value: Formula


class Branch(_NetData, frozen=True, tag="branch"):
    """Open one of two gates."""

    cond: Formula
    then: int
    otherwise: int


class Iterate(_NetData, frozen=True, tag="iterate"):
    """Run a loop over the elements of a sequence."""

    loop: int
    seq: Formula


class Repeat(_NetData, frozen=True, tag="repeat"):
    """Run a loop whose iterations follow each other."""

    loop: int
    carry: Formula
    times: Formula | None
    output: int


class Step(_NetData, frozen=True, tag="step"):
    """End one iteration of a repeat, inside its scope: what it passes on, and whether it was the last."""

    loop: int
    next: Formula
    until: Formula | None


class Lookup(_NetData, frozen=True, tag="lookup"):
    """Look for a key in the site's cache."""

    key: Formula
    found: int
    miss: int
    nested: bool = False
    """Whether it is inside another cache block: then it must not wait for others, which may wait for that one."""


class Store(_NetData, frozen=True, tag="store"):
    """Join a cache block: the value found, or else the value stored. Its first input is the lookup's answer."""

    value: Formula
    output: int


class Gather(_NetData, frozen=True, tag="gather"):
    """Keep a value of a loop's body for :attr:`Loop.collects`. ``errors``: what becomes of a failed one."""

    loop: int
    collect: int
    value: Formula
    errors: Literal["fail", "skip", "keep"] = "fail"


class Make(_NetData, frozen=True, tag="make"):
    """Make a value of an expression."""

    value: Formula
    output: int


class Choose(_NetData, frozen=True, tag="choose"):
    """Take the value of the branch that ran: that of the only input which was not skipped."""

    output: int


class Quorum(_NetData, frozen=True, tag="quorum"):
    """Make a list of those inputs that have not failed, with their ``sites``; fail if they are too few.

    The first inputs are the values, one for each site.
    """

    sites: tuple[str, ...]
    at_least: int
    output: int


class Await(_NetData, frozen=True, kw_only=True, tag="await"):
    """Wait for an event, for a time to be over, or for whichever comes first.

    Attributes:
        event: the name of the event; None if it only waits for a time.
        output: the place of the value of the event; it gets None if there is no event.
        seconds: how long it waits at most; None means without a limit.
        fallback: the value of ``output`` if there was no event in time; None if it then has none.
    """

    event: str | None
    output: int
    seconds: Formula | None = None
    fallback: Formula | None = None


Action: TypeAlias = (
    Call | Emit | Branch | Iterate | Repeat | Step | Lookup | Store | Gather | Make | Choose | Quorum | Await
)


def outputs_of(action: Action) -> list[int]:
    """Return the places that an action fills."""
    names = ("output", "ended", "then", "otherwise", "found", "miss")
    return [index for name in names if (index := getattr(action, name, None)) is not None]


def formulas_of(action: Action) -> dict[str, Formula]:
    """Return the formulas of an action by their names, without its fallback; those of a call are its arguments."""
    if isinstance(action, Call):
        return action.args
    names = ("value", "cond", "seq", "carry", "times", "next", "until", "key", "seconds")
    return {name: formula for name in names if (formula := getattr(action, name, None)) is not None}


class Input(_NetData, frozen=True, tag="input"):
    """A place that a transition waits for. ``role``: a value, a gate, or mere order."""

    place: int
    role: Literal["data", "gate", "after"] = "data"


class Transition(_NetData, frozen=True, tag="transition"):
    """Fires once per frame of its scope, when all its inputs are there.

    ``handled``: that it fails is not an error of the job, because everything that needs its value can do without.
    """

    label: str
    scope: int
    inputs: tuple[Input, ...]
    action: Action
    handled: bool = False


class Place(_NetData, frozen=True, tag="place"):
    """A named buffer: one token per frame of its scope. ``routes``: the other locations that get a copy.

    ``handled``: as that of the transition which fills it.
    """

    index: int
    scope: int
    label: str
    routes: tuple[int, ...] = ()
    handled: bool = False


class Scope(_NetData, frozen=True, tag="scope"):
    """The pipeline (no parent), or the body of a loop."""

    index: int
    parent: int | None
    loop: int | None


class Loop(_NetData, frozen=True, kw_only=True, tag="loop"):
    """A loop as one location sees it.

    Attributes:
        index: its number in the plan.
        label: its name in messages.
        scope: the scope of its body.
        control: the location that drives it.
        members: the locations that have a part in its body; each notifies ``control`` when it is done with an element.
        element: the place of the element, or of the value that a repeat passes on; None if nothing reads it.
        enter: the place of a token without a value, for transitions that need nothing else of the element.
        limit: the largest number of elements in flight.
        collects: places in the outer scope that get the list of a body's values, in the order of ``Gather.collect``.
    """

    index: int
    label: str
    scope: int
    control: int
    members: tuple[int, ...]
    element: int | None
    enter: int | None
    limit: int
    collects: tuple[int, ...] = ()


class ContainedCall(_NetData, frozen=True, kw_only=True, tag="contained_call"):
    """A call of another location, as its caller knows it: what it waits for, and what follows if it fails.

    ``reruns``: how many losses of its worker there may be before it is not called again. The rest as in :class:`Call`.
    """

    label: str
    operation: str
    scope: int
    inputs: tuple[Input, ...]
    output: int
    ended: int | None = None
    fallback: Formula | None = None
    within: float | None = None
    reruns: int = 0


class Contained(_NetData, frozen=True, kw_only=True, tag="contained"):
    """Another location whose loss is a failure of its calls, and not of the job.

    It only has calls whose failures are handled, and exchanges tokens with no other location than this one, its
    *caller*. So the caller knows what the location was doing, and goes on without it.

    Attributes:
        location: its number.
        calls: its calls, each after those that it needs.
        params: the places of parameters that it reads.
        loops: the loops that it takes part in; the caller drives them.
    """

    location: int
    calls: tuple[ContainedCall, ...]
    params: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()


class YieldPoint(_NetData, frozen=True, tag="yield_point"):
    """One ``Yield`` of the pipeline: its place and the node whose value it sends."""

    place: str
    node: str


class Net(_NetData, frozen=True, kw_only=True, tag="net"):
    """What one location does of a pipeline."""

    location: int
    locations: tuple[Location, ...]
    scopes: tuple[Scope, ...]
    places: tuple[Place, ...]
    loops: tuple[Loop, ...]
    transitions: tuple[Transition, ...]
    params: tuple[tuple[str, int], ...]
    points: tuple[YieldPoint, ...]
    literals: tuple[Any, ...] = ()
    contains: tuple[Contained, ...] = ()
