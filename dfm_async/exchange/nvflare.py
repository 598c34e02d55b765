"""What both transports for NVFLARE's programs share: the options of its client, headers of tasks, names of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from dfm_async.exchange.task import Model

__all__ = [
    "SUBMIT_MODEL_NAME",
    "ParamsExchange",
    "ParamsFormat",
    "ParamsTransfer",
    "is_empty",
    "model_from",
    "named_metrics",
    "task_headers",
    "task_meta",
    "unreadable",
]

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
_AS_TEXT: Final = frozenset({"PARAMETER", "PARAMETERS", "TAG", "TAGS"})
"""Kinds of records whose values NVFLARE's receivers turn into text."""


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

    @property
    def config(self) -> dict[str, str]:
        """The entries of the client's configuration. NVFLARE's own enumerations are written as their values."""
        return {
            "exchange_format": _FORMATS[_FORMATS.index(self.format)],
            "server_expected_format": "numpy",
            "transfer_type": _TRANSFERS[_TRANSFERS.index(self.transfer)],
        }


def model_from(value: Any) -> Model | None:
    """The model that is sent for a value: a model, a mapping of parameters, or None.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, Model):
        return value
    if isinstance(value, Mapping):
        return Model(params=value)
    found = type(value).__name__
    raise TypeError(f"NVFLARE exchanges models: submit a Model, or a mapping of names and arrays, not {found}")


def task_headers(model: Model | None, site: str, job: str, *, submit_model: bool) -> dict[str, Any]:
    """The headers of a task that NVFLARE's client looks for.

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
    """What the headers of a task add to the meta of its model, as NVFLARE's client has it."""
    return {key: headers[header] for key, header in _HEADERS.items() if headers.get(header) is not None}


def is_empty(model: Model | None) -> bool:
    """Whether a task brings neither parameters nor metrics."""
    return model is None or (model.params is None and model.metrics is None)


def unreadable(error: BaseException) -> str:
    """What is wrong with a message that cannot be read, and what to do about tensors."""
    text = str(error) or type(error).__name__
    if "torch" not in text:
        return text
    return f"{text.rstrip('.')}. Set params_exchange_format='pytorch': NVFLARE's client then turns tensors into arrays"


def named_metrics(name: str, value: Any, kind: str = "") -> dict[str, Any]:
    """The metrics in one record of a tracking writer: a mapping gives one for each of its keys, ``name/key``.

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
