"""The methods of blocking sessions and jobs, as they follow from the asynchronous ones.

``python -m tests.sync.methods`` writes them; format the files afterwards.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import dfm_async

PACKAGE: Final = Path(dfm_async.__file__).parent
SOURCES: Final = {
    "Session": [("session/session.py", "Session"), ("session/direct_calls.py", "DirectCalls")],
    "Job": [("session/job.py", "Job")],
}
"""The asynchronous classes that have the methods of each blocking one."""
BY_HAND: Final = {"connect", "close", "completed"}
RETURNED: Final = {
    "MapStream": "MapStream[{}]",
    "EachStream": "Stream[SiteReply[{}]]",
    "ResultStream": "Stream[{}]",
    "EventStream": "Stream[Event]",
    "InfoWatch": "Stream[JobInfo]",
    "JobWatch": "Stream[JobInfo]",
    "SiteWatch": "Stream[dict[str, SiteStats]]",
    "ActivityReader": "Stream[Activity]",
    "AsyncGenerator": "Stream[{}]",
    "Profiling": "Managed[{}]",
    "Schedule": "Schedule[{}]",
}
"""What blocking methods return instead; the braces stand for the items."""
DEFAULT_ITEM: Final = "Result"
PASSED: Final = {"input_params": "streamed(input_params)", "*iterables": "*map(pulled, iterables)"}
"""What is passed on instead of an argument."""
MARKER: Final = "    # Written by python -m tests.sync.methods, from the methods of dfm_async.{}\n"
REMARKS: Final = {
    "def each(self, operation: Any,": "def each(  # type: ignore[misc] # as of the other\n    self, operation: Any,",
    "input_params: Params={},": "input_params: Params={},  # noqa: B006 - never changed\n",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def class_of(path: Path, name: str) -> ast.ClassDef:
    """Return a class of a module."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    return found[0]


def public_methods(found: ast.ClassDef) -> Iterator[Function]:
    """Yield the public methods of a class, each overload for itself."""
    for node in found.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def decorators(method: Function) -> list[str]:
    return [ast.unparse(node) for node in method.decorator_list]


def blocking(name: str) -> list[str]:
    """Return the source of the methods that a blocking class gets from the asynchronous ones."""
    found = [
        method
        for path, source in SOURCES[name]
        for method in public_methods(class_of(PACKAGE / path, source))
        if "abstractmethod" not in decorators(method) and method.name not in BY_HAND
    ]
    kinds: dict[str, str] = {}
    for method in found:  # the first overload knows what the implementation of several returns
        kinds.setdefault(method.name, ast.unparse(method.returns or ast.Constant(None)))
    return [_blocking(method, kinds[method.name], name) for method in found]


def _blocking(method: Function, kind: str, owner: str) -> str:
    arguments = copy.deepcopy(method.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.Name) and argument.id == "Inputs":
            argument.id = "Iterable"
    returns = _returned(ast.unparse(method.returns)) if method.returns is not None else "None"
    lines = [f"@{decorator}" for decorator in decorators(method)]
    lines.append(f"def {method.name}({ast.unparse(arguments)}) -> {returns}:")
    if "overload" in decorators(method):
        lines[-1] += " ..."
    else:
        first = (ast.get_docstring(method) or "").partition("\n")[0]
        first = first.replace("``await ", "``").replace("``async ", "``")
        if "property" in decorators(method):
            lines.append(f'    """{first}"""')
        else:
            lines += [f'    """{first}', "", f"    See :meth:`dfm_async.{owner}.{method.name}`.", '    """']
        lines.append(f"    return {_body(method, kind)}")
    return "\n".join(f"    {line}" if line else "" for line in lines)


def _returned(annotation: str) -> str:
    outer, _, inner = annotation.partition("[")
    return RETURNED.get(outer, annotation).replace("{}", inner.removesuffix("]") or DEFAULT_ITEM)


def _body(method: Function, kind: str) -> str:
    call = f"self._async.{method.name}"
    if "property" not in decorators(method):
        call += f"({', '.join(_passed(method.args))})"
    got = f"self._wait({call})" if isinstance(method, ast.AsyncFunctionDef) else f"self._call(lambda: {call})"
    if kind.partition("[")[0] == "Job":
        return f"Job(self._loop, {got})"
    if kind == "list[Job]":
        return f"[Job(self._loop, job) for job in {got}]"
    outer = _returned(kind).partition("[")[0]
    if outer in ("Stream", "MapStream", "Managed", "Schedule"):
        return f"{outer}(self._loop, {got})"
    return got


def _passed(arguments: ast.arguments) -> list[str]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    if arguments.vararg is not None:
        names.append(f"*{arguments.vararg.arg}")
    names = [PASSED.get(name, name) for name in names]
    names += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    return [*names, f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else names


def write() -> None:
    """Write the methods into the modules of the blocking classes."""
    for name in SOURCES:
        path = PACKAGE / "sync" / f"{name.lower()}.py"
        text = "\n\n".join(blocking(name))
        for code, remark in REMARKS.items():
            text = text.replace(code, remark)
        head, marker, _ = path.read_text().partition(MARKER.format(name))
        path.write_text(f"{head}{marker}\n{text}\n")


if __name__ == "__main__":
    write()
