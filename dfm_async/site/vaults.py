"""Vaults of a site's secrets: its environment, files, the keyring of the user, or a class of your own.

Vaults cache nothing: each secret is looked up when it is requested, so a new value is used from the next call on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from dfm_async.base.text import install_hint
from dfm_async.errors import SecretError

_LARGEST: Final = 1024 * 1024
_MAPPINGS: Final = frozenset({".json", ".yaml", ".yml"})


class Vault(Protocol):
    """Keeps secrets. Any class with this method is one; the method may be asynchronous."""

    def secret_for_key(self, key: str) -> Any | Awaitable[Any]:
        """Return a secret. May block: it is called in a thread.

        Raises:
            Exception: there is no such secret. Only the type of the exception is reported.
        """


class EnvironmentVault:
    """Secrets in environment variables: that for ``api_key`` is in ``DFM_SECRET_API_KEY``.

    Args:
        prefix: the beginning of their names.
    """

    def __init__(self, prefix: str = "DFM_SECRET_") -> None:
        self._prefix = prefix

    def secret_for_key(self, key: str) -> str:
        """Return a secret."""
        name = f"{self._prefix}{key}".upper()
        found = os.environ.get(name)
        if found is None:
            raise SecretError("", key, f"the environment variable {name} is not set where the site runs")
        return found

    def __repr__(self) -> str:
        return "<EnvironmentVault>"


class FileVault:
    """Secrets in a file, or in a directory of files with one secret each, named by their keys.

    The file is a mapping, in JSON or YAML. Only its owner and its group may have permissions.

    Args:
        path: the file or the directory; a relative one is relative to the working directory of the site's process.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).expanduser()
        found = self._checked(self._path, "")
        if not stat.S_ISDIR(found.st_mode):
            if self._path.suffix not in _MAPPINGS:
                raise SecretError("", "", f"a file of secrets ends in .json, .yaml or .yml, unlike {self._path.name!r}")
            self._read("")

    def secret_for_key(self, key: str) -> Any:
        """Return a secret."""
        if not self._path.is_dir():
            found = self._read(key)
            if key not in found:
                raise SecretError("", key, f"{self._path.name!r} does not have this key")
            return found[key]
        if not key or key in (".", "..") or "/" in key or "\\" in key or "\0" in key:
            raise SecretError("", key, "the name of a secret in a directory must not contain slashes, or be only dots")
        file = self._path / key
        self._checked(file, key)
        return _text(file, key).removesuffix("\n")

    def _read(self, key: str) -> Mapping[str, Any]:
        self._checked(self._path, key)
        text = _text(self._path, key)
        try:
            if self._path.suffix == ".json":
                import json

                found = json.loads(text)
            else:
                import yaml

                found = yaml.safe_load(text)
        except Exception as error:  # noqa: BLE001 - also errors of YAML; their texts quote the file
            kind = self._path.suffix[1:].upper()
            raise SecretError("", key, f"{self._path.name!r} is not valid {kind} ({type(error).__name__})") from None
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise SecretError("", key, f"{self._path.name!r} is not a mapping of names to secrets")
        return found

    def _checked(self, path: Path, key: str) -> os.stat_result:
        try:
            found = path.stat()
        except OSError as error:
            expected = f" (expected in {path.absolute().parent})" if isinstance(error, FileNotFoundError) else ""
            raise SecretError("", key, f"{path.name!r} cannot be read: {error.strerror}{expected}") from None
        if found.st_mode & stat.S_IRWXO:
            fix = "chmod o-rwx"
            raise SecretError("", key, f"everybody on this machine can open {path.name!r}: run {fix} on it")
        return found

    def __repr__(self) -> str:
        return "<FileVault>"


def _text(path: Path, key: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise SecretError("", key, f"{path.name!r} is larger than {_LARGEST:,} bytes")
        return data.decode()
    except OSError as error:
        raise SecretError("", key, f"{path.name!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SecretError("", key, f"{path.name!r} is not text in UTF-8") from None


class KeyringVault:
    """Secrets in the keyring of the user that the site runs as. Needs the extra ``keyring``.

    Args:
        service: the service that they are stored for; the key is the user name there.
    """

    def __init__(self, service: str) -> None:
        try:
            import keyring  # noqa: F401 - that it can be used is known before the first secret is needed
        except ModuleNotFoundError:
            raise SecretError("", "", f"a keyring needs the package keyring: {install_hint('keyring')}") from None
        if not service:
            raise SecretError("", "", "a keyring needs the name of a service")
        self._service = service

    def secret_for_key(self, key: str) -> str:
        """Return a secret."""
        import keyring

        try:
            found = keyring.get_password(self._service, key)
        except keyring.errors.NoKeyringError:
            fix = "install a backend of keyring, or choose another vault"
            raise SecretError("", key, f"the site has no keyring: {fix}") from None
        if found is None:
            fix = f"run 'keyring set SERVICE {key}' as the site's user"
            raise SecretError("", key, f"the keyring has no such secret: {fix}")
        return found

    def __repr__(self) -> str:
        return "<KeyringVault>"
