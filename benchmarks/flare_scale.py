"""How the FLARE target grows to hundreds of sites and thousands of jobs: a simulation with measured costs.

``python -m benchmarks.flare_scale`` prints tables, ``--svg FOLDER`` also draws them. The costs are those of
``benchmarks/flare_costs.json``, which ``python -m benchmarks.flare_costs --save`` measures anew.

What is simulated, event by event: applications, each with a host job of its own, keep a number of jobs in the
federation. A job has locations at some sites: it is submitted, assigned and started there, its operations take their
time one after the other, tokens go from each location to the next, and the last one yields results; no message of a job
is left out.
Each process is a queue that does one thing at a time (Python has one loop, and one lock around its threads). The relay,
which is the server's own process and passes every packet on, and all hubs share the server's processors. Links have
batches and a window as the real ones do: four packets in flight, and what comes meanwhile goes with the next. Between
a site and the server the network takes its time, also back, for the acknowledgement.

Through the gateway, messages between hub and application are packets, too. By app commands, each application has one
command in flight while it has jobs; the server serves one command at a time, of all applications, and that one waits
at its hub until there is something to say, for at most a tenth of a second.

What the columns mean: ``jobs/s`` is how many jobs end per second, ``median`` and ``95%`` how long they take from
submission to the last result, ``packets`` how many of them the relay has for one job, and ``busiest`` which process has
the least time left, with the share of time that it works. Sites are named together, because the busiest of them counts.
Operations take no processor time of these processes: they run in the workers of their sites.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from benchmarks.common import Options
from benchmarks.flare_model import AT_ONCE, COSTS, Outcome, Scenario, simulate

SITES, JOBS, APPLICATIONS = (10, 30, 100, 300), (16, 128, 1024, 4096), (1, 3, 10, 30, 100)


def _row(names: Sequence[object], outcome: Outcome) -> str:
    first = "".join(f"{name:>13}" for name in names)
    return (
        f"{first}{outcome.throughput:>10,.0f}{outcome.median * 1e3:>12,.0f}{outcome.late * 1e3:>10,.0f}"
        f"{outcome.packets:>9.1f}   {outcome.busiest} {outcome.busy:.0%}"
    )


def _head(names: Sequence[str]) -> str:
    first = "".join(f"{name:>13}" for name in names)
    return f"{first}{'jobs/s':>10}{'median, ms':>12}{'95%, ms':>10}{'packets':>9}   busiest"


def check(costs: Mapping[str, float]) -> Iterator[str]:
    """The model beside what was measured: the same job on as many processors as there were."""
    yield "Model and measurement: one application, one small operation at one site, all on one machine of 2 processors"
    for jobs, name in ((1, "jobs_per_second"), (AT_ONCE, "jobs_per_second_at_once")):
        small = Scenario(2, jobs, locations=1, tokens=0, results=1, operation=1e-4, network=0.0, rounds=200 // jobs + 2)
        found = simulate(replace(small, server_cores=2, one_machine=True), costs)
        yield (
            f"{jobs:>13} at once: {found.throughput:,.0f} jobs/s simulated, {costs[name]:,.0f} measured;"
            f" {found.packets:.1f} packets per job simulated"
        )


Points = dict[str, list[tuple[float, Outcome]]]


def tables(costs: Mapping[str, float], quick: bool) -> Iterator[tuple[str, str, str, Points]]:
    """Each table: its name, what its first column is, its text, and the outcomes by line."""
    rounds = 2 if quick else 4
    sites = SITES[::2] if quick else SITES
    jobs = JOBS[:3] if quick else JOBS
    for gateway in (True, False):
        points: Points = {}
        lines = []
        for site in sites:
            for count in jobs:
                found = simulate(Scenario(site, count, gateway=gateway, rounds=rounds), costs)
                points.setdefault(f"{site} sites", []).append((count, found))
                lines.append(_row((site, count), found))
        name = "one application, gateway" if gateway else "one application, app commands"
        yield name, "jobs at a time", "\n".join([_head(("sites", "jobs")), *lines]), points
    points, lines = {}, []
    for gateway in (True, False):
        way = "gateway" if gateway else "commands"
        for count in APPLICATIONS[:4] if quick else APPLICATIONS:
            found = simulate(Scenario(100, 16, applications=count, gateway=gateway, rounds=rounds), costs)
            points.setdefault(way, []).append((count, found))
            lines.append(_row((way, count), found))
    head = _head(("way", "applications"))
    yield "many applications of 16 jobs each, 100 sites", "applications", "\n".join([head, *lines]), points


def chart(title: str, across: str, points: Points, up: str, value: Callable[[Outcome], float]) -> str:
    """Lines over two logarithmic axes, as SVG with classes instead of colours."""
    values = [(x, max(value(outcome), 1e-9)) for line in points.values() for x, outcome in line]
    low_x, high_x = (math.log10(limit(x for x, _ in values)) for limit in (min, max))
    low_y, high_y = math.floor(math.log10(min(y for _, y in values))), math.ceil(math.log10(max(y for _, y in values)))
    high_y = max(high_y, low_y + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across_by = (math.log10(x) - low_x) / ((high_x - low_x) or 1)
        return 70 + 500 * across_by, 250 - 210 * (math.log10(max(y, 1e-9)) - low_y) / (high_y - low_y)

    label = re.sub(r"\W+", "-", title.lower())  # unique on a page
    parts = [
        f'<title id="{label}">{escape(title)}</title>',
        f'<text class="strong mid" x="320" y="20">{escape(title)}</text>',
    ]
    for power in range(low_y, high_y + 1):
        y = place(10**low_x, 10**power)[1]
        parts.append(f'<path class="line dashed" d="M70 {y:.0f}H570"/>')
        parts.append(f'<text class="small" text-anchor="end" x="64" y="{y + 4:.0f}">{10.0**power:,g}</text>')
    ticks = sorted({x for x, _ in values})
    parts += [f'<text class="small mid" x="{place(x, 1)[0]:.0f}" y="268">{x:,g}</text>' for x in ticks]
    parts.append(f'<text class="small mid" x="320" y="288">{escape(across)}</text>')
    parts.append(f'<text class="small" x="10" y="20">{escape(up)}</text>')
    drawn = [
        (name, kind, [place(x, value(outcome)) for x, outcome in line])
        for (name, line), kind in zip(points.items(), ("a", "b", "c", "here", "good", "bad"), strict=False)
    ]
    free = 300.0
    for name, kind, spots in sorted(drawn, key=lambda line: -line[2][-1][1]):  # names stand in the order of the lines
        path = "L".join(f"{x:.0f} {y:.0f}" for x, y in spots)
        y = min(spots[-1][1] + 4, free)
        free = y - 13
        parts.append(f'<path class="curve {kind}" d="M{path}"/>')
        parts.append(f'<text class="small {kind}" x="578" y="{y:.0f}">{escape(name)}</text>')
    body = "\n  ".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 300" role="img" aria-labelledby="{label}">'
    return f"{head}\n  {body}\n</svg>\n"


def main() -> None:
    parser = Options.parser(__doc__)
    parser.add_argument("--costs", type=Path, default=COSTS, help="the measured costs")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw the tables there, too")
    given = parser.parse_args()
    costs = json.loads(given.costs.read_text())["costs"]
    if not given.json:
        print("\n".join(check(costs)))
    for number, (name, across, text, points) in enumerate(tables(costs, given.quick)):
        if given.json:
            for line, outcomes in points.items():
                for x, outcome in outcomes:
                    row = {"table": name, "line": line, across: x}
                    row |= {field: getattr(outcome, field) for field in Outcome.__slots__}
                    print(json.dumps(row), flush=True)
        else:
            print(f"\n{name}\n{text}", flush=True)
        if given.svg:
            given.svg.mkdir(parents=True, exist_ok=True)
            drawn = chart(f"Throughput: {name}", across, points, "jobs per second", lambda found: found.throughput)
            (given.svg / f"flare-scale-{number + 1}-throughput.svg").write_text(drawn)
            drawn = chart(f"Latency: {name}", across, points, "median, ms", lambda found: found.median * 1e3)
            (given.svg / f"flare-scale-{number + 1}-latency.svg").write_text(drawn)


if __name__ == "__main__":
    main()
