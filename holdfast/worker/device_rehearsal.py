"""Rehearses a training step on a GPU, in a standby that will hold it.

A process that first uses a GPU waits for much: the driver, a context, the handles of cuBLAS and cuDNN,
each kernel that is loaded at its first launch, NCCL's kernels and its look at the machine's topology.
That takes a second or more, and a killed rank's successor would wait for all of it. So the standby does
once what training does: products in several precisions, attention, convolution, optimizers, and a
communicator of its own.

The script must not notice. Torch's allocator is emptied and its statistics start again, random
generators are as they were, and so are the current device and the environment. What it can notice: CUDA
is initialized, so a process that the script forks cannot use it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from holdfast.messages.local import TakeDevice
from holdfast.worker.rehearsal import unnoticed

log = logging.getLogger("holdfast.worker")

CONTEXT_BYTES: Final = 512 << 20
"""What a context costs, where NVML does not tell."""


class NoRoom(Exception):
    """The GPU has too little free memory for a standby."""


def take(torch: Any, order: TakeDevice) -> int:
    """Take the GPU and rehearse on it; return how much of its memory that costs."""
    os.environ.update(order.variables)
    torch.cuda.init()
    before = _free_without_context(torch, order.index)
    with unnoticed(torch), torch.cuda.device(order.index), _state_kept(torch, order.index):
        torch.zeros(1, device="cuda")
        free = free_bytes(torch, order.index)
        if free < order.leave_bytes:
            raise NoRoom(f"{free >> 20} MiB of GPU {order.index} are free")
        if before is None:
            before = free + CONTEXT_BYTES
        for piece in PIECES:
            _try(piece, torch, "cuda")
        if order.nccl:
            _try(_communicate, order.index)
        torch.cuda.synchronize()
    return max(0, before - free_bytes(torch, order.index))


def free_bytes(torch: Any, index: int) -> int:
    return int(torch.cuda.mem_get_info(index)[0])


def _try(piece: Callable[..., None], *arguments: Any) -> None:
    """Rehearse a piece; one that this version of torch cannot do is left to the script."""
    try:
        piece(*arguments)
    except Exception:  # Of any version of torch or CUDA; one that sticks shows afterwards.
        log.info("%s cannot be rehearsed on the GPU", piece.__name__, exc_info=True)


@contextmanager
def _state_kept(torch: Any, index: int) -> Iterator[None]:
    """Restore the generator of the GPU; leave nothing in torch's allocators."""
    generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
        gc.collect()
        for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
            getattr(torch._C, name, lambda: None)()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(index)
        torch.cuda.reset_accumulated_memory_stats(index)


# ---- what training does ------------------------------------------------------------------------


def _products(torch: Any, device: str) -> None:
    functional = torch.nn.functional
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = torch.nn.Sequential(
            torch.nn.Embedding(8, 16),
            torch.nn.Linear(16, 16),
            torch.nn.ReLU(),
            torch.nn.LayerNorm(16),
            torch.nn.GELU(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(16, 8, bias=False),
        ).to(device, dtype)
        tokens = torch.zeros(4, dtype=torch.long).to(device, non_blocking=True)
        outputs = model(tokens)
        loss = functional.cross_entropy(outputs, tokens) + functional.mse_loss(outputs, outputs * 2)
        torch.autograd.backward(loss)
        loss.item()


def _optimizers(torch: Any, device: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4, device=device))
    kinds = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam]
    settings: list[dict[str, Any]] = [{}, {"foreach": False}, {"fused": True}]
    for kind in kinds:
        for more in settings:
            optimizer = kind([weight], lr=0.0, **more)
            weight.grad = torch.zeros_like(weight)
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _autocast(torch: Any, device: str) -> None:
    model = torch.nn.Linear(16, 16).to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = torch.softmax(model(torch.zeros(4, 16, device=device)), -1).float().square().mean()
    torch.autograd.backward(loss)


def _attention(torch: Any, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        parts = [
            torch.zeros(1, 2, 16, 64, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        ]
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        torch.autograd.backward(out.sum())


def _convolution(torch: Any, device: str) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.MaxPool2d(2)
    ).to(device)
    torch.autograd.backward(model(torch.zeros(2, 3, 16, 16, device=device)).sum())


PIECES: Final = (_products, _optimizers, _autocast, _attention, _convolution)


def _communicate(index: int) -> None:
    """Make a communicator of one rank, with the library that torch has loaded, and destroy it."""
    nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    communicator = ctypes.c_void_p()
    if nccl.ncclCommInitAll(ctypes.byref(communicator), 1, (ctypes.c_int * 1)(index)) == 0:
        nccl.ncclCommDestroy(communicator)


# ---- memory of a GPU that has no context yet ---------------------------------------------------


class _NvmlMemory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def _free_without_context(torch: Any, index: int) -> int | None:
    """Return the GPU's free memory, asked of the driver's management library, which makes no context;
    None if it does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        for prefix in (b"GPU-", b"MIG-"):
            name = prefix + uuid.encode()
            if (
                nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0
                and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            ):
                return int(memory.free)
        return None
    finally:
        nvml.nvmlShutdown()
