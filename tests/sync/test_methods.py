"""Blocking classes have the methods of the asynchronous ones, with the same signatures."""

from __future__ import annotations

import ast
import inspect

import pytest

import dfm_async
from dfm_async import sync
from tests.sync.methods import BY_HAND, PACKAGE, SOURCES, blocking, class_of, public_methods

OTHER = {"Job": {"wait"}, "Session": set[str]()}
"""What only the blocking class has: the equivalent of ``await job``."""
CLASSES = {"Session": (dfm_async.Session, sync.Session), "Job": (dfm_async.Job, sync.Job)}


@pytest.mark.parametrize("name", SOURCES)
def test_methods_follow_from_the_asynchronous_ones(name: str) -> None:
    expected = ast.parse("class _:\n" + "\n".join(blocking(name))).body[0]
    assert isinstance(expected, ast.ClassDef)
    found = public_methods(class_of(PACKAGE / "sync" / f"{name.lower()}.py", name))
    written = [ast.unparse(method) for method in found if method.name not in BY_HAND | OTHER[name]]
    assert written == [ast.unparse(method) for method in expected.body], "run python -m tests.sync.methods, and format"


@pytest.mark.parametrize("name", SOURCES)
def test_public_names_are_the_same(name: str) -> None:
    asynchronous, blocks = ({key for key in dir(cls) if not key.startswith("_")} for cls in CLASSES[name])
    assert blocks == asynchronous | OTHER[name]


def test_sessions_are_made_with_the_same_arguments() -> None:
    assert inspect.signature(sync.Session) == inspect.signature(dfm_async.Session)


@pytest.mark.parametrize("name", ["connect", "close"])
def test_methods_written_by_hand_have_the_same_parameters(name: str) -> None:
    assert inspect.signature(getattr(sync.Session, name)) == inspect.signature(getattr(dfm_async.Session, name))
