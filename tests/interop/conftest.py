"""Interpreters with the real NVFLARE and the real nv_dfm_core."""

from pathlib import Path

import pytest

from tests.interop.environments import NV_DFM_CORE, NVFLARE_2_8, NVFLARE_2_9, environment

PROGRAMS = Path(__file__).parent / "programs"


def _python(wanted: tuple[str, ...]) -> Path:
    found = environment(*wanted)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def nvflare_2_8() -> Path:
    """The interpreter of an environment with NVFLARE 2.8.3, and without us."""
    return _python(NVFLARE_2_8)


@pytest.fixture(scope="session")
def nvflare_2_9() -> Path:
    """The interpreter of an environment with NVFLARE 2.9, and us with the extra ``flare``."""
    return _python(NVFLARE_2_9)


@pytest.fixture(scope="session")
def nv_dfm_core() -> Path:
    """The interpreter of an environment with nv_dfm_core 3.1.31, and us."""
    return _python(NV_DFM_CORE)
