"""Classes of nv_dfm_core that code at sites derives from, for where it is not installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dfm_async.discovery import FieldAdvice, build_advice
from dfm_async.model.resources import VaultConfig
from dfm_async.site.vaults import EnvironmentVault

__all__ = ["AdviceBuilder", "Frame", "SecretsVault", "telemetry_enabled"]


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

    number: int

    @classmethod
    def start_frame(cls, num: int) -> Frame:
        """Gives the frame of a parameter set."""
        return cls(num)


class AdviceBuilder:
    """Asks the advisors of an adapter, as tests of adapters do."""

    @classmethod
    async def build_advice(cls, adapter: object, **params: Any) -> FieldAdvice | None:
        """Asks them; ``Advise()``, or leaving a parameter out, asks for advice."""
        return await build_advice(adapter, **params)


def telemetry_enabled() -> bool:
    """Whether spans may be made: always. Those of jobs that are not traced do nothing."""
    return True
