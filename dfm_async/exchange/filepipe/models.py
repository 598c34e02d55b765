"""Our models as NVFLARE's data exchange objects, and back. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, cast

from dfm_async.exchange.filepipe.values import AnalyticsDataType, DataKind, Dxo, LogWriterName, Shareable
from dfm_async.exchange.nvflare import SUBMIT_MODEL_NAME, is_empty, model_from, named_metrics, task_meta
from dfm_async.exchange.task import Model
from dfm_async.exchange.values import Encoded

__all__ = ["ModelCodec", "metrics_from_dxo", "metrics_to_dxos", "model_of", "shareable_of", "task_of"]

CONTENT_TYPE: Final = "__content_type__"
DXO: Final = "DXO"
_INITIAL_METRICS: Final = "initial_metrics"
_KINDS: Final = {"FULL": DataKind.WEIGHTS, "DIFF": DataKind.WEIGHT_DIFF}


class ModelCodec:
    """Values of a connection by files: NVFLARE exchanges models, so everything must be one, or the parameters of one.

    It makes no bytes: the connection does, when it knows the headers that belong to the value.

    Args:
        site: whether this is the site's end, which sends tasks and reads results, and not the program's.
    """

    def __init__(self, *, site: bool = False) -> None:
        self._site = site

    def encode(self, value: Any) -> Encoded:
        """Takes a model, a mapping of parameters, or None.

        Raises:
            TypeError: it is something else.
            ValueError: a result has neither parameters nor metrics.
        """
        found = value if isinstance(value, Shareable) else model_from(value)
        if not self._site and isinstance(found, Model) and is_empty(found):
            raise ValueError("a model needs parameters or metrics")
        return Encoded(cast("bytes", found))

    def decode(self, encoded: Encoded) -> Any:
        """Gives the model, or None if there is none."""
        found: Any = encoded.data
        if not isinstance(found, Shareable):
            return found
        return model_of(found) if self._site else task_model_of(found)

    def encode_metrics(self, record: Mapping[str, Any]) -> bytes:
        """Gives the metrics as they are."""
        return cast("bytes", dict(record))

    def decode_metrics(self, data: bytes) -> Mapping[str, Any]:
        """Gives the metrics as they are."""
        return cast("Mapping[str, Any]", data)


def shareable_of(value: Model | Shareable | None) -> Shareable:
    """Turns the data of a result into a shareable, which is empty if there is no data."""
    return Shareable() if value is None else value if isinstance(value, Shareable) else _with_dxo(value)


def task_of(value: Model | Shareable | None) -> Shareable:
    """Turns the data of a task into a shareable. Without data, it has a model without parameters."""
    return value if isinstance(value, Shareable) else _with_dxo(Model(params={}) if value is None else value)


def _with_dxo(model: Model) -> Shareable:
    meta = dict(model.meta)
    if model.params is not None:
        kind = _KINDS[model.params_type]
        data = dict(model.params) if isinstance(model.params, Mapping) else model.params
        if model.metrics is not None:
            meta[_INITIAL_METRICS] = dict(model.metrics)
    elif model.metrics is not None:
        kind, data = DataKind.METRICS, dict(model.metrics)
    else:
        kind, data = DataKind.WEIGHTS, {}
    found = Shareable({DXO: {"kind": kind, "data": data, "meta": meta}})
    found.headers[CONTENT_TYPE] = DXO
    return found


def model_of(shareable: Shareable) -> Model | None:
    """Reads the model in a shareable; None if it has none.

    Raises:
        ValueError: what is there is not a model.
    """
    dxo = shareable.get(DXO)
    if dxo is None:
        return None
    if not isinstance(dxo, Mapping) or not {"kind", "data"} <= dxo.keys():
        raise ValueError("the message has no model where one belongs")
    kind, data, meta = dxo["kind"], dxo["data"], dict(dxo.get("meta") or {})
    metrics = meta.pop(_INITIAL_METRICS, None)
    if kind == DataKind.METRICS:
        return Model(metrics=data, meta=meta)
    return Model(
        params=data, metrics=metrics, params_type="DIFF" if kind == DataKind.WEIGHT_DIFF else "FULL", meta=meta
    )


def task_model_of(shareable: Shareable) -> Model | None:
    """Reads the model in a task. Headers that NVFLARE's client puts into its meta are there, too.

    Raises:
        ValueError: what is there is not a model.
    """
    meta = task_meta(shareable.headers)
    if SUBMIT_MODEL_NAME in meta:  # then NVFLARE's client reads nothing else
        return Model(meta=meta)
    found = model_of(shareable)
    return None if found is None else dataclasses.replace(found, meta={**found.meta, **meta})


def metrics_to_dxos(record: Mapping[str, Any], step: int | None) -> list[Dxo]:
    """Turns metrics into records as NVFLARE's trackers take them: one for every name."""
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
    """Reads what a program has logged.

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
