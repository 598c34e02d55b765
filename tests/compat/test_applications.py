"""Applications that were written for DFM run unmodified, without generated code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dfm_async
from tests.federations import ROOT, file_of

CODE = Path(dfm_async.__file__).parent.parent


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run an application in another folder, where its package is not installed."""
    environment = {**os.environ, "PYTHONPATH": str(CODE), "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-m", "dfm_async.compat", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_script_with_sites_callbacks_and_arguments_runs(tmp_path: Path) -> None:
    app = ROOT / "examplefed" / "apps" / "porter.py"
    done = run(tmp_path, file_of("examplefed"), app, "--name", "Ann", "--words", "Welcome, {name}!", "--target=local")
    assert done.stdout.splitlines() == ["concierge -> yield [0]: Welcome, Ann!", "bye"]
    assert done.stderr.splitlines() == ["_dfm_status_: StopToken of [0]", "_dfm_status_: StopToken of all"]
    assert done.returncode == 0


def test_module_with_several_jobs_and_errors_runs(tmp_path: Path) -> None:
    done = run(tmp_path, file_of("myfed"), "-m", "myfed.apps.picture")
    assert done.stdout.splitlines() == [  # as nv_dfm_core prints it
        "True True 2 ['_dfm_status_ False stop', '_dfm_status_ False stop', '_dfm_status_ True stop']",
        "(5, 6) uint8 0 255",
        "True True 2 ['_dfm_status_ False ValueError', '_dfm_status_ True stop', 'yield False ValueError']",
    ]
    assert (done.stderr, done.returncode) == ("", 0)
