"""Handshakes between the processes of a host job, and the packets behind them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dfm_async.errors import DfmError
from dfm_async.targets.flare.authentication import Credentials, Forged
from dfm_async.targets.flare.link import _GREETING, Inboxes
from tests.flare.identities import SERVER, certificate, credentials, key


def shake(one: Credentials, two: Credentials) -> tuple[Any, Any]:
    """Both sides of a handshake; returns their keys."""
    opening = one.greet(two.name, b"hello")
    assert two.read_greeting(one.name, opening.greeting) == b"hello"
    theirs, answer = two.answer(one.name, opening.greeting, b"welcome")
    ours, told = opening.finish(answer)
    assert told == b"welcome"
    return ours, theirs


@pytest.mark.parametrize(("first", "second"), [("lab", "server"), ("server", "lab"), ("lab", "desk")])
def test_both_sides_of_a_handshake_agree_on_keys(first: str, second: str) -> None:
    ours, theirs = shake(credentials(first), credentials(second))
    packet = ours.encrypt(7, b"head", b"body")
    assert theirs.decrypt(7, b"head", packet) == b"body"
    assert ours.acknowledgement(7) == theirs.acknowledgement(7) != ours.acknowledgement(8)
    for number, head, data in [(8, b"head", packet), (7, b"heaD", packet), (7, b"head", packet[:-1]), (7, b"", b"")]:
        with pytest.raises(Forged, match="wrong authentication code"):
            theirs.decrypt(number, head, data)


def test_every_link_has_keys_of_its_own() -> None:
    one, two = credentials("lab"), credentials("desk")
    (first, _), (second, _) = shake(one, two), shake(one, two)
    assert first.encrypt(1, b"", b"body") != second.encrypt(1, b"", b"body")
    assert first.acknowledgement(1) != second.acknowledgement(1)


HOSTILE = {
    "the certificate of desk": lambda: credentials("lab", owner="desk"),  # its own certificate
    "a certificate of desk for the hub": lambda: credentials("server", owner="desk"),
    "not signed": lambda: credentials("lab", owner="desk", chain=[certificate("lab")]),  # that of another
    "not issued": lambda: credentials("lab", owner="self", chain=[certificate("lab", "self", owner="self")]),
    "may not issue": lambda: credentials(  # issued by another site
        "lab", owner="x", chain=[certificate("lab", "desk", owner="x"), certificate("desk")]
    ),
    "not valid at present": lambda: credentials("lab", chain=[certificate("lab", days=-1)]),
    "not signed, for another job": lambda: credentials("lab", "another job"),
    "another role: lead": lambda: credentials("lab", chain=[certificate("lab", role="lead")]),  # a user of that name
    "another role: server": lambda: credentials("lab", chain=[certificate("lab", role="server")]),
    "the certificate of a site called server": lambda: credentials("server", owner="server"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_nobody_can_take_part_under_the_name_of_another(how: str) -> None:
    hostile, target = HOSTILE[how](), credentials("home")
    greeting = hostile.greet("home", b"hello").greeting
    with pytest.raises(
        Forged, match=how.split(",")[0] if how.startswith(("not", "may", "another")) else "the certificate of"
    ):
        target.answer(hostile.name, greeting, b"")
    opening = target.greet(hostile.name, b"hello")  # nor can they answer in its place
    with pytest.raises(Forged):
        opening.finish(hostile.sign("answer", "home", hashlib.sha256(opening.greeting).digest(), b"", opening._private))
    assert shake(credentials(hostile.name), target)


def test_a_handshake_is_good_for_its_receiver_and_its_greeting_only() -> None:
    lab, desk, home = credentials("lab"), credentials("desk"), credentials("home")
    opening = lab.greet("desk", b"hello")
    with pytest.raises(Forged, match="not signed"):
        home.read_greeting("lab", opening.greeting)  # passed on to another receiver
    _, answer = desk.answer("lab", opening.greeting, b"")
    with pytest.raises(Forged, match="not signed"):
        lab.greet("desk", b"hello").finish(answer)  # to an earlier greeting
    with pytest.raises(Forged, match="not signed"):
        desk.read_greeting("lab", b"garbage")


def test_certificates_that_name_their_kind_of_participant_are_accepted() -> None:
    server = credentials("server", chain=[certificate(SERVER, role="server")])
    assert shake(credentials("lab", chain=[certificate("lab", role="client")]), server)


def test_certificates_by_an_intermediate_authority_are_taken() -> None:
    middle = certificate("middle", authority=True)
    lab = credentials("lab", chain=[certificate("lab", "middle"), middle])
    assert shake(lab, credentials("home"))


def test_a_greeting_that_is_repeated_does_not_change_the_keys() -> None:
    inboxes, lab = Inboxes(credentials("home"), "life", 1000), credentials("lab")
    greeting = _GREETING + lab.greet("home", b"\x91\x92\x01\x01").greeting  # of link (1, 1)
    answer, _ = inboxes.take("lab", greeting)
    assert inboxes.take("lab", greeting) == (answer, [])
    another = _GREETING + lab.greet("home", b"\x91\x92\x01\x01").greeting
    with pytest.raises(ValueError, match="replaced"):
        inboxes.take("lab", another)


def write_kit(folder: Path, name: str) -> None:
    kind, holder = ("server", SERVER) if name == "server" else ("client", name)
    (folder / f"{kind}.crt").write_bytes(certificate(holder).public_bytes(Encoding.PEM))
    private = key(holder).private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / f"{kind}.key").write_bytes(private)
    (folder / "rootCA.pem").write_bytes(certificate("root", authority=True).public_bytes(Encoding.PEM))
    if kind == "client":
        (folder / "fed_client.json").write_text(json.dumps({"servers": [{"name": "fed", "identity": SERVER}]}))


def test_credentials_are_read_from_startup_kits(tmp_path: Path) -> None:
    found = []
    for name in ("server", "lab"):
        folder = tmp_path / name
        folder.mkdir()
        write_kit(folder, name)
        found.append(Credentials.load(folder, name, "job"))
    assert shake(*found)
    assert shake(*reversed(found))
    (tmp_path / "lab" / "client.key").unlink()
    with pytest.raises(DfmError, match=r"not a complete startup kit: FileNotFoundError.* Provision it again"):
        Credentials.load(tmp_path / "lab", "lab", "job")
