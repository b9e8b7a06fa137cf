"""How much of a node is in use: read from the kernel, and sent only when it has changed."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.agent import node_usage
from holdfast.agent.node_sampler import (
    OLD_AFTER,
    READ_EVERY_S,
    SAMPLES_PER_S,
    SEND_EVERY_S,
    NodeSampler,
    SampleRule,
    interval_s,
)
from holdfast.agent.node_usage import Capacity, GpuReader, MachineReading, Traffic
from holdfast.messages.usage import GpuUsage, NodeUsage

GIB = 1 << 30


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


STAT = """cpu  999 9 9 9 9 9 9 9 0 0
cpu0 100 0 50 800 10 0 0 40 0 0
cpu1 300 0 50 600 10 0 0 40 0 0
cpu77 900 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def test_without_a_quota_the_cpus_of_our_affinity_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    put(tmp_path, "proc/stat", STAT)
    assert node_usage.cpu_use(tmp_path) == Capacity(used_s=5.8, cpus=2)


def test_a_quota_of_our_cgroup_or_one_above_it_counts_before_the_machine(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    put(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    put(tmp_path, "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    put(tmp_path, "sys/fs/cgroup/pod/cpu.max", "400000 100000\n")
    put(tmp_path, "sys/fs/cgroup/pod/cpu.stat", "usage_usec 8000000\nuser_usec 7000000\n")
    assert node_usage.cpu_use(tmp_path) == Capacity(used_s=8.0, cpus=4.0)


def test_a_quota_of_version_1_counts_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    put(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/job\n")
    folder = "sys/fs/cgroup/cpu,cpuacct/job"
    put(tmp_path, f"{folder}/cpu.cfs_quota_us", "200000\n")
    put(tmp_path, f"{folder}/cpu.cfs_period_us", "100000\n")
    put(tmp_path, f"{folder}/cpuacct.usage", "3000000000\n")
    assert node_usage.cpu_use(tmp_path) == Capacity(used_s=3.0, cpus=2.0)


DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 5000 5 0 0 0 0 0 0 5000 5 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0
 bond0: 100 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0
"""


def test_traffic_counts_each_byte_once_and_rdma_too(tmp_path) -> None:
    put(tmp_path, "proc/self/net/dev", DEV)
    assert node_usage.traffic(tmp_path) == Traffic(200, 20), "in a container no device is visible"
    (tmp_path / "sys/class/net/eth0/device").mkdir(parents=True)
    assert node_usage.traffic(tmp_path) == Traffic(100, 10)
    counters = "sys/class/infiniband/mlx5_0/ports/1/counters"
    put(tmp_path, f"{counters}/port_rcv_data", "1000\n")
    put(tmp_path, f"{counters}/port_xmit_data", "500\n")
    assert node_usage.traffic(tmp_path) == Traffic(4100, 2010)


def test_what_the_kernel_does_not_show_is_unknown(tmp_path) -> None:
    reading = node_usage.read(1.0, root=tmp_path)
    assert reading == MachineReading(1.0, None, 0, 0, None)


def test_this_machine_can_be_read_at_almost_no_cost() -> None:
    gpus = GpuReader()
    before = time.thread_time()
    readings = [node_usage.read(float(i), gpus) for i in range(20)]
    each_s = (time.thread_time() - before) / 20
    last = readings[-1]
    assert last.cpu is not None
    assert 0 < last.memory_used_bytes <= last.memory_bytes
    assert each_s < 0.001 * READ_EVERY_S, "more than a tenth of a percent of a CPU"


class Nvml:
    """NVML as its Python binding shows it, with two GPUs, of which one refuses its utilization."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        if device == 1:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=83, memory=20)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(used=30 * GIB, total=80 * GIB)


def test_gpus_are_read_by_nvml_as_far_as_it_tells(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    first, second = GpuReader().read()
    assert first == GpuUsage(busy=0.83, memory_used_bytes=30 * GIB, memory_bytes=80 * GIB)
    assert second.busy is None


# ---- what is sent ----


def reading(at: float, busy: float = 0.5, memory: int = 10 * GIB, rate: float = 0.0):
    """A machine of 8 CPUs that was busy to that share ever since it started."""
    moved = round(rate * at)
    traffic = Traffic(moved, moved)
    return MachineReading(at, Capacity(8 * busy * at, 8.0), memory, 64 * GIB, traffic)


def test_the_first_sample_is_sent_after_two_readings() -> None:
    rule = SampleRule(60.0)
    assert rule.take(reading(0.0)) is None
    sent = rule.take(reading(10.0, rate=5e6))
    assert sent == NodeUsage(
        cpu=0.5,
        cpus=8.0,
        memory_used_bytes=10 * GIB,
        memory_bytes=64 * GIB,
        received_bytes_per_s=5e6,
        sent_bytes_per_s=5e6,
    )


def samples(rule: SampleRule, until_s: float, **how) -> list[float]:
    """When samples were sent, of a machine that is read every ten seconds."""
    times = [i * READ_EVERY_S for i in range(round(until_s / READ_EVERY_S))]
    return [at for at in times if rule.take(reading(at, **how)) is not None]


def test_a_machine_that_does_the_same_all_the_time_is_seldom_reported() -> None:
    assert samples(SampleRule(60.0), 3600.0 * 2) == pytest.approx(
        [10.0 + i * OLD_AFTER * 60.0 for i in range(12)], abs=60.0
    )


def test_a_change_is_reported_with_the_next_minute_and_not_before() -> None:
    rule = SampleRule(60.0)
    samples(rule, 130.0)
    fuller = [i for i in range(12) if rule.take(reading(130.0 + 10 * i, memory=20 * GIB))]
    assert len(fuller) == 1
    assert fuller[0] <= 6


def test_ten_thousand_nodes_together_send_a_few_samples_a_second() -> None:
    assert interval_s(1) == SEND_EVERY_S
    assert 10_000 / interval_s(10_000) <= SAMPLES_PER_S


def test_a_sampler_reports_this_machine_until_it_is_closed() -> None:
    async def first_sample() -> NodeUsage:
        sent: asyncio.Queue[NodeUsage] = asyncio.Queue()
        sampler = NodeSampler(1, sent.put_nowait, read_every_s=0.05)
        sampler.start()
        try:
            return await asyncio.wait_for(sent.get(), 60)
        finally:
            sampler.close()

    usage = asyncio.run(first_sample())
    assert usage.memory_bytes > 0
    assert usage.cpu is not None
