"""Checks the GPUs: does the driver want one recovered, is one gone, has its memory erred or leaked?

The driver's own verdict comes first: since version 570 it names the recovery that a GPU needs, and
every version reports a lost GPU. That is evidence. A call that fails is none: the GPU is then unknown.

Uncorrected memory errors fail a GPU if they are new, because what was computed on it since the last
look cannot be trusted. Old ones, and rows that wait for a reset to be remapped, leave it usable (the
driver does not hand out bad pages) and are a warning.

A process that died inside the driver can leave its memory allocated, and the next one on that GPU runs
out of memory without a visible reason. It shows as memory in use that no living process uses. That
proves something only where every process can be seen: in a container the users of a GPU are hidden,
and where the kernel itself uses GPU memory (a NUMA node with memory but no processors) no process need
own it. A process that ended a moment ago may still be releasing its memory, so a suspicion is only
believed if a second look confirms it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from holdfast.health.baseline import EccSeen, GpusSeen
from holdfast.health.judgement import Judgement, Remark, amount, counted, summed, unknown
from holdfast.health.node import Node
from holdfast.health.nvml import ABSENT, LOST, Gpu, Gpus, NoNvml, NvmlRefusal, read_gpus
from holdfast.messages.health import Fact, Verdict

ACTIONS = {
    1: "must be reset: end its processes, then `nvidia-smi -r`",
    2: "needs the node rebooted",
    3: "needs its peer-to-peer traffic drained: end the processes that use it",
    4: "works at reduced capacity: drain it, then reset it",
    5: "needs its IMEX domain recovered",
    6: "needs a bus reset",
    7: "needs the whole system rebooted",
}

RECOVERY_DRIVER = 570

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The namespace in which all processes can be seen."""


def judge_gpus(gpus: Gpus | NoNvml, node: Node, judge: Callable[[Gpus], Judgement]) -> Judgement:
    """Judge the GPUs if NVML shows them; otherwise say why it does not."""
    if isinstance(gpus, Gpus):
        return judge(gpus)
    if not node.has_nvidia_device:
        return unknown("no GPU here: no NVIDIA device")
    return unknown(f"there is an NVIDIA device, but {gpus.reason}")


def verdict_of(refusal: NvmlRefusal) -> Verdict:
    """Return "fail" if the driver says that the GPU is lost; other errors prove nothing."""
    return "fail" if refusal.error in LOST else "unknown"


# ---- recovery -----------------------------------------------------------------------------------


def check_recovery(node: Node, before: GpusSeen | None) -> Judgement:
    return judge_gpus(node.gpus, node, lambda gpus: judge_recovery(gpus, before))


def judge_recovery(gpus: Gpus, before: GpusSeen | None) -> Judgement:
    here = {gpu.uuid: gpu.index for gpu in gpus.gpus if gpu.uuid}
    known = before.uuids if before else {}
    remarks = [remark for gpu in gpus.gpus for remark in _recovery(gpu, gpus.driver)]
    remarks += [
        Remark("fail", f"GPU {index} ({uuid}) was there at an earlier look and is gone")
        for uuid, index in known.items()
        if uuid not in here
    ]
    if not gpus.gpus and not remarks:
        remarks.append(Remark("unknown", "NVML sees no GPU"))
    fine = f"the driver ({gpus.driver}) wants nothing done to {counted(len(gpus.gpus), 'GPU')}"
    facts: dict[str, Fact] = {"gpus": len(gpus.gpus), "driver": gpus.driver}
    # What is true of all GPUs need not be said of each.
    return summed(list(dict.fromkeys(remarks)), fine, facts, GpusSeen({**known, **here}))


def _recovery(gpu: Gpu, driver: str) -> list[Remark]:
    told = gpu.handle or gpu.recovery
    if told == 0:
        return []
    if isinstance(told, int):
        asked = ACTIONS.get(told, f"needs recovery action {told}: see `nvidia-smi -q`")
        return [Remark("fail", f"{gpu} {asked}")]
    if gpu.handle is None and told.error in ABSENT:
        return [Remark("unknown", _too_old(driver))]
    return [Remark(verdict_of(told), f"{gpu}: {told}")]


def _too_old(driver: str) -> str:
    major = driver.partition(".")[0]
    if major.isdecimal() and int(major) < RECOVERY_DRIVER:
        return f"driver {driver} reports no recovery action; {RECOVERY_DRIVER} and later do"
    return f"driver {driver} reports no recovery action for these GPUs"


# ---- memory errors ------------------------------------------------------------------------------


def check_ecc(node: Node, before: EccSeen | None) -> Judgement:
    return judge_gpus(node.gpus, node, lambda gpus: judge_ecc(gpus, before))


