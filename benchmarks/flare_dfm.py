"""The peer nv_dfm_core: its own FLARE target, with nvflare 2.6.3, in an environment of its own.

Its federation is made here: a server and two clients, started as ours are, with the code that it generates from a
federation file. The server of nvflare 2.6 listens on all interfaces, so everything runs in a network namespace that
has nothing but loopback. The project is called ``server``: with another name the sites cannot answer the server's
messages ("invalid target"), each is asked about after two seconds, and everything takes longer.

Each of its jobs is a FLARE job. Rates are those between the first and the last of a job's results, as the callback
gets them (``results``) or as they come at the second site (``tokens``, ``arrays``), so that neither the start nor the
end of a FLARE job counts. Tokens and arrays are parameter sets: an operation of it cannot read what a generator at
another site yields.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = ("nv-dfm-core-flare-3.1.31", "nv-dfm-core==3.1.31", "nvflare==2.6.3", "numpy", "psutil", "-e", ".")
"""What it needs."""
NAME = "nv_dfm_core"
LIMIT = 420
_MIB = 1024 * 1024
_ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Runs a command where there is no other network than loopback."""

_OPERATIONS = {"Echo": ("x",), "Numbers": ("n",), "Array": ("size",), "Stage": ("v",), "Stamp": ("v",)}
_CODE = """
import time

import numpy


class _Adapter:
    def __init__(self, site, provider):
        self.site = site


class Echo(_Adapter):
    async def body(self, x):
        return {"x": x}


class Numbers(_Adapter):
    async def body(self, n):
        return iter(range(n))


class Array(_Adapter):
    async def body(self, size):
        return numpy.arange(size // 8, dtype="f8")


class Stage(_Adapter):
    async def body(self, v):
        return v + 1


class Stamp(_Adapter):
    async def body(self, v):
        return time.time()
"""


# who asks


def measure(workload: str, quick: bool) -> dict[str, float]:
    """Makes the environment and measures there; nothing if that does not work, or a quick run would have to make it."""
    from benchmarks import stock
    from benchmarks.external import ROOT

    python = stock.interpreter(ENVIRONMENT, quick)
    if python is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="dfm-bench-") as folder:
        command = [*_ALONE, python, "-m", "benchmarks.flare_dfm", workload, folder, "1" if quick else "2"]
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "XDG_STATE_HOME": folder}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, timeout=LIMIT, check=True, capture_output=True, text=True
            )
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            told = (getattr(error, "stderr", None) or "").splitlines()[-1:]
            print(f"note: {NAME} is left out: {error} {told}", file=sys.stderr)
            return {}


def beside(found: dict[str, float], metric: str, factor: float = 1.0) -> dict[str, float]:
    """A figure of it as that of a peer, if there is one."""
    return {NAME: found[metric] * factor} if metric in found else {}


# what runs there


def _generate(folder: Path) -> None:
    """Its federation file, and the code that it makes from that."""
    import yaml
    from nv_dfm_core.gen.apigen import ApiGen

    offered = {
        f"#/operations/bench.{name}": {
            "adapter": f"dfmbench.lib.{name}",
            "args": {parameter: {"from-param": parameter} for parameter in parameters},
        }
        for name, parameters in _OPERATIONS.items()
    }
    federation = {
        "dfm": "1.0.0",
        "info": {"api-version": "0.0.1", "code-package": "dfmbench", "description": "benchmarks"},
        "operations": {
            f"bench.{name}": {
                "description": name,
                "parameters": {parameter: {"type": "object", "description": parameter} for parameter in parameters},
                "required": list(parameters),
                "returns": "object",
            }
            for name, parameters in _OPERATIONS.items()
        },
        "sites": {
            **{name: {"info": {"description": name}, "interface": {}} for name in ("homesite", "server")},
            **{name: {"info": {"description": name}, "interface": offered} for name in ("a", "b")},
        },
    }
    library = folder / "dfmbench" / "lib"
    library.mkdir(parents=True)
    (folder / "dfmbench" / "__init__.py").touch()
    (library / "__init__.py").write_text(_CODE)
    path = folder / "federation.dfm.yaml"
    path.write_text(yaml.safe_dump(federation))
    generator = ApiGen.from_yaml_file(str(path))
    generator.generate_api("python", outpath=folder)
    generator.generate_runtime("python", outpath=folder)


class _Jobs:
    """Runs its jobs, one after the other."""

    def __init__(self, folder: Path, kit: Path, user: str) -> None:
        from dfmbench.fed.runtime.homesite import get_session  # type: ignore[import-not-found] # it was made just now

        self.session = get_session(
            target="flare", user=user, admin_package=kit, flare_workspace=folder, job_workspace=folder / "jobs"
        )
        began = time.perf_counter()
        self.session.connect()
        self.connected = time.perf_counter() - began

    def run(self, make: Callable[[], Any], params: Any) -> tuple[float, list[tuple[float, Any]], float]:
        """Runs a job to its end: when it was submitted, when each result came, and when it was over."""
        from nv_dfm_core.api import ErrorToken, Pipeline, Yield

        with Pipeline() as pipeline:
            Yield(value=make())
        prepared = self.session.prepare(pipeline)
        came: list[tuple[float, Any]] = []

        def callback(_site: Any, _node: Any, _frame: Any, _place: Any, data: Any) -> None:
            if isinstance(data, ErrorToken):
                print(data, file=sys.stderr)
            else:
                came.append((time.perf_counter(), data if isinstance(data, float | int) else None))

        began = time.perf_counter()
        job = self.session.execute(
            prepared, input_params=params, default_callback=lambda *_: None, place_callbacks={"yield": callback}
        )
        job.wait_until_finished(timeout=120)
        return began, came, time.perf_counter()


