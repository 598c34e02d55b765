"""How many worker processes a site has, and for how long idle ones are kept."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

Workers: TypeAlias = int | tuple[int, int] | None
"""The number of workers of a site: the largest, the smallest and the largest, or None for as many as there are cores.

As many as the smallest number take jobs, and are kept once they have started. Further ones only run calls.
"""
IDLE_AFTER: Final = 10.0
"""After how many seconds without calls a worker ends that takes no jobs, unless its site sets another number."""
_LONGEST: Final = 366 * 86400


def fewest_workers(workers: Workers) -> int | None:
    """Return how many workers take jobs and are kept; None if nothing was chosen."""
    return workers[0] if isinstance(workers, tuple) else workers


def most_workers(workers: Workers) -> int | None:
    """Return how many workers there are at most; None if nothing was chosen."""
    return workers[1] if isinstance(workers, tuple) else workers


def workers_text(workers: Workers) -> str:
    """Return the number of workers as it is written on the command line; empty if nothing was chosen."""
    return "" if workers is None else "-".join(map(str, workers if isinstance(workers, tuple) else (workers,)))


def check_workers(workers: Any, idle_after: Any) -> None:
    """Check what a user has chosen.

    Raises:
        ValueError: a number is out of its range, and which.
        TypeError: it is not a number.
    """
    ends = workers if isinstance(workers, tuple) else (workers, workers)
    if workers is not None:
        if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
            raise TypeError(f"workers must be a whole number, or two as in workers=(1, 8), not {workers!r}")
        if ends[0] < 1:
            raise ValueError(f"workers must be at least 1, not {workers!r}")
        if ends[0] > ends[1]:
            raise ValueError(f"workers=(least, most) must begin with the smaller number, not {workers!r}")
    if isinstance(idle_after, bool) or not isinstance(idle_after, int | float):
        raise TypeError(f"idle_after must be a number of seconds, not {idle_after!r}")
    if not 0 <= idle_after <= _LONGEST:
        raise ValueError(f"idle_after must be between 0 and {_LONGEST:,} s, not {idle_after!r}")
