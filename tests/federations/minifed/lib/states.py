"""States of a calculation."""

from __future__ import annotations

from typing import Any


class Step:
    async def body(self, state: dict[str, Any], mode: str | None, limits: dict[str, Any] | None, model: Any) -> Any:
        step = 1.0 if mode == "quick" else 0.5
        value = state["value"] + step
        if limits is not None:
            value = min(max(value, limits["low"]), limits["high"])
        return {"value": value, "mode": mode}
