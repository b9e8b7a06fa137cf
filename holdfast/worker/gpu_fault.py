"""A real CUDA error: a kernel that writes where it must not.

The driver compiles a few lines of PTX for whatever GPU is there, in the context that torch uses; from
then on every CUDA call of the process fails, as after any illegal access.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry fault()
{
    .reg .u64 %a;
    .reg .u32 %v;
    mov.u64 %a, 16;
    mov.u32 %v, 1;
    st.global.u32 [%a], %v;
    ret;
}
"""


def break_gpu() -> None:
    """Have the current device fail; raises what torch raises, where torch uses it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()  # Makes the context, if there is none.
    _launch(ctypes.CDLL("libcuda.so.1"))
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def _launch(cuda: ctypes.CDLL) -> None:
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    device = ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        cuda.cuDeviceGet(ctypes.byref(device), 0)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)
    cuda.cuModuleLoadData(ctypes.byref(module), _PTX)
    cuda.cuModuleGetFunction(ctypes.byref(function), module, b"fault")
    one = [ctypes.c_uint(1)] * 6
    cuda.cuLaunchKernel(function, *one, ctypes.c_uint(0), None, None, None)
    cuda.cuCtxSynchronize()
