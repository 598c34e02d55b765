"""How a program finds its site: a small private file, named in the environment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.errors import HandshakeRefused
from dfm_async.exchange.program_messages import VERSION

VARIABLE: Final = "DFM_ASYNC_BOOTSTRAP"
"""The environment variable that names the file."""

_LARGEST: Final = 64 * 1024


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the site listens.

    Attributes:
        kind: the name of the transport.
        name: the path of a Unix socket (a leading ``@`` means an abstract one), or the name of a listener in memory.
        port: the TCP port.
    """

    kind: str
    name: str = ""
    port: int = 0


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What a program must know to say hello.

    Attributes:
        address: where the site listens.
        token: proves that the site has invited the program; good for one hello.
        session: which executor it belongs to.
        site: the name of the site.
        job: the job that it works for.
        version: of the protocol.
        launch_once: whether the program serves many tasks.
    """

    address: Address
    token: str
    session: str
    site: str = ""
    job: str = ""
    version: int = VERSION
    launch_once: bool = True

    def __repr__(self) -> str:
        # The token must not end up in logs.
        return f"<Bootstrap {self.address.kind} {self.address.name or self.address.port} of session {self.session}>"


def new_token() -> str:
    """Return a secret that cannot be guessed."""
    return secrets.token_urlsafe(32)


def stamp_of(session: str, token: str) -> int:
    """Return the number that every frame of one launch carries: frames of another launch are ignored."""
    found = hashlib.blake2b(f"{session}\0{token}".encode(), digest_size=8).digest()
    return int.from_bytes(found, "little")


def write_bootstrap(bootstrap: Bootstrap, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the file, readable only by this user, in one step: it is never seen incomplete.

    Args:
        bootstrap: what to write.
        path: where; by default a new file of its own.
    """
    folder = tempfile.gettempdir() if path is None else os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix="dfm-async-", suffix=".json", dir=folder)  # 0600 by its contract
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(bootstrap))
        if path is None:
            return Path(temporary)
        os.replace(temporary, path)
        return Path(path).absolute()  # it is removed later, wherever the process is then
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_bootstrap(
    path: str | os.PathLike[str] | None = None, environment: Mapping[str, str] | None = None
) -> Bootstrap:
    """Read the file, or the one that the environment names.

    Raises:
        HandshakeRefused: the file is missing, invalid, writable by others, or of another version.
    """
    if path is None:
        path = (os.environ if environment is None else environment).get(VARIABLE)
        if not path:
            raise HandshakeRefused(
                f"the environment variable {VARIABLE} is not set: this program was not launched by a site. "
                "To attach it by hand, name the bootstrap file that executor.bootstrap() wrote"
            )
    try:
        with open(path, "rb") as file:
            _check_owner(os.fstat(file.fileno()), path)
            data = file.read(_LARGEST + 1)
    except OSError as error:
        why = "it was used already, or the site has ended" if isinstance(error, FileNotFoundError) else str(error)
        raise HandshakeRefused(f"the bootstrap file {os.fspath(path)} cannot be read: {why}") from error
    try:
        plain: Any = json.loads(data)
        version = plain.get("version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version != VERSION:
            problem = f"the site uses version {version} of the protocol, this program {VERSION}"
            raise HandshakeRefused(f"{problem}: install the same version of dfm_async")
        return msgspec.convert(plain, Bootstrap)
    except (ValueError, RecursionError) as error:
        raise HandshakeRefused(f"{os.fspath(path)} is not a bootstrap file: {error}") from error


def _check_owner(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise HandshakeRefused(
            f"the bootstrap file {os.fspath(path)} must belong to this user, and be readable only by it (mode 0600)"
        )
