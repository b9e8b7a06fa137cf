"""GPUs: does the driver want one recovered, is one gone, has its memory erred?

The driver's own verdict comes first: since 570 it says what it wants done to a GPU, and at any age
it says when one is lost. That is evidence. That a call fails is none: the GPU is then unknown.

Errors that memory could not correct fail a GPU when they are new, because what was computed on it
since the last look cannot be trusted. Old ones, and rows that wait for a reset to be replaced, leave
it usable (the bad pages are not handed out any more) and are a warning.
"""

from __future__ import annotations

from holdfast.health.baseline import EccSeen, GpusSeen, Seen
from holdfast.health.finding import Finding, Remark, counted, summed, unknown
from holdfast.health.node import Node
from holdfast.health.nvml import ABSENT, LOST, Gpu, Gpus, NoNvml, Refused
from holdfast.messages.health import Fact, Verdict

ACTIONS = {
    1: "must be reset: end its processes, then `nvidia-smi -r`",
    2: "needs the node rebooted",
    3: "wants its peer-to-peer traffic drained: end the processes that use it",
    4: "works at reduced capacity: drain it, then reset it",
}

RECOVERY_DRIVER = 570


def none_to_ask(node: Node, no_nvml: NoNvml) -> Finding:
    """Nothing can be said about GPUs; on a machine without any there is nothing to say."""
    if not node.has_nvidia_device:
        return unknown(f"no GPU here: no NVIDIA device, and {no_nvml.reason}")
    return unknown(f"there is an NVIDIA device, but {no_nvml.reason}")


def check_recovery(node: Node, before: Seen | None) -> Finding:
    gpus = node.gpus
    if isinstance(gpus, NoNvml):
        return none_to_ask(node, gpus)
    return judge_recovery(gpus, before if isinstance(before, GpusSeen) else None)


def judge_recovery(gpus: Gpus, before: GpusSeen | None) -> Finding:
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
        asked = ACTIONS.get(told, f"wants action {told}: see `nvidia-smi -q`")
        return [Remark("fail", f"{gpu} {asked}")]
    if gpu.handle is None and told.error in ABSENT:
        return [Remark("unknown", _too_old(driver))]
    return [Remark(verdict_of(told), f"{gpu}: {told}")]


def verdict_of(refused: Refused) -> Verdict:
    """That a GPU is lost is the driver's word; that a call failed says nothing about the GPU."""
    return "fail" if refused.error in LOST else "unknown"


def _too_old(driver: str) -> str:
    major = driver.partition(".")[0]
    if major.isdecimal() and int(major) < RECOVERY_DRIVER:
        return f"driver {driver} tells no recovery action; one from {RECOVERY_DRIVER} on does"
    return f"driver {driver} tells no recovery action for these GPUs"


def check_ecc(node: Node, before: Seen | None) -> Finding:
    gpus = node.gpus
    if isinstance(gpus, NoNvml):
        return none_to_ask(node, gpus)
    return judge_ecc(gpus, before if isinstance(before, EccSeen) else None)


def judge_ecc(gpus: Gpus, before: EccSeen | None) -> Finding:
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
        remarks.append(Remark("warn", f"{gpu} waits for a reset to replace bad memory rows"))
    count = gpu.ecc_uncorrected
    word = "uncorrected memory error"
    if isinstance(count, int):
        # A counter that went back was reset with its GPU: what it says now is all new.
        new = 0 if known is None else count - known if count >= known else count
        if new:
            remarks.append(Remark("fail", f"{gpu} had {counted(new, word)} just now"))
        elif count:
            remarks.append(Remark("warn", f"{gpu} had {counted(count, word)} since its reset"))
    asked = (gpu.handle, count, gpu.remap_failed)
    for refused in dict.fromkeys(part for part in asked if isinstance(part, Refused)):
        if refused.error not in ABSENT:
            remarks.append(Remark(verdict_of(refused), f"{gpu}: {refused}"))
    return remarks
