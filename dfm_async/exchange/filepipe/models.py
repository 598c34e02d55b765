"""Our models as what NVFLARE puts into its messages, and back. Pure.

Classes that stand for NVFLARE's own let messages be read and written without it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from dfm_async.exchange.nvflare import (
    SUBMIT_MODEL_NAME,
    ModelCodec,
    dxo_of,
    is_empty,
    model_from,
    model_of_dxo,
    named_metrics,
    task_meta,
)
from dfm_async.exchange.task import Model
from dfm_async.exchange.value_codec import Encoded

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


# models

CONTENT_TYPE: Final = "__content_type__"
DXO: Final = "DXO"


class ShareableCodec(ModelCodec):
    """Values of a connection by files: models, and shareables, whose headers the connection adds.

    Args:
        site: whether this is the site's end, which sends tasks and reads results, and not the program's.
    """

    def __init__(self, *, site: bool = False) -> None:
        self._site = site

    def encode(self, value: Any) -> Encoded:
        """Take a model, a mapping of parameters, or None.

        Raises:
            TypeError: it is something else.
            ValueError: a result has neither parameters nor metrics.
        """
        found = value if isinstance(value, Shareable) else model_from(value)
        if not self._site and isinstance(found, Model) and is_empty(found):
            raise ValueError("a model needs parameters or metrics")
        return Encoded(cast("bytes", found))

    def decode(self, encoded: Encoded) -> Any:
        """Return the model; None for a result without one."""
        found: Any = encoded.data
        if not isinstance(found, Shareable):
            return found
        return model_of(found) if self._site else task_model_of(found)


def shareable_of(value: Model | Shareable | None) -> Shareable:
    """Turn the data of a result into a shareable, which is empty if there is no data."""
    return Shareable() if value is None else value if isinstance(value, Shareable) else _with_dxo(value)


def task_of(value: Model | Shareable | None) -> Shareable:
    """Turn the data of a task into a shareable. Without data, it has a model without parameters."""
    return value if isinstance(value, Shareable) else _with_dxo(Model(params={}) if value is None else value)


def _with_dxo(model: Model) -> Shareable:
    kind, data, meta = dxo_of(model)
    found = Shareable({DXO: {"kind": DataKind(kind), "data": data, "meta": meta}})
    found.headers[CONTENT_TYPE] = DXO
    return found


def model_of(shareable: Shareable) -> Model | None:
    """Read the model in a shareable; None if it has none.

    Raises:
        ValueError: what is there is not a model.
    """
    dxo = shareable.get(DXO)
    if dxo is None:
        return None
    if not isinstance(dxo, Mapping) or not {"kind", "data"} <= dxo.keys():
        raise ValueError("the message has no model where one belongs")
    return model_of_dxo(dxo["kind"], dxo["data"], dxo.get("meta"))


def task_model_of(shareable: Shareable) -> Model | None:
    """Read the model in a task. Headers that NVFLARE's client puts into its meta are there, too.

    Raises:
        ValueError: what is there is not a model.
    """
    meta = task_meta(shareable.headers)
    if SUBMIT_MODEL_NAME in meta:  # then NVFLARE's client reads nothing else
        return Model(meta=meta)
    found = model_of(shareable)
    return None if found is None else dataclasses.replace(found, meta={**found.meta, **meta})


def metrics_to_dxos(record: Mapping[str, Any], step: int | None) -> list[Dxo]:
    """Turn metrics into records as NVFLARE's trackers take them: one for every name."""
    return [
        Dxo(DataKind.ANALYTIC, _record(name, value, step), _tracker(_type_of(value))) for name, value in record.items()
    ]


def _record(name: str, value: Any, step: int | None) -> dict[str, Any]:
    found = {"track_key": name, "track_value": value}
    if step is not None:
        found["global_step"] = step
    return found


def _tracker(kind: AnalyticsDataType) -> dict[str, Any]:
    return {"analytics_data_type": kind, "tracker_key": LogWriterName.TORCH_TB}


def _type_of(value: Any) -> AnalyticsDataType:
    if isinstance(value, Mapping):
        return AnalyticsDataType.SCALARS
    return AnalyticsDataType.TEXT if isinstance(value, str) else AnalyticsDataType.SCALAR


def metrics_from_dxo(dxo: Any) -> tuple[dict[str, Any], int | None]:
    """Read what a program has logged.

    Raises:
        ValueError: it is no such record.
    """
    data = dxo.data if isinstance(dxo, Dxo) else None
    if not isinstance(data, Mapping) or "track_key" not in data:
        raise ValueError("the message has no metrics where they belong")
    value = data.get("track_value")
    step = data.get("global_step")
    kind = str(dxo.meta.get("analytics_data_type", ""))
    return named_metrics(str(data["track_key"]), value, kind), step if isinstance(step, int) else None
