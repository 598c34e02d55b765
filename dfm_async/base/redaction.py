"""Secrets that were handed out in this process, kept out of every text that leaves it.

Code that hands out a secret notes it here; code that sends text away has the secrets redacted. As long as no secret was
handed out, that costs one check of an empty variable.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from dfm_async.base.containers import BoundedDict

_log = logging.getLogger(__name__)

HIDDEN: Final = "***"
"""The text that replaces a secret."""
SHORTEST: Final = 4
"""Shorter ones are not hidden: they are part of too many words."""
_KEPT: Final = 256
"""The number of secrets that are kept; the least recently handed out are evicted first."""
LONGEST: Final = 16 * 1024
"""The longest text that is kept as one; a longer one is kept line by line, and piece by piece."""
_PIECES: Final = 64
_DEEPEST: Final = 8

_secrets: Final[BoundedDict[str, tuple[str, ...]]] = BoundedDict(_KEPT)
"""Secrets, and the forms of each in texts."""
_hidden: tuple[str, ...] = ()
"""All of these, the longest first: one may be a part of another."""
_pickled: Final[BoundedDict[bytes, None]] = BoundedDict(_KEPT)
"""Numbers and bytes among the secrets, as they are in a pickle."""
_watching = False
_lock: Final = threading.RLock()  # an object that is a secret may hand out another when its attributes are read


def note_secret(value: Any) -> None:
    """Keep a secret that is about to be handed out. May be called from any thread."""
    global _hidden, _watching  # of the process, as its output is
    with _lock:
        if type(value) is str and "\n" not in value and _secrets.use(value):  # the same as for the call before
            return
        new = False
        for part in _parts(value, _DEEPEST):
            if isinstance(part, (int, float, bytes)):
                pickled = _in_pickle(part)
                if len(pickled if isinstance(part, bytes) else repr(part)) >= SHORTEST:
                    _pickled[pickled] = None
                    _pickled.use(pickled)
        for text in _texts(value):
            if not _secrets.use(text):
                _secrets[text] = tuple(_forms(text))
                new = True
        if new:
            forms = {form for found in _secrets.values() for form in found}
            _hidden = tuple(sorted(forms, key=len, reverse=True))
        if _hidden and not _watching:
            _watching = True
            _watch_logs()


def hide(text: str) -> str:
    """Return the text without the secrets that were handed out."""
    for form in _hidden:
        if form in text:
            text = text.replace(form, HIDDEN)
    return text


def holds_secret(data: bytes) -> bool:
    """Return whether encoded data, such as a pickled exception, has a secret in it."""
    if not _hidden:
        return False
    text = data.decode("utf-8", "replace")
    return any(form in text for form in _hidden) or any(part in data for part in list(_pickled))


def _parts(value: Any, depth: int) -> Iterator[str | bytes | int | float]:
    """Yield the plain values in a secret: most are one text, but a vault may return a mapping or an object."""
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, (bytearray, memoryview)):
        yield bytes(value)
    elif value is None or isinstance(value, bool):
        return
    elif isinstance(value, (int, float)):
        yield value
    elif hasattr(value, "get_secret_value"):  # of pydantic
        yield from _parts(value.get_secret_value(), depth)
    elif depth:
        inner = _inner(value)
        if inner is None:
            yield str(value)  # a scalar such as Decimal or UUID
            if not _is_scalar(value):
                _log.warning("a secret of type %s can be hidden only as str() writes it", type(value).__qualname__)
        else:
            for item in inner:
                yield from _parts(item, depth - 1)


def _inner(value: Any) -> Iterable[Any] | None:
    """Return what a collection or an object consists of; None if that cannot be seen."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if _is_scalar(value):
        return None
    names = getattr(type(value), "__struct_fields__", None)  # of msgspec
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = dict(getattr(value, "__dict__", None) or {})
    found |= {name: getattr(value, name) for name in (*(names or ()), *slots) if hasattr(value, name)}
    return found.values() or None


