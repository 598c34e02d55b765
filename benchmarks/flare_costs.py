"""What the parts of a federation on FLARE cost, in processor time: ``python -m benchmarks.flare_costs`` measures it.

Prints the costs, and with ``--save`` keeps them in ``benchmarks/flare_costs.json``, where ``flare_scale`` finds them.
Each is the processor time that one process takes for one thing, so that it holds also where processes do not share the
machine. Everything between sites passes the server's process (the relay); the hub is in the server's job process.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from typing import Any

import psutil

from benchmarks import flare, workloads
from benchmarks.common import Options, Usage
from benchmarks.flare_model import AT_ONCE, COSTS
from benchmarks.flare_raw import RawJob
from dfm_async.flare import LocalFlare

MIB = 1024 * 1024
LARGE = 32 * MIB


class _Processes:
    """The processes of a federation, by what they do."""

    def __init__(self, up: LocalFlare, raw: RawJob) -> None:
        self._found: dict[str, psutil.Process] = {"application": psutil.Process(os.getpid())}
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            at = next((name for name in (*flare.SITES, "home", "localhost") if f"{up.folder / name}" in command), None)
            if at is None:
                continue
            if "-n" in command:
                kind = "raw " if raw.job_id in command else ""
                self._found[kind + {"home": "gateway", "localhost": "hub"}.get(at, at)] = process
            elif at == "localhost":
                self._found["relay"] = process

    async def costs(self, work: Awaitable[Any], n: int) -> dict[str, float]:
        """Seconds on a processor of each process, and those of a clock, for one of n things."""
        before = {name: Usage.of([process]).cpu for name, process in self._found.items()}
        seconds = await workloads.elapsed(work)
        after = {name: Usage.of([process]).cpu for name, process in self._found.items()}
        return {"clock": seconds / n, **{name: (after[name] - before[name]) / n for name in before}}


async def measure(options: Options) -> dict[str, Any]:
    """All costs, in seconds for one of each."""
    async with (
        flare.up() as up,
        flare.Contender(up) as ours,
        flare.Contender(up, gateway="never") as other,
        RawJob(up) as raw,
    ):
        one, stream, elements, there = await ours.one(), await ours.stream(), await ours.elements(), await other.one()
        for plan, params in ((one, {"x": 1}), (stream, {"n": 1}), (elements, {"n": 1})):
            await ours.run(plan, params)
        await other.run(there, {"x": 1})
        of = _Processes(up, raw).costs
        jobs, packets, events, tokens = map(options.size, (400, 800, 80_000, 160_000))
        found = {
            "packet": await of(raw.seconds(packets, 100, 4, "cell"), packets),
            "packet of 1 MiB": await of(raw.seconds(packets // 8, MIB, 4, "cell"), packets // 8),
            "message of 32 MiB": await of(raw.seconds(4, LARGE), 4),
            "command": await of(workloads.rate(raw.command, jobs // 4, 1), jobs // 4),
            "job": await of(workloads.rate(lambda i: ours.run(one, {"x": i}), jobs, 1), jobs),
            f"job, {AT_ONCE} at once": await of(
                workloads.rate(lambda i: ours.run(one, {"x": i}), 4 * jobs, AT_ONCE), 4 * jobs
            ),
            "job by commands": await of(workloads.rate(lambda i: other.run(there, {"x": i}), jobs // 4, 1), jobs // 4),
            "event": await of(ours.run(stream, {"n": events}, events), events),
            "token": await of(ours.run(elements, {"n": tokens}), tokens),
        }
        latency = await raw.seconds(options.size(200), 100, 1, "cell")
    return {"measured": found, "costs": derived(found, latency)}


def derived(found: dict[str, dict[str, float]], latency: float) -> dict[str, float]:
    """What the simulation takes from that."""
    packet, large = found["packet"], found["packet of 1 MiB"]
    many = found[f"job, {AT_ONCE} at once"]
    packets = {name: found[name]["relay"] / packet["relay"] for name in ("job", f"job, {AT_ONCE} at once")}
    ends = (packet["raw a"] + packet["raw b"]) / 2
    return {
        "latency": latency,
        "packet_relay": packet["relay"],
        "packet_send": packet["raw a"],
        "packet_receive": packet["raw b"],
        "byte_relay": (large["relay"] - packet["relay"]) / MIB,
        "byte_send": (large["raw a"] - packet["raw a"]) / MIB,
        "byte_receive": (large["raw b"] - packet["raw b"]) / MIB,
        "packets_per_job": packets["job"],
        "packets_per_job_at_once": packets[f"job, {AT_ONCE} at once"],
        # What a job takes besides its packets; each of them was at the hub, and about a half at the other ends.
        "job_hub": max(many["hub"] - packets[f"job, {AT_ONCE} at once"] * ends, many["hub"] / 4),
        "job_site": max(many["a"] - packets[f"job, {AT_ONCE} at once"] / 2 * ends, many["a"] / 4),
        "job_application": many["application"],
        "event_hub": found["event"]["hub"],
        "event_site": found["event"]["a"],
        "event_gateway": found["event"]["gateway"],
        "event_application": found["event"]["application"],
        "event_relay": found["event"]["relay"],
        "token_send": found["token"]["a"],
        "token_receive": found["token"]["b"],
        "command": found["command"]["clock"],
        "command_relay": found["command"]["relay"],
        "command_hub": found["command"]["raw hub"],
        "jobs_per_second": 1 / found["job"]["clock"],
        "jobs_per_second_at_once": 1 / many["clock"],
    }


def main() -> None:
    parser = Options.parser(__doc__)
    parser.add_argument("--save", action="store_true", help=f"keep them in {COSTS.name}")
    given = parser.parse_args()
    found = asyncio.run(measure(Options(given.json, given.quick)))
    if given.save:
        COSTS.write_text(json.dumps(found, indent=1) + "\n")
    if given.json:
        print(json.dumps(found))
        return
    names = list(dict.fromkeys(name for costs in found["measured"].values() for name in costs))
    print("processor time, in microseconds for one")
    print(" " * 20, *(f"{name:>11}" for name in names))
    for what, costs in found["measured"].items():
        print(f"{what:20}", *(f"{costs[name] * 1e6:11,.1f}" for name in names))
    print()
    for name, value in found["costs"].items():
        print(f"{name:26} {value:.3g}")


if __name__ == "__main__":
    main()
