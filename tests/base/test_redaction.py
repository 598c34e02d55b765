"""Secrets are found in texts however they are written there, and forgotten ones are few."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import secrets
import urllib.parse
import uuid
from base64 import b64encode, urlsafe_b64encode
from decimal import Decimal
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from dfm_async.base import redaction
from dfm_async.base.redaction import hide, holds_secret, note_secret

TEXTS = st.text(min_size=redaction.SHORTEST, max_size=40).filter(lambda text: len(text.strip()) >= redaction.SHORTEST)


def unused() -> str:
    return secrets.token_hex(12)


@given(TEXTS, st.text(max_size=20), st.text(max_size=20))
def test_a_secret_is_hidden_as_it_is_in_a_repr_in_json_and_in_a_url(secret: str, before: str, behind: str) -> None:
    note_secret(secret)
    core = secret.strip()
    for text in (
        core,
        repr(core)[1:-1],
        repr({"key": [core]})[9:-3],
        json.dumps(core)[1:-1],
        json.dumps(core, ensure_ascii=False)[1:-1],
        urllib.parse.quote(core.encode("utf-8", "replace")),
        urllib.parse.quote_plus(core.encode("utf-8", "replace")),
    ):
        assert text not in hide(f"{before}{text}{behind}") or text in redaction.HIDDEN


@pytest.mark.parametrize(
    "value", [b"bytes-%s", {"user": "u", "password": "%s"}, ["%s"], ("deep", [{"er": "%s"}]), SecretStr("%s")]
)
def test_secrets_inside_other_values_are_found(value: Any) -> None:
    secret = unused()
    note_secret(_filled(value, secret))
    assert hide(f"a {secret} b") == f"a {redaction.HIDDEN} b" or isinstance(value, bytes)
    assert secret not in hide(f"bytes-{secret}")


def _filled(value: Any, secret: str) -> Any:
    if isinstance(value, bytes):
        return value % secret.encode()
    if isinstance(value, SecretStr):
        return SecretStr(secret)
    if isinstance(value, dict):
        return {name: _filled(item, secret) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, secret) for item in value)
    return value.replace("%s", secret)


def test_each_line_of_a_key_is_a_secret() -> None:
    lines = [unused() for _ in range(3)]
    note_secret("\n".join(lines) + "\n")
    assert hide(f"x {lines[1]}") == "x ***"
    assert hide("\n".join(lines)) == "***"


def test_nothing_is_hidden_before_a_secret_was_handed_out_nor_what_is_too_short() -> None:
    text = "a text as any other"
    assert hide(text) is text
    note_secret("abc")
    note_secret("")
    note_secret(None)
    note_secret(True)
    assert hide("abc") == "abc"


def test_those_that_were_not_used_for_the_longest_time_are_forgotten() -> None:
    first, second = unused(), unused()
    note_secret(first)
    note_secret(second)
    for number in range(254):
        note_secret(f"secret number {number}")
    note_secret(first)  # handed out again
    note_secret("one more")
    assert hide(first) == "***"
    assert hide(second) == second
    assert len(redaction._secrets) == 256


def test_a_pickled_exception_with_a_secret_is_noticed() -> None:
    secret = unused()
    error = ValueError(f"no: {secret}")
    assert not holds_secret(pickle.dumps(error))
    note_secret(secret)
    assert holds_secret(pickle.dumps(error))
    assert not holds_secret(pickle.dumps(ValueError("no")))
    assert not holds_secret(b64encode(secret.encode()))  # what somebody encodes on purpose is not found


def test_what_a_log_record_has_besides_is_without_it(caplog: pytest.LogCaptureFixture) -> None:
    secret = unused()
    note_secret(secret)
    extra = {
        "url": f"https://x/?key={secret}",
        "headers": {"auth": [secret, 1]},
        "error": ValueError(f"refused {secret}"),
        "count": 3,
    }
    logging.getLogger("elsewhere").warning("asking", extra=extra)
    (record,) = caplog.records
    assert record.url == "https://x/?key=***"  # type: ignore[attr-defined] # given by extra
    assert vars(record)["headers"] == {"auth": ["***", 1]}
    assert vars(record)["error"] == "ValueError: refused ***"
    assert vars(record)["count"] == 3
    again = pickle.loads(pickle.dumps(record))
    assert type(vars(again)) is dict
    assert vars(again) == vars(record)
    assert extra["headers"] == {"auth": [secret, 1]}, "what belongs to the caller stays"


def test_log_records_of_every_logger_are_made_without_it(caplog: pytest.LogCaptureFixture) -> None:
    secret = unused()
    logger = logging.getLogger("somebody.elses")
    note_secret(secret)
    logger.warning("with %s and %d", secret, 7)
    logger.warning(KeyError(secret), stack_info=True)
    try:
        dict[str, str]()[secret]
    except KeyError:
        logger.exception("it failed")
    logger.warning("%s has %d", "nothing", 1)
    first, second, third, last = caplog.records
    assert (first.getMessage(), first.args) == ("with *** and 7", ())
    assert secret not in str(second.msg)
    assert third.exc_text is not None
    assert third.exc_text.endswith("KeyError: '***'")
    assert last.args == ("nothing", 1)
    assert secret not in caplog.text


@dataclasses.dataclass
class Login:
    user: str
    password: str


class Slotted:
    __slots__ = ("token",)

    def __init__(self, token: str) -> None:
        self.token = token


class Private:
    __slots__ = ("__token",)

    def __init__(self, token: str) -> None:
        self.__token = token


class _Private(Private):
    __slots__ = "__other"

    def __init__(self, token: str) -> None:
        self.__other = token


class Struct(msgspec.Struct):
    token: str


class Settings(BaseModel):
    token: str


class Plain:
    def __init__(self, token: str) -> None:
        self.inner = {"token": [token]}


OBJECTS = [
    *(Slotted, Private, _Private, Struct, Plain),
    *(lambda token: Login("ann", token), lambda token: Settings(token=token)),
]


@pytest.mark.parametrize("make", OBJECTS)
def test_secrets_inside_objects_are_hidden(make: Any) -> None:
    secret = unused()
    note_secret(make(secret))
    assert hide(f"a {secret} b") == f"a {redaction.HIDDEN} b"


@pytest.mark.parametrize(
    "value",
    [
        1234567890,
        2**70 + 12345,
        -987654321,
        3.14159265,
        40_404,
        uuid.UUID(int=2**127 + 12345),
        Decimal("1234.5678"),
        bytes(range(200, 220)),
    ],
)
def test_numbers_and_bytes_are_hidden_and_do_not_travel_in_exceptions(value: Any) -> None:
    note_secret(value)
    texts = [str(value), repr(value)] if not isinstance(value, bytes) else [repr(value), value.hex()]
    for text in texts:
        assert str(value) not in hide(f"refused: {text}")
        assert hide(f"refused: {text}") != f"refused: {text}"
    if isinstance(value, (int, float, bytes)):
        assert holds_secret(pickle.dumps(ValueError(value), protocol=5))
    assert not holds_secret(pickle.dumps(ValueError("another"), protocol=5))


@pytest.mark.parametrize("value", [b"", b"k", 1, 443, 0.5, -1])
def test_small_numbers_and_bytes_keep_no_exception_from_travelling(value: Any) -> None:
    note_secret({"part": value, "password": unused()})
    for error in (ValueError("plain", 1), OSError(2, "no such file"), KeyError(value), ValueError(443)):
        assert not holds_secret(pickle.dumps(error, protocol=5))


def test_bytes_are_hidden_in_both_alphabets_of_base64() -> None:
    secret = b"\xff\xfe\xfb" + secrets.token_bytes(12)
    note_secret(secret)
    for text in (b64encode(secret).decode(), urlsafe_b64encode(secret).decode()):
        assert hide(f"key {text}").startswith("key ***")


def test_long_secret_is_hidden_in_whole() -> None:
    secret = secrets.token_hex(30_000)
    note_secret(secret)
    left = hide(f"<{secret}>")
    assert not any(secret[start : start + 20] in left for start in range(0, len(secret) - 20, 20))


@pytest.mark.parametrize("secret", ["it's a key", 'say "key"', "both ' and \" here", "a@b:c/d e", "käse & co = 1"])
def test_secrets_with_quotes_and_spaces_are_hidden_wherever_they_are_quoted(secret: str) -> None:
    note_secret(secret)
    shown = [
        repr(f'"{secret}'),
        repr(f"'{secret}"),
        repr(json.dumps({"key": secret})),
        repr(json.dumps({"key": secret}, ensure_ascii=False)),
        str(httpx2.URL("http://host/").copy_with(path=f"/{secret}")),
        str(httpx2.URL("http://host/", params={"key": secret})),
    ]
    for text in shown:
        assert redaction.HIDDEN in hide(text), text


def test_names_of_loggers_and_threads_hold_no_secret() -> None:
    secret = unused()
    note_secret(secret)
    record = logging.getLogger(f"client.{secret}").makeRecord(f"client.{secret}", 20, "f", 1, "text", (), None)
    assert secret not in record.name


def test_secret_that_cannot_be_watched_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    note_secret(object())
    assert "a secret of type object can be hidden only as str() writes it" in caplog.text
