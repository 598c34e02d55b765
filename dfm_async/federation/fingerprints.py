"""Fingerprints of the code of operations: a job that is resumed should run the code that it began with."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import types
from typing import Any

from dfm_async.federation.operation import Adapter
from dfm_async.model.resources import ClassPath


def fingerprint(adapter: Adapter) -> str:
    """Return a fingerprint of the code of an adapter; empty if it is not known here.

    The source counts, without comments, layout and decorators; where there is none, the bytecode. Functions that the
    code calls do not count. The code of external programs and of classes that sites import is not known here.
    """
    if adapter.external or isinstance(adapter.code, ClassPath):
        return ""
    code = inspect.unwrap(adapter.code) if callable(adapter.code) else adapter.code
    if not isinstance(code, (type, types.FunctionType, types.MethodType)):
        code = type(code)  # an object with a body
    found = _source(code)
    return hashlib.sha256((found if found is not None else _bytecode(code)).encode()).hexdigest()[:16]


def _source(code: Any) -> str | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):  # of the command line, built-in, or a lambda within a line
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            node.decorator_list = []
    return ast.dump(tree)


def _bytecode(code: Any) -> str:
    if isinstance(code, type):
        methods = {name: found for name, found in vars(code).items() if inspect.isroutine(found)}
        return repr([(name, _bytecode(methods[name])) for name in sorted(methods)])
    function = inspect.unwrap(getattr(code, "__func__", code))
    return _code_text(function.__code__) if isinstance(function, types.FunctionType) else f"{function!r:.60}"


def _code_text(code: types.CodeType) -> str:
    return repr((code.co_code, code.co_names, [_constant_text(value) for value in code.co_consts]))


def _constant_text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code_text(value)
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
