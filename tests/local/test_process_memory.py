"""The counters of processes that the kernel ended because memory ran out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfm_async.workers.process_memory import oom_kills

VMSTAT = "nr_free_pages 1\noom_kill {}\nnuma_hit 3\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("membership", "file", "content"),
    [
        ("0::/user.slice/app\n", "user.slice/app/memory.events", EVENTS),
        ("0::/\n", "memory.events", EVENTS),
        ("0::/only/visible/outside\n", "memory.events", EVENTS),
        ("5:devices:/\n4:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control", CONTROL),
        ("4:memory:/only/visible/outside\n", "memory/memory.oom_control", CONTROL),
    ],
)
def test_kills_in_our_control_group_are_counted(tmp_path: Path, membership: str, file: str, content: str) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    _write(proc / "vmstat", VMSTAT.format(3))
    _write(proc / "self" / "cgroup", membership)
    _write(cgroups / file, content.format(4))
    assert oom_kills(proc, cgroups) == 7
    _write(cgroups / file, content.format(5))
    assert oom_kills(proc, cgroups) == 8


def test_there_may_be_no_counters(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path) == 0
    _write(tmp_path / "vmstat", "oom_kill many\nother 3\n")
    assert oom_kills(tmp_path, tmp_path) == 0
    assert oom_kills() >= 0
