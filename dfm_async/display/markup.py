"""Pieces of HTML. Everything that comes from outside is escaped here."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from dfm_async.base.tasks import INTERRUPTS
from dfm_async.wire.codec.registry import preview

_ROWS: Final = 5
_COLUMNS: Final = 20
"""The most rows and columns of a table that are shown."""
_STYLE = (
    ".dfm{font-size:13px;line-height:1.5}"
    ".dfm .dfm-scroll{overflow-x:auto}"
    ".dfm table{border-collapse:collapse;margin:.4em 0;font-size:inherit;color:inherit}"
    ".dfm th,.dfm td{text-align:left;vertical-align:top;padding:2px 12px 2px 0;border:0;background:none}"
    ".dfm th{font-weight:600;border-bottom:1px solid #8886}"
    ".dfm code,.dfm pre{font-family:ui-monospace,monospace;font-size:12px;background:none}"
    ".dfm pre{white-space:pre-wrap;margin:.3em 0}"
    ".dfm summary{cursor:pointer}"
    ".dfm .dfm-dim{opacity:.7}"
    ".dfm .dfm-badge{padding:0 8px;border-radius:9px;border:1px solid;font-weight:600;font-size:12px}"
    ".dfm .dfm-bad{color:#c5221f}"
    ".dfm .dfm-good{color:#188038}"
    "@media(prefers-color-scheme:dark){.dfm .dfm-bad{color:#ff8a80}.dfm .dfm-good{color:#81c995}}"
    ':is([data-jp-theme-light="false"],.vscode-dark) .dfm .dfm-bad{color:#ff8a80}'
    ':is([data-jp-theme-light="false"],.vscode-dark) .dfm .dfm-good{color:#81c995}'
    ':is([data-jp-theme-light="true"],.vscode-light) .dfm .dfm-bad{color:#c5221f}'
    ':is([data-jp-theme-light="true"],.vscode-light) .dfm .dfm-good{color:#188038}'
    ".dfm progress{width:16em;max-width:60%;vertical-align:middle}"
)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8
_short.maxlevel = 4


def framed(*parts: str) -> str:
    """Return parts as one element of a page."""
    return f'<div class="dfm"><style>{_STYLE}</style>{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table. The head is text, the cells are HTML already."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="dfm-scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(summary: str, inside: str) -> str:
    """Show a line, and the rest when it is clicked. Both are HTML already."""
    return f"<details><summary>{summary}</summary>{inside}</details>"


def badge(text: str, mood: str = "") -> str:
    """Return an emphasised word; ``mood`` is "good", "bad" or nothing."""
    return f'<span class="dfm-badge{f" dfm-{mood}" if mood else ""}">{escape(text)}</span>'


def bar(done: int, total: int) -> str:
    """Show how much is done."""
    return f'<progress max="{max(total, 1)}" value="{done}" aria-label="{done} of {total}"></progress>'


def short_repr(value: Any) -> str:
    """Return a value in a few words, whatever it is."""
    try:
        return _short.repr(value)
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - the value's own code runs here
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def value_html(value: Any) -> str:
    """Return a value as it shows itself, or in a few words."""
    own = None if isinstance(value, type) else getattr(value, "_repr_html_", None)
    if callable(own):
        try:
            found = own()
        except INTERRUPTS:
            raise
        except BaseException:  # noqa: BLE001 - the value's own code runs here
            found = None
        if isinstance(found, str):
            return found
    shown = _table_html(value)
    if shown is not None:
        return shown
    return f"<code>{escape(short_repr(value))}</code>"


def _table_html(value: Any) -> str | None:
    """Return the shape, the columns and the first rows of a table that does not show itself; None for other values."""
    try:
        found = preview(value, _ROWS * _COLUMNS)
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001 - the value's own code runs here
        return None
    if not isinstance(found, dict) or "rows" not in found:
        return None
    height, width = found["shape"]
    names = [str(name) for name in found["columns"][:_COLUMNS]]
    rows = ([escape(short_repr(cell)) for cell in row[:_COLUMNS]] for row in found["rows"][:_ROWS])
    head = f"<div><code>{escape(found['type'])}</code>, {height:,} rows x {width:,} columns</div>"
    return head + table(names, rows)
