"""Check that all public names have declared types, with ``pyright --verifytypes``; ``nox -s types`` runs it.

pyright counts every module without a leading underscore as public. Here a name counts if a public module lists it, or
if it is a member of a class that one lists.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.docs.pages import ROOT
from tests.public import PUBLIC_MODULES, public_names

_INNER: Final = ("partially unknown", "docstring", "Ambiguous base class override", "default values in function")
"""What is reported for a name although its own types are declared."""


def public_definitions() -> set[str]:
    """Where the public names are defined, as pyright calls these places."""
    found: set[str] = set()
    for module in PUBLIC_MODULES:
        for name in public_names(module):
            value = getattr(module, name)
            found.add(f"{module.__name__}.{name}")
            if inspect.isclass(value) or inspect.isfunction(value):
                file = Path(inspect.getsourcefile(value) or "").resolve()
                if file.is_relative_to(ROOT):
                    found.add(".".join([*file.relative_to(ROOT).with_suffix("").parts, value.__qualname__]))
    return found


def incomplete(symbols: list[dict[str, Any]]) -> dict[str, str]:
    """The public names without a declared type, and what pyright says about each."""
    defined = public_definitions()
    found: dict[str, str] = {}
    for symbol in symbols:
        name: str = symbol["name"]
        parts = name.split(".")
        if any(part.startswith("_") and not part.endswith("__") for part in parts):
            continue
        if not any(".".join(parts[:end]) in defined for end in range(1, len(parts) + 1)):
            continue
        for problem in symbol["diagnostics"]:
            text = problem["message"].partition("\n")[0]
            if not any(inner in text for inner in _INNER):
                found[name] = text
    return found


def main() -> int:
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "dfm_async", "--ignoreexternal", "--outputjson"]
    with tempfile.TemporaryDirectory() as folder:  # outside the project, so that the package is found as installed
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        done = subprocess.run(
            [*command, "--pythonpath", sys.executable],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    found = incomplete(symbols)
    for name, text in sorted(found.items()):
        print(f"{name}: {text}")
    print(f"{len(found)} public names without a declared type, of {len(symbols)} names")
    return 1 if found or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
