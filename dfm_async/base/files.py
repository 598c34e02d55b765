"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that replaces a path atomically when the block ends; if the block fails, the path stays as it is.

    Args:
        path: the path.
        mode: the permissions of the new file, before the umask.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.unlink(missing_ok=True)  # of an earlier process with these numbers
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
