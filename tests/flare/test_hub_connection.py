"""Which host job a session takes, and which ones FLARE reports although they have ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, FlareOptions, Pipeline, Yield
from dfm_async.planning.prepare import prepare
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.admin_process import _Admin, _outcome, _refused_by, _runs
from dfm_async.targets.flare.flare_target import FlareTarget
from dfm_async.targets.flare.hub_connection import _has_all

BEGAN = 1000.0

fed = Federation("travelling")


@fed.site("lab").operation
async def weigh() -> int:
    return 1


with Pipeline("weighing") as weighing:
    Yield(weigh())


def welcome(*there: str, deployed: tuple[str, ...] = ("server", "archive", "lab"), **lost: float) -> fm.Welcome:
    sites = {name: fm.SiteInfo({}, False) for name in there}
    gone = dict.fromkeys(lost, "it was lost")
    return fm.Welcome(
        protocol=fm.PROTOCOL,
        version="1",
        host_job="host_job",
        sites=sites,
        deployed=list(deployed),
        gone=gone,
        gateway=("", ""),
        largest=1,
        began=BEGAN,
        since=lost,
    )


@pytest.mark.parametrize(
    ("found", "last_seen", "fits"),
    [
        (welcome("server", "archive", "lab"), {"archive": 2000.0, "lab": 2000.0}, True),
        (welcome("server"), {"archive": 2000.0, "lab": 2000.0}, True),  # they are starting
        (welcome("archive"), {"archive": 2000.0}, None),
        (welcome("server", "archive", lab=1500.0), {"archive": 2000.0, "lab": 1499.0}, True),  # it is dead
        (welcome("server", "archive", lab=1500.0), {"archive": 2000.0, "lab": 1501.0}, False),  # it is back
        (welcome("server", "archive", lab=1500.0), {"archive": 2000.0}, True),
        (welcome("server", deployed=("server", "archive")), {"archive": 2000.0, "lab": 999.0}, True),
        (welcome("server", deployed=("server", "archive")), {"archive": 2000.0, "lab": 1001.0}, False),
    ],
)
def test_a_new_host_job_is_started_only_if_it_can_have_more_sites(
    found: fm.Welcome, last_seen: dict[str, float], fits: bool | None
) -> None:
    assert _has_all(last_seen, found) is fits


@pytest.mark.parametrize(
    ("meta", "runs"),
    [
        ({"status": "RUNNING", "start_time": "1970-01-01T00:16:39+00:00"}, False),  # the server has started again
        ({"status": "RUNNING", "start_time": "1970-01-01T00:16:41+00:00"}, True),
        ({"status": "SUBMITTED"}, True),
        ({"status": "DISPATCHED", "start_time": ""}, True),
        ({"status": "FINISHED:COMPLETED", "start_time": "1970-01-01T00:16:41+00:00"}, False),
    ],
)
def test_jobs_of_an_earlier_server_process_do_not_count_as_running(meta: dict[str, Any], runs: bool) -> None:
    assert _runs(meta, BEGAN) is runs


def test_sites_that_refuse_a_host_job_are_known() -> None:
    details = ["server: OK", "lab: BYOC: not allowed", "archive: OK"]
    assert _refused_by({"job_deploy_detail": details}) == ["lab"]
    assert _refused_by({}) == []


FAILED = {"status": "FINISHED:FAILED_TO_RUN"}
REASON = {**FAILED, "job_deploy_detail": ["server: OK", "lab: BYOC not permitted"]}


@pytest.mark.parametrize(
    ("metas", "outcome"),
    [
        ([{"status": "RUNNING"}], ""),
        ([{"status": "FINISHED:COMPLETED"}], "FINISHED:COMPLETED"),
        ([REASON], "FINISHED:FAILED_TO_RUN; lab: BYOC not permitted"),
        ([FAILED, FAILED, REASON], "FINISHED:FAILED_TO_RUN; lab: BYOC not permitted"),
        ([FAILED] * 6, "FINISHED:FAILED_TO_RUN"),
    ],
)
def test_the_reason_why_a_host_job_did_not_run_may_be_written_later(metas: list[dict[str, Any]], outcome: str) -> None:
    unread = iter(metas)
    assert _outcome(lambda: next(unread)) == outcome
    assert list(unread) == []


def test_sites_that_refuse_a_host_job_may_be_written_later() -> None:
    job = {"name": "host", "job_id": "1", "status": "DISPATCHED"}
    answers = iter([[job], [{**job, "job_deploy_detail": ["server: OK", "lab: not allowed"]}]])
    session = SimpleNamespace(
        get_system_info=lambda: SimpleNamespace(server_info=SimpleNamespace(start_time=0)),
        list_jobs=lambda **_: next(answers),
    )
    assert _Admin.host_jobs(SimpleNamespace(_session=session), "host") == [("1", ["lab"])]  # type: ignore[arg-type]


@pytest.mark.parametrize("python", [fm.PYTHON, "2.7"])
async def test_code_does_not_travel_to_another_version_of_python(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = prepare(weighing, fed, "home")
    sites = {name: fm.SiteInfo({}, True, python=python) for name in plan.sites}

    async def arrived(_sites: Any) -> None:
        """All sites are there."""

    async def connected(_target: FlareTarget, _plan: Any) -> Any:
        return SimpleNamespace(welcome=msgspec.structs.replace(welcome("server"), sites=sites), arrived=arrived)

    monkeypatch.setattr(FlareTarget, "_connected", connected)
    target = FlareTarget(FlareOptions(startup_kit=tmp_path, user="ann@lab.org", code="travels"))
    target._federation, target._homesite = fed, "home"
    target._offers = target._ship(fed, "home", {})
    problems = [str(problem) for problem in await target.refusals(plan)]
    text = f"the site has 2.7, and this program {fm.PYTHON}"
    assert problems == [] if python == fm.PYTHON else all(text in problem for problem in problems) and problems
