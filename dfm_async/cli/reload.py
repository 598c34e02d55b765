"""``--reload``: use the new code of a federation when its source files change."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeVar

import dfm_async
from dfm_async.base.text import install_hint
from dfm_async.cli.command_options import SessionOptions
from dfm_async.cli.command_runner import BadInput
from dfm_async.cli.references import find_federation
from dfm_async.errors import DfmError
from dfm_async.federation.federation import Federation

if TYPE_CHECKING:
    import asyncinotify

T = TypeVar("T")

_QUIET: Final = 0.1
"""For how many seconds no file may change before the code is loaded: editors write several files."""
_LIBRARY: Final = Path(dfm_async.__file__).resolve().parent


class Reloading:
    """Imports the modules of a federation again when their files change, for a session that is open.

    Modules are those in the folder of the federation's module, or of its package.

    Args:
        options: how the user has named the federation.
        federation: the federation of the session, which gets the new code.
        module: its module.
        report: shows a problem to the user.
    """

    def __init__(
        self,
        options: SessionOptions,
        federation: Federation,
        module: ModuleType | None,
        report: Callable[[str], None],
    ) -> None:
        if module is None:
            raise BadInput(f"--reload is for federations in Python modules, and {options.federation} is not one")
        if options.flare is not None:
            raise BadInput("--reload cannot be used with --flare: it is for sites on this machine")
        self._options = options
        self._federation = federation
        self._report = report
        self.folder = _folder_of(module)
        """The folder whose modules are imported again."""
        self._inotify = _inotify()
        # Python compares the times of source files in seconds. A file that is saved twice in one second, with the same
        # size, would be loaded once: no bytecode is written from now on, and what was written is deleted.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def __enter__(self) -> Reloading:
        self._watch()
        return self

    def __exit__(self, *_error: object) -> None:
        self._inotify.close()

    async def next(self, choose: Callable[[Federation, ModuleType], T]) -> T:
        """Wait until files have changed, and give the new code to the session. Running jobs keep the old one.

        Code that cannot be imported, or does not have what ``choose`` looks for, is reported, and changes nothing.

        Args:
            choose: finds what the command needs among the new code, and applies its options to the federation.
        """
        while True:
            await self._changed()
            try:
                return self._load(choose)
            except (BadInput, DfmError) as error:
                self._report(f"{error}\nThe code from before the change is still in use")
            finally:
                self._watch()

    def _load(self, choose: Callable[[Federation, ModuleType], T]) -> T:
        before = dict(self._modules())
        for name, loaded in before.items():
            del sys.modules[name]
            with contextlib.suppress(OSError):  # it does not exist, or belongs to others
                os.unlink(importlib.util.cache_from_source(str(loaded.__file__)))
        importlib.invalidate_caches()
        try:
            federation, module = find_federation(self._options.federation)
            assert module is not None  # noqa: S101 - it was one before
            chosen = choose(federation, module)
        except BaseException:
            for name, _ in list(self._modules()):
                del sys.modules[name]
            sys.modules.update(before)
            raise
        ours = self._federation
        vars(ours).update({**vars(federation), "revision": ours.revision})
        ours.changed()
        return chosen

    def _modules(self) -> Iterator[tuple[str, ModuleType]]:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is not None and name != "__main__":
                path = Path(file).resolve()
                inside = path.is_relative_to(self.folder) and not path.is_relative_to(_LIBRARY)
                if inside and "site-packages" not in path.relative_to(self.folder).parts:
                    yield name, module

    # files

    def _watch(self) -> None:
        """Watch the folders of all modules; those that are watched already stay so."""
        from asyncinotify import Mask

        wanted = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE
        folders = {Path(str(module.__file__)).resolve().parent for _, module in self._modules()}
        for folder in {self.folder, *folders}:
            with contextlib.suppress(FileNotFoundError):
                self._inotify.add_watch(folder, wanted)

    async def _changed(self) -> None:
        while not _is_source(await self._inotify.get()):
            pass
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(_QUIET):
                    await self._inotify.get()


def _is_source(event: asyncinotify.Event) -> bool:
    return event.name is None or event.name.suffix == ".py"  # without a name: events were lost


def _folder_of(module: ModuleType) -> Path:
    package = sys.modules[module.__name__.partition(".")[0]]
    for folder in getattr(package, "__path__", ()):
        return Path(folder).resolve()
    return Path(str(module.__file__)).resolve().parent


def _inotify() -> asyncinotify.Inotify:
    try:
        import asyncinotify
    except ImportError as error:
        raise BadInput(f"--reload needs Linux and asyncinotify: {install_hint('cli')}") from error
    try:
        found = asyncinotify.Inotify()
    except OSError as error:
        raise BadInput(
            f"--reload cannot watch files: {error.strerror}. Raise fs.inotify.max_user_instances with sysctl"
        ) from error
    os.set_blocking(found.fd, False)  # asyncinotify 4.4 takes the wrong constant for its flag
    return found
