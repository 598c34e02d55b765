"""The file by which a program finds its site: private, whole or not there, and its secret never told (3.1.1)."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from dfm_async.errors import HandshakeRefused
from dfm_async.exchange.bootstrap import VARIABLE, Address, Bootstrap, new_token, read_bootstrap, write_bootstrap
from dfm_async.exchange.program_messages import VERSION, Hello

BOOTSTRAP = Bootstrap(
    address=Address(kind="unix", name="@somewhere"),
    token="very secret",
    session="s1",
    site="berlin",
    job="j1",
    launch_once=False,
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = write_bootstrap(BOOTSTRAP, tmp_path / "boot")
    assert read_bootstrap(file) == read_bootstrap(str(file)) == BOOTSTRAP
    assert os.listdir(tmp_path) == ["boot"], "nothing else is left"


def test_without_a_path_it_is_a_new_file() -> None:
    first, second = write_bootstrap(BOOTSTRAP), write_bootstrap(BOOTSTRAP)
    try:
        assert first != second
        assert read_bootstrap(first) == BOOTSTRAP
    finally:
        first.unlink()
        second.unlink()


def test_only_this_user_can_read_it_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = write_bootstrap(BOOTSTRAP, tmp_path / "boot")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_was_there_is_replaced_in_one_step(tmp_path: Path) -> None:
    """Whoever reads meanwhile sees the old one or the new one, and never half of one."""
    path = tmp_path / "boot"
    long = msgspec.structs.replace(BOOTSTRAP, job="j" * 40_000)
    write_bootstrap(BOOTSTRAP, path)
    stop = threading.Event()
    seen: list[Bootstrap | HandshakeRefused] = []

    def read() -> None:
        while not stop.is_set():
            try:
                found = read_bootstrap(path)
            except HandshakeRefused as error:
                seen.append(error)
            else:
                if found not in (BOOTSTRAP, long):
                    seen.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(30):
            write_bootstrap(long, path)
            write_bootstrap(BOOTSTRAP, path)
    finally:
        stop.set()
        reader.join()
    assert seen == []


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    with pytest.raises(OSError, match="boot"):
        write_bootstrap(BOOTSTRAP, tmp_path / "boot")
    assert os.listdir(tmp_path) == ["boot"]


def test_the_path_is_known_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_bootstrap(BOOTSTRAP, "boot") == tmp_path / "boot"


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_bootstrap(BOOTSTRAP, tmp_path / "boot")
    assert read_bootstrap(environment={VARIABLE: str(file)}) == BOOTSTRAP
    monkeypatch.setenv(VARIABLE, str(file))
    assert read_bootstrap() == BOOTSTRAP


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}])
def test_a_program_that_was_not_launched_gets_advice_to_attach(environment: dict[str, str]) -> None:
    with pytest.raises(HandshakeRefused, match=f"{VARIABLE} is not set.*executor.bootstrap"):
        read_bootstrap(environment=environment)


@pytest.mark.parametrize(("name", "problem"), [("none", "used already"), (".", "cannot be read")])
def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(HandshakeRefused, match=problem) as caught:
        read_bootstrap(tmp_path / name)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o777])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_bootstrap(BOOTSTRAP, tmp_path / "boot")
    file.chmod(mode)
    with pytest.raises(HandshakeRefused, match="mode 0600"):
        read_bootstrap(file)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_bootstrap(BOOTSTRAP, tmp_path / "boot")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(HandshakeRefused, match="belong to this user"):
        read_bootstrap(file)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            msgspec.json.encode(msgspec.structs.replace(BOOTSTRAP, version=VERSION + 1)),
            f"version {VERSION + 1} .* this",
        ),
        (b'{"version": 99, "where": "elsewhere"}', "version 99"),
        (b"", "boot is not a bootstrap file"),
        (b"{", "boot is not a bootstrap file"),
        (b"[]", "boot is not a bootstrap file"),
        (b"3", "boot is not a bootstrap file"),
        (b"{}", "boot is not a bootstrap file"),
        (b"\xff\xfe\x00", "boot is not a bootstrap file"),
        (b'{"version": "1"}', "boot is not a bootstrap file"),
        (b'{"address": {"kind": "unix"}, "session": "s"}', "boot is not a bootstrap file"),
        (b" " * 100_000, "boot is not a bootstrap file"),
        (b"[" * 60_000, "boot is not a bootstrap file"),
    ],
)
def test_another_version_and_other_content_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "boot"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(HandshakeRefused, match=problem):
        read_bootstrap(file)


def test_the_token_is_never_in_what_is_shown() -> None:
    hello = Hello(VERSION, BOOTSTRAP.token, BOOTSTRAP.session, 7)
    for shown in (repr(BOOTSTRAP), str(BOOTSTRAP), f"{BOOTSTRAP}", repr([BOOTSTRAP]), repr(hello), str(hello)):
        assert BOOTSTRAP.token not in shown
        assert BOOTSTRAP.session in shown


def test_tokens_are_long_and_different() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32