def _slots(kind: type) -> Iterator[str]:
    """Yield the names of the attributes that a class declares, private ones as Python mangles them."""
    slots = kind.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        private = name.startswith("__") and not name.endswith("__")
        yield f"_{kind.__name__.lstrip('_')}{name}" if private else name


def _is_scalar(value: Any) -> bool:
    return type(value).__module__ in ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid")


def _in_pickle(value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    import pickle  # loaded with the first such secret; it is written here, never read

    return pickle.dumps(value, protocol=3)[2:-1]  # without its header and its end


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in which a secret can appear."""
    for part in _parts(value, _DEEPEST):
        texts = [part] if isinstance(part, str) else _written(part)
        for text in texts:
            # Output arrives line by line, so each line of a key is a secret, too.
            lines = text.splitlines() if len(text) > LONGEST or "\n" in text else []
            for line in (text, *lines):
                pieces = range(0, min(len(line), _PIECES * LONGEST), LONGEST)
                for piece in [line[start : start + LONGEST].strip() for start in pieces]:
                    if len(piece) >= SHORTEST:
                        yield piece


def _written(part: bytes | int | float) -> Iterator[str]:
    if not isinstance(part, bytes):
        yield repr(part)
        return
    import base64

    with contextlib.suppress(UnicodeDecodeError):
        yield part.decode()
    yield repr(part)[2:-1]
    yield part.hex()
    yield base64.b64encode(part).decode().rstrip("=")
    yield base64.urlsafe_b64encode(part).decode().rstrip("=")


_LEFT_IN_URLS: Final = ("/", "", "/:@", "!$&'()*+,;=:@/", "!$&'()*+,;=:@/?~%")
"""Characters that libraries leave as they are in different parts of URLs."""


def _forms(text: str) -> Iterator[str]:
    """Yield a secret as it is, and as it appears in a repr, in JSON, and in a URL."""
    import json  # loaded with the first secret: workers wait for what they import
    import urllib.parse

    yield text
    for plain in (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        yield plain
        shown = repr(plain)[1:-1]
        yield shown
        yield shown.replace("\\'", "'").replace("'", "\\'")  # beside a double quote
    yield text.encode("utf-8", "backslashreplace").decode()
    safe = text.encode("utf-8", "replace")
    for left in _LEFT_IN_URLS:
        yield urllib.parse.quote(safe, safe=left)
    yield urllib.parse.quote_plus(safe)


# logging


def _watch_logs() -> None:
    """Redact all log records of this process from now on."""
    make = logging.getLogRecordFactory()

    def make_hidden(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        _clean(record)
        record.__dict__ = _RecordAttributes(record.__dict__)
        return record

    logging.setLogRecordFactory(make_hidden)


class _RecordAttributes(dict[str, Any]):
    """The attributes of a record. Those that are set by name come from ``extra=``, when the record is created."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _without_secrets(value, _DEEPEST))

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return (dict, (dict(self),))  # readers in other processes need not have this class


def _without_secrets(value: Any, depth: int) -> Any:
    """Return the value, or one with redacted text instead of what contains a secret."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, BaseException):
        text = str(value)
        redacted = hide(text)
        return value if redacted == text else f"{type(value).__name__}: {redacted}"
    if isinstance(value, Mapping) and depth:
        return {name: _without_secrets(item, depth - 1) for name, item in value.items()}
    if type(value) in (list, tuple, set, frozenset) and depth:
        return type(value)(_without_secrets(item, depth - 1) for item in value)
    return value


def _clean(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
        redacted = hide(text)
        if redacted != text:
            record.msg, record.args = redacted, ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            redacted = hide(text)
            if redacted != text:  # handlers would format the exception again
                record.exc_text, record.exc_info = redacted, None
        if record.stack_info:
            record.stack_info = hide(record.stack_info)
        record.name, record.threadName = hide(record.name), hide(record.threadName or "")
    except Exception:  # noqa: BLE001 - a message that cannot be formatted: the handler reports it
        record.msg = hide(str(record.msg))
