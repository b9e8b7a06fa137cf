"""OOM kills are read from the kernel's counters."""

from __future__ import annotations

from pathlib import Path

from holdfast.cgroups import kill_count


def machine(tmp_path: Path, files: dict[str, str]) -> int:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
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
