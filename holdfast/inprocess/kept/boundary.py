"""Records at each commit what changes between steps too, so that a survivor can go back to the
commit.

Parameters and optimizer state change in a step alone, so they are not copied: at a boundary the
living tensors are the state. Everything else may already belong to the next step when a function is
left: the position in the data, the learning rate, generators, and buffers, which a forward pass
changes. These are recorded. All of it together must cost a few microseconds, because every step
pays for it.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

SMALL_BYTES = 64 << 10
"""Buffers up to this size are copied at each commit."""

_SCALARS: Final = frozenset({int, float, bool, str, bytes, complex, type(None)})


@dataclass(frozen=True)
class Generators:
    """Generators of random numbers of this process, as they were at a commit; not numpy's, of which
    reading the state alone takes 50 µs."""

    torch_cpu: torch.Tensor
    python: Any
    device: tuple[int, torch.Tensor] | None
    """CUDA device and the state of its generator, if CUDA is in use."""

    @classmethod
    def now(cls) -> Generators:
        device = None
        if torch.cuda.is_initialized():
            index = torch.cuda.current_device()
            device = index, torch.cuda.default_generators[index].get_state()
        return cls(torch.default_generator.get_state(), random.getstate(), device)

    def put_back(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        random.setstate(self.python)
        if self.device is not None:
            index, state = self.device
            torch.cuda.default_generators[index].set_state(state)


@dataclass(frozen=True)
class Boundary:
    """What was recorded at a commit."""

    step: int
    values: dict[str, Any]
    """Plain values, and state dicts of entries that are not held in place."""
    groups: dict[str, list[dict[str, Any]]]
    """Parameter groups of each optimizer."""
    generators: Generators


class BoundaryRecorder:
    """Records the boundaries of a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._optimizers = [
            (name, entry)
            for name, entry in state.items()
            if isinstance(entry, torch.optim.Optimizer)
        ]
        self._plain = [name for name, entry in state.items() if not hasattr(entry, "state_dict")]
        self._asked = [
            (name, entry)
            for name, entry in state.items()
            if hasattr(entry, "state_dict") and not is_in_place(entry)
        ]
        self.buffers = BufferCopies(e for e in state.values() if isinstance(e, torch.nn.Module))

    def record(self, step: int) -> Boundary:
        self.buffers.update()
        values = {name: detached(entry.state_dict()) for name, entry in self._asked}
        for name in self._plain:
            values[name] = detached(self._state[name])
        groups = {
            name: [{**group} for group in optimizer.param_groups]
            for name, optimizer in self._optimizers
        }
        return Boundary(step, values, groups, Generators.now())


def is_in_place(entry: Any) -> bool:
    """Return whether an entry's state changes in a step alone, so that it is taken as it stands.

    A class of the script says so with `kept_in_place = True`. A gradient scaler is one, because
    asking it for its state waits for the device."""
    torchs = torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler
    return isinstance(entry, torchs) or bool(getattr(entry, "kept_in_place", False))


def detached(value: Any) -> Any:
    """Return a copy that later changes do not reach. Tensors are not copied."""
    kind = type(value)
    if kind in _SCALARS or isinstance(value, torch.Tensor):
        return value
    if kind is dict or kind is OrderedDict:
        if _SCALARS.issuperset(map(type, value.values())):
            return value.copy()
        return kind((key, detached(child)) for key, child in value.items())
    if kind is list or kind is tuple:
        return kind(map(detached, value))
    return copy.deepcopy(value)


class BufferCopies:
    """Copies of the buffers of modules, as they were at the last commit.

    Small ones are copied at each commit. Of a large one torch's count of its changes is consulted; for
    small ones that would not do, because the kernels of batch normalisation do not count theirs."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._places = [
            (one._buffers, key)
            for module in modules
            for one in module.modules()
            for key, buffer in one._buffers.items()
            if buffer is not None and key not in one._non_persistent_buffers_set
        ]
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._copies: list[torch.Tensor] = []

    def update(self) -> None:
        if not self._places:
            return
        buffers = [_local(owner[key]) for owner, key in self._places]
        with torch.no_grad():
            if self._copies:
                self._copy(buffers)
            else:
                self._copies = [buffer.clone() for buffer in buffers]
        self._seen = [(buffer, buffer._version) for buffer in buffers]

    def _copy(self, buffers: list[torch.Tensor]) -> None:
        sources, targets = [], []
        for number, buffer in enumerate(buffers):
            before, changes = self._seen[number]
            same = before is buffer and changes == buffer._version
            if same and buffer.nbytes > SMALL_BYTES:
                continue
            if before.shape != buffer.shape or before.dtype != buffer.dtype:
                self._copies[number] = buffer.clone()
            else:
                sources.append(buffer)
                targets.append(self._copies[number])
        if sources:
            torch._foreach_copy_(targets, sources)

    def by_address(self) -> dict[int, torch.Tensor]:
        """Return the copies by the addresses of the buffers that they are copies of."""
        pairs = zip(self._seen, self._copies, strict=True)
        return {buffer.data_ptr(): one for (buffer, _), one in pairs if one.numel()}


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
