"""Timing that is fair to all: contestants take turns, so what else the machine does hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, perf_counter, sleep

from checkpoints.lines import Seconds

LOOK_EVERY_S = 0.01


def took(act: Callable[[], object]) -> Seconds:
    began = perf_counter()
    act()
    return perf_counter() - began


def alternate(
    tries: int, contestants: Mapping[str, Callable[[], Seconds]], warm: int = 1
) -> dict[str, list[Seconds]]:
    """A B C A B C ...: each tells its own time, as it may have to tidy up after what counts."""
    found: dict[str, list[Seconds]] = {name: [] for name in contestants}
    for turn in range(warm + tries):
        for name, run in contestants.items():
            seconds = run()
            if turn >= warm:
                found[name].append(seconds)
    return found


def wait_for_shared_memory(size: int, limit_s: Seconds = 60.0) -> Seconds:
    """Until this process has so many bytes of shared memory at hand; how long that took."""
    began = monotonic()
    while _shared_memory_bytes() < size:
        if monotonic() - began > limit_s:
            raise TimeoutError(f"no {size / 1e9:.2f} GB of shared memory after {limit_s:g} s")
        sleep(LOOK_EVERY_S)
    return monotonic() - began


def _shared_memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssShmem")
