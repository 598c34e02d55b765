"""Nothing is imported, run, written or asked for because a document says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, JobFailed, Pipeline, Session, Yield
from dfm_async.errors import DfmError
from dfm_async.federation import ClassPath, VaultConfig
from tests.conftest import Connect
from tests.safety import borrowed
from tests.safety.documents import MARK
from tests.support.processes import ROOT, run_python


def test_reading_hostile_documents_makes_python_do_nothing_else(tmp_path: Path) -> None:
    # -B: writing bytecode is no fault
    done = run_python("-B", "-m", "tests.safety.watched", tmp_path, cwd=ROOT, timeout=120)
    assert done.stdout.startswith("tried "), done.stdout
    assert int(done.stdout.split()[1]) > 100
    assert [path.name for path in tmp_path.iterdir()] == ["federation.dfm.yaml"]


ARGS: dict[str, Any] = {"args": ["touch", MARK]}
PATHS = [
    "os.system",
    "subprocess.Popen",
    "subprocess.run",
    "builtins.eval",
    "importlib.import_module",
    "antigravity.Joke",
    "__main__.Adapter",
    "dfm_async.exchange.launcher.SubprocessLauncher",
    "dfm_async.session.session.Session",
    "tests.safety.borrowed.Popen",
    "tests.safety.borrowed.run",
    "tests.safety.borrowed.Bodiless",
    "tests.safety.borrowed.missing",
]


@pytest.fixture(autouse=True)
def nothing_was_done() -> Iterator[None]:
    yield
    assert not Path(MARK).exists()
    assert not borrowed.built
    assert "antigravity" not in sys.modules


def hostile() -> Federation:
    federation = Federation("hostile")
    federation.declare("op", lambda: 1)

    @federation.site("good").operation
    def fine() -> int:
        return 1

    return federation


async def test_classes_that_are_not_adapters_are_not_built(connect: Connect) -> None:
    federation = hostile()
    pipelines = []
    for number, path in enumerate(PATHS):
        site = federation.site(f"s{number}", workers=1)
        site.adapt("op", ClassPath(path, ARGS))
        with Pipeline(path) as pipeline:
            Yield(federation.operations.op(site=site), place="bad")
            Yield(federation.operations.fine(), place="fine")
        pipelines.append(pipeline)
    async with connect(federation) as session:
        for pipeline in pipelines:
            job = await session.execute(pipeline)
            with pytest.raises(JobFailed, match="LoadingError"):
                await job
            assert [result.value for result in job.latest()] == [1]


@pytest.mark.parametrize("path", ["subprocess.Popen", "tests.safety.borrowed.Popen", "tests.safety.borrowed.Bodiless"])
async def test_classes_that_are_not_vaults_are_not_built(path: str) -> None:
    federation = Federation("hostile")
    federation.site("here", vault=VaultConfig(path=path, args=ARGS)).operation(len)
    with pytest.raises(DfmError, match=r"vault|secret"):
        async with Session(federation, target="inline"):
            pass
