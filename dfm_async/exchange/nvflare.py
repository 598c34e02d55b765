"""What both transports for NVFLARE's programs share: pipe, codec, client options, models, headers of tasks, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from dfm_async.base.tasks import OwnedTasks
from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.endpoint import PipeTraits
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.task import Model
from dfm_async.exchange.value_codec import Encoded

ParamsFormat: TypeAlias = Literal["numpy", "pytorch", "keras_layer_weights", "raw"]
"""What a script works with: NVFLARE's ``params_exchange_format``."""
ParamsTransfer: TypeAlias = Literal["FULL", "DIFF"]
"""What a script's result holds: NVFLARE's ``params_transfer_type``."""

_FORMATS: Final = ("numpy", "pytorch", "keras_layer_weights", "raw")
_TRANSFERS: Final = ("FULL", "DIFF")

SUBMIT_MODEL_NAME: Final = "submit_model_name"
_HEADERS: Final = {
    SUBMIT_MODEL_NAME: SUBMIT_MODEL_NAME,
    "validate_type": "_validate_type",
    "start_round": "start_round",
    "job_id": "job_id",
    "site_name": "site_name",
}
"""Keys of a model's meta that NVFLARE sends as headers of the task, and the names of these."""
_BEST_MODEL: Final = "best_model"
"""The model that NVFLARE's cross-site evaluation asks for."""
_INITIAL_METRICS: Final = "initial_metrics"
_METRICS: Final = "METRICS"
_PARAMS_KINDS: Final = {"FULL": "WEIGHTS", "DIFF": "WEIGHT_DIFF"}
"""What NVFLARE calls the kinds of data."""
_AS_TEXT: Final = frozenset({"PARAMETER", "PARAMETERS", "TAG", "TAGS"})
"""Kinds of records whose values NVFLARE's receivers turn into text."""


class NvflarePipe(Pipe):
    """One end of a connection in terms of NVFLARE, which sends large parts inside its messages.

    Subclasses have ``send``, which starts :attr:`tasks`, and :meth:`finish`.
    """

    traits = PipeTraits(shows_progress=False)

    def __init__(self) -> None:
        super().__init__()
        self.tasks = OwnedTasks()
        self.closing: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Do nothing: what is sent is kept elsewhere."""

    def close(self) -> None:
        """Send what is queued, and end the connection."""
        self._close(True)

    def abort(self) -> None:
        """End the connection at once."""
        self._close(False)

    def _close(self, flush: bool) -> None:
        if self.closing is None:
            work = self._close_once(flush)
            self.closing = asyncio.get_running_loop().create_task(work, name="closing a connection to NVFLARE")

    async def _close_once(self, flush: bool) -> None:
        try:
            await self.finish(flush)
        finally:
            self.lose("the connection was closed")
            self._ended.settle(None)

    async def finish(self, flush: bool) -> None:
        """End everything that was started; first send what is queued, if that is wanted."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ParamsExchange:
    """How NVFLARE's client hands parameters to a script, and takes them back. Arrays travel as numpy in any case.

    Attributes:
        format: what the script works with.
        transfer: ``DIFF`` lets the client send the difference from the parameters that the task brought.
    """

    format: ParamsFormat = "numpy"
    transfer: ParamsTransfer = "FULL"

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"params_exchange_format must be one of {', '.join(_FORMATS)}, not {self.format!r}")
        if self.transfer not in _TRANSFERS:
            raise ValueError(f"params_transfer_type must be FULL or DIFF, not {self.transfer!r}")

    def task_exchange(self, options: ExecutorOptions, *, launch_once: bool) -> dict[str, Any]:
        """Return what the configuration of NVFLARE's client says about tasks, in plain values."""
        return {
            # NVFLARE's own enumerations are strings, but are not written as such.
            "exchange_format": _FORMATS[_FORMATS.index(self.format)],
            "server_expected_format": "numpy",
            "transfer_type": _TRANSFERS[_TRANSFERS.index(self.transfer)],
            "train_with_eval": options.train_with_evaluation,
            "train_task_name": options.train_task_name,
            "eval_task_name": options.evaluate_task_name,
            "submit_model_task_name": options.submit_model_task_name,
            "launch_once": launch_once,
        }


