"""What somebody wants to run at a site, read from what they would run."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Final

import msgspec

from dfm_async.discovery.advisors import DISCOVER
from dfm_async.net import spec
from dfm_async.net.checking import check_net
from dfm_async.site.authorizing import Denied
from dfm_async.targets.flare import messages as fm

__all__ = ["CACHE", "Wanted", "read_request"]

CACHE: Final = "#cache"
"""What the location of a site's cache is called, behind the site and ``#``. No operation can have this name."""
_MOST_LOCATIONS: Final = 10_000

_net: Final = msgspec.msgpack.Decoder(spec.Net)


class Wanted(msgspec.Struct, frozen=True):
    """What one location of a job does.

    Attributes:
        digest: the hash of its net: what is authorized is what runs.
        operations: the operations that it uses: those that it calls, and those whose advisors it asks.
        providers: their providers, as far as it names them.
        calls: what it may look for at the site's table: the operations, and ``#discover`` if it asks advisors.
    """

    digest: str
    operations: tuple[str, ...]
    providers: tuple[str, ...]
    calls: tuple[str, ...]


def read_request(site: str, request: fm.Seat, own_process: Container[str] | None) -> Wanted:
    """Reads what a location would do. Nothing of it is trusted.

    Args:
        site: the site.
        request: what the hub asks for.
        own_process: the operations of the site that have a process of their own; None if its code is not known,
            because the user brings it.

    Raises:
        Denied: it is no net, not one for this site, or one that cannot be judged.
    """
    try:
        net = _net.decode(request.net)
        check_net(net)
    except (ValueError, RecursionError) as error:
        raise Denied(f"what it would run cannot be read: {error}") from error
    _check_locations(site, request, net)
    operations: dict[str, None] = {}
    providers: dict[str, None] = {}
    calls: dict[str, None] = {}
    for transition in net.transitions:
        action = transition.action
        if isinstance(action, spec.Call):
            calls[action.operation] = None
            if action.operation == DISCOVER:
                operation, provider = _asked_about(action, net)
                calls[operation] = None
            else:
                operation, provider = action.operation, action.provider
            operations[operation] = None
            if provider is not None:
                providers[provider] = None
    _check_location(site, request.location, operations if own_process is None else own_process)
    digest = hashlib.sha256(request.net).hexdigest()
    return Wanted(digest, tuple(operations), tuple(providers), tuple(calls))


def _check_locations(site: str, request: fm.Seat, net: spec.Net) -> None:
    if not len(request.sites) == len(net.locations) <= _MOST_LOCATIONS:
        raise Denied(f"it has {len(net.locations):,} locations at {len(request.sites):,} sites")
    if net.location != request.at or net.locations[request.at] != request.location:
        raise Denied("what it would run is for another location")
    if any(location.partition("#")[0] != at for location, at in zip(net.locations, request.sites, strict=True)):
        raise Denied("its locations are not at the sites that it names")
    if request.sites[request.at] != site:
        raise Denied(f"it is for another site ({request.sites[request.at]!r})")


def _check_location(site: str, location: str, own_process: Container[str]) -> None:
    name, mark, part = location.partition("#")
    if name != site or (mark and part != CACHE and part not in own_process):
        raise Denied(f"site {site!r} has no location {location!r}")


def _asked_about(action: spec.Call, net: spec.Net) -> tuple[str, str | None]:
    """The operation whose advisors are asked, and its provider. The planner writes both as literals.

    Raises:
        Denied: it is not known before it runs, so that nobody can decide about it.
    """
    found = []
    for name in ("operation", "provider"):
        formula = action.args.get(name)
        found.append(net.literals[formula.literal] if isinstance(formula, spec.Const) else formula)
    operation, provider = found
    if not isinstance(operation, str) or not isinstance(provider, (str, type(None))):
        raise Denied("it asks for advice about an operation that it does not name")
    return operation, provider
