"""Random jobs under random faults: whatever happens, nothing hangs, nothing is lost, nothing comes twice.

``DFM_CHAOS_ROUNDS`` and ``DFM_CHAOS_SEED`` say how many rounds there are, and with which seed they begin.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.left import nothing_left
from tests.chaos.rounds import Round
from tests.chaos.seeds import seeds


@pytest.mark.parametrize("seed", seeds(3))
async def test_results_are_complete_or_their_absence_is_reported(seed: int, tmp_path: Path) -> None:
    async with nothing_left():
        chaos = Round(seed, tmp_path)
        await chaos.run()
        print(chaos)
        del chaos