def judge_ecc(gpus: Gpus, before: EccSeen | None) -> Judgement:
    known = before.uncorrected if before else {}
    remarks = [remark for gpu in gpus.gpus for remark in _ecc(gpu, known.get(gpu.uuid))]
    counts = {g.uuid: g.ecc_uncorrected for g in gpus.gpus if isinstance(g.ecc_uncorrected, int)}
    remaps = any(isinstance(gpu.remap_failed, bool) for gpu in gpus.gpus)
    told = ["no uncorrected errors"] * bool(counts) + ["no rows to remap"] * remaps
    if not told and not remarks:
        return unknown("these GPUs keep no count of memory errors")
    fine = f"{' and '.join(told)} on {counted(len(gpus.gpus), 'GPU')}"
    facts = {"uncorrected": sum(counts.values())}
    return summed(remarks, fine, facts, EccSeen({**known, **counts}))


def _ecc(gpu: Gpu, known: int | None) -> list[Remark]:
    remarks = []
    if gpu.remap_failed is True:
        remarks.append(Remark("fail", f"{gpu} has no spare memory rows left: replace it"))
    if gpu.remap_pending is True:
        remarks.append(Remark("warn", f"{gpu} waits for a reset to remap bad memory rows"))
    count, word = gpu.ecc_uncorrected, "uncorrected memory error"
    if isinstance(count, int):
        # A counter that went back was reset with its GPU: all that it counts is new.
        new = 0 if known is None else count - known if count >= known else count
        if new:
            remarks.append(Remark("fail", f"{gpu} had {counted(new, word)} just now"))
        elif count:
            remarks.append(Remark("warn", f"{gpu} had {counted(count, word)} since its reset"))
    parts = (gpu.handle, count, gpu.remap_failed)
    for refusal in dict.fromkeys(part for part in parts if isinstance(part, NvmlRefusal)):
        if refusal.error not in ABSENT:
            remarks.append(Remark(verdict_of(refusal), f"{gpu}: {refusal}"))
    return remarks


# ---- leftover memory ----------------------------------------------------------------------------


def check_gpu_memory(node: Node, before: None) -> Judgement:
    why_blind, limit = _why_blind(node), node.settings.limits.leftover_bytes

    def judge(gpus: Gpus) -> Judgement:
        return judge_memory(gpus, node.alive, why_blind, limit)

    found = judge_gpus(node.gpus, node, judge)
    if found.verdict != "fail":
        return found
    time.sleep(node.settings.settle_s)
    return judge_gpus(read_gpus(node.settings.nvml), node, judge)


def _why_blind(node: Node) -> str | None:
    """Return why memory without an owner would prove nothing here; None if it does."""
    try:
        namespace = os.readlink(node.path("proc/self/ns/pid"))
    except OSError:
        namespace = ""
    if namespace != _INITIAL_PID_NAMESPACE:
        return "in a container not every process can be seen"
    with_memory = node.numbers("sys/devices/system/node/has_memory") or set()
    if with_memory - (node.numbers("sys/devices/system/node/has_cpu") or with_memory):
        return "the kernel may use GPU memory as its own here"
    return None


def judge_memory(
    gpus: Gpus, alive: Callable[[int], bool], why_blind: str | None, limit_bytes: int
) -> Judgement:
    used = {g.index: g.used_bytes for g in gpus.gpus if isinstance(g.used_bytes, int)}
    remarks = [r for gpu in gpus.gpus for r in _memory(gpu, alive, why_blind, limit_bytes)]
    if not gpus.gpus:
        remarks.append(Remark("unknown", "NVML sees no GPU"))
    facts = {f"gpu{index}_used_bytes": size for index, size in used.items()}
    return summed(remarks, "all GPU memory in use belongs to living processes", facts)


def _memory(
    gpu: Gpu, alive: Callable[[int], bool], why_blind: str | None, limit_bytes: int
) -> list[Remark]:
    used, processes = gpu.used_bytes, gpu.processes
    if gpu.handle or isinstance(used, NvmlRefusal) or isinstance(processes, NvmlRefusal):
        refusals = [x for x in (gpu.handle, used, processes) if isinstance(x, NvmlRefusal)]
        return [Remark("unknown", f"{gpu}: its memory is unknown ({refusals[0]})")]
    living = [process for process in processes if alive(process.pid)]
    left = used - sum(process.used_bytes or 0 for process in living)
    if left <= limit_bytes:
        return []
    if why_blind is not None:
        text = f"no process seen here uses {amount(left)}, but {why_blind}"
        return [Remark("unknown", f"{gpu}: {text}")]
    if any(process.used_bytes is None for process in living):
        return [Remark("unknown", f"{gpu}: how much its processes use is unknown")]
    dead = [str(process.pid) for process in processes if process not in living]
    whose = f" (process {', '.join(dead)} is dead)" if dead else ""
    text = f"{gpu}: {amount(left)} of its memory are used by no living process{whose}: reset it"
    return [Remark("fail", text)]
