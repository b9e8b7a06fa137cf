from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from fakenode import GIB, FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.baseline import EccSeen, GpusSeen
from holdfast.health.gpu import (
    check_ecc,
    check_gpu_memory,
    check_recovery,
    judge_ecc,
    judge_memory,
    judge_recovery,
)
from holdfast.health.judgement import SEVERITY
from holdfast.health.node import Node
from holdfast.health.nvml import (
    ERRORS,
    LOST,
    Gpu,
    GpuProcess,
    Gpus,
    NoNvml,
    NvmlRefusal,
    read_gpus,
)

HEALTHY: dict[str, Any] = {
    "pci": "0000:4e:00.0",
    "recovery": 0,
    "ecc_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "used_bytes": 0,
    "processes": [],
}


def gpus(*found: Gpu, driver: str = "570.1") -> Gpus:
    return Gpus(driver, found)


# ---- absent evidence ----


def test_a_machine_without_gpus_is_told_so_and_nothing_alarms(fake: FakeNode) -> None:
    for check in (check_recovery, check_ecc, check_gpu_memory):
        found = check(fake.node(), None)
        assert found.verdict == "unknown"
        assert found.reason.startswith("no GPU here")


def test_a_gpu_without_a_driver_is_unknown(fake: FakeNode) -> None:
    fake.pci_gpu("pci0000:00/0000:00:01.0")
    found = check_recovery(fake.node(), None)
    assert found.verdict == "unknown"
    assert "there is an NVIDIA device, but no NVML here" in found.reason


def test_an_old_driver_is_unknown_and_says_which_one_is_needed(fake: FakeNode) -> None:
    fake.gpus({**HEALTHY, "recovery": {"error": 2}}, driver="535.104.05")
    found = check_recovery(fake.node(), None)
    assert found.verdict == "unknown"
    assert found.reason == "driver 535.104.05 reports no recovery action; 570 and later do"


@pytest.mark.parametrize("error", sorted(set(ERRORS) - set(LOST)))
def test_an_nvml_error_is_unknown_and_never_a_failure(error: int) -> None:
    refused = NvmlRefusal(error)
    asked = [
        judge_recovery(gpus(Gpu(index=0, uuid="a", recovery=refused)), None),
        judge_recovery(gpus(Gpu(index=0, handle=refused)), None),
        judge_ecc(gpus(Gpu(index=0, ecc_uncorrected=refused, remap_failed=refused)), None),
        judge_memory(gpus(Gpu(index=0, used_bytes=refused)), lambda pid: True, None, GIB),
    ]
    assert [found.verdict for found in asked] == ["unknown"] * len(asked)


@pytest.mark.parametrize("error", LOST)
def test_that_a_gpu_is_lost_is_the_drivers_own_word(error: int) -> None:
    found = judge_recovery(gpus(Gpu(index=3, handle=NvmlRefusal(error))), None)
    assert found.verdict == "fail"
    assert found.reason.startswith("GPU 3: ")


def test_a_file_that_is_no_description_is_no_evidence(fake: FakeNode) -> None:
    fake.write("nvml.json", "{")
    assert isinstance(fake.node().gpus, NoNvml)


# ---- recovery ----


@pytest.mark.parametrize(
    ("action", "verdict", "words"),
    [
        (0, "pass", "wants nothing done"),
        (1, "fail", "must be reset"),
        (2, "fail", "rebooted"),
        (3, "fail", "peer-to-peer"),
        (4, "fail", "reduced capacity"),
        (9, "fail", "needs recovery action 9"),
    ],
)
def test_each_recovery_action_has_its_verdict(
    fake: FakeNode, action: int, verdict: str, words: str
) -> None:
    fake.gpus(HEALTHY, {**HEALTHY, "pci": "0000:5f:00.0", "recovery": action})
    found = check_recovery(fake.node(), None)
    assert found.verdict == verdict
    assert words in found.reason
    assert verdict == "pass" or "GPU 1 (0000:5f:00.0)" in found.reason


