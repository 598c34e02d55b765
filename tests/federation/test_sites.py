"""Options of sites."""

from __future__ import annotations

from typing import Any

import pytest

from dfm_async import Federation


@pytest.mark.parametrize("workers", [None, 1, 8, (1, 1), (2, 8)])
def test_a_site_keeps_its_number_of_workers(workers: Any) -> None:
    assert Federation("f").site("lab", workers=workers).workers == workers


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"workers": (0, 8)}, r"workers must be at least 1, not \(0, 8\)"),
        ({"workers": (8, 1)}, r"must begin with the smaller number, not \(8, 1\)"),
        ({"workers": (1, 2, 3)}, r"a whole number, or two as in workers=\(1, 8\), not \(1, 2, 3\)"),
        ({"workers": "8"}, "workers must be a whole number, or two"),
        ({"workers": True}, "workers must be a whole number, or two"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"idle_after": -1}, "idle_after must be between 0 and"),
        ({"idle_after": float("nan")}, "idle_after must be between 0 and"),
        ({"idle_after": None}, "idle_after must be a number of seconds, not None"),
    ],
)
def test_numbers_out_of_range_are_rejected(options: Any, problem: str) -> None:
    federation = Federation("f")
    with pytest.raises((ValueError, TypeError), match=problem):
        federation.site("lab", **options)
    assert not federation.sites
