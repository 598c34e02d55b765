"""The simulation of federations on FLARE: what it says follows from its costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import flare_model
from benchmarks.flare_model import Scenario, simulate
from benchmarks.flare_scale import chart, check

COSTS = json.loads(flare_model.COSTS.read_text())["costs"]
FREE = dict.fromkeys(COSTS, 0.0)
ONE = Scenario(10, 1, locations=1, tokens=0, results=1, operation=1e-9)


def test_the_same_seed_gives_the_same_outcome() -> None:
    scenario = Scenario(10, 32, rounds=2)
    assert simulate(scenario, COSTS) == simulate(scenario, COSTS)
    assert simulate(scenario, COSTS) != simulate(scenario, COSTS, seed=2)


@pytest.mark.parametrize("locations", [1, 2, 3])
def test_a_job_alone_takes_the_ways_of_its_messages(locations: int) -> None:
    # Submission, seats, their answers, start, results to the hub and to the application, and tokens between locations;
    # each goes to the relay and on.
    messages = 6 + locations - 1
    found = simulate(replace(ONE, locations=locations, tokens=1, network=0.01), FREE)
    assert found.median == pytest.approx(2 * messages * 0.01, rel=1e-3)


def test_the_relay_limits_how_many_jobs_there_are() -> None:
    slow = {**FREE, "packet_relay": 0.001}
    found = simulate(replace(ONE, jobs=200, network=0.0, rounds=20), slow)
    assert found.busiest == "relay"
    assert found.busy == pytest.approx(1.0, abs=0.01)
    assert found.throughput == pytest.approx(1000 / found.packets, rel=0.02)


def test_what_comes_while_packets_are_under_way_goes_together() -> None:
    few, many = (simulate(replace(ONE, jobs=jobs), COSTS).packets for jobs in (1, 500))
    assert many < few / 3


def test_a_command_that_waits_at_its_hub_keeps_those_of_others_waiting() -> None:
    crowd = replace(ONE, operation=0.3, applications=50)
    commands, gateway = (simulate(replace(crowd, gateway=way), COSTS) for way in (False, True))
    assert commands.busiest == "commands"
    assert commands.median > 3 * gateway.median


def test_hubs_share_the_processors_of_the_server() -> None:
    work = {**FREE, "job_hub": 0.01}
    many = replace(ONE, jobs=10, applications=8, network=0.0)
    two, eight = (simulate(replace(many, server_cores=cores), work).throughput for cores in (2, 8))
    assert two == pytest.approx(200, rel=0.05)
    assert eight == pytest.approx(800, rel=0.05)


def test_the_stored_costs_make_a_model_that_is_near_to_what_was_measured() -> None:
    one, many = (line.partition(":")[2].split() for line in list(check(COSTS))[1:])
    for words in (one, many):
        simulated, measured = (float(words[at].replace(",", "")) for at in (0, 3))
        assert 0.5 < simulated / measured < 2


def test_a_chart_has_a_line_for_each_of_its_series() -> None:
    points = {f"{sites} sites": [(1.0, simulate(ONE, COSTS)), (4.0, simulate(ONE, COSTS))] for sites in (10, 20)}
    drawn = chart("Throughput <now>", "jobs", points, "jobs/s", lambda found: found.throughput)
    assert drawn.count('class="curve ') == 2
    assert "&lt;now&gt;" in drawn
    assert "20 sites" in drawn
