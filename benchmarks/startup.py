"""Starting costs little before anything runs.

The time by the clock of a whole process that imports what an application begins with, or prints the help of the command
line, beside a bare interpreter and one that imports pydantic. Claimed: importing takes at most 150 ms more than
pydantic alone, and ``dfm-async --help`` at most 300 ms in all.

All contenders find their modules compiled, as installed packages are: a first round that does not count fills a
bytecode cache of their own. It is the best of several runs: what other programs of the machine take does not count.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.common import Figure, Options, Target, main

NAMES = "Federation, ForEach, If, JobFailed, Pipeline, PlaceParam, Session, Yield"
CONTENDERS = {
    "interpreter": ["-c", "pass"],
    "pydantic": ["-c", "import pydantic; pydantic.BaseModel"],
    "import": ["-c", f"from dfm_async import {NAMES}"],
    "help": ["-m", "dfm_async", "--help"],
}


def _once(arguments: list[str], environment: dict[str, str]) -> float:
    before = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment, check=True)
    return (time.perf_counter() - before) * 1000


def _measure(options: Options) -> list[Figure]:
    runs: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for turn in range(2 * options.repeats + 1):
            for name, arguments in CONTENDERS.items():
                took = _once(arguments, environment)
                if turn:
                    runs[name].append(took)
    found = {name: min(times) for name, times in runs.items()}  # what other programs add is not ours
    peers = {name: found[name] for name in ("interpreter", "pydantic")}
    return [
        Figure("a process that imports dfm_async", "ms", found["import"], peers),
        Figure(
            "the same, beyond one that imports pydantic", "ms", found["import"] - found["pydantic"], {}, Target(150)
        ),
        Figure("dfm-async --help", "ms", found["help"], peers, Target(300)),
    ]


async def run(options: Options) -> list[Figure]:
    return await asyncio.to_thread(_measure, options)


if __name__ == "__main__":
    main("startup", __doc__, run)
