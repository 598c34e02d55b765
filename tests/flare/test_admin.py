"""What is wrong with a user's kit is told before anybody connects."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dfm_async import FlareOptions
from dfm_async.errors import FlareError
from dfm_async.targets.flare.admin import Admin, UserKit


def kit(folder: Path, name: str = "fed_admin.json", text: str | None = None, port: int = 1) -> Path:
    (folder / "startup").mkdir()
    admin = {"admin": {"username": "ann@lab.org", "host": "localhost", "port": port}}
    (folder / "startup" / name).write_text(json.dumps(admin) if text is None else text)
    return folder


def test_a_kit_says_whose_it_is_and_where_the_server_is(tmp_path: Path) -> None:
    assert UserKit.read(kit(tmp_path, port=8003)) == ("ann@lab.org", "localhost", 8003)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("fed_client.json", "{}", "is the startup kit of a client, not of a user"),
        ("fed_server.json", "{}", "is the startup kit of the server, not of a user"),
        ("fed_admin.json", "{", "cannot be read: JSONDecodeError"),
        ("fed_admin.json", "{}", "cannot be read: KeyError"),
        ("fed_admin.json", "[]", "cannot be read: TypeError"),
        ("something", "", "cannot be read: FileNotFoundError"),
    ],
)
def test_what_is_no_kit_of_a_user_is_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(FlareError, match=told):
        UserKit.read(kit(tmp_path, name, text))


async def test_another_user_than_that_of_the_kit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlareError, match=r"is that of 'ann@lab.org', not of 'bob@lab.org'"):
        await Admin(kit(tmp_path), "bob@lab.org").open(1)


async def test_an_unreachable_server_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    assert await UserKit.read(kit(tmp_path, port=port)).why_not() == f"localhost, port {port}: Connection refused"


async def test_a_server_that_can_be_connected_to_is_not_blamed(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as there:
        assert await UserKit.read(kit(tmp_path, port=there.getsockname()[1])).why_not() == ""


@pytest.mark.parametrize(("named", "kind"), [({"user": ""}, ValueError), ({"startup_kit": None}, TypeError)])
def test_options_without_a_user_or_a_kit_are_refused(named: dict[str, Any], kind: type[Exception]) -> None:
    given: dict[str, Any] = {"startup_kit": "kit", "user": "ann", **named}
    with pytest.raises(kind, match=next(iter(named))):
        FlareOptions(**given)
