"""Names of modules and classes: two things have the same name only for a reason that is written down here."""

from __future__ import annotations

import ast
import pathlib
from collections import Counter
from typing import Final

import dfm_async

ROOT = pathlib.Path(dfm_async.__file__).parent
_FACADE: Final = "the public module of these names, and the module that defines them"
_COMMAND: Final = "a command of the command line, and what it runs"
_FORMAT: Final = "each external format has its own module for this part of it"
_BLOCKING: Final = "sync mirrors the asynchronous API; compat mirrors DFM's"

MODULES: Final = {
    "adapters": "files/ reads what federations declare, runtime/ runs it",
    "callbacks": _FACADE,
    "containment": "planning computes which locations may be lost, and net plays with their loss",
    "doctor": _COMMAND,
    "events": _FACADE,
    "flare": _FACADE,
    "http": "model/ declares requests to HTTP services, and federations name site.http as the adapter that sends them",
    "job": _BLOCKING,
    "jobs": "the commands that show and steer jobs, and the errors of jobs",
    "local": "the target, and the command that starts a federation on this machine",
    "operations": "files/ reads what federations declare; compat mirrors DFM's",
    "options": "options of programs and of sessions, each beside what it configures",
    "profile": _COMMAND,
    "reading": _FORMAT,
    "run": _COMMAND,
    "schemas": _FORMAT,
    "session": _BLOCKING,
    "stats": _FACADE,
    "transport": "both transports of programs of NVFLARE implement the same interface",
    "values": _FORMAT,
    "writing": _FORMAT,
}
"""The base names of several modules, with the reason."""

CLASSES: Final = {
    "Call": "an action of nets, which plans print as 'call'; and what a fake of a test gets, which is public",
    "Heartbeat": "of workers and of FLARE participants, in two protocols",
    "Job": _BLOCKING,
    "MapStream": _BLOCKING,
    "Node": "a node of a drawing; compat has the names of DFM",
    "Ownership": "the same transactions in SQLite and in PostgreSQL",
    "Repeat": "a block of pipelines, and the action of nets that runs it",
    "Schedule": _BLOCKING,
    "Session": _BLOCKING,
    "Site": "DFM calls both a site: a location in pipelines, and the object that adapters get",
    "Span": "the open span of an adapter, and a recorded one",
    "Store": "the public interface of stores, and an action of nets, which plans print as 'store'",
    "Submission": "of a session, and the schema of a request to the web service, which OpenAPI documents show",
    "Welcome": "answers the first message of a program and of an application, in two protocols",
}
"""The names of several classes, with the reason."""


def several(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_modules_with_the_same_base_name_have_a_reason() -> None:
    found = several([path.stem for path in ROOT.rglob("*.py") if not path.stem.startswith("__")])
    assert found == MODULES.keys(), "rename new duplicates after their job; remove entries that are no duplicates"


def test_classes_with_the_same_name_have_a_reason() -> None:
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    found = several([node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)])
    assert found == CLASSES.keys(), "rename new duplicates after their job; remove entries that are no duplicates"
