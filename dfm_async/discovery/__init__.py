"""Discovery: what values the parameters of operations can have, as the sites advise.

Adapters say it by advisors, methods that :func:`field_advisor` marks and that return advised values.
``await session.discover(pipeline)`` asks them, and gives a :class:`Discovery`: a tree of advice per site and node.
"""

from typing import TYPE_CHECKING

from dfm_async.lazy import lazy_names

if TYPE_CHECKING:
    from dfm_async.discovery.advice import (
        BranchFieldAdvice,
        ErrorFieldAdvice,
        FieldAdvice,
        PartialFieldAdvice,
        SingleFieldAdvice,
    )
    from dfm_async.discovery.advisors import AdviceContext, field_advisor
    from dfm_async.discovery.asking import build_advice
    from dfm_async.discovery.discovery import AdviceError, Discovery
    from dfm_async.discovery.values import (
        AdvisedDateRange,
        AdvisedDict,
        AdvisedError,
        AdvisedLiteral,
        AdvisedOneOf,
        AdvisedSubsetOf,
        AdvisedValue,
        Okay,
    )

__all__ = [
    "AdviceContext",
    "AdviceError",
    "AdvisedDateRange",
    "AdvisedDict",
    "AdvisedError",
    "AdvisedLiteral",
    "AdvisedOneOf",
    "AdvisedSubsetOf",
    "AdvisedValue",
    "BranchFieldAdvice",
    "Discovery",
    "ErrorFieldAdvice",
    "FieldAdvice",
    "Okay",
    "PartialFieldAdvice",
    "SingleFieldAdvice",
    "build_advice",
    "field_advisor",
]

_HOMES = {
    "dfm_async.discovery.advice": (
        "BranchFieldAdvice",
        "ErrorFieldAdvice",
        "FieldAdvice",
        "PartialFieldAdvice",
        "SingleFieldAdvice",
    ),
    "dfm_async.discovery.advisors": ("AdviceContext", "field_advisor"),
    "dfm_async.discovery.asking": ("build_advice",),
    "dfm_async.discovery.discovery": ("AdviceError", "Discovery"),
    "dfm_async.discovery.values": (
        "AdvisedDateRange",
        "AdvisedDict",
        "AdvisedError",
        "AdvisedLiteral",
        "AdvisedOneOf",
        "AdvisedSubsetOf",
        "AdvisedValue",
        "Okay",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, globals(), _HOMES)
