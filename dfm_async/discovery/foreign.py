"""Advice of adapters that are written for DFM, where its own package is installed.

Its classes are another package's, which this one never imports: they are known by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from dfm_async.discovery.advisors import Advisor
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
from dfm_async.pipeline.expressions import Advise

__all__ = ["adopted", "asking"]

_PACKAGE: Final = "nv_dfm_core"


def asking(advisor: Advisor) -> Any:
    """The value that an advisor gets where it is asked: ``Advise()``, as its own package has it."""
    if advisor.foreign:
        theirs = getattr(sys.modules.get(f"{_PACKAGE}.api"), "Advise", None)
        if theirs is not None:
            return theirs()
    return Advise()


def adopted(advice: Any) -> Any:
    """Makes advice of DFM's own classes ours; leaves everything else as it is."""
    if isinstance(advice, AdvisedValue) or type(advice).__module__.partition(".")[0] != _PACKAGE:
        return advice
    make = _KINDS.get(type(advice).__name__)
    return advice if make is None else make(vars(advice))


def _listed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "values": [adopted(option) for option in found["_values"]],
        "break_on_advice": found["_break_on_advice"],
        "split_on_advice": found["_split_on_advice"],
    }


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], AdvisedValue]]] = {
    "AdvisedLiteral": lambda found: AdvisedLiteral(found["_value"], found["_break_on_advice"]),
    "AdvisedOneOf": lambda found: AdvisedOneOf(**_listed(found)),
    "AdvisedSubsetOf": lambda found: AdvisedSubsetOf(**_listed(found)),
    "AdvisedDict": lambda found: AdvisedDict(
        {key: adopted(option) for key, option in found["_dictionary"].items()},
        found["_allow_extras"],
        found["_break_on_advice"],
    ),
    "AdvisedDateRange": lambda found: AdvisedDateRange(found["_start"], found["_end"], found["_break_on_advice"]),
    "AdvisedError": lambda found: AdvisedError(found["_msg"]),
    "Okay": lambda _: Okay(),
}
