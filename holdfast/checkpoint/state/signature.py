"""Checks that a state's tensors still have the shapes, dtypes and devices that a layout was made for.

The check runs at each save, while training waits, over tens of thousands of tensors; so no line of
Python is executed per tensor. They are visited in batches, several times each: what torch knows of a
tensor is spread over memory that the last copy evicted from the cache, and should be fetched once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import Any

import torch

_AT_A_TIME = 500


@dataclass(frozen=True)
class Signature:
    types: list[type]
    sizes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[int]
    contiguous: list[bool]
    more: list[Any]
    """Properties that few tensors have: strides, conjugation, sharding."""

    @classmethod
    def of(cls, tensors: list[Any], locals_: list[torch.Tensor]) -> Signature:
        """Record the tensors; `locals_` are this rank's parts, or the same list if none is sharded."""
        dtypes, contiguous = list(map(_dtype, locals_)), list(map(_contiguous, locals_))
        return cls(
            list(map(type, tensors)),
            list(map(_size, locals_)),
            dtypes,
            list(map(_device, locals_)),
            contiguous,
            _more(tensors, locals_, dtypes, contiguous),
        )

    def addresses(self, tensors: list[Any], locals_: list[torch.Tensor]) -> list[int] | None:
        """Return the tensors' addresses if all match the signature, else None."""
        if list(map(type, tensors)) != self.types:
            return None
        found: list[int] = []
        for first in range(0, len(locals_), _AT_A_TIME):
            some = slice(first, first + _AT_A_TIME)
            part = locals_[some]
            if not (
                all(map(eq, map(_size, part), self.sizes[some]))
                and list(map(_dtype, part)) == self.dtypes[some]
                and list(map(_device, part)) == self.devices[some]
                and list(map(_contiguous, part)) == self.contiguous[some]
            ):
                return None
            found += map(_address, part)
        more = _more(tensors, locals_, self.dtypes, self.contiguous)
        return found if more == self.more else None


_dtype = attrgetter("dtype")
_size: Callable[[torch.Tensor], torch.Size] = torch.Tensor.size
_device: Callable[[torch.Tensor], int] = torch.Tensor.get_device
_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


def _more(
    tensors: list[Any],
    locals_: list[torch.Tensor],
    dtypes: list[torch.dtype],
    contiguous: list[bool],
) -> list[Any]:
    found: list[Any] = []
    if not all(contiguous):
        strided = (local for local, flat in zip(locals_, contiguous, strict=True) if not flat)
        found.append([local.stride() for local in strided])
    if any(dtype.is_complex for dtype in set(dtypes)):
        found.append(list(map(torch.Tensor.is_conj, locals_)))
    if locals_ is not tensors:
        found.append([_sharding(tensor) for tensor in tensors])
    return found


def _sharding(tensor: Any) -> Any:
    if not hasattr(tensor, "_local_tensor"):
        return None
    return tensor.shape, tensor.device_mesh, tensor.placements
