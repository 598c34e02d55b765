"""Development tasks of this project. ``python3 noxfile.py NAME ...`` needs only Python.

Run as a script, this file creates a virtual environment with nox in it and runs the named sessions there.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LOCK = ROOT / "constraints.txt"
"""The version of every package that the sessions install, written by the session ``lock``."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start thousands of processes: compile their code once


def bootstrap(names: list[str]) -> int:
    """Run the named sessions with nox from a private virtual environment."""
    home = ROOT / ".nox" / "bootstrap"
    python = home / "bin" / "python"
    if not python.exists():
        print("installing nox ...", flush=True)
        venv.create(home, with_pip=True)
    quiet = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", str(LOCK), "nox>=2024.10"]
    subprocess.run(quiet, check=True)
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    arguments = [str(python), "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", *names]
    return subprocess.run(arguments, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(bootstrap(sys.argv[1:] or ["demo"]))

import nox

nox.options.sessions = ["check"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

PARALLEL = ["-n", str(min(8, (os.cpu_count() or 1) + 3)), "--dist", "worksteal"]
"""Options to run tests in parallel. Three processes more than cores, because most of their time is waiting."""

PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")


def install(session: nox.Session, *groups: str, project: str = ".", locked: bool = True) -> None:
    """Install the project and some of its dependency groups."""
    lock = ["-c", str(LOCK)] if locked else []
    env = {"PIP_BUILD_CONSTRAINT": str(LOCK)}  # for what builds the project
    session.install("-q", *lock, "-e", project, *nox.project.dependency_groups(PROJECT, *groups), env=env)


BROWSER = {"chromium": "chromium fonts-liberation", "curl": "curl", "firefox-esr": "firefox-esr"}
DATABASE = {"pg_ctlcluster": "postgresql"}
NETWORK = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
"""Programs that tests need, with the Debian packages that contain them."""


def install_programs(session: nox.Session, programs: dict[str, str]) -> None:
    """Install system programs where possible; tests that need a missing program fail with a message."""
    chromium = ("chromium-browser", "google-chrome", "google-chrome-stable")
    found = {"chromium"} if "DFM_CHROMIUM" in os.environ or any(map(shutil.which, chromium)) else set()
    if "DFM_FIREFOX" in os.environ or shutil.which("firefox"):
        found.add("firefox-esr")
    missing = [name for name in programs if name not in found and shutil.which(name) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        session.warn(f"{', '.join(missing)} not found: tests that need them will fail. Run nox as root on Debian")
        return
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    packages = [package for name in missing for package in programs[name].split()]
    session.run(*apt, "update", external=True, env=env, silent=True)
    session.run(*apt, "install", "--no-install-recommends", *packages, external=True, env=env, silent=True)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the built-in example: three sites, progress, results."""
    install(session, project=".[cli]")
    session.run("dfm-async", "demo", *session.posargs)


@nox.session
def serve(session: nox.Session) -> None:
    """Start the example service with its live page."""
    install(session, "serve", project=".[web,sqlite]")
    session.run("python", "examples/service.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style, the import contracts, and that the package imports what it declares and nothing else."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    session.run("deptry", "dfm_async", silent=True)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, the tests and the tools, and that all public names have types."""
    install(session, "types", "bench")
    session.run("mypy")
    session.run("python", "-m", "tests.types.completeness")


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests, including real processes, random pipelines and the code of the guide."""
    install(session, "test")
    install_programs(session, BROWSER | NETWORK | DATABASE)
    session.run("pytest", *(session.posargs or PARALLEL))


def interpreter(version: str) -> str:
    """Return the interpreter of a version, from the path or from pyenv; otherwise the version, for nox to resolve."""
    found = shutil.which(f"python{version}")
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = [path for path in sorted(kept.glob(f"{version}.*/bin/python")) if path.exists()]
    works = found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
    return found if found and works else str(installed[-1]) if installed else version


def tests_on(version: str) -> None:
    """Define the session that runs all tests on one version of Python."""

    def run(session: nox.Session) -> None:
        tests(session)

    run.__doc__ = f"Run all tests on Python {version}."
    nox.session(python=interpreter(version), name=f"tests-{version}")(run)


SUPPORTED = nox.project.python_versions(PROJECT)
"""The Python versions in the classifiers of the project."""
for each in SUPPORTED:
    tests_on(each)


@nox.session
def pythons(session: nox.Session) -> None:
    """Run all tests on every supported version of Python that is installed."""
    for version in SUPPORTED:
        if Path(interpreter(version)).exists():
            session.notify(f"tests-{version}")
        else:
            session.warn(f"Python {version} is not installed: skipped")


@nox.session(python=interpreter("3.11"))
def lowest(session: nox.Session) -> None:
    """Run all tests with the oldest dependencies that pyproject.toml allows."""
    session.install("-q", "uv")
    group = nox.project.dependency_groups(PROJECT, "test")
    place = ["--python", str(Path(session.virtualenv.location) / "bin" / "python")]
    session.run("uv", "pip", "install", "-q", *place, "--resolution", "lowest-direct", "-e", ".[all]", *group)
    install_programs(session, BROWSER | NETWORK | DATABASE)
    session.run("pytest", *(session.posargs or PARALLEL))


@nox.session
def chaos(session: nox.Session) -> None:
    """Inject random faults, such as killed workers and applications: ``-- 1000`` sets the number of rounds.

    ``-- 200 --seed 4711 tests/chaos/test_kill_replicas.py`` runs only some tests, and begins with a seed. The name of
    each test contains its seed: ``-- 1 4711``, or ``-- 1 --seed 4711``, repeats the round with the seed 4711.
    """
    parser = argparse.ArgumentParser(prog="nox -s chaos --", allow_abbrev=False)
    parser.add_argument("--seed", type=int)
    parser.add_argument("given", nargs="*", metavar="rounds, seed or path")
    options = parser.parse_intermixed_args(session.posargs)
    numbers = [int(each) for each in options.given if each.isdecimal()]
    paths = [each for each in options.given if not each.isdecimal()]
    if options.seed is not None:
        numbers = [*(numbers or [100]), options.seed]
    defaults = [100, random.SystemRandom().randrange(10**9)]
    rounds, seed, *more = [*numbers, *defaults[len(numbers) :]]
    if more:
        parser.error("give at most a number of rounds and a seed")
    install(session, "test")
    install_programs(session, DATABASE)
    env = {"DFM_CHAOS_ROUNDS": str(rounds), "DFM_CHAOS_SEED": str(seed)}  # one seed for all processes of the run
    session.run("pytest", *PARALLEL, "-v", "--tb=short", *(paths or ["tests/chaos"]), env=env)


@nox.session
def flare(session: nox.Session) -> None:
    """Run all tests on real FLARE federations in their long version, with the gateway and with app commands."""
    install(session, "test")
    install_programs(session, NETWORK)
    paths = session.posargs or ["tests/flare", "tests/deploy", "tests/conformance"]
    for gateway in ("auto", "never"):
        env = {"DFM_FLARE_GATEWAY": gateway, "DFM_FLARE_PIPELINES": "200"}
        session.run("pytest", *PARALLEL, "-m", "", "-k", "flare", *paths, env=env)


@nox.session
def values(session: nox.Session) -> None:
    """Test the codec of PyTorch's tensors, which needs PyTorch."""
    install(session, "values")
    session.run("pytest", *(session.posargs or ["tests/wire/torch_tensors.py"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; every warning is an error."""
    install(session, "docs")
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def screenshot(session: nox.Session) -> None:
    """Take the screenshots of the live page for the documentation."""
    install(session, "test")
    install_programs(session, BROWSER)
    session.run("python", "-m", "tests.web.page.screenshots", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks: one command per figure, each compared with a peer or a lower bound."""
    install(session, "bench", "peers")
    install_programs(session, BROWSER | DATABASE)
    session.run("python", "-m", "benchmarks.all", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Run the code of Ray, Dask and Prefect in the documentation, and compare its output with ours."""
    install(session, "peer-docs", locked=False)
    session.run("pytest", "--noconftest", "-m", "peers", "tests/docs/test_peers.py", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Add to ``constraints.txt`` what pyproject.toml declares; ``-- --upgrade`` takes the newest versions."""
    session.install("-q", *nox.project.dependency_groups(PROJECT, "lock"))
    groups = [f"--group={name}" for name in PROJECT["dependency-groups"] if name != "peer-docs"]
    output = ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "-o", LOCK.name]
    python = ["--universal", f"--python-version={SUPPORTED[0]}", "--custom-compile-command=nox -s lock"]
    given = ["pyproject.toml", "--all-extras", *groups]
    session.run("uv", "pip", "compile", "-q", "--no-config", *python, *output, *given, *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Find known vulnerabilities of what ``constraints.txt`` names; needs access to PyPI."""
    install(session, "audit")
    session.run("pip-audit", "--strict", "--no-deps", "--disable-pip", "-r", str(LOCK), *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the sdist in ``dist``, check them, and run the demo of the wheel in a new environment."""
    session.install("-q", "-c", str(LOCK), *nox.project.dependency_groups(PROJECT, "build"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", silent=True)
    built = [str(path) for path in sorted((ROOT / "dist").iterdir())]
    session.run("twine", "check", "--strict", *built)
    wheel = next(path for path in built if path.endswith(".whl"))
    home = Path(session.create_tmp()).resolve() / "wheel"
    venv.create(home, clear=True, with_pip=True)
    session.chdir(home)  # so that the checkout is not imported
    python = str(home / "bin" / "python")
    session.run(python, "-m", "pip", "install", "-q", "-c", str(LOCK), f"{wheel}[cli]", external=True)
    session.run(python, "-m", "dfm_async", "demo", external=True)


@nox.session
def check(session: nox.Session) -> None:
    """Run everything that must pass."""
    for name in ("lint", "types", "docs", "tests"):
        session.notify(name)
