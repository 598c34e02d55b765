"""Labels: every argument shows where it comes from."""

from __future__ import annotations

from typing import Any


class Label:
    def body(
        self,
        number: float,
        prefix: str,
        digits: int,
        upper: bool,
        suffix: str,
        places: list[Any],
        token: str,
        region: str,
        unit: str,
    ) -> str:
        text = (
            f"{prefix} {number:.{digits}f} {unit} in the {region}{suffix} ({len(places)} places, {len(token)} letters)"
        )
        return text.upper() if upper else text
