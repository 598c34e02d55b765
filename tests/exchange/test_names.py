"""The names of message files."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from dfm_async.exchange.filepipe.queue import MessageName, format_name, parse_name

_TOPICS = st.from_regex(r"[A-Za-z0-9_]{1,20}", fullmatch=True)
_IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="./\\"), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("REQ._HEARTBEAT_.3f-7a", MessageName("_HEARTBEAT_", "3f-7a")),
        ("REP.train.1-2.3-4", MessageName("train", "3-4", "1-2")),
        ("REQ.REP.REQ", MessageName("REP", "REQ")),
    ],
)
def test_names_are_as_the_peer_makes_them(text: str, name: MessageName) -> None:
    assert format_name(name) == text
    assert parse_name(text) == name


@hypothesis.given(st.builds(MessageName, _TOPICS, _IDS, st.none() | _IDS))
def test_a_name_is_read_as_it_was_made(name: MessageName) -> None:
    text = format_name(name)
    assert "/" not in text
    assert parse_name(text) == name


@hypothesis.given(st.text())
def test_what_is_read_would_be_made_again(text: str) -> None:
    try:
        name = parse_name(text)
    except ValueError:
        return
    assert format_name(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "REQ",
        "REQ.topic",
        "REQ.topic.1.2",
        "REP.topic.1",
        "REP.topic.1.2.3",
        "req.topic.1",
        "REX.topic.1",
        "REQ..1",
        "REQ.topic.",
        "REP.topic..2",
        "REQ.to-pic.1",
        "REQ.t\u00f6pic.1",
        "REQ.topic\n.1",
        "REQ.topic.1\n",
        "REQ.topic.1 2",
        "REQ.topic.\u00e4",
        "REQ.topic./etc/passwd",
        "REQ./etc/passwd.1",
        "REQ.topic.a\\b",
        "REQ.topic.a\0",
        "../REQ.topic.1",
        "REQ.topic." + "1" * 250,
    ],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"name of a message|topic|id"):
        parse_name(text)


@pytest.mark.parametrize(
    "name",
    [
        MessageName("a.b", "1"),
        MessageName("", "1"),
        MessageName("a", ""),
        MessageName("a", "1.2"),
        MessageName("a", "1/2"),
        MessageName("a", "1", ""),
        MessageName("a", "1", "1.2"),
        MessageName("a" * 250, "1"),
    ],
)
def test_parts_that_cannot_be_in_a_name_are_refused(name: MessageName) -> None:
    with pytest.raises(ValueError, match=r"topic|id|name"):
        format_name(name)
