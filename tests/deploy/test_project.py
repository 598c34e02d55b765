"""Project files: what FLARE provisions from."""

from __future__ import annotations

import re

import pytest
import yaml

from dfm_async.deploy.project import project_name
from dfm_async.errors import DeploymentError
from dfm_async.flare import Project, User


def project(**changes: object) -> Project:
    given = {"name": "weather", "sites": ("home", "lab"), "users": (User("ann@example.org"),), "server": "localhost"}
    return Project(**{**given, **changes})  # type: ignore[arg-type] # wrong ones are what the tests are about


def test_the_project_file_has_the_server_every_site_and_every_user() -> None:
    users = (User("ann@example.org"), User("bob@example.org", "project_admin"))
    data = yaml.safe_load(project(users=users, port=9002, admin_port=9003).to_yaml())
    found = {entry["name"]: entry for entry in data["participants"]}
    assert found["localhost"]["type"] == "server"
    assert (found["localhost"]["fed_learn_port"], found["localhost"]["admin_port"]) == (9002, 9003)
    assert found["home"]["type"] == found["lab"]["type"] == "client"
    assert {name: found[name]["role"] for name in ("ann@example.org", "bob@example.org")} == {
        "ann@example.org": "lead",
        "bob@example.org": "project_admin",
    }


def test_all_invalid_names_are_reported_together() -> None:
    wrong = project(
        name="a b",
        sites=("home", "lab/../x", "server", "home", "x" * 64),
        users=(User("ann"), User("bob@example.org", "king")),
        server="no host",
        org="a-b",
        scheme="pigeon",
        port=0,
    )
    with pytest.raises(DeploymentError) as raised:
        wrong.check()
    reported = "\n".join(raised.value.problems)
    names = ["'a b'", "lab/../x", "'server' is the server", "'home' is there twice", "xxxx", "'ann' must be", "king"]
    for part in [*names, "no host", "a-b", "pigeon", "port 0"]:
        assert part in reported
    assert len(raised.value.problems) == 11


def test_a_project_without_sites_or_users_is_refused() -> None:
    with pytest.raises(DeploymentError, match=r"no site besides the server[^\n]*\n[^\n]*no user"):
        project(sites=(), users=()).check()


@pytest.mark.parametrize("name", ["weather", "weather.europe.2", "Wetter für alle", "x" * 100, "../..", ""])
def test_federation_names_are_valid_in_flare(name: str) -> None:
    found = project_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,63}", found)
    project(name=found).check()
