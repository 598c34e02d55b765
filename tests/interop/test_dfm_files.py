"""With the real nv_dfm_core: the files that we write are files of its format, and its classes run beside us."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dfm_async import Federation
from tests.federations import NAMES, file_of
from tests.federations import ROOT as FEDERATIONS
from tests.interop.conftest import PROGRAMS, output_of

pytestmark = pytest.mark.timeout(180)

READ = """\
import sys, yaml
from nv_dfm_core.gen.apigen._config_models import FederationObject
for path in sys.argv[1:]:
    with open(path) as file:
        print(*FederationObject.model_validate(yaml.safe_load(file)).sites)
"""


def test_nv_dfm_core_reads_the_files_that_we_write(nv_dfm_core: Path, tmp_path: Path) -> None:
    for name in NAMES:
        Federation.from_yaml(file_of(name)).to_yaml(tmp_path / name)
    paths = [tmp_path / name for name in NAMES]
    output = output_of(nv_dfm_core, "-c", READ, *paths)
    assert output.splitlines() == ["concierge server reception", "alpha beta gamma", "homesite loader plotter"]


@pytest.mark.parametrize("target", ["inline", "local"])
def test_adapters_run_unmodified_where_nv_dfm_core_is_installed(nv_dfm_core: Path, target: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(FEDERATIONS)}
    output = output_of(nv_dfm_core, PROGRAMS / "beside_dfm.py", FEDERATIONS, target, env=environment)
    assert json.loads(output) == [
        ["real", True],
        ["label", "no. 4 metres in the north (3 places, 14 letters)"],
        ["square", 9.0],
        ["greeting", "examplefed has the honour to receive you, Ann."],
    ]
