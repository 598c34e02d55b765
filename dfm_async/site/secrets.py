"""The secrets of one site: its vault is built when the site starts, and queried for each call."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final

from dfm_async.base.redaction import note_secret
from dfm_async.base.tasks import in_thread
from dfm_async.errors import LoadingError, SecretError
from dfm_async.model.resources import VaultConfig
from dfm_async.site.loading import Loader, wrong_arguments
from dfm_async.site.vaults import EnvironmentVault, FileVault, KeyringVault, Vault

_log = logging.getLogger(__name__)

_NAMED: Final[dict[str, type[Any]]] = {
    "environment": EnvironmentVault,
    "file": FileVault,
    "keyring": KeyringVault,
}
_AT_ONCE: Final = 8
"""The number of threads that query a vault at the same time; further ones wait."""


class NoSecret(SecretError, ValueError):
    """The error of a site object for a missing secret: adapters that are written for DFM expect this kind."""


class Secrets:
    """Return the secrets of a site. Each is noted, so that it is redacted in all text that leaves the process.

    The vault is a :class:`~dfm_async.federation.VaultConfig`, or an object with ``secret_for_key``.
    """

    def __init__(self, site: str, vault: Any, loader: Loader) -> None:
        self._site = site
        self._config = vault
        self._loader = loader
        self._vault: Vault | None = None
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def open(self) -> None:
        """Build the vault.

        Raises:
            SecretError: it cannot be built, or is not a vault. There is no fallback.
            LoadingError: there is no such class.
        """
        config = self._config
        if isinstance(config, VaultConfig):
            if config.path in (None, "environment"):
                self._vault = self._build(config)
            else:
                self._vault = await in_thread(lambda: self._build(config), f"vault-{self._site}")
        elif _lacks_method(type(config)) is None:
            self._vault = config
        else:
            raise SecretError(self._site, "", f"an object of {type(config).__qualname__} has no secret_for_key(key)")

    def _build(self, config: VaultConfig) -> Vault:
        path = config.path or "environment"
        kind = _NAMED.get(path)
        if kind is None and "." not in path:
            listed = ", ".join(_NAMED)
            raise LoadingError(self._site, "the vault", path, f"is not one of {listed}, nor the path of a class")
        if kind is None:
            kind = self._loader.load(path, "the vault", _lacks_method)
        wrong = wrong_arguments(kind, config.args)
        if wrong is not None:
            raise SecretError(self._site, "", f"{path} cannot be built with its args: {wrong}")
        try:
            return kind(**config.args)  # type: ignore[no-any-return] # it has the method
        except SecretError as error:
            raise SecretError(self._site, "", error.reason) from None
        except BaseException as error:  # noqa: BLE001 - whatever the class raises
            raise SecretError(self._site, "", _without_text(f"{path} cannot be built", error)) from None

    async def aclose(self) -> None:
        """Close a vault that was built here, if it has ``aclose`` or else ``close``."""
        vault, self._vault = self._vault, None
        if vault is None or vault is self._config:  # an object belongs to the application
            return
        close = getattr(vault, "aclose", None) or getattr(vault, "close", None)
        if not callable(close):
            return
        try:
            if inspect.iscoroutinefunction(close):
                await close()
            else:
                await in_thread(close, f"vault-{self._site}")
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # it takes too long
            # The site ends nevertheless.
            _log.warning("closing the vault of site %s raised %s", self._site, type(error).__name__)

    async def get(self, key: str) -> Any:
        """Return a secret.

        Raises:
            SecretError: there is no such secret, or the vault raised.
        """
        vault = self._opened(key)
        try:
            if type(vault) is EnvironmentVault or inspect.iscoroutinefunction(vault.secret_for_key):
                found = vault.secret_for_key(key)
            else:
                async with self._room:
                    found = await in_thread(lambda: vault.secret_for_key(key), f"vault-{self._site}")
            if inspect.isawaitable(found):
                found = await found
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a vault raises
            raise self._failure(key, error) from None
        return self._handed_out(key, found)

    def read(self, key: str, wait: Callable[[Any], Any]) -> Any:
        """Return a secret, for synchronous code. Blocks.

        Args:
            key: the name of the secret.
            wait: waits for a coroutine, for vaults that are asynchronous.

        Raises:
            SecretError: there is no such secret, or the vault raised.
        """
        vault = self._opened(key)
        if inspect.iscoroutinefunction(vault.secret_for_key):
            return wait(self.get(key))
        try:
            found = vault.secret_for_key(key)
        except BaseException as error:  # noqa: BLE001 - whatever a vault raises
            raise self._failure(key, error) from None
        return wait(self._awaited(key, found)) if inspect.isawaitable(found) else self._handed_out(key, found)

    async def _awaited(self, key: str, found: Awaitable[Any]) -> Any:
        try:
            return self._handed_out(key, await found)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a vault raises
            raise self._failure(key, error) from None

    def _opened(self, key: str) -> Vault:
        if self._vault is None:
            raise SecretError(self._site, key, "the site has not started")
        if not isinstance(key, str) or not key:
            raise SecretError(self._site, "", f"the name of a secret must be a non-empty string, not {key!r}")
        return self._vault

    def _handed_out(self, key: str, found: Any) -> Any:
        if found is None:
            raise SecretError(self._site, key, "the vault has no secret of this name")
        note_secret(found)
        return found

    def _failure(self, key: str, error: BaseException) -> SecretError:
        if isinstance(error, SecretError):
            return SecretError(self._site, key, error.reason)
        return SecretError(self._site, key, _without_text(f"the vault ({type(self._vault).__qualname__})", error))

    def __repr__(self) -> str:
        return f"<Secrets of {self._site!r}>"


def _lacks_method(kind: type[Any]) -> str | None:
    return None if callable(getattr(kind, "secret_for_key", None)) else "is not a vault: it has no secret_for_key(key)"


def _without_text(what: str, error: BaseException) -> str:
    """Return the type and the place of an error. Its text may contain the vault's configuration, or a secret."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    return f"{what}: {type(error).__name__} was raised{where} (its text is not shown: it may hold secrets)"
