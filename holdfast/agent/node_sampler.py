"""Reports how much of this node's machine is in use.

Every ten seconds the counters are read, which takes about a millisecond; a sample is the mean of a
minute or longer. It is sent only if it differs noticeably from the one sent last, or if that is old:
each sample is an event in the job's journal, and those of ten thousand nodes must not fill it. For the
same reason the nodes of a large job send less often: about `SAMPLES_PER_S` of all nodes together.

Reading happens in a thread of its own. A driver that hangs (NVML, a network file system) then costs the
samples, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.agent import node_usage
from holdfast.agent.node_usage import GpuReader, MachineReading
from holdfast.messages.units import Seconds
from holdfast.messages.usage import GpuUsage, NodeUsage

log = logging.getLogger("holdfast.agent")

READ_EVERY_S: Final = 10.0
SEND_EVERY_S: Final = 60.0
SAMPLES_PER_S: Final = 5.0
"""Samples of the whole job in a second, at most."""
OLD_AFTER: Final = 10
"""A sample is sent again, changed or not, after this many times the usual interval."""
NOTICEABLE: Final = 0.05
"""Change of a share that counts."""
NOTICEABLE_TIMES: Final = 1.5
NOTICEABLE_BYTES_PER_S: Final = 1e6
"""Change of the network's load that counts: by that factor and that much."""


def interval_s(nodes: int) -> Seconds:
    """Return how often a node of a job of that size may send a sample."""
    return max(SEND_EVERY_S, nodes / SAMPLES_PER_S)


class SampleRule:
    """Turns readings into the samples that are worth sending."""

    def __init__(self, every_s: Seconds) -> None:
        self._every_s = every_s
        self._readings: list[MachineReading] = []
        """Since the last sample that was considered, with the one before."""
        self._sent: NodeUsage | None = None
        self._sent_at = 0.0

    def take(self, reading: MachineReading) -> NodeUsage | None:
        """Take a reading; return a sample if one is to be sent now."""
        self._readings.append(reading)
        first = self._readings[0]
        if len(self._readings) < 2:
            return None
        due = self._sent is None or reading.at - first.at >= self._every_s - READ_EVERY_S / 2
        if not due:
            return None
        usage = mean(self._readings)
        self._readings = [reading]
        old = reading.at - self._sent_at >= OLD_AFTER * self._every_s
        if self._sent is not None and not old and not differs(self._sent, usage):
            return None
        self._sent, self._sent_at = usage, reading.at
        return usage


def mean(readings: Sequence[MachineReading]) -> NodeUsage:
    """Summarize the time from the first of these readings to the last."""
    first, last = readings[0], readings[-1]
    took_s = last.at - first.at
    cpu, received, sent = None, None, None
    if first.cpu is not None and last.cpu is not None and last.cpu.cpus > 0 and took_s > 0:
        used_s = last.cpu.used_s - first.cpu.used_s
        cpu = round(min(1.0, max(0.0, used_s / took_s / last.cpu.cpus)), 4)
    if first.traffic is not None and last.traffic is not None and took_s > 0:
        received = round(max(0.0, (last.traffic.received - first.traffic.received) / took_s))
        sent = round(max(0.0, (last.traffic.sent - first.traffic.sent) / took_s))
    return NodeUsage(
        cpu=cpu,
        cpus=round(last.cpu.cpus, 2) if last.cpu is not None else 0.0,
        memory_used_bytes=max(one.memory_used_bytes for one in readings[1:]),
        memory_bytes=last.memory_bytes,
        received_bytes_per_s=received,
        sent_bytes_per_s=sent,
        gpus=_mean_gpus([one.gpus for one in readings[1:]]),
    )


def _mean_gpus(seen: Sequence[tuple[GpuUsage, ...]]) -> tuple[GpuUsage, ...]:
    found = []
    for index, newest in enumerate(seen[-1]):
        ones = [gpus[index] for gpus in seen if index < len(gpus)]
        known = [one.busy for one in ones if one.busy is not None]
        found.append(
            GpuUsage(
                busy=round(sum(known) / len(known), 4) if known else None,
                memory_used_bytes=max(one.memory_used_bytes for one in ones),
                memory_bytes=newest.memory_bytes,
            )
        )
    return tuple(found)


def differs(before: NodeUsage, after: NodeUsage) -> bool:
    """Return whether something has changed noticeably."""
    shares = [(before.cpu, after.cpu), (before.memory, after.memory)]
    for old, new in zip(before.gpus, after.gpus, strict=False):
        shares += [(old.busy, new.busy), (_memory(old), _memory(new))]
    if len(before.gpus) != len(after.gpus) or any(_moved(*pair) for pair in shares):
        return True
    rates = [
        (before.received_bytes_per_s, after.received_bytes_per_s),
        (before.sent_bytes_per_s, after.sent_bytes_per_s),
    ]
    return any(_jumped(old or 0.0, new or 0.0) for old, new in rates)


def _memory(gpu: GpuUsage) -> float | None:
    return gpu.memory_used_bytes / gpu.memory_bytes if gpu.memory_bytes else None


def _moved(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) >= NOTICEABLE


def _jumped(old: float, new: float) -> bool:
    low, high = sorted((old, new))
    return high - low >= NOTICEABLE_BYTES_PER_S and high >= NOTICEABLE_TIMES * low


class NodeSampler:
    """Reads in a thread of its own, until it is closed."""

    def __init__(
        self, nodes: int, send: Callable[[NodeUsage], None], read_every_s: Seconds = READ_EVERY_S
    ) -> None:
        self._rule = SampleRule(interval_s(nodes))
        self._send = send
        self._read_every_s = read_every_s
        self._closed = threading.Event()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        threading.Thread(target=self._run, name="holdfast-sampler", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        try:
            gpus = GpuReader()
            while not self._closed.is_set():
                usage = self._rule.take(node_usage.read(time.monotonic(), gpus))
                if usage is not None:
                    with suppress(RuntimeError):  # The agent may have ended.
                        self._loop.call_soon_threadsafe(self._send, usage)
                self._closed.wait(self._read_every_s)
        except Exception:  # The edge of the thread: samples are not worth an agent.
            log.exception("the sampler of this node crashed; no more samples are sent")


@contextmanager
def sampling(sampler: NodeSampler) -> Iterator[None]:
    """Sample in the background within this context."""
    sampler.start()
    try:
        yield
    finally:
        sampler.close()
