"""Services on one database are killed, stopped and cut off from it, while clients talk to any of them."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.histories import Outcome, problems, takeovers
from tests.chaos.replicas import TAKEOVER, Cluster
from tests.chaos.seeds import seeds
from tests.support.postgres import PostgresServer

BOUND = 90.0
JOBS = 4
FAULTS = 2
"""How many faults each lane has."""


@pytest.mark.parametrize("seed", seeds(1))
async def test_clients_of_replicas_see_each_job_run_once(seed: int, postgres: PostgresServer) -> None:
    cluster = Cluster(seed, postgres)
    async with cluster.running():
        try:
            async with asyncio.timeout(BOUND):
                lives = (cluster.live(f"job{at}", waits=at % 2 == 1) for at in range(JOBS))
                await asyncio.gather(cluster.disturb(FAULTS), *lives)
        except TimeoutError:
            pytest.fail(f"jobs do not end after {cluster.faults}: {cluster.unended()}")
        await cluster.settle()
    assert all(job.submitted is Outcome.DONE for job in cluster.jobs.values())
    wrong = {name: found for name, job in cluster.jobs.items() if (found := problems(job))}
    for name in wrong:
        print(name, cluster.jobs[name])
    taken = takeovers(cluster.deaths, cluster.commits, cluster.owners)
    print(f"seed {seed}: {cluster.faults}, taken over after {taken}, calls recorded: {cluster.recorded}")
    assert not wrong, f"after {cluster.faults}: {wrong}"
    assert all(after <= TAKEOVER for after in taken.values()), f"after {cluster.faults}: {taken}"
