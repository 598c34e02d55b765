"""Secrets that were handed out in this process, kept out of every text that leaves it.

Whoever gives a secret to code notes it here; whoever sends text away asks for it without secrets. As long as no secret
was handed out, that costs one look at an empty variable.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["HIDDEN", "SHORTEST", "hide", "holds_secret", "note_secret"]

HIDDEN: Final = "***"
"""What stands in the place of a secret."""
SHORTEST: Final = 4
"""Shorter ones are not hidden: they are part of too many words."""
_KEPT: Final = 256
"""How many secrets are remembered; those that were not handed out for the longest time are forgotten first."""
_LONGEST: Final = 16 * 1024
"""How many characters of a secret are remembered; of a longer one each line counts by itself."""
_DEEPEST: Final = 8

_secrets: Final[OrderedDict[str, tuple[str, ...]]] = OrderedDict()
"""Secrets, and how each can look in a text."""
_hidden: tuple[str, ...] = ()
"""All of these, the longest first: one may be a part of another."""
_watching = False
_lock: Final = threading.Lock()


def note_secret(value: Any) -> None:
    """Remembers a secret that is about to be handed out. May be called from any thread."""
    global _hidden, _watching  # one process has one memory of what it must not say
    with _lock:
        if type(value) is str and "\n" not in value and value in _secrets:  # the same as for the call before
            _secrets.move_to_end(value)
            return
        new = False
        for text in _texts(value, _DEEPEST):
            if text in _secrets:
                _secrets.move_to_end(text)
            else:
                _secrets[text] = tuple(_looks(text))
                new = True
        while len(_secrets) > _KEPT:
            _secrets.popitem(last=False)
        if new:
            looks = {look for found in _secrets.values() for look in found}
            _hidden = tuple(sorted(looks, key=len, reverse=True))
        if _hidden and not _watching:
            _watching = True
            _watch_logs()


def hide(text: str) -> str:
    """The text without the secrets that were handed out."""
    for look in _hidden:
        if look in text:
            text = text.replace(look, HIDDEN)
    return text


def holds_secret(data: bytes) -> bool:
    """Whether encoded data, such as a pickled exception, has a secret in it."""
    if not _hidden:
        return False
    text = data.decode("utf-8", "replace")
    return any(look in text for look in _hidden)


def _texts(value: Any, depth: int) -> Iterator[str]:
    """The texts in a secret: most are one, but a vault may give a mapping of them."""
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "replace")
    elif hasattr(value, "get_secret_value"):  # pydantic's
        value = value.get_secret_value()
    if isinstance(value, str):
        lines = value.splitlines() if len(value) > _LONGEST or "\n" in value else []
        # Output comes line by line, so each line of a key is a secret, too.
        for text in (value, *lines):
            if len(text.strip()) >= SHORTEST and len(text) <= _LONGEST:
                yield text.strip()
    elif isinstance(value, Mapping) and depth:
        for item in value.values():
            yield from _texts(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)) and depth:
        for item in value:
            yield from _texts(item, depth - 1)
    elif isinstance(value, int) and not isinstance(value, bool) and len(str(value)) >= SHORTEST:
        yield str(value)


def _looks(text: str) -> Iterator[str]:
    """A secret as it is, and as it looks inside a repr, in JSON, and in a URL."""
    import json  # loaded with the first secret: workers wait for what they import
    import urllib.parse

    yield text
    yield repr(text)[1:-1]
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield text.encode("utf-8", "backslashreplace").decode()
    safe = text.encode("utf-8", "replace")
    yield urllib.parse.quote(safe)
    yield urllib.parse.quote(safe, safe="")
    yield urllib.parse.quote_plus(safe)


# logging


def _watch_logs() -> None:
    """From the first secret on, no log record of this process is made with one."""
    make = logging.getLogRecordFactory()

    def make_hidden(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        _clean(record)
        return record

    logging.setLogRecordFactory(make_hidden)


def _clean(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
        said = hide(text)
        if said != text:
            record.msg, record.args = said, ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            said = hide(text)
            if said != text:  # handlers would write the exception anew
                record.exc_text, record.exc_info = said, None
        if record.stack_info:
            record.stack_info = hide(record.stack_info)
    except Exception:  # noqa: BLE001 - a message that cannot be formatted: the handler says so in its own way
        record.msg = hide(str(record.msg))
