"""``dfm-async profile``: runs a pipeline as ``run`` does, and writes where the time went."""

from __future__ import annotations

from pathlib import Path

from tests.cli.rig import STATIONS, dfm, invoked

RUN = (STATIONS, "squares", "--param", "x=3", "--target", "inline")


def test_a_profile_comes_with_the_results(tmp_path: Path) -> None:
    done = dfm("profile", *RUN, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "yield [0] 9\n")
    assert "where the time went:\n\noperation  site  worker" in done.stderr
    assert "the flame graph is in profile.html" in done.stderr
    assert "Where the time went" in (tmp_path / "profile.html").read_text()


def test_a_profile_is_written_although_the_job_fails(tmp_path: Path) -> None:
    path = tmp_path / "flame.txt"
    failing = (STATIONS, "anomalies", "--param", "day=fri", "--target", "inline")
    done = dfm("profile", *failing, "--quiet", "--flame", str(path))
    assert done.returncode == 1
    assert "KeyError: 'fri'" in done.stderr
    assert "where the time went" not in done.stderr
    assert path.exists()


def test_a_file_that_cannot_be_written_is_rejected_before_the_run(tmp_path: Path) -> None:
    for path, problem in [
        ("flame.svg", "must end with .html"),
        (str(tmp_path / "no" / "x.html"), "there is no folder"),
    ]:
        done = invoked("profile", *RUN, "--flame", path)
        assert (done.exit_code, done.stdout) == (2, "")
        assert problem in done.stderr
