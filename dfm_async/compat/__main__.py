"""``python -m dfm_async.compat federation.dfm.yaml app.py``: run an application that was written for DFM."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dfm_async.compat.modules import install
from dfm_async.errors import FederationError

_USAGE = """usage: python -m dfm_async.compat FEDERATION.yaml APP.py [ARGUMENT ...]
       python -m dfm_async.compat FEDERATION.yaml -m MODULE [ARGUMENT ...]"""


def main(arguments: list[str]) -> None:
    """Install the modules of a federation, and run a script or a module as Python does.

    Raises:
        SystemExit: the application ends, or cannot be run.
    """
    as_module = arguments[1:2] == ["-m"]
    if len(arguments) < 2 + as_module:
        print(_USAGE, file=sys.stderr)  # noqa: T201 - a program
        raise SystemExit(2)
    file, app = arguments[0], arguments[1 + as_module]
    sys.argv = [app, *arguments[2 + as_module :]]
    sys.path[0] = str(Path.cwd()) if as_module else str(Path(app).resolve().parent)
    try:
        install(file)
    except (FederationError, OSError) as error:
        raise SystemExit(f"cannot read {file}: {error}") from None
    if as_module:
        runpy.run_module(app, run_name="__main__", alter_sys=True)
    elif not Path(app).is_file():
        raise SystemExit(f"there is no file {app}")
    else:
        runpy.run_path(app, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
