"""The names of message files, which say what a message is: ``REQ.<topic>.<id>`` or ``REP.<topic>.<request>.<id>``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["MessageName", "format_name", "parse_name"]

_TOPIC: Final = re.compile(r"[A-Za-z0-9_]+")
_ID: Final = re.compile(r"[!-\-0-\[\]-~]+")
"""What can be seen, but no dots, which separate the parts, and nothing that leads out of a folder."""
_LONGEST: Final = 255


@dataclass(frozen=True, slots=True)
class MessageName:
    """What the name of a file says about the message in it.

    Attributes:
        topic: what it is about: the name of a task, or one of the peer's signals.
        id: its own id.
        request: the id of the request that it answers; None if it is a request itself.
    """

    topic: str
    id: str
    request: str | None = None


def format_name(name: MessageName) -> str:
    """Makes the name of a file.

    Raises:
        ValueError: the topic or an id cannot be part of one.
    """
    ids = (name.id,) if name.request is None else (name.request, name.id)
    if not _TOPIC.fullmatch(name.topic):
        raise ValueError(f"a topic consists of letters, digits and underscores, unlike {name.topic!r}")
    for part in ids:
        if not _ID.fullmatch(part):
            raise ValueError(f"an id must not be empty or contain dots, slashes or blanks, unlike {part!r}")
    text = ".".join(("REQ" if name.request is None else "REP", name.topic, *ids))
    if len(text) > _LONGEST:
        raise ValueError(f"the name of a message has at most {_LONGEST} characters, unlike {text!r}")
    return text


def parse_name(text: str) -> MessageName:
    """Reads the name of a file.

    Raises:
        ValueError: it is none of a message.
    """
    match text.split("."):
        case ["REQ", topic, own]:
            name = MessageName(topic, own)
        case ["REP", topic, request, own]:
            name = MessageName(topic, own, request)
        case _:
            raise ValueError(f"{text!r} is not the name of a message")
    format_name(name)  # refuses what it would not have made
    return name
