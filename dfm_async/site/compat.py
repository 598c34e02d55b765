"""Classes of nv_dfm_core that code at sites derives from, for where it is not installed."""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal

from dfm_async.discovery import FieldAdvice, build_advice
from dfm_async.model.resources import VaultConfig
from dfm_async.site.objects import DfmContext, Span
from dfm_async.site.vaults import EnvironmentVault

__all__ = [
    "DISCOVERY_PLACE_NAME",
    "STATUS_PLACE_NAME",
    "AdviceBuilder",
    "And",
    "Equal",
    "ErrorInfo",
    "ErrorToken",
    "FlowInfo",
    "Frame",
    "GreaterThan",
    "GreaterThanOrEqual",
    "LessThan",
    "LessThanOrEqual",
    "NodeId",
    "Not",
    "NotEqual",
    "Or",
    "PanicError",
    "SecretsVault",
    "StopToken",
    "adapter_span",
    "telemetry_enabled",
    "well_known_id",
]

STATUS_PLACE_NAME: Final = "_dfm_status_"
DISCOVERY_PLACE_NAME: Final = "_dfm_discovery_"


class SecretsVault(EnvironmentVault):
    """A vault as DFM has it: secrets in the environment. Others derive from it.

    Args:
        prefix: what the names of the variables begin with.
        kwargs: what others want besides; not used.
    """

    def __init__(self, prefix: str = "DFM_SECRET_", **kwargs: Any) -> None:
        super().__init__(prefix)

    @classmethod
    def from_config(cls, config: VaultConfig) -> SecretsVault:
        """Builds a vault of this class with configured arguments."""
        if config.path is not None:
            raise ValueError("the vault of a site is built by the site: derive from SecretsVault, and name the class")
        return cls(**config.args)


@dataclass(frozen=True, slots=True)
class Frame:
    """What adapters give to ``send_to_place``, which wants one in DFM. Here values of one call belong together."""

    frame: tuple[int, ...] | Literal["stop"]

    @classmethod
    def start_frame(cls, num: int) -> Frame:
        """Gives the frame of a parameter set."""
        return cls((num,))

    @classmethod
    def stop_frame(cls) -> Frame:
        """Gives the frame that ends a job in DFM."""
        return cls("stop")

    def is_stop_frame(self) -> bool:
        """Whether it ends a job."""
        return self.frame == "stop"


@dataclass(frozen=True, slots=True)
class FlowInfo:
    """What DFM sends along control edges."""

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
        """Makes one of an exception."""
        trace = "".join(traceback.format_exception(error))
        return cls([ErrorInfo(type(error).__name__, str(error), trace)])


class PanicError(Exception):
    """Wraps another exception, as DFM does with errors that end a job."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class NodeId:
    """The id of a node in DFM's JSON."""

    ident: int | str
    tag: str = "@dfm-node"


def well_known_id(ident: int | str) -> NodeId:
    """Makes an id that users choose."""
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
    """Negates a condition."""
    return ~exp


class AdviceBuilder:
    """Asks the advisors of an adapter, as tests of adapters do."""

    @classmethod
    async def build_advice(cls, adapter: object, **params: Any) -> FieldAdvice | None:
        """Asks them; ``Advise()``, or leaving a parameter out, asks for advice."""
        return await build_advice(adapter, **params)


def telemetry_enabled() -> bool:
    """Whether spans may be made: always. Those of jobs that are not traced do nothing."""
    return True


def adapter_span(
    dfm_context: DfmContext, adapter_name: str, operation_name: str
) -> AbstractContextManager[Span | None]:
    """Opens a span around the call of an adapter, as DFM's generated code does."""
    return dfm_context.span(operation_name, {"adapter": adapter_name})
