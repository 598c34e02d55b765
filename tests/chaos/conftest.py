"""Where the calls of a round run is random, too."""

from __future__ import annotations

import os
import random

import pytest

SPREAD = "DFM_SPREAD"


@pytest.fixture(autouse=True)
def spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers run all calls in other workers, none, or those that compute: by the seed, if it is not set."""
    if "seed" not in request.fixturenames:
        return
    seed = request.node.callspec.params["seed"]
    if SPREAD not in os.environ:
        drawn = random.Random(f"spread {seed}").choice(["always", "never", ""])
        if drawn:
            monkeypatch.setenv(SPREAD, drawn)
    print(f"seed {seed}: {SPREAD}={os.environ.get(SPREAD, '')}")
