"""OOM kills are read from the kernel's counters, and who is frozen from its files."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.cgroups import is_frozen, kill_count, memory_left

PATIENCE_S = 60.0


def write(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(tmp_path: Path, files: dict[str, str]) -> int:
    write(tmp_path, files)
    return kill_count(tmp_path / "proc", tmp_path / "cg")


def test_our_own_cgroup_is_asked_first(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "cg/a/b/memory.events": "low 0\noom 5\noom_kill 3\n",
        "proc/vmstat": "oom_kill 99\n",
    }
    assert machine(tmp_path, files) == 3


def test_the_older_cgroups_are_known_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/x\n1:name=systemd:/\n",
        "cg/memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }
    assert machine(tmp_path, files) == 2


def test_without_a_cgroup_the_machines_count_is_taken(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free 1\noom_kill 7\n"}
    assert machine(tmp_path, files) == 7


def test_a_machine_that_does_not_tell_has_killed_nobody(tmp_path: Path) -> None:
    assert kill_count(tmp_path / "none", tmp_path / "none") == 0


def test_this_machine_can_be_asked() -> None:
    assert kill_count() >= 0


# ---- frozen ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "frozen"),
    [
        ("0::/a", "cg/a/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a", "cg/a/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("1:name=systemd:/\n0::/a", "cg/unified/a/cgroup.events", "frozen 1\n", True),
        ("6:freezer:/b\n0::/", "cg/freezer/b/freezer.state", "FROZEN\n", True),
        ("6:freezer:/b\n0::/", "cg/freezer/b/freezer.state", "FREEZING\n", False),
        ("6:freezer:/b\n0::/", "cg/freezer/b/freezer.state", "THAWED\n", False),
        ("5:cpu:/b", "cg/freezer/b/freezer.state", "FROZEN\n", False),
        ("0::/../elsewhere", "cg/a/cgroup.events", "frozen 1\n", False),
    ],
)
def test_who_is_frozen_is_read_from_either_kind_of_cgroup(
    tmp_path: Path, cgroup: str, file: str, text: str, frozen: bool
) -> None:
    write(tmp_path, {"proc/7/cgroup": cgroup + "\n", file: text})
    assert is_frozen(7, tmp_path / "proc", tmp_path / "cg") == frozen


def test_a_process_that_is_gone_is_not_frozen(tmp_path: Path) -> None:
    assert not is_frozen(7, tmp_path, tmp_path)


def test_a_real_process_that_is_frozen_is_seen_to_be() -> None:
    group = Path("/sys/fs/cgroup/freezer") / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no cgroup can be created here")
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        assert not is_frozen(pid)
        (group / "freezer.state").write_text("FROZEN")
        deadline = time.monotonic() + PATIENCE_S
        while not is_frozen(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        (group / "freezer.state").write_text("THAWED")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        group.rmdir()


# ---- memory that is left ----

MEMINFO = "MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    60 kB\n"


def left(tmp_path: Path, files: dict[str, str]) -> tuple[int, int]:
    write(tmp_path, files)
    return memory_left(tmp_path / "proc", tmp_path / "cg")


def test_without_a_limit_the_machine_says_what_is_left(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/meminfo": MEMINFO, "cg/a/memory.max": "max\n"}
    assert left(tmp_path, files) == (60 << 10, 100 << 10)


def test_the_limit_of_a_cgroup_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/meminfo": MEMINFO,
        "cg/a/b/memory.max": "51200\n",
        "cg/a/b/memory.current": "40960\n",
        "cg/a/b/memory.stat": "anon 20480\ninactive_file 10240\n",
    }
    assert left(tmp_path, files) == (20480, 51200)


def test_the_limit_of_an_outer_cgroup_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/meminfo": MEMINFO,
        "cg/a/b/memory.max": "max\n",
        "cg/a/memory.max": "51200\n",
        "cg/a/memory.current": "51200\n",
    }
    assert left(tmp_path, files) == (0, 51200)


def test_the_older_cgroups_limit_memory_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/x\n",
        "proc/meminfo": MEMINFO,
        "cg/memory/x/memory.limit_in_bytes": "51200\n",
        "cg/memory/x/memory.usage_in_bytes": "30720\n",
        "cg/memory/x/memory.stat": "total_inactive_file 10240\n",
    }
    assert left(tmp_path, files) == (30720, 51200)


def test_a_limit_beyond_the_machine_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/x\n",
        "proc/meminfo": MEMINFO,
        "cg/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
        "cg/memory/x/memory.usage_in_bytes": "30720\n",
    }
    assert left(tmp_path, files) == (60 << 10, 100 << 10)


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    assert left(tmp_path, {}) == (0, 0)


def test_this_machine_has_memory_left() -> None:
    free, total = memory_left()
    assert 0 < free <= total
