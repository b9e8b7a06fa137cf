"""Standbys hold GPUs only where ranks can spare the memory, and only the GPU of their rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.agent.devices import (
    ASSUMED_BYTES,
    Device,
    Devices,
    choice,
    has_room,
    held_text,
    ran_out_of_memory,
    visible_device,
)
from holdfast.config.settings import RunSettings
from holdfast.messages.local import DeviceUsed
from holdfast.messages.records import Raised

GIB = 1 << 30


@dataclass
class Waiting:
    """A standby, as far as it is decided by."""

    rehearsed: bool = True
    outdated: bool = False
    device: Device | None = None
    taking_device: bool = False
    name: str = field(default="", compare=False)


def settings(**changed: Any) -> RunSettings:
    given = {"standby_gpu": True, "virtual_local_rank": False} | changed
    return cast(RunSettings, SimpleNamespace(**given))


def report(index: int = 0, free: int = 70 * GIB, **more: Any) -> DeviceUsed:
    return DeviceUsed(index=index, free_bytes=free, total_bytes=80 * GIB, **more)


def known(*reports: DeviceUsed, **changed: Any) -> Devices:
    """What is known after the first steps of a round."""
    devices = Devices(settings(**changed), {})
    devices.begin_round(range(len(reports)))
    for local_rank, one in enumerate(reports):
        devices.used(local_rank, one)
    return devices


def device(index: int) -> Device:
    return Device("", index)


# ---- who takes which ----


def test_each_rank_gets_a_standby_for_its_gpu_one_after_the_other() -> None:
    devices, standbys = known(report(0), report(1)), [Waiting(), Waiting()]
    taken = []
    while (found := devices.next_order(standbys)) is not None:
        standby, gpu, order = found
        taken.append(order.index)
        standby.device, standby.taking_device = gpu, True
        assert devices.next_order(standbys) is None
        standby.taking_device = False
    assert taken == [0, 1]


def test_two_ranks_that_share_a_gpu_have_two_standbys_there() -> None:
    devices = known(report(0), report(0))
    standbys = [Waiting(device=device(0)), Waiting()]
    found = devices.next_order(standbys)
    assert found is not None
    assert found[:2] == (standbys[1], device(0))


def test_no_gpu_is_taken_before_all_ranks_have_stepped() -> None:
    devices = Devices(settings(), {})
    devices.begin_round(range(2))
    devices.used(0, report(0))
    assert devices.next_order([Waiting()]) is None
    devices.used(1, report(1))
    assert devices.next_order([Waiting()]) is not None


def test_in_a_new_round_the_first_steps_come_first_again() -> None:
    devices = known(report(0))
    devices.begin_round([0])
    assert devices.next_order([Waiting()]) is None
    assert devices.of(0) == device(0)


@pytest.mark.parametrize(
    "standby", [Waiting(rehearsed=False), Waiting(outdated=True), Waiting(device=Device("", 7))]
)
def test_only_a_standby_that_is_ready_and_has_no_gpu_takes_one(standby: Waiting) -> None:
    assert known(report(0)).next_order([standby]) is None


def test_an_outdated_standby_does_not_keep_a_new_one_from_the_gpu() -> None:
    standbys = [Waiting(device=device(0), outdated=True), Waiting()]
    found = known(report(0)).next_order(standbys)
    assert found is not None
    assert found[0] is standbys[1]


def test_it_can_be_switched_off() -> None:
    devices = known(report(0), standby_gpu=False)
    assert devices.next_order([Waiting()]) is None
    assert devices.of(0) is None


def test_a_script_that_makes_its_own_settings_for_cuda_gets_no_standby_that_has_used_it() -> None:
    own = report(0, own_settings=("CUDA_VISIBLE_DEVICES",))
    assert known(report(1), own).next_order([Waiting()]) is None


def test_a_rank_that_sees_only_its_own_gpu_has_a_standby_that_does_too() -> None:
    devices = Devices(settings(virtual_local_rank=True), {"CUDA_VISIBLE_DEVICES": "MIG-a, MIG-b"})
    devices.begin_round([1])
    devices.used(1, report(0, nccl=True))
    found = devices.next_order([Waiting()])
    assert found is not None
    assert found[1] == Device("MIG-b", 0)
    assert found[2].variables == {"CUDA_VISIBLE_DEVICES": "MIG-b"}
    assert found[2].nccl


@pytest.mark.parametrize(
    ("virtual", "environ", "expected"),
    [
        (False, {"CUDA_VISIBLE_DEVICES": "3,4"}, None),
        (True, {}, "1"),
        (True, {"CUDA_VISIBLE_DEVICES": "3, 4"}, "4"),
        (True, {"CUDA_VISIBLE_DEVICES": "MIG-x,MIG-y"}, "MIG-y"),
    ],
)
def test_the_visible_gpu_of_a_rank(
    virtual: bool, environ: dict[str, str], expected: str | None
) -> None:
    assert visible_device(settings(virtual_local_rank=virtual), 1, environ) == expected


# ---- memory ----


@pytest.mark.parametrize(
    ("free_gib", "each_gib", "holders", "expected"),
    [
        (70, 1, 0, True),
        (9, 1, 0, True),  # 8 of 80 stay free: a tenth
        (8, 1, 0, False),
        (9, 1, 1, False),
        (10, 1, 1, True),
        (14, 5, 0, False),  # 9 stay free: less than two times 5
        (15, 5, 0, True),
        (0, 1, 0, False),
    ],
)
def test_a_gpu_is_taken_if_enough_of_its_memory_stays_free(
    free_gib: int, each_gib: int, holders: int, expected: bool
) -> None:
    assert has_room(report(free=free_gib * GIB), each_gib * GIB, holders) is expected


def test_what_a_standby_measured_counts_from_then_on() -> None:
    devices = known(report(0, free=8 * GIB + ASSUMED_BYTES))
    assert devices.next_order([Waiting()]) is not None
    devices.bytes_each = ASSUMED_BYTES + 1
    assert devices.next_order([Waiting()]) is None


def test_a_full_gpu_does_not_keep_standbys_from_the_others() -> None:
    found = known(report(0, free=GIB), report(1)).next_order([Waiting()])
    assert found is not None
    assert found[2].index == 1


def test_a_standby_is_told_when_to_leave() -> None:
    found = known(report(0)).next_order([Waiting()])
    assert found is not None
    assert found[2].leave_bytes == 4 * GIB


def test_the_user_is_told_what_standbys_hold() -> None:
    said = "standbys hold 0.7 GiB of each GPU (--standby-gpu off frees it)"
    assert held_text(720 << 20) == said


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("RuntimeError", "CUDA error: out of memory", True),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", True),
        ("DistBackendError", "NCCL error: Cuda failure 2 'out of memory'", True),
        ("RuntimeError", "CUDA error: device-side assert triggered", False),
        ("ValueError", "memory", False),
    ],
)
def test_what_counts_as_out_of_memory(kind: str, message: str, expected: bool) -> None:
    raised = Raised(type=kind, message=message, where="", traceback="")
    assert ran_out_of_memory(raised) is expected


# ---- who is given to which rank ----


@pytest.mark.parametrize(
    ("standbys", "wanted", "expected"),
    [
        ([Waiting(name="plain"), Waiting(device=device(1), name="own")], device(1), "own"),
        ([Waiting(device=device(0), name="other"), Waiting(name="plain")], device(1), "plain"),
        ([Waiting(device=device(0), name="other")], device(1), None),
        ([Waiting(device=device(0), name="other")], None, None),
        ([Waiting(device=device(1), taking_device=True, name="busy")], device(1), None),
        ([Waiting(rehearsed=False, name="new"), Waiting(name="old")], None, "old"),
        (
            [Waiting(device=device(1), outdated=True, name="outdated"), Waiting(name="plain")],
            device(1),
            "plain",
        ),
        ([], None, None),
    ],
)
def test_the_best_standby_for_a_rank(
    standbys: list[Waiting], wanted: Device | None, expected: str | None
) -> None:
    best = choice(standbys, wanted)
    assert (best.name if best is not None else None) == expected