def _first_result(jobs: _Jobs, n: int) -> dict[str, float]:
    from dfmbench.fed.api.bench import Echo  # type: ignore[import-not-found]
    from nv_dfm_core.api import PlaceParam

    began, came, ended = jobs.run(lambda: Echo(site="a", x=PlaceParam(place="x")), {"x": 1})
    _expect(came, 1)
    return {"first result": came[0][0] - began, "round trip": ended - began}


def _results(jobs: _Jobs, n: int) -> dict[str, float]:
    from dfmbench.fed.api.bench import Numbers
    from nv_dfm_core.api import PlaceParam

    _, came, _ = jobs.run(lambda: Numbers(site="a", n=PlaceParam(place="n")), {"n": n})
    _expect(came, n)
    return {"results": (n - 1) / max(came[-1][0] - came[0][0], 1e-3)}


def _tokens(jobs: _Jobs, n: int) -> dict[str, float]:
    from dfmbench.fed.api.bench import Stage, Stamp
    from nv_dfm_core.api import PlaceParam

    rows = [{"x": i} for i in range(n)]
    _, came, _ = jobs.run(lambda: Stamp(site="b", v=Stage(site="a", v=PlaceParam(place="x"))), rows)
    _expect(came, n)
    return {"tokens": _rate(came)}


def _arrays(jobs: _Jobs, n: int) -> dict[str, float]:
    from dfmbench.fed.api.bench import Array, Stamp
    from nv_dfm_core.api import PlaceParam

    found = {}
    for mib, count in ((1, 16), (16, 8)):
        rows = [{"size": mib * _MIB}] * count
        _, came, _ = jobs.run(lambda: Stamp(site="b", v=Array(site="a", size=PlaceParam(place="size"))), rows)
        _expect(came, count)
        found[f"{mib} MiB"] = 1 / _rate(came)
    return found


WORKLOADS: dict[str, Callable[[_Jobs, int], dict[str, float]]] = {
    "first_result": _first_result,
    "results": _results,
    "tokens": _tokens,
    "arrays": _arrays,
}


def _expect(came: list[Any], n: int) -> None:
    if len(came) != n:
        raise RuntimeError(f"{len(came)} of {n} results came")


def _rate(came: list[tuple[float, Any]]) -> float:
    """How many per second the second site got."""
    times: list[float] = sorted(value for _, value in came)
    return (len(times) - 1) / (times[-1] - times[0])


@asynccontextmanager
async def _federation(folder: Path) -> AsyncIterator[tuple[Path, str]]:
    """A server and two clients of nvflare 2.6, whose kits are not those of 2.9; gives the kit of a user."""
    import yaml

    from dfm_async.deploy.flare_process import FlareProcess, guarded, kill_marked
    from dfm_async.deploy.kit import Kit
    from dfm_async.deploy.local_flare import _free_ports
    from dfm_async.deploy.project import Project, User

    port, admin_port = _free_ports()
    user = User("user@dfm.local")
    sites = ("a", "b")
    project = Project(
        name="server", sites=sites, users=(user,), server="localhost", port=port, admin_port=admin_port, scheme="tcp"
    )
    described = yaml.safe_load(project.to_yaml())
    for builder in described["builders"]:
        if builder["path"].endswith("CertBuilder"):
            builder["args"] = {}  # it has none in 2.6
        if builder["path"].endswith("StaticFileBuilder"):
            agent = {"path": "nvflare.ha.dummy_overseer_agent.DummyOverseerAgent", "overseer_exists": False}
            builder["args"]["overseer_agent"] = {**agent, "args": {"sp_end_point": f"localhost:{port}:{admin_port}"}}
    (folder / "project.yml").write_text(yaml.safe_dump(described))
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "."]
    await asyncio.to_thread(subprocess.run, command, cwd=folder, check=True, stdin=subprocess.DEVNULL)
    kits = folder / project.name / "prod_00"
    Kit(kits / "localhost").become_server(str(folder / "store"))
    mark = secrets.token_hex(8)
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    async with guarded(mark, ()):
        server = FlareProcess(Kit(kits / "localhost"), "server", org=project.org, mark=mark, environment=environment)
        clients = [
            FlareProcess(Kit(kits / n), "client", org=project.org, mark=mark, environment=environment) for n in sites
        ]
        try:
            async with asyncio.timeout(60):
                await server.start()
                await asyncio.gather(*(client.start() for client in clients))
            yield kits / user.name, user.name
        finally:
            await kill_marked(mark)
            for node in (server, *clients):
                await node.kill()


async def _main(workload: str, folder: Path, repeats: int) -> None:
    logging.disable(logging.CRITICAL)
    _generate(folder)
    output = os.dup(1)
    os.dup2(2, 1)  # FLARE prints
    async with _federation(folder) as (kit, user):
        jobs = await asyncio.to_thread(_Jobs, folder, kit, user)
        n = 100 if repeats == 1 else 400
        rounds = [await asyncio.to_thread(WORKLOADS[workload], jobs, n) for _ in range(repeats)]
        await asyncio.to_thread(jobs.session.close)
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    found["connect"] = jobs.connected
    os.write(output, json.dumps(found).encode() + b"\n")
    os._exit(0)  # FLARE's threads may hang in the interpreter's own end


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
