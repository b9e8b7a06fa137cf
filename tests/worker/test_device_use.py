"""A rank reports the GPU that it trains on, and what its script set before it touched it."""

from __future__ import annotations

import os
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.messages.local import DeviceUsed
from holdfast.worker.channel import Channel
from holdfast.worker.device_use import DeviceReport, main_device, read_once, uses_nccl


def cuda(reserved: dict[int, int], current: int = 0, **more: Any) -> ModuleType:
    """What a rank asks of torch, on a machine with these GPUs."""
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        current_device=lambda: current,
        device_count=lambda: len(reserved),
        memory_reserved=reserved.__getitem__,
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        mem_get_info=lambda index: (30, 80),
        get_allocator_backend=lambda: "native",
    )
    vars(torch.cuda).update(more)
    return torch  # type: ignore[no-any-return]


def reported(monkeypatch: pytest.MonkeyPatch, torch: ModuleType, **sets: str) -> DeviceUsed | None:
    """What a rank reports whose script sets these variables."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(theirs.detach())
    report = DeviceReport(channel)
    for name, value in sets.items():
        monkeypatch.setenv(name, value)
    report.stepped()
    channel.close()
    with ours:
        packet = ours.recv(65536)
    return msgspec.msgpack.decode(packet, type=DeviceUsed) if packet else None


def test_a_rank_reports_its_gpu_and_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = DeviceUsed(index=1, free_bytes=30, total_bytes=80)
    assert reported(monkeypatch, cuda({0: 0, 1: 5}, current=1)) == expected


@pytest.mark.parametrize(
    ("reserved", "current", "expected"),
    [({0: 0, 1: 9}, 0, 1), ({0: 4, 1: 4}, 1, 1), ({0: 0}, 0, 0), ({0: 7, 1: 9, 2: 0}, 2, 1)],
)
def test_the_gpu_of_a_rank_is_where_its_memory_is(
    reserved: dict[int, int], current: int, expected: int
) -> None:
    assert main_device(cuda(reserved, current)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_DEBUG",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ],
)
def test_a_variable_that_counts_only_at_first_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    report = reported(monkeypatch, cuda({0: 1}), **{name: "x"})
    assert report is not None
    assert report.own_settings == (name,)


def test_any_other_variable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(
        monkeypatch, cuda({0: 1}), TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="7"
    )
    assert report is not None
    assert report.own_settings == ()


def test_what_was_set_before_the_script_is_no_setting_of_its_own() -> None:
    environ = {"CUDA_HOME": "/usr", "PATH": "/bin"}
    assert read_once(environ) == {"CUDA_HOME": "/usr"}


def test_an_allocator_of_the_scripts_own_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(monkeypatch, cuda({0: 1}, get_allocator_backend=lambda: "pluggable"))
    assert report is not None
    assert report.own_settings == ("an allocator",)


@pytest.mark.parametrize(
    "torch",
    [
        cuda({0: 1}, is_initialized=lambda: False),
        cuda({0: 1}, is_current_stream_capturing=lambda: True),
        ModuleType("torch"),
    ],
)
def test_a_rank_without_a_gpu_or_amid_a_capture_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, torch: ModuleType
) -> None:
    assert reported(monkeypatch, torch) is None


def test_a_group_over_gloo_is_not_nccls(with_torch: Any) -> None:
    with_torch(f"""
    import os, sys
    import torch.distributed as dist
    from holdfast.worker.device_use import uses_nccl
    assert not uses_nccl()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not uses_nccl()
    dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD] = "cpu:gloo,cuda:nccl"
    assert uses_nccl()
    os._exit({os.EX_OK})
    """)


def test_without_torch_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d", raising=False)
    assert not uses_nccl()
