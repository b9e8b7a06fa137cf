"""Processors, memory, limits, disks, clock."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from fakenode import GIB, FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health import cpu
from holdfast.health.baseline import ClockSeen, CpuSeen
from holdfast.health.clock import Steering, check_clock, judge_clock
from holdfast.health.cpu import KNOWN, check_compute, check_cpu, judge_results, work
from holdfast.health.memory import check_limits, check_memory, check_shm
from holdfast.health.node import Node, number_set
from holdfast.health.settings import HealthLimits, HealthSettings
from holdfast.health.storage import check_disk, judge_disk

HERE = Node(HealthSettings())

# ---- processors ----


def test_a_machine_that_shows_no_cores_is_unknown(fake: FakeNode) -> None:
    assert check_cpu(fake.node(), None).verdict == "unknown"


def test_a_core_that_was_there_is_missed_until_it_is_back(fake: FakeNode) -> None:
    fake.cores("0-7")
    first = check_cpu(fake.node(), None)
    fake.cores("0-4,6-7")
    second = check_cpu(fake.node(), first.seen)
    third = check_cpu(fake.node(), second.seen)
    assert [f.verdict for f in (first, second, third)] == ["pass", "fail", "fail"]
    assert "cores 5 were there" in third.reason
    fake.cores("0-7")
    assert check_cpu(fake.node(), third.seen).verdict == "pass"


def test_cores_that_are_off_warn_unless_they_are_second_threads(fake: FakeNode) -> None:
    fake.cores("0-3", present="0-7")
    assert check_cpu(fake.node(), None).verdict == "warn"
    fake.write("sys/devices/system/cpu/smt/control", "off")
    assert check_cpu(fake.node(), None).verdict == "pass"


def test_a_process_bound_to_one_core_of_many_is_warned(fake: FakeNode) -> None:
    fake.cores("0-63")
    fake.write("proc/self/status", "Name:\tpython\nCpus_allowed_list:\t7")
    found = check_cpu(fake.node(), None)
    assert found.verdict == "warn"
    assert "may use 1 of 64 cores" in found.reason


def test_load_is_held_against_the_cores_that_are_usable(fake: FakeNode) -> None:
    fake.cores("0-3")
    fake.write("proc/loadavg", "15.9 1 1 1/2 3")
    assert check_cpu(fake.node(), None).verdict == "pass"
    fake.write("proc/loadavg", "16.1 1 1 1/2 3")
    assert check_cpu(fake.node(), None).verdict == "warn"


def test_throttling_is_told_when_it_grows(fake: FakeNode) -> None:
    fake.cores("0-1")
    count = "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count"
    fake.write(count, 40)
    first = check_cpu(fake.node(), None)
    assert (first.verdict, first.seen) == ("pass", CpuSeen((0, 1), 40))
    fake.write(count, 41)
    second = check_cpu(fake.node(), first.seen)
    assert second.verdict == "warn"
    assert "too hot 1 time since" in second.reason


def test_cores_that_are_held_slow_are_told(fake: FakeNode) -> None:
    fake.cores("0")
    fake.write("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", 3_000_000)
    fake.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", 1_000_000)
    assert "below 50%" in check_cpu(fake.node(), None).reason


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/x": "",
            "sys/fs/cgroup/a/cpu.max": "250000 100000",
        },
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/hidden/by/a/container",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        {"proc/self/cgroup": "0::/../..", "sys/fs/cgroup/cpu.max": "250000 100000"},
    ],
)
def test_a_quota_of_any_level_and_version_is_found(fake: FakeNode, files: dict[str, str]) -> None:
    fake.cores("0-7")
    for name, content in files.items():
        fake.write(name, content)
    found = check_cpu(fake.node(), None)
    assert found.facts["quota_cores"] == 2.5
    assert found.verdict == "warn"
    assert "the container may use 2.5 of 8 CPUs" in found.reason


def test_a_quota_that_all_cores_fit_in_limits_nothing(fake: FakeNode) -> None:
    fake.cores("0-7")
    fake.write("proc/self/cgroup", "0::/")
    fake.write("sys/fs/cgroup/cpu.max", "800000 100000")
    assert check_cpu(fake.node(), None).verdict == "pass"


def test_no_quota_is_none(fake: FakeNode) -> None:
    fake.cores("0-7")
    fake.write("proc/self/cgroup", "0::/")
    fake.write("sys/fs/cgroup/cpu.max", "max 100000")
    assert "quota_cores" not in check_cpu(fake.node(), None).facts


@given(st.sets(st.integers(0, 200)))
def test_a_list_of_cores_is_read_as_the_kernel_writes_it(cores: set[int]) -> None:
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    assert number_set(text) == cores


# ---- computing ----


def test_this_machine_computes_what_is_known() -> None:
    before = os.sched_getaffinity(0)
    found = check_compute(HERE, None)
    assert (found.verdict, found.facts["wrong"]) == ("pass", 0)
    assert os.sched_getaffinity(0) == before


def test_a_small_error_changes_the_result() -> None:
    assert work() == KNOWN
    assert work(0.4 + 1e-15) != KNOWN


def test_the_core_that_computes_wrong_is_named() -> None:
    results = {core: {KNOWN} for core in range(8)} | {5: {KNOWN, "other"}}
    found = judge_results(results, 8)
    assert (found.verdict, found.reason) == ("fail", "core 5 computes wrong results")


def test_a_machine_whose_cores_all_agree_on_something_else_is_not_blamed() -> None:
    assert judge_results({0: {"x"}, 1: {"x"}}, 2).verdict == "unknown"
    assert judge_results({}, 2).verdict == "unknown"


@given(st.dictionaries(st.integers(0, 20), st.sets(st.sampled_from([KNOWN, "x", "y"]), min_size=1)))
def test_a_core_that_computes_right_is_never_named(results: dict[int, set[str]]) -> None:
    found = judge_results(results, 21)
    words = set(found.reason.replace(";", "").split()) if found.verdict == "fail" else set()
    assert not words & {str(core) for core, got in results.items() if got == {KNOWN}}


def test_cores_beyond_the_time_are_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count(step=cpu.BUDGET_S * 0.75)
    with monkeypatch.context() as patched:
        patched.setattr(cpu.time, "monotonic", lambda: next(ticks))
        patched.setattr(cpu.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
        patched.setattr(cpu.os, "sched_setaffinity", lambda pid, cores: None)
        found = check_compute(HERE, None)
    assert found.reason == "1 of 4 cores computed the known result"


# ---- memory ----


def test_a_machine_that_does_not_tell_its_memory_is_unknown(fake: FakeNode) -> None:
    assert check_memory(fake.node(), None).verdict == "unknown"


@pytest.mark.parametrize(
    ("available", "verdict"), [(32.0, "pass"), (2.0, "warn"), (0.2, "fail"), (0.0, "fail")]
)
def test_memory_is_judged_by_what_is_left(fake: FakeNode, available: float, verdict: str) -> None:
    fake.memory(64, available)
    assert check_memory(fake.node(), None).verdict == verdict


GROUPS = {
    "v2": ("0::/job", "", "memory.max", "memory.current", "inactive_file"),
    "v1": (
        "4:memory:/job",
        "/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", GROUPS)
def test_a_limit_above_us_counts_and_cached_files_do_not(fake: FakeNode, version: str) -> None:
    line, mount, limit, usage, cache = GROUPS[version]
    fake.memory(64, 60)
    fake.write("proc/self/cgroup", f"{line}/inner")
    base = f"sys/fs/cgroup{mount}/job"
    fake.write(f"{base}/inner/{limit}", "max" if version == "v2" else 9223372036854771712)
    fake.write(f"{base}/inner/{usage}", 3 * GIB)
    fake.write(f"{base}/{limit}", 4 * GIB)
    fake.write(f"{base}/{usage}", 4 * GIB)
    fake.write(f"{base}/memory.stat", f"anon 1\n{cache} {2 * GIB}")
    found = check_memory(fake.node(), None)
    assert (found.verdict, found.facts["available_bytes"]) == ("pass", 2 * GIB)
    fake.write(f"{base}/memory.stat", "anon 1")
    found = check_memory(fake.node(), None)
    assert found.verdict == "fail"
    assert f"cgroup {base}" in found.reason


def test_a_limit_on_addresses_is_told(fake: FakeNode) -> None:
    fake.memory(64, 60)
    fake.write("proc/self/limits", f"Max address space         {GIB}   {GIB}   bytes")
    assert "ulimit -v" in check_memory(fake.node(), None).reason


def test_new_memory_errors_fail_and_old_ones_warn(fake: FakeNode) -> None:
    fake.memory(64, 60)
    fake.write("sys/devices/system/edac/mc/mc0/ue_count", 0)
    first = check_memory(fake.node(), None)
    fake.write("sys/devices/system/edac/mc/mc0/ue_count", 2)
    second = check_memory(fake.node(), first.seen)
    third = check_memory(fake.node(), second.seen)
    assert [f.verdict for f in (first, second, third)] == ["pass", "fail", "warn"]


# ---- limits and shared memory ----


def limits_file(files: object, locked: object) -> str:
    return (
        f"Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max open files            {files}                1048576              files\n"
        f"Max locked memory         {locked}             unlimited            bytes\n"
    )


def test_limits_that_are_not_told_are_unknown(fake: FakeNode) -> None:
    assert check_limits(fake.node(), None).verdict == "unknown"


@pytest.mark.parametrize(
    ("files", "verdict"), [(256, "warn"), (1024, "pass"), ("unlimited", "pass")]
)
def test_few_open_files_warn(fake: FakeNode, files: object, verdict: str) -> None:
    fake.write("proc/self/limits", limits_file(files, "unlimited"))
    assert check_limits(fake.node(), None).verdict == verdict


def test_locked_memory_matters_only_to_rdma(fake: FakeNode) -> None:
    fake.write("proc/self/limits", limits_file(4096, 65536))
    assert check_limits(fake.node(), None).verdict == "pass"
    fake.infiniband("mlx5_0", "pci0000:00/0000:00:05.0")
    found = check_limits(fake.node(), None)
    assert found.verdict == "warn"
    assert "ulimit -l" in found.reason


def test_shared_memory_is_judged_by_room_and_size(fake: FakeNode) -> None:
    assert check_shm(fake.node(), None).verdict == "unknown"
    (fake.root / "dev/shm").mkdir(parents=True)
    small = HealthLimits(shm_bytes=0, shm_size_bytes=1 << 60)
    full = HealthLimits(shm_bytes=1 << 60)
    plenty = HealthLimits(shm_bytes=0, shm_size_bytes=0)
    verdicts = [check_shm(fake.node(limits), None).verdict for limits in (plenty, small, full)]
    assert verdicts == ["pass", "warn", "fail"]


# ---- disks ----


def test_a_disk_that_is_full_fails_and_so_does_one_without_inodes() -> None:
    limits = HealthLimits(disk_bytes=10, disk_share=0.5, inodes=10, inode_share=0.5)

    def verdict(free: int = 90, inodes: int = 100, free_inodes: int = 90, flags: int = 0) -> str:
        parts = (1, 1, 100, free, free, inodes, free_inodes, free_inodes, flags, 255)
        return judge_disk(os.statvfs_result(parts), "/x", limits).verdict

    assert verdict() == "pass"
    assert verdict(free=40) == "warn"
    assert verdict(free=9) == "fail"
    assert verdict(free_inodes=40) == "warn"
    assert verdict(free_inodes=9) == "fail"
    assert verdict(inodes=0, free_inodes=0) == "pass"
    assert verdict(free=0, flags=os.ST_RDONLY) == "pass", "it needs no space"


def test_a_path_that_is_not_there_fails(fake: FakeNode, tmp_path: Path) -> None:
    found = check_disk(fake.node(), str(tmp_path / "gone"), None)
    assert found.verdict == "fail"
    assert "No such file" in found.reason


def test_a_home_that_is_not_made_yet_is_judged_by_the_disk_it_will_be_on(
    fake: FakeNode, tmp_path: Path
) -> None:
    home = str(tmp_path / "not" / "yet")
    limits = HealthLimits(disk_bytes=0, disk_share=0, inodes=0, inode_share=0)
    assert check_disk(fake.node(limits, home=home), home, None).verdict == "pass"
    assert not (tmp_path / "not").exists()


# ---- the clock ----

STILL = ClockSeen(100.0)


@pytest.mark.parametrize(
    ("steering", "told", "verdict"),
    [
        (None, False, "unknown"),
        (Steering(False, 16.0), False, "unknown"),
        (Steering(False, 16.0), True, "pass"),
        (Steering(True, 0.01), False, "pass"),
        (Steering(True, 9.0), False, "warn"),
    ],
)
def test_a_clock_is_right_when_somebody_says_so(
    steering: Steering | None, told: bool, verdict: str
) -> None:
    assert judge_clock(steering, told, None, STILL, HealthLimits()).verdict == verdict


@pytest.mark.parametrize("step", [-3600.0, 90.0])
def test_a_clock_that_was_set_is_told(step: float) -> None:
    found = judge_clock(Steering(True, 0.01), False, STILL, ClockSeen(100.0 + step), HealthLimits())
    assert found.verdict == "warn"
    assert f"{step:+.1f} s" in found.reason


def test_the_real_clock_can_be_asked_twice() -> None:
    first = check_clock(HERE, None)
    second = check_clock(HERE, first.seen)
    assert first.verdict == second.verdict != "fail"
    assert "was set" not in second.reason


def test_a_fake_node_has_no_clock(fake: FakeNode) -> None:
    assert check_clock(fake.node(), None).verdict == "unknown"
