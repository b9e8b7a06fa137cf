"""GPU memory that a dead process left behind.

A process that died inside the driver can leave its memory taken; the next one on that GPU then runs
out of memory and nobody can say why. It shows as memory in use that no living process uses.

That can only be told where every process can be seen. In a container the users of a GPU are hidden,
and on machines where the kernel itself uses the GPU's memory (it shows as memory without processors)
no process need own it: there the answer is unknown. And since a process that ended a moment ago may
still be giving its memory back, a suspicion is only believed when a second look confirms it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding, Remark, amount, summed
from holdfast.health.gpu import none_to_ask
from holdfast.health.node import Node
from holdfast.health.nvml import Gpu, Gpus, NoNvml, Refused
from holdfast.messages.health import Fact

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The number that the kernel gives to the namespace in which all processes can be seen."""


def check_gpu_memory(node: Node, before: Seen | None) -> Finding:
    limit = node.settings.limits.leftover_bytes
    gpus, why_blind = node.gpus, _why_blind(node)
    if isinstance(gpus, NoNvml):
        return none_to_ask(node, gpus)
    found = judge_memory(gpus, node.alive, why_blind, limit)
    if found.verdict != "fail":
        return found
    time.sleep(node.settings.settle_s)
    gpus = node.look_again()
    if isinstance(gpus, NoNvml):
        return none_to_ask(node, gpus)
    return judge_memory(gpus, node.alive, why_blind, limit)


def _why_blind(node: Node) -> str | None:
    """Why memory without an owner would prove nothing here; None where it does."""
    try:
        namespace = os.readlink(node.path("proc/self/ns/pid"))
    except OSError:
        namespace = ""
    if namespace != _FIRST_PID_NAMESPACE:
        return "in a container not every process can be seen"
    with_memory = node.numbers("sys/devices/system/node/has_memory") or set()
    if with_memory - (node.numbers("sys/devices/system/node/has_cpu") or with_memory):
        return "the kernel may use GPU memory as its own here"
    return None


def judge_memory(
    gpus: Gpus, alive: Callable[[int], bool], why_blind: str | None, limit_bytes: int
) -> Finding:
    remarks = []
    facts: dict[str, Fact] = {}
    for gpu in gpus.gpus:
        if isinstance(gpu.used_bytes, int):
            facts[f"gpu{gpu.index}_used_bytes"] = gpu.used_bytes
        remark = _memory(gpu, alive, why_blind, limit_bytes)
        if remark is not None:
            remarks.append(remark)
    if not gpus.gpus:
        remarks.append(Remark("unknown", "NVML sees no GPU"))
    return summed(remarks, "all GPU memory in use belongs to living processes", facts)


def _memory(
    gpu: Gpu, alive: Callable[[int], bool], why_blind: str | None, limit_bytes: int
) -> Remark | None:
    refused = next((x for x in (gpu.handle, gpu.used_bytes, gpu.processes) if _refused(x)), None)
    if refused is not None:
        return Remark("unknown", f"{gpu}: its memory cannot be asked for ({refused})")
    assert not isinstance(gpu.used_bytes, Refused)
    assert not isinstance(gpu.processes, Refused)
    if gpu.used_bytes <= limit_bytes:
        return None
    living = [process for process in gpu.processes if alive(process.pid)]
    owned = sum(process.used_bytes or 0 for process in living)
    left = gpu.used_bytes - owned
    if left <= limit_bytes:
        return None
    if why_blind is not None:
        return Remark("unknown", f"{gpu}: nobody seen here uses {amount(left)}, but {why_blind}")
    if any(process.used_bytes is None for process in living):
        return Remark("unknown", f"{gpu}: how much its processes use is not told")
    dead = [str(process.pid) for process in gpu.processes if process not in living]
    whose = f" (process {', '.join(dead)} is dead)" if dead else ""
    text = f"{gpu}: {amount(left)} of its memory are used by no living process{whose}: reset it"
    return Remark("fail", text)


def _refused(value: object) -> bool:
    return isinstance(value, Refused)
