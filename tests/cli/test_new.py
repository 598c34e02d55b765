"""``dfm-async new``: what it creates works as it is, and nothing is overwritten."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cli.rig import dfm, invoked, started
from tests.support.processes import read_until, run_python

FILES = ["README.md", "my_weather.py", "pyproject.toml", "tests/test_my_weather.py"]


def test_a_new_project_passes_its_tests_runs_and_serves(tmp_path: Path) -> None:
    made = dfm("new", "my-weather", cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    project = tmp_path / "my-weather"
    assert sorted(str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()) == FILES
    assert [name for name in FILES if "project" in (project / name).read_text().replace("[project]", "")] == []

    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"] == []
    assert "pip install '/path/to/the/checkout[cli]'" in (project / "README.md").read_text()
    tested = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", cwd=project)
    assert "4 passed" in tested.stdout
    assert tested.stderr == ""
    last = made.stdout.splitlines()[-1].split()
    assert last[:2] == ["dfm-async", "run"]
    ran = dfm("run", *last[2:], "--place", "result", "--quiet", cwd=project)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "result [0] 1.5\n", "")
    with started("serve", "my_weather.py", "--port", "0", cwd=project) as process:
        assert "(pipelines: anomalies)" in read_until(process.stdout, "serving 'my_weather'").string


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weather").mkdir()
    done = invoked("new", "weather")
    assert done.exit_code == 2
    assert "weather exists already: choose another name" in done.stderr
    assert list((tmp_path / "weather").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../weather", "'../weather' is not a valid project name"),
        ("my.weather", "'my.weather' is not a valid project name"),
        ("weather-", "'weather-' is not a valid project name"),
        ("2days", "'2days' is not a valid project name"),
        ("größe", "'größe' is not a valid project name"),
        ("w" * 51, "is not a valid project name"),
        ("lambda", "'lambda' is a keyword of Python"),
        ("json", "there is another module 'json'"),
        ("dfm-async", "there is another module 'dfm_async'"),
        ("tests", "there is another module 'tests'"),
    ],
)
def test_names_that_cannot_be_imported_are_rejected(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoked("new", name)
    assert done.exit_code == 2
    assert problem in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = invoked("new", "weather")
    assert (done.exit_code, done.stderr) == (2, "dfm-async: weather: No such file or directory\n")
