"""How long processes had no CPU: counters of the real kernel, and of made-up machines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import proc
from holdfast.agent import contention
from holdfast.agent.contention import CpuTicks, Quota, Reading, ThreadTime
from holdfast.messages.timings import CpuShortage

BUSY = "while True: pass"
CPU = Path("/sys/fs/cgroup/cpu")


@contextmanager
def busy(count: int, cpus: set[int]) -> Iterator[list[int]]:
    """Processes that compute for ever, on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    os.sched_setaffinity(0, before)
    try:
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


def measured(pid: int, until_s: float = 5.0) -> CpuShortage:
    """What a process lacked, once it has wanted to run for a while."""
    before = contention.read(pid, time.monotonic())
    deadline = time.monotonic() + until_s
    while True:
        after = contention.read(pid, time.monotonic())
        had = [after.threads[t] for t in after.threads.keys() & before.threads.keys()]
        known = [before.threads[t] for t in after.threads.keys() & before.threads.keys()]
        wanted_s = sum(map(sum, had)) - sum(map(sum, known))
        if wanted_s > 0.5 or time.monotonic() > deadline:
            return contention.shortage(before, after)


def test_of_two_processes_that_share_a_cpu_each_waits_half_of_the_time() -> None:
    cpu = min(os.sched_getaffinity(0))
    with busy(2, {cpu}) as (one, _):
        lacked = measured(one)
    assert lacked.queued_s > 0.15
    assert lacked.throttled_s == 0.0


def has_begun(pid: int) -> bool:
    """Whether it is the command already, and no longer this process's child that becomes it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")


def test_a_process_that_only_sleeps_lacks_nothing() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            while proc.process_state(sleeper.pid) != "S" or not has_begun(sleeper.pid):
                time.sleep(0.001)
            time.sleep(0.05)
            before = contention.read(sleeper.pid, time.monotonic())
            time.sleep(0.05)
            after = contention.read(sleeper.pid, time.monotonic())
        finally:
            sleeper.kill()
    assert contention.shortage(before, after).queued_s == 0.0


def test_every_thread_of_a_real_process_is_read() -> None:
    found = contention.thread_times(os.getpid())
    assert found.keys() == {int(name) for name in os.listdir("/proc/self/task")}
    assert found[os.getpid()].ran_s > 0
    assert contention.cpu_ticks().wanted > 0


def test_a_process_that_is_gone_reads_as_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    now = contention.read(gone.pid, 1.0)
    assert (now.threads, now.quotas) == ({}, {})
    assert contention.shortage(now, contention.read(gone.pid, 2.0)).total_s == 0.0


@pytest.mark.skipif(not os.access(CPU, os.W_OK), reason="no CPU cgroup of version 1 can be created")
def test_a_real_quota_throttles_and_is_seen() -> None:
    group = CPU / f"holdfast-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text("4000")
        with busy(1, os.sched_getaffinity(0)) as (pid,):
            (group / "cgroup.procs").write_text(str(pid))
            # On a busy machine it may take a while until the process has used up its quota.
            looks = (measured(pid, until_s=2.0) for _ in range(15))
            assert any(lacked.throttled_s > 0.1 for lacked in looks)
    finally:
        group.rmdir()


# ---- made-up machines ----


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_steal_is_a_share_of_the_time_that_was_wanted(tmp_path: Path) -> None:
    machine(tmp_path, proc__stat="cpu  100 10 40 900 50 5 5 40 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert contention.cpu_ticks(tmp_path) == CpuTicks(wanted=200, stolen=40)
    before = Reading(0.0, {1: ThreadTime(1.0, 0.0)}, CpuTicks(0, 0))
    after = Reading(2.0, {1: ThreadTime(2.0, 0.0)}, CpuTicks(200, 40))
    assert contention.shortage(before, after) == CpuShortage(stolen_s=0.2)


@pytest.mark.parametrize("text", ["", "intr 1 2 3", "cpu 1 2 3"])
def test_a_kernel_that_counts_no_steal_has_none(tmp_path: Path, text: str) -> None:
    assert contention.cpu_ticks(machine(tmp_path, proc__stat=text)) == CpuTicks()


def test_quotas_of_all_levels_of_version_2_are_read(tmp_path: Path) -> None:
    throttled = "usage_usec 9\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000\n"
    machine(
        tmp_path,
        proc__7__cgroup="0::/pod/task\n",
        sys__fs__cgroup__pod__task__cpu_stat="",
    )
    top = tmp_path / "sys/fs/cgroup"
    (top / "pod/cpu.stat").write_text(throttled)
    (top / "pod/task/cpu.stat").write_text("usage_usec 9\n")
    assert contention.quotas(7, tmp_path) == {top / "pod": Quota(10, 4, 2.5)}


def test_a_container_that_does_not_see_its_path_has_the_mounted_quota(tmp_path: Path) -> None:
    machine(tmp_path, proc__7__cgroup="3:cpu,cpuacct:/docker/abc\n0::/../..\n")
    top = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    top.mkdir(parents=True)
    (top / "cpu.stat").write_text("nr_periods 5\nnr_throttled 5\nthrottled_time 3000000000\n")
    assert contention.quotas(7, tmp_path) == {top: Quota(5, 5, 3.0)}


def test_time_that_many_cpus_were_throttled_counts_once() -> None:
    group = Path("g")
    before = Reading(0.0, {}, quotas={group: Quota(100, 50, 10.0)})
    after = Reading(1.0, {}, quotas={group: Quota(110, 55, 74.0)})
    assert contention.shortage(before, after) == CpuShortage(throttled_s=0.5)
