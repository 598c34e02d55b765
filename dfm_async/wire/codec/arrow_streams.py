"""Tables of any library as Arrow IPC streams, for clients that know only Arrow."""

from __future__ import annotations

from typing import Any

from dfm_async.base.tasks import INTERRUPTS
from dfm_async.wire.codec.registry import Unsupported, arrow_table, load_library


def arrow_parts(value: Any) -> list[Any] | None:
    """Return a table as the buffers of an Arrow IPC stream; None if the value is not a table.

    Most of the buffers are those of the table, not copies. Takes a while if columns have to be converted.

    Raises:
        Unsupported: the table has no form in Arrow, or pyarrow is not installed.
    """
    try:
        table = arrow_table(value)
        if table is None:
            return None
        load_library("pyarrow")
        from dfm_async.wire.codec.libraries.arrow_tables import stream_parts

        return stream_parts(table)
    except (Unsupported, *INTERRUPTS):
        raise
    except BaseException as error:
        raise Unsupported(str(error)) from error


def read_table(data: bytes) -> Any:
    """Return the ``pyarrow.Table`` of an Arrow IPC stream, which may be untrusted.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: this is not a stream, or one that is not accepted, such as one with extension types.
    """
    try:
        load_library("pyarrow")
    except LookupError as error:
        raise ImportError(str(error)) from error
    from pyarrow import ArrowException

    from dfm_async.wire.codec.libraries.arrow_tables import decode_stream

    try:
        return decode_stream(memoryview(data))
    except (ArrowException, OSError) as error:
        raise ValueError(str(error)) from error