def test_a_gpu_that_was_there_is_missed_until_it_is_back() -> None:
    both = [Gpu(index=i, uuid=f"GPU-{i}", recovery=0) for i in range(2)]
    first = judge_recovery(gpus(*both), None)
    assert isinstance(first.seen, GpusSeen)
    second = judge_recovery(gpus(both[0]), first.seen)
    assert isinstance(second.seen, GpusSeen)
    third = judge_recovery(gpus(both[0]), second.seen)
    assert [f.verdict for f in (first, second, third)] == ["pass", "fail", "fail"]
    assert "GPU 1 (GPU-1)" in third.reason
    assert judge_recovery(gpus(*both), second.seen).verdict == "pass"


def test_every_sick_gpu_is_named() -> None:
    sick = [Gpu(index=i, uuid=str(i), recovery=i % 3) for i in range(6)]
    found = judge_recovery(gpus(*sick), None)
    named = [i for i in range(6) if f"GPU {i} " in found.reason]
    assert named == [1, 2, 4, 5]


# ---- memory errors ----


def test_new_uncorrected_errors_fail_and_old_ones_warn(fake: FakeNode) -> None:
    fake.gpus({**HEALTHY, "ecc_uncorrected": 2})
    first = check_ecc(fake.node(), None)
    assert (first.verdict, first.facts["uncorrected"]) == ("warn", 2)
    assert check_ecc(fake.node(), first.seen).verdict == "warn"
    fake.gpus({**HEALTHY, "ecc_uncorrected": 3})
    second = check_ecc(fake.node(), first.seen)
    assert second.verdict == "fail"
    assert "1 uncorrected memory error just now" in second.reason


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_counter_that_went_back_was_reset_and_is_all_new(was: int, now: int) -> None:
    gpu = Gpu(index=0, uuid="a", ecc_uncorrected=now)
    found = judge_ecc(gpus(gpu), EccSeen({"a": was}))
    grew = now > was or 0 < now < was
    assert found.verdict == ("fail" if grew else "warn" if now else "pass")


@pytest.mark.parametrize(
    ("state", "verdict"),
    [({"remap_pending": True}, "warn"), ({"remap_failed": True}, "fail")],
)
def test_rows_to_remap_warn_and_none_left_fails(
    fake: FakeNode, state: dict[str, bool], verdict: str
) -> None:
    fake.gpus({**HEALTHY, **state})
    assert check_ecc(fake.node(), None).verdict == verdict


def test_a_gpu_without_ecc_is_unknown(fake: FakeNode) -> None:
    fake.gpus({"recovery": 0})
    assert check_ecc(fake.node(), None).verdict == "unknown"


# ---- memory of the dead ----


def used(bytes_: int, *processes: GpuProcess) -> Gpus:
    return gpus(Gpu(index=0, uuid="a", used_bytes=bytes_, processes=processes))


def test_memory_of_a_dead_process_fails(fake: FakeNode) -> None:
    fake.sees_all_processes()
    process = {"pid": 4242, "used_bytes": 20 * GIB}
    fake.gpus({**HEALTHY, "used_bytes": 20 * GIB, "processes": [process]})
    found = check_gpu_memory(fake.node(), None)
    assert found.verdict == "fail"
    assert "20.0 GiB" in found.reason
    assert "process 4242 is dead" in found.reason
    fake.write("proc/4242/comm", "python")
    assert check_gpu_memory(fake.node(), None).verdict == "pass"


def test_memory_that_is_given_back_meanwhile_blames_nobody(fake: FakeNode) -> None:
    fake.sees_all_processes()
    fake.gpus({**HEALTHY, "used_bytes": 20 * GIB, "processes": []})
    node = fake.node()
    assert isinstance(node.gpus, Gpus), "the first look"
    fake.gpus({**HEALTHY, "used_bytes": 0, "processes": []})
    assert check_gpu_memory(node, None).verdict == "pass"
    fake.gpus({**HEALTHY, "used_bytes": 20 * GIB, "processes": []})
    assert check_gpu_memory(node, None).verdict == "fail"


