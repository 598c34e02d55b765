"""``dfm-async doctor``."""

from __future__ import annotations

import platform
import resource
from importlib import metadata

import pytest

from dfm_async.base.text import install_hint
from dfm_async.cli.doctor import _CHECKS, package_findings
from dfm_async.model.findings import Finding
from tests.cli.rig import dfm, lines


def found() -> dict[str, Finding]:
    return {finding.name: finding for check in _CHECKS for finding in check()}


def test_a_machine_that_runs_these_tests_is_ok() -> None:
    done = dfm("doctor", "--json")
    reported = {line["name"]: line for line in lines(done.stdout)}
    assert (done.returncode, [line for line in reported.values() if line["state"] == "bad"]) == (0, [])
    assert reported["a worker"]["detail"].startswith("answered")
    assert f"msgspec {metadata.version('msgspec')}" in reported["packages"]["detail"]
    assert "typer" in reported["extra cli"]["detail"]


def test_few_open_files_are_bad_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 2000))
    assert found()["open files"] == Finding("open files", "bad", "100 (hard limit 2,000)", "ulimit -n 2000")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert found()["open files"].advice.startswith("have the hard limit raised"), "what cannot help is no advice"


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_bad(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("x" * 80)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert found()["temporary files"].state != "bad", "on Linux, sockets have no path"
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    finding = found()["temporary files"]
    assert (finding.state, finding.advice.partition(":")[0]) == ("bad", "set TMPDIR to a shorter path")


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version

    def version(name: str) -> str:
        if name == "typer":
            return "0.1"
        if name in ("msgspec", "uvloop"):
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    reported = {finding.name: finding for finding in package_findings()}
    assert (reported["packages"].state, reported["packages"].detail) == ("bad", "msgspec is missing")
    assert (reported["extra cli"].state, reported["extra cli"].detail) == ("warn", "typer is 0.1, but must be >=0.19")
    assert reported["extra uvloop"].detail == f"not installed; to install it: {install_hint('uvloop')}"
