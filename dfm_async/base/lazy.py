"""Public modules whose names are loaded on first use: workers and programs start faster.

A public module writes each of its names once, as an ordinary import that editors and type checkers understand::

    with lazy_imports(__name__):
        from dfm_async.model.stats import LaneStats as LaneStats

This is what ``lazy from`` of PEP 810 does in newer versions of Python.
"""

from __future__ import annotations

import builtins
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_patching = threading.Lock()


class _LazyName:
    """Stand in for a module that is not imported yet, and for its names."""

    def __init__(self, module: str, name: str = "") -> None:
        self.module = module
        self.name = name

    def __getattr__(self, name: str) -> _LazyName:
        return _LazyName(self.module, name)


@contextmanager
def lazy_imports(package: str, moved: Mapping[str, str] | None = None) -> Iterator[None]:
    """Defer the imports of the block until their names are used; list these names in ``__all__`` and in ``dir()``.

    Only imports of the form ``from module import Name as Name`` in the block itself are deferred.

    Args:
        package: the ``__name__`` of the module that has the block.
        moved: names that are deprecated here: each public module that has them now, with its names in one string. A
            name that has changed is ``old=new``.
    """
    namespace = vars(sys.modules[package])

    def defer(name: str, caller: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if caller is not namespace:  # an import of another module, in another thread
            return original(name, caller, local, names, level)
        return _LazyName(name)

    with _patching:
        original = builtins.__import__
        vars(builtins)["__import__"] = defer
        try:
            yield
        finally:
            vars(builtins)["__import__"] = original

    pending = {name: value for name, value in namespace.items() if isinstance(value, _LazyName)}
    for name in pending:
        del namespace[name]
    public = sorted(name for name in pending if not name.startswith("_"))
    replaced: dict[str, tuple[str, str]] = {}
    for home, names in (moved or {}).items():
        for old, _, new in (name.partition("=") for name in names.split()):
            replaced[old] = home, new

    def load(name: str) -> Any:
        if name in pending:
            try:
                module = import_module(pending[name].module)
            except AttributeError as error:  # an import statement would replace it, and hide what is missing
                raise ImportError(f"cannot load {name!r} of {package}: AttributeError: {error}") from error
            namespace[name] = getattr(module, pending[name].name)
            return namespace[name]
        if name in replaced:
            home, new = replaced[name]
            message = f"{package}.{name} is deprecated: import {new or 'it'} from {home}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(import_module(home), new or name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    namespace.update(__all__=public, __getattr__=load, __dir__=lambda: [*public, *(pending.keys() - public)])
