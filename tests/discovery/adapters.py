"""Adapter classes that sites load by their paths."""

from __future__ import annotations

from typing import Any

from dfm_async.discovery import AdviceContext, AdvisedOneOf, AdvisedValue, Okay, field_advisor


class Station:
    """Has arguments of its own names, and advisors for them."""

    def __init__(self, site: Any, provider: Any, kind: str = "plain") -> None:
        self.site = site
        self.provider = provider
        self.kind = kind

    async def body(self, place: str, hours: int, source: str, token: str, quality: str) -> str:
        return f"{place} {hours} {source} {quality}"

    @field_advisor("place", order=0)
    async def places(self, value: Any, context: AdviceContext) -> AdvisedValue:
        found = [self.kind, self.site.dfm_context.this_site, context.get("source"), len(context.get("token"))]
        return AdvisedOneOf(found)

    @field_advisor("hours", order=1)
    async def numbers(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return AdvisedOneOf([1, 2])

    @field_advisor("source", order=2)
    async def sources(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return Okay()

    @field_advisor("token", order=3)
    async def tokens(self, value: Any, context: AdviceContext) -> AdvisedValue:
        raise AssertionError("nobody asks for a secret")

    @field_advisor("quality", order=4)
    async def qualities(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return AdvisedOneOf(["raw", "fine"])


class Leak:
    """Says its secret wherever it can."""

    async def body(self, text: str, token: str) -> str:
        return text

    @field_advisor("text")
    async def texts(self, value: Any, context: AdviceContext) -> AdvisedValue:
        raise RuntimeError(f"cannot use {context.get('token')}")
