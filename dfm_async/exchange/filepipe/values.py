"""What NVFLARE puts into its messages besides plain Python values.

These stand for NVFLARE's classes, so that messages can be read and written without it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["HEADERS", "AnalyticsDataType", "DataKind", "Dxo", "FlContext", "LogWriterName", "ParamsType", "Shareable"]

HEADERS: Final = "__headers__"
"""The key of a shareable's headers."""


class Shareable(dict[Any, Any]):
    """A task or a result: a dict that always has headers, itself a dict, at the key ``__headers__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setdefault(HEADERS, {})

    @property
    def headers(self) -> dict[str, Any]:
        """What is said about the task or the result, such as its name or its return code."""
        found: dict[str, Any] = self.setdefault(HEADERS, {})
        return found

    def __repr__(self) -> str:
        return f"Shareable({super().__repr__()})"


class DataKind(enum.StrEnum):
    """What the data of a DXO is."""

    FL_MODEL = "FL_MODEL"
    WEIGHTS = "WEIGHTS"
    WEIGHT_DIFF = "WEIGHT_DIFF"
    METRICS = "METRICS"
    ANALYTIC = "ANALYTIC"
    COLLECTION = "COLLECTION"
    STATISTICS = "STATISTICS"
    PSI = "PSI"
    APP_DEFINED = "APP_DEFINED"


class ParamsType(enum.StrEnum):
    """Whether parameters are a whole model or what was changed in it."""

    FULL = "FULL"
    DIFF = "DIFF"


class AnalyticsDataType(enum.StrEnum):
    """What kind of record a program has logged."""

    SCALARS = "SCALARS"
    SCALAR = "SCALAR"
    IMAGE = "IMAGE"
    TEXT = "TEXT"
    LOG_RECORD = "LOG_RECORD"
    PARAMETER = "PARAMETER"
    PARAMETERS = "PARAMETERS"
    METRIC = "METRIC"
    METRICS = "METRICS"
    MODEL = "MODEL"
    TAG = "TAG"
    TAGS = "TAGS"
    INIT_DATA = "INIT_DATA"


class LogWriterName(enum.StrEnum):
    """For which tracking tool a record was made."""

    TORCH_TB = "TORCH_TENSORBOARD"
    MLFLOW = "MLFLOW"
    WANDB = "WEIGHTS_AND_BIASES"


@dataclass(frozen=True, slots=True)
class Dxo:
    """A data exchange object; on the metric channel each record is one. Inside a shareable it is a plain dict.

    Attributes:
        kind: what the data is, a :class:`DataKind` as a rule.
        data: the data, a dict unless the kind is ``APP_DEFINED``.
        meta: what else is said about it.
    """

    kind: str
    data: Any
    meta: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlContext:
    """The sender's context. Tasks of real jobs carry it in their headers.

    Attributes:
        model: always None by now, but it is written.
        props: its properties by name.
    """

    model: Any = None
    props: dict[Any, Any] = field(default_factory=dict)
