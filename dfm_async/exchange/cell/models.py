"""Our models as NVFLARE's own objects, and back. Imports NVFLARE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from dfm_async.exchange.nvflare import is_empty, model_from
from dfm_async.exchange.task import Model
from dfm_async.exchange.values import Encoded

__all__ = ["CellCodec", "from_fl_model", "to_fl_model", "to_model", "to_shareable"]


class CellCodec:
    """Values of a connection by cells: models, which NVFLARE itself turns into bytes."""

    def encode(self, value: Any) -> Encoded:
        """Takes a model, a mapping of parameters, or None.

        Raises:
            TypeError: it is something else.
        """
        return Encoded(cast("bytes", model_from(value)))

    def decode(self, encoded: Encoded) -> Any:
        """Gives the model as it is."""
        return encoded.data

    def encode_metrics(self, record: Mapping[str, Any]) -> bytes:
        """Gives the metrics as they are."""
        return cast("bytes", dict(record))

    def decode_metrics(self, data: bytes) -> Mapping[str, Any]:
        """Gives the metrics as they are."""
        return cast("Mapping[str, Any]", data)


def to_shareable(model: Model | None) -> Any:
    """Turns a model into a task's data. Without data, it has a model without parameters."""
    if model is None or is_empty(model):
        model = Model(params={}, meta={} if model is None else model.meta)
    meta = dict(model.meta)
    if model.params is not None:
        kind = DataKind.WEIGHT_DIFF if model.params_type == "DIFF" else DataKind.WEIGHTS
        if model.metrics is not None:
            meta[MetaKey.INITIAL_METRICS] = dict(model.metrics)
        return DXO(kind, data=dict(model.params), meta=meta).to_shareable()
    return DXO(DataKind.METRICS, data=dict(model.metrics or {}), meta=meta).to_shareable()


def to_model(shareable: Any) -> Model:
    """Reads a result.

    Raises:
        ValueError: there is no model in it.
    """
    dxo = from_shareable(shareable)
    meta = dict(dxo.meta or {})
    metrics = meta.pop(MetaKey.INITIAL_METRICS, None)
    if dxo.data_kind == DataKind.METRICS:
        return Model(metrics=dxo.data, meta=meta)
    return Model(
        params=dxo.data,
        metrics=metrics,
        params_type="DIFF" if dxo.data_kind == DataKind.WEIGHT_DIFF else "FULL",
        meta=meta,
    )


def from_fl_model(found: Any) -> Model:
    """Reads what ``nvflare.client`` has received."""
    diff = found.params_type is not None and str(found.params_type.value) == "DIFF"
    start = {} if found.start_round is None else {"start_round": found.start_round}
    return Model(
        params=found.params,
        metrics=found.metrics,
        params_type="DIFF" if diff else "FULL",
        meta={**(found.meta or {}), **start},
    )


def to_fl_model(model: Model) -> Any:
    """Turns a model into what ``nvflare.client`` sends."""
    kind = None if model.params is None else ParamsType.DIFF if model.params_type == "DIFF" else ParamsType.FULL
    return FLModel(
        params=None if model.params is None else dict(model.params),
        params_type=kind,
        metrics=None if model.metrics is None else dict(model.metrics),
        meta=dict(model.meta),
    )
