"""Deferred imports of public modules."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType
from typing import Any

import pytest

from dfm_async.base.lazy import lazy_imports


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that can be the owner of a block."""
    made = ModuleType("tests_lazy_module")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def _run(module: ModuleType, *lines: str) -> None:
    block = "".join(f"    {line}\n" for line in lines)
    exec(f"from dfm_async.base.lazy import lazy_imports\nwith lazy_imports(__name__):\n{block}", vars(module))


def test_a_name_is_imported_on_first_use(module: ModuleType) -> None:
    _run(module, "from no_such_module import Missing as Missing", "from fractions import Fraction as Fraction")
    found: Any = module
    assert vars(module)["__all__"] == ["Fraction", "Missing"]
    assert "Fraction" not in vars(module)
    assert found.Fraction(1, 2) == 0.5
    assert "Fraction" in vars(module)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        found.Missing  # noqa: B018 - the access is the test


def test_imports_of_other_modules_are_not_deferred(module: ModuleType) -> None:
    with lazy_imports(module.__name__):
        from fractions import Fraction
    assert Fraction(1, 2) == 0.5


def test_the_import_function_is_restored_after_an_error(module: ModuleType) -> None:
    before = builtins.__import__
    with pytest.raises(ZeroDivisionError), lazy_imports(module.__name__):
        1 / 0  # noqa: B018 - the error is the test
    assert builtins.__import__ is before
