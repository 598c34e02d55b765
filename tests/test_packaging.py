"""The lock names what is declared."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
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
