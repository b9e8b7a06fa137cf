"""Tells the agent which GPU a rank trains on, so that a standby can be ready for it.

It is told after the first step, when the script has made its choice and most of its memory is
allocated. A script can make settings that only count for a process that has not touched a GPU yet:
environment variables that CUDA, its libraries and torch's allocator read once, or another allocator.
The report names them, and no standby touches the GPU then: the script gets what it sets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from holdfast.messages.local import DeviceUsed
from holdfast.worker.channel import Channel
from holdfast.worker.heartbeat import uses_device

READ_ONCE: Final = (
    "CUDA",
    "CUBLAS",
    "CUDNN",
    "NCCL",
    "NVIDIA",
    "PYTORCH_CUDA",
    "PYTORCH_ALLOC",
    "PYTORCH_NO_CUDA_MEMORY",
    "PYTORCH_NVML",
    "TORCH_CUDNN",
    "TORCH_BLAS",
    "TORCH_ALLOW_TF32",
)
"""Beginnings of the names of variables that are read when a process first uses a GPU, or NCCL."""
MOST_NAMES: Final = 20


class DeviceReport:
    """Made before the script runs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._before = read_once(os.environ)

    def stepped(self) -> None:
        """Tell the agent, if the script uses a GPU; called after its first step."""
        if not uses_device():
            return
        torch: Any = sys.modules["torch"]
        try:
            if not torch.cuda.is_current_stream_capturing():
                self._channel.send(self._report(torch))
        except (RuntimeError, AttributeError):  # Of the driver, or of another version of torch.
            pass

    def _report(self, torch: Any) -> DeviceUsed:
        index = main_device(torch)
        free, total = torch.cuda.mem_get_info(index)
        changed = {name for name, _ in self._before.items() ^ read_once(os.environ).items()}
        own = [name[:100] for name in sorted(changed)[:MOST_NAMES]]
        if torch.cuda.get_allocator_backend() not in ("native", "cudaMallocAsync"):
            own.append("an allocator")
        return DeviceUsed(
            index=index,
            free_bytes=free,
            total_bytes=total,
            nccl=uses_nccl(),
            own_settings=tuple(own),
        )


def read_once(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that count only before a GPU is touched."""
    return {name: value for name, value in environ.items() if name.startswith(READ_ONCE)}


def main_device(torch: Any) -> int:
    """Return the GPU on which this process has most of its memory, else its current one."""
    current = int(torch.cuda.current_device())
    held = {index: torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())}
    return max(held, key=lambda index: (held[index], index == current), default=current)


def uses_nccl() -> bool:
    """Return whether a process group of this process is NCCL's."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return any("nccl" in str(config) for config in c10d._world.pg_backend_config.values())
    except AttributeError:  # Not imported, or another version of torch.
        return False