def test_in_a_container_nobody_can_tell_whose_memory_it_is(fake: FakeNode) -> None:
    fake.gpus({**HEALTHY, "used_bytes": 20 * GIB})
    found = check_gpu_memory(fake.node(), None)
    assert found.verdict == "unknown"
    assert "container" in found.reason


def test_where_the_kernel_uses_gpu_memory_nobody_can_tell_either(fake: FakeNode) -> None:
    fake.sees_all_processes()
    fake.write("sys/devices/system/node/has_memory", "0,8")
    fake.write("sys/devices/system/node/has_cpu", "0")
    fake.gpus({**HEALTHY, "used_bytes": 20 * GIB})
    assert check_gpu_memory(fake.node(), None).verdict == "unknown"


def test_a_living_process_whose_use_is_not_told_is_not_blamed() -> None:
    found = judge_memory(used(20 * GIB, GpuProcess(1)), lambda pid: True, None, GIB)
    assert found.verdict == "unknown"


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 20)), unique_by=lambda p: p[0]),
    st.sets(st.integers(1, 99)),
)
def test_only_memory_that_no_living_process_uses_fails(
    total: int, processes: list[tuple[int, int]], living: set[int]
) -> None:
    listed = [GpuProcess(pid, gib * GIB) for pid, gib in processes]
    found = judge_memory(used(total * GIB, *listed), living.__contains__, None, GIB)
    owned = sum(gib for pid, gib in processes if pid in living)
    assert found.verdict == ("fail" if total - owned > 1 else "pass")


# ---- the whole ----

NUMBERS = st.one_of(st.integers(0, 9), st.builds(NvmlRefusal, st.integers(1, 30)))
FLAGS = st.one_of(st.booleans(), st.builds(NvmlRefusal, st.integers(1, 30)))
ANY_GPU = st.builds(
    Gpu,
    index=st.integers(0, 8),
    uuid=st.text(max_size=3),
    handle=st.none() | st.builds(NvmlRefusal, st.integers(1, 30)),
    recovery=NUMBERS,
    ecc_uncorrected=NUMBERS,
    remap_pending=FLAGS,
    remap_failed=FLAGS,
)


@given(st.lists(ANY_GPU, max_size=8))
def test_a_pass_needs_evidence_and_a_failure_too(found: list[Gpu]) -> None:
    recovery, ecc = judge_recovery(gpus(*found), None), judge_ecc(gpus(*found), None)
    evidence = [g for g in found if g.handle is None and isinstance(g.recovery, int)]
    lost = [
        g
        for g in found
        for part in (g.handle, g.recovery)
        if isinstance(part, NvmlRefusal) and part.error in LOST
    ]
    if recovery.verdict == "pass":
        assert len(evidence) == len(found) > 0
    if recovery.verdict == "fail":
        assert lost or any(g.recovery for g in evidence)
    assert recovery.verdict in SEVERITY
    assert ecc.verdict in SEVERITY


# ---- the library --------------------------------------------------------------------------------


def test_without_pynvml_a_check_says_how_to_install_it(
    fake: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    fake.write("dev/nvidia0", "")
    found = check_recovery(Node(fake.settings(nvml=None)), None)
    assert found.verdict == "unknown"
    assert found.reason.endswith("nvidia-ml-py is not installed: pip install 'holdfast[gpu]'")


@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no GPU here")
def test_a_real_gpu_is_described() -> None:
    pytest.importorskip("pynvml")
    found = read_gpus(None)
    assert isinstance(found, Gpus)
    for gpu in found.gpus:
        assert gpu.handle is None
        assert gpu.uuid.startswith("GPU-")
        assert os.path.exists(f"/sys/bus/pci/devices/{gpu.pci}")
        assert isinstance(gpu.used_bytes, int)
        assert isinstance(gpu.processes, tuple)
