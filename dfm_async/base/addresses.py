"""Addresses of machines."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str | None) -> bool:
    """Return whether a host is this machine: ``localhost``, or an address of its loopback interface."""
    try:
        found = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return bool(found.is_loopback if mapped is None else mapped.is_loopback)
