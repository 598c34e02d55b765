"""Random pipelines on a real federation do what plain Python does."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings

from dfm_async import Pipeline, Session
from tests.conformance.conftest import flare_options
from tests.flare.shared import Shared
from tests.property.random_pipelines import fed, pipelines
from tests.property.test_random_pipelines import check, sets, valid
from tests.property.test_stream_matrix import matrix

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(flare: Shared) -> AsyncIterator[Session]:
    async with Session(fed, target="flare", options=flare_options(flare)) as session:
        yield session


@settings(
    max_examples=int(os.environ.get("DFM_FLARE_PIPELINES", "10")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    deadline=None,
)
@given(pipeline=pipelines(), params=sets)
async def test_a_federation_on_flare_does_what_plain_python_does(
    session: Session, pipeline: Pipeline, params: Any
) -> None:
    if await valid(pipeline, session):
        await check(session, pipeline, params)


async def test_streams_of_all_kinds_in_all_directions_on_flare(session: Session) -> None:
    for pipeline in list(matrix())[3::6]:
        await check(session, pipeline, [{"x": x} for x in (5, 8)])
