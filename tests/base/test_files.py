"""Files that are replaced as a whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dfm_async.base.files import replaced


def test_threads_that_replace_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, both = tmp_path / "state", threading.Barrier(2)

    def write(text: bytes) -> None:
        with replaced(path) as file:
            both.wait(10)
            file.write(text * 1000)
            both.wait(10)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, [b"a", b"b"]))
    assert path.read_bytes() in (b"a" * 1000, b"b" * 1000)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="half"), replaced(path) as file:
        file.write(b"new")
        raise ValueError("half-way")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
