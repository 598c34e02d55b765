"""How many rounds run, and with which seeds.

``DFM_CHAOS_ROUNDS`` says how many; without it only a few run, always the same. ``DFM_CHAOS_SEED`` is the seed of the
first; without it a long run begins with one that was never used before.
"""

from __future__ import annotations

import os
import random


def seeds(few: int) -> list[int]:
    """The seeds of all rounds, if without a wish there are so few."""
    rounds, seed = os.environ.get("DFM_CHAOS_ROUNDS"), os.environ.get("DFM_CHAOS_SEED")
    count = int(rounds) if rounds else 1 if seed else few
    first = int(seed) if seed else random.SystemRandom().randrange(10**9) if rounds else 0
    return list(range(first, first + count))
