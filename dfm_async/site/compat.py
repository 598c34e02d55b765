"""Classes of nv_dfm_core that code at sites derives from, for where it is not installed."""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, model_serializer

from dfm_async.discovery import FieldAdvice, build_advice
from dfm_async.language import builder
from dfm_async.model.resources import VaultConfig
from dfm_async.site.objects import DfmContext, Span
from dfm_async.site.vaults import EnvironmentVault

STATUS_PLACE_NAME: Final = "_dfm_status_"
DISCOVERY_PLACE_NAME: Final = "_dfm_discovery_"


class SecretsVault(EnvironmentVault):
    """A vault as DFM has it: secrets in the environment. Others derive from it.

    Args:
        prefix: the beginning of the names of the variables.
        kwargs: further arguments of subclasses; not used.
    """

    def __init__(self, prefix: str = "DFM_SECRET_", **kwargs: Any) -> None:
        super().__init__(prefix)

    @classmethod
    def from_config(cls, config: VaultConfig) -> SecretsVault:
        """Build a vault of this class with configured arguments."""
        if config.path is not None:
            raise ValueError("the vault of a site is built by the site: derive from SecretsVault, and name the class")
        return cls(**config.args)


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame that adapters pass to ``send_to_place``, as in DFM. Here values of one call belong together."""

    frame: tuple[int, ...] | Literal["stop"]

    @classmethod
    def start_frame(cls, num: int) -> Frame:
        """Return the frame of a parameter set."""
        return cls((num,))

    @classmethod
    def stop_frame(cls) -> Frame:
        """Return the frame that ends a job in DFM."""
        return cls("stop")

    def is_stop_frame(self) -> bool:
        """Return whether it ends a job."""
        return self.frame == "stop"


@dataclass(frozen=True, slots=True)
class FlowInfo:
    """The value that DFM sends along control edges."""

    hint: int | None = None


@dataclass(frozen=True, slots=True)
class StopToken:
    """The end of a stream, as DFM sends it to callbacks. Here streams end, and no callback gets it."""

    token: str = "@dfm-stop-token"  # noqa: S105 - no secret


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """One error in an :class:`ErrorToken`."""

    type: str
    message: str
    stack_trace: str


@dataclass(frozen=True, slots=True)
class ErrorToken:
    """Errors as DFM sends them to the status place. Here the job fails, and no callback gets it."""

    errors: Sequence[ErrorInfo]
    token: str = "@dfm-error-token"  # noqa: S105 - no secret

    @classmethod
    def from_exception(cls, error: Exception) -> ErrorToken:
        """Return the token of an exception."""
        trace = "".join(traceback.format_exception(error))
        return cls([ErrorInfo(type(error).__name__, str(error), trace)])


class PolymorphicBaseModel(BaseModel):
    """A model that is written with all its fields, also where a model that it derives from is declared.

    Unlike DFM's own it never imports a class because data names it: ``dfm_class_name`` is a field like others.
    """

    @model_serializer(mode="wrap")
    def serialize_model(self, _handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Return all fields."""
        return {name: getattr(self, name) for name in type(self).model_fields}


class PanicError(Exception):
    """Wraps another exception, as DFM does with errors that end a job."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def PlaceParam(place: str, multiuse: bool = False) -> Any:
    """Return a parameter of a pipeline."""
    return builder.PlaceParam(place)


def Yield(value: Any, place: str = "yield", multiuse: bool = False, dfm_after: Any = None) -> None:
    """Send a value to the application."""
    builder.Yield(value, place, after=dfm_after)


@dataclass(frozen=True, slots=True)
class NodeId:
    """The id of a node in DFM's JSON."""

    ident: int | str
    tag: str = "@dfm-node"


def well_known_id(ident: int | str) -> NodeId:
    """Return an id that users choose."""
    return NodeId(ident if isinstance(ident, str) else f"wkid{ident}")


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def build(*, left: Any, right: Any) -> Any:
        return compare(left, right)

    return build


def _combination(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def build(*, exp: Sequence[Any]) -> Any:
        return functools.reduce(combine, exp)

    return build


Equal = _comparison(operator.eq)
NotEqual = _comparison(operator.ne)
LessThan = _comparison(operator.lt)
LessThanOrEqual = _comparison(operator.le)
GreaterThan = _comparison(operator.gt)
GreaterThanOrEqual = _comparison(operator.ge)
And = _combination(operator.and_)
Or = _combination(operator.or_)


def Not(*, exp: Any) -> Any:
    """Negate a condition."""
    return ~exp


class AdviceBuilder:
    """Query the advisors of an adapter, as tests of adapters do."""

    @classmethod
    async def build_advice(cls, adapter: object, **params: Any) -> FieldAdvice | None:
        """Return their advice for parameters that are ``Advise()`` or left out."""
        return await build_advice(adapter, **params)


def telemetry_enabled() -> bool:
    """Return True: spans can always be opened. Those of jobs that are not traced do nothing."""
    return True


def adapter_span(
    dfm_context: DfmContext, adapter_name: str, operation_name: str
) -> AbstractContextManager[Span | None]:
    """Open a span around the call of an adapter, as DFM's generated code does."""
    return dfm_context.span(operation_name, {"adapter": adapter_name})
