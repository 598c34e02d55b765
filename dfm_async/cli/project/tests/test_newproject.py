"""Test the operations and the pipeline."""

from collections.abc import Callable

import pytest
from dfm_async import Federation, Session
from dfm_async.testing import Fake, returns

from newproject import anomalies, anomaly, fed, load


@pytest.fixture(scope="session")
def dfm_federation() -> Federation:
    """Connect the sessions of the tests to this federation."""
    return fed


def test_an_operation_is_an_ordinary_function() -> None:
    assert anomaly(17.0) == 2.0


async def test_the_pipeline_returns_the_mean_anomaly(dfm_session: Session) -> None:
    assert await dfm_session.run(anomalies, day="mon") == 1.5


async def test_the_pipeline_with_a_fake_archive(dfm_session: Session, dfm_override: Callable[..., Fake]) -> None:
    dfm_override(load, returns([20.0]))
    assert await dfm_session.run(anomalies, day="any") == 5.0


@pytest.mark.dfm(target="local")
async def test_the_pipeline_in_worker_processes(dfm_session: Session) -> None:
    assert await dfm_session.run(anomalies, day="tue", base=10.0) == 0.75
