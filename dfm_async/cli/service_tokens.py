"""The token that clients send to a service: from a file, from ``DFM_TOKEN``, or from a service of the same user."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dfm_async.base.addresses import is_loopback
from dfm_async.cli.command_runner import BadInput

VARIABLE: Final = "DFM_TOKEN"
_SHORTEST: Final = 16
_OTHERS: Final = 0o077
"""The permissions of all users but the owner."""


def client_token(file: Path | None, url: str) -> str | None:
    """Return the token for a service, if the user has one.

    A service of the same user on this machine, which was started by ``dfm-async serve`` without a token, has left its
    token where only that user can read it. It is sent only to the address that the service listens on; to
    ``localhost`` only if that has no other address.
    """
    found = _token(file)
    return _shared(url) if found is None else found


def server_token(file: Path | None, host: str) -> str | None:
    """Return the token that clients must send; None if the service generates one, for this machine only."""
    found = _token(file)
    if found is None and not is_loopback(host):
        raise BadInput(
            f"--host {host} serves other machines, so clients need a token: write one to a file and give "
            f"--token-file FILE, or set {VARIABLE}. "
            "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        )
    if found is not None and len(found) < _SHORTEST:
        raise BadInput(f"the token has {len(found)} characters, but needs at least {_SHORTEST}")
    return found


def _token(file: Path | None) -> str | None:
    if file is None:
        source, found = VARIABLE, os.environ.get(VARIABLE, "").strip()
        if not found:
            return None
    else:
        source = f"--token-file {file}"
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                status = os.fstat(opened.fileno())
                found = opened.read(_LONGEST).strip()
        except OSError as error:
            raise BadInput(f"{source}: {error.strerror or error}") from error
        if stat.S_ISREG(status.st_mode) and status.st_mode & _OTHERS:
            raise BadInput(f"{source}: other users of this machine can read the token. Run: chmod 600 {file}")
    if not found.isascii():
        raise BadInput(f"{source}: a token can only have ASCII characters")
    if not found.isprintable() or not found or " " in found:
        raise BadInput(f"{source} must contain one token without spaces or line breaks")
    return found


_LONGEST: Final = 4096


# services of the same user


@contextmanager
def shared_token(address: str, port: int, token: str) -> Iterator[None]:
    """Leave a token for the commands of the same user, while a service listens at an address of this machine."""
    path = _path(address, port)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        private = _is_private(path.parent)
    except OSError:
        private = False
    if not private:  # commands need --token-file or DFM_TOKEN then
        yield
        return
    with suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == token:  # otherwise another service has replaced it
                path.unlink()
                path.parent.rmdir()  # unless there are other tokens


def _shared(url: str) -> str | None:
    try:
        address = urlsplit(url)
        port = address.port
    except ValueError:
        return None
    host = address.hostname or ""
    if port is None or not is_loopback(host):
        return None
    # A program of another user may listen at another address of the same port, and clients try all that a name has.
    found = {_left(where, port) for where in (_addresses(port) if host == "localhost" else [host])}
    return found.pop() if len(found) == 1 else None


def _addresses(port: int) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _left(address: str, port: int) -> str | None:
    path = _path(address, port)
    try:
        return path.read_text() if _is_private(path.parent) else None
    except OSError:
        return None


def _path(address: str, port: int) -> Path:
    home = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(home) / "dfm_async" if home else Path(tempfile.gettempdir()) / f"dfm_async-{os.getuid()}"
    return folder / f"serve-{ipaddress.ip_address(address)}-{port}.token"


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS
