"""The token that clients show to a service: from a file, or from ``DFM_TOKEN``."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Final

from dfm_async.cli.exits import BadInput

__all__ = ["VARIABLE", "client_token", "server_token"]

VARIABLE: Final = "DFM_TOKEN"
_SHORTEST: Final = 16


def client_token(file: Path | None) -> str | None:
    """The token to show to a service, if the user has one."""
    return _token(file)


def server_token(file: Path | None, host: str) -> str | None:
    """The token that clients must show; None if only this machine is served.

    Raises:
        BadInput: others are to be served, and there is no token; or it is too short.
    """
    found = _token(file)
    if found is None and not _is_loopback(host):
        raise BadInput(
            f"--host {host} serves other machines, so that clients need a token: write one to a file and give "
            f"--token-file FILE, or set {VARIABLE}. "
            "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        )
    if found is not None and len(found) < _SHORTEST:
        raise BadInput(f"the token has {len(found)} characters: at least {_SHORTEST} are needed")
    return found


def _token(file: Path | None) -> str | None:
    if file is None:
        source, found = VARIABLE, os.environ.get(VARIABLE, "").strip()
        if not found:
            return None
    else:
        source = f"--token-file {file}"
        try:
            found = file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise BadInput(f"{source}: {error.strerror or error}") from error
    if not found.isascii():
        raise BadInput(f"{source}: a token has only ASCII characters")
    if not found.isprintable() or not found or " " in found:
        raise BadInput(f"{source} must hold one token, without spaces or line breaks in it")
    return found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
