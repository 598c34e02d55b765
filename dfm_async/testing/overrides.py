"""Fakes in the place of operations, for a block of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Operation
from dfm_async.federation.site import Site
from dfm_async.testing.board import Board, Chosen, Rule
from dfm_async.testing.fakes import Fake

__all__ = ["choose", "override"]


@contextmanager
def override(
    federation: Federation,
    operation: str | Operation[..., Any],
    fake: Fake | Callable[..., Any],
    *,
    site: str | Site | None = None,
    provider: str | None = None,
) -> Iterator[Fake]:
    """Replaces an operation by a fake while the block runs, in all sessions of this process.

    The fake runs in the process of the test, on the loop of its session, wherever the operation would: so it can use
    whatever the test has, and must not block. Streams come to it as lists.

    Args:
        federation: the federation.
        operation: the operation, or its name.
        fake: a function, an async function, a generator, ``returns(...)`` or ``raises(...)``.
        site: only calls at this site; by default at all.
        provider: only calls of this provider's code; by default of all.

    Yields:
        The fake, with its ``calls``.

    Raises:
        LookupError: the federation does not offer the operation there.
        TypeError: the parameters of the fake do not fit.
    """
    chosen = choose(federation, operation, site, provider)
    made = Fake.of(fake)
    made.check(federation.operations[chosen.operation])
    board, rule = Board.of(federation), Rule(chosen, made)
    board.add(rule)
    try:
        yield made
    finally:
        board.remove(rule)


def choose(
    federation: Federation, operation: str | Operation[..., Any], site: str | Site | None, provider: str | None
) -> Chosen:
    """Finds the calls that are meant.

    Raises:
        LookupError: the federation does not offer the operation there.
    """
    name = operation.name if isinstance(operation, Operation) else operation
    place = site.name if isinstance(site, Site) else site
    offers = [(found.name, key[1]) for found in federation.sites.values() for key in found.adapters if key[0] == name]
    if not offers:
        known = ", ".join(sorted(federation.operations)) or "none"
        raise LookupError(f"federation {federation.name!r} has no operation {name!r} (it has: {known})")
    if not any(place in (None, where) and provider in (None, whose) for where, whose in offers):
        listed = ", ".join(sorted(where + (f" (provider {whose})" if whose else "") for where, whose in offers))
        asked = "".join([f" at site {place!r}" if place else "", f" of provider {provider!r}" if provider else ""])
        raise LookupError(f"operation {name!r} is not offered{asked} (it is at: {listed})")
    return Chosen(operation=name, site=place, provider=provider)
