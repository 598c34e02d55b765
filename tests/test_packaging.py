"""What is installed: locked dependencies, the contents of the wheel and the sdist, and how workflows build them."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dfm_async

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SUPPORTED = [
    classifier.rpartition(" ")[2]
    for classifier in PROJECT["project"]["classifiers"]
    if re.search(r":: 3\.\d+$", classifier)
]
LINE = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9][0-9a-z.]*)( ; (?P<marker>.+))?")


# the lock


def locked() -> Iterator[Requirement]:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            assert LINE.fullmatch(line), f"not a version of a package: {line}"
            yield Requirement(line)


def declared() -> Iterator[Requirement]:
    project = PROJECT["project"]
    groups = [group for name, group in PROJECT["dependency-groups"].items() if name != "peer-docs"]
    listed = [PROJECT["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    for text in [text for group in [*listed, *groups] for text in group if isinstance(text, str)]:
        if not text.startswith("dfm-async["):
            yield Requirement(text)


@pytest.mark.parametrize("version", SUPPORTED)
def test_lock_has_one_version_of_everything_that_is_declared(version: str) -> None:
    python = {"python_version": version, "python_full_version": f"{version}.9", "sys_platform": "linux"}
    found: dict[str, list[str]] = {}
    for pin in locked():
        if pin.marker is None or pin.marker.evaluate(python):
            found.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    assert [name for name, versions in found.items() if len(versions) > 1] == []
    for requirement in declared():
        versions = found.get(canonicalize_name(requirement.name), [])
        fitting = [found for found in versions if found in requirement.specifier]
        assert fitting, f"constraints.txt has no version of {requirement} for Python {version}: run nox -s lock"


# the distributions


def sources(folder: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if not re.search(r"/(__pycache__|\.\w+_cache)/", str(path))}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def test_wheel_contains_the_package_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = set(ZipFile(wheel).namelist())
    metadata = {name for name in names if name.startswith(f"dfm_async-{dfm_async.__version__}.dist-info/")}
    assert names - metadata == sources("dfm_async")
    assert names > {
        "dfm_async/py.typed",
        "dfm_async/cli/project/pyproject.toml",
        "dfm_async/cli/project/tests/test_newproject.py",
        "dfm_async/cli/timeline.html",
        "dfm_async/telemetry/flame.html",
        "dfm_async/web/page/index.html",
        "dfm_async/web/page/main.js",
        "dfm_async/web/page/page.css",
    }
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


def test_sdist_contains_what_builds_and_tests_the_package(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names > sources("dfm_async") | {"pyproject.toml", "noxfile.py", "constraints.txt", "LICENSE", "README.md"}
    assert names > {"tests/conftest.py", "docs/conf.py", "CHANGELOG.md"}
    assert [name for name in names if "__pycache__" in name or "_cache/" in name or "_build/" in name] == []


# the workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_valid_and_pins_its_actions(path: Path) -> None:
    checker = str(Path(sys.executable).parent / "check-jsonschema")
    command = [checker, "--builtin-schema", "vendor.github-workflows", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    text = path.read_text(encoding="utf-8")
    actions = re.findall(r"uses: (\S+)", text)
    assert actions
    assert all(re.search(r"@(release/)?v\d+$", action) for action in actions)
    sessions = re.findall(r"noxfile\.py ([\w ]+)", text)
    known = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for names in sessions for name in names.split()} <= set(known)


def test_workflow_checks_every_supported_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == SUPPORTED
