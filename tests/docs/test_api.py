"""The reference names everything that is public, and what docstrings show as code runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from dfm_async import (
    Federation,
    FlareOptions,
    Job,
    LocalOptions,
    OperationContext,
    Pipeline,
    ResultLimits,
    Session,
    Yield,
    web,
)
from dfm_async.client import Client
from tests.docs.pages import DOCS
from tests.public import PUBLIC_MODULES, public_names


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public name with its module; the root first, and no name twice."""
    in_root = public_names(PUBLIC_MODULES[0])
    for module in PUBLIC_MODULES:
        for name in public_names(module):
            if module is PUBLIC_MODULES[0] or name not in in_root or module.__name__ == "dfm_async.site":
                yield f"{module.__name__}.{name}", getattr(module, name)


def reference() -> str:
    return (DOCS / "api.md").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name() -> None:
    page = reference()
    assert [name for name, _ in public() if not re.search(rf":: {re.escape(name)}\b", page)] == []


def test_the_reference_names_nothing_that_is_not_there() -> None:
    for name in re.findall(r"^\.\. (?:auto\w+|py:data):: (dfm_async\.[\w.]+)", reference(), re.MULTILINE):
        home, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(home), last), name


@pytest.mark.parametrize("cls", [Session, Job, Client])
def test_every_public_member_of_a_central_class_is_in_the_reference(cls: type[Any]) -> None:
    (listed,) = re.findall(
        rf"autoclass:: dfm_async(?:\.client)?\.{cls.__name__}(?:\(\))?\n   :members: ([^:]*?)\n\n", reference()
    )
    assert {name for name in dir(cls) if not name.startswith("_")} == set(re.split(r",\s+", listed))


@pytest.mark.parametrize(
    "described", [FlareOptions, LocalOptions, OperationContext, ResultLimits, web.Service, web.WebLimits]
)
def test_the_reference_has_every_member_that_users_set_or_call(described: type) -> None:
    page = reference()
    found = re.search(rf"^\.\. autoclass:: [\w.]+\.{described.__name__}\b.*\n((?: {{3}}.*\n)+)", page, re.MULTILINE)
    assert found is not None
    members = {name for name in (*vars(described), *described.__annotations__) if not name.startswith("_")}
    explained = set(re.findall(r"^ +(\w+): ", inspect.getdoc(described) or "", re.MULTILINE))
    assert members - explained - INTERNAL - set(re.findall(r"\w+", found[1])) == set()


def test_the_reference_has_every_iterator_of_a_session() -> None:
    page = reference()
    for name in ("changes", "health"):
        iterator = inspect.signature(getattr(Session, name)).return_annotation
        assert re.search(rf"autoclass:: [\w.]+\.{iterator}\b", page), iterator


INTERNAL = {"lanes_for", "slots_for"}
"""Members that only the package itself uses."""

# examples


def shown() -> dict[str, str]:
    """The code in the docstrings of public names and of their methods."""
    found = {}
    for name, value in public():
        holders = {name: value}
        if isinstance(value, type):
            methods = {f"{name}.{key}": member for key, member in vars(value).items() if not key.startswith("_")}
            holders |= {key: member for key, member in methods.items() if inspect.isroutine(member)}
        for key, holder in holders.items():
            block = re.search(r"::\n\n((?: {4}.*\n|\n)+)", (inspect.getdoc(holder) or "") + "\n")
            if block is not None:
                found[key] = textwrap.dedent(block[1])
    return found


def of_an_operation() -> dict[str, Any]:
    class Context:
        span = OperationContext.span
        trace = None

    async def fetch(url: str) -> bytes:
        return url.encode()

    return {"context": Context(), "url": "https://example.org", "fetch": fetch}


def of_a_service() -> dict[str, Any]:
    with Pipeline("report") as report:
        Yield(1)
    names = {"Service": web.Service, "Starlette": Starlette, "Mount": Mount}
    return {**names, "federation": Federation("f"), "report": report}


GIVEN = {"dfm_async.OperationContext.span": of_an_operation, "dfm_async.web.Service": of_a_service}
"""The docstrings that show code, and what their examples need."""


def test_every_example_in_a_docstring_is_run() -> None:
    assert shown().keys() == GIVEN.keys()


@pytest.mark.parametrize("name", GIVEN)
async def test_an_example_in_a_docstring_runs(name: str) -> None:
    namespace = GIVEN[name]()
    code = compile(shown()[name], name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    made = eval(code, namespace)
    if inspect.isawaitable(made):
        await made
    assert set(namespace) > {"__builtins__"}
