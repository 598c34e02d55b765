"""The reference names everything that is public, and what docstrings show as code runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import dfm_async
from dfm_async import Federation, Pipeline, Yield, deploy, discovery, drawing, exchange, site, telemetry, testing, web
from dfm_async.exchange import sync
from dfm_async.exchange.filepipe import gate
from dfm_async.targets import local
from tests.docs.pages import DOCS

HOMES: list[ModuleType] = [
    dfm_async,
    deploy,
    discovery,
    drawing,
    exchange,
    gate,
    local,
    site,
    sync,
    telemetry,
    testing,
    web,
]


def public() -> Iterator[tuple[str, Any]]:
    """Every public name with its home. What the package itself has need not be told again for others."""
    for home in HOMES:
        for name in home.__all__:
            if home is dfm_async or name not in dfm_async.__all__:
                yield f"{home.__name__}.{name}", getattr(home, name)


def reference() -> str:
    return (DOCS / "api.md").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name() -> None:
    page = reference()
    assert [name for name, _ in public() if not re.search(rf":: {re.escape(name)}\b", page)] == []


def test_the_reference_names_nothing_that_is_not_there() -> None:
    for name in re.findall(r"^\.\. (?:auto\w+|py:data):: (dfm_async\.[\w.]+)", reference(), re.MULTILINE):
        home, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(home), last), name


# examples

GIVEN: dict[str, str] = {
    "dfm_async.OperationContext.span": "context",
    "dfm_async.web.Service": "service",
}
"""The docstrings that show code, and which of the fixtures below their examples need."""


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


def test_every_example_in_a_docstring_is_run() -> None:
    assert shown().keys() == GIVEN.keys()


@pytest.mark.parametrize("name", GIVEN)
async def test_an_example_in_a_docstring_runs(name: str) -> None:
    namespace = {"context": of_an_operation, "service": of_a_service}[GIVEN[name]]()
    code = compile(shown()[name], name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    made = eval(code, namespace)
    if inspect.isawaitable(made):
        await made
    assert set(namespace) > {"__builtins__"}


def of_an_operation() -> dict[str, Any]:
    class Context:
        span = dfm_async.OperationContext.span
        trace = None

    async def fetch(url: str) -> bytes:
        return url.encode()

    return {"context": Context(), "url": "https://example.org", "fetch": fetch}


def of_a_service() -> dict[str, Any]:
    with Pipeline("report") as report:
        Yield(1)
    return {
        "Service": web.Service,
        "Starlette": Starlette,
        "Mount": Mount,
        "federation": Federation("f"),
        "report": report,
    }