def model_from(value: Any) -> Model | None:
    """Return the model that is sent for a value: a model, a mapping of parameters, or None.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, Model):
        return value
    if isinstance(value, Mapping):
        return Model(params=value)
    found = type(value).__name__
    raise TypeError(f"NVFLARE exchanges models: submit a Model, or a mapping of names and arrays, not {found}")


class ModelCodec:
    """Values of a connection to NVFLARE, which exchanges models. It makes no bytes: NVFLARE's own messages do."""

    def encode(self, value: Any) -> Encoded:
        """Take a model, a mapping of parameters, or None.

        Raises:
            TypeError: it is something else.
        """
        return Encoded(cast("bytes", model_from(value)))

    def decode(self, encoded: Encoded) -> Any:
        """Return the model as it is."""
        return encoded.data

    def encode_metrics(self, record: Mapping[str, Any]) -> bytes:
        """Return the metrics as they are."""
        return cast("bytes", dict(record))

    def decode_metrics(self, data: bytes) -> Mapping[str, Any]:
        """Return the metrics as they are."""
        return cast("Mapping[str, Any]", data)


def dxo_of(model: Model) -> tuple[str, Any, dict[str, Any]]:
    """Return a model as NVFLARE's data exchange objects have it: the kind of the data, the data, the meta."""
    meta = dict(model.meta)
    if model.params is None:
        return (_PARAMS_KINDS["FULL"], {}, meta) if model.metrics is None else (_METRICS, dict(model.metrics), meta)
    if model.metrics is not None:
        meta[_INITIAL_METRICS] = dict(model.metrics)
    params = dict(model.params) if isinstance(model.params, Mapping) else model.params
    return _PARAMS_KINDS[model.params_type], params, meta


def model_of_dxo(kind: str, data: Any, meta: Mapping[str, Any] | None) -> Model:
    """Return the model in a data exchange object."""
    rest = dict(meta or {})
    metrics = rest.pop(_INITIAL_METRICS, None)
    if kind == _METRICS:
        return Model(metrics=data, meta=rest)
    return Model(
        params=data, metrics=metrics, params_type="DIFF" if kind == _PARAMS_KINDS["DIFF"] else "FULL", meta=rest
    )


def task_headers(model: Model | None, site: str, job: str, *, submit_model: bool) -> dict[str, Any]:
    """Return the headers of a task that NVFLARE's client looks for.

    Args:
        model: the data of the task.
        site: the name of the site.
        job: the job.
        submit_model: whether the task asks for a model. Without a model in it, it must name the one to submit.
    """
    meta = {} if model is None else model.meta
    found = {header: meta[key] for key, header in _HEADERS.items() if meta.get(key) is not None}
    if submit_model and is_empty(model):
        found.setdefault(SUBMIT_MODEL_NAME, _BEST_MODEL)
    return {**found, "job_id": job, "site_name": site}


def task_meta(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the headers of a task add to the meta of its model, as NVFLARE's client has it."""
    return {key: headers[header] for key, header in _HEADERS.items() if headers.get(header) is not None}


def is_empty(model: Model | None) -> bool:
    """Whether a task brings neither parameters nor metrics."""
    return model is None or (model.params is None and model.metrics is None)


def unreadable(error: BaseException) -> str:
    """Return what is wrong with a message that cannot be read, and what to do about tensors."""
    text = str(error) or type(error).__name__
    if "torch" not in text:
        return text
    return f"{text.rstrip('.')}. Set params_exchange_format='pytorch': NVFLARE's client then turns tensors into arrays"


def named_metrics(name: str, value: Any, kind: str = "") -> dict[str, Any]:
    """Return the metrics in one record of a tracking writer: for a mapping, one per key, ``name/key``.

    Args:
        name: the name of the record.
        value: a value, or a mapping of them.
        kind: NVFLARE's kind of record. Parameters and tags that are neither numbers nor text are written as text.
    """
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found.update(named_metrics(f"{name}/{key}", item, kind))
        return found
    if kind in _AS_TEXT and not isinstance(value, (bool, int, float, str)):
        value = str(value)
    return {name: value}
