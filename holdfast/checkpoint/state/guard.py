"""What may be copied while training goes on, and who is held back until it is.

Parameters and an optimizer's own state change in its step and nowhere else. So they may be copied
after `save` has returned, as long as the next step waits for the rest of the copy; torch calls a hook
before each step of any optimizer. Everything else (buffers, whatever the script itself keeps) may
change at any time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.checkpoint.memory.slots import Copy
from holdfast.checkpoint.state.capture import Captured, Layout


@dataclass
class _Known:
    layout: Layout
    guarded: frozenset[int]
    addresses: dict[int, int]


class Guard:
    """Holds optimizers back while a copy is under way."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._copy: Copy | None = None
        self._known: _Known | None = None
        if optimizers:
            # The hook is of all optimizers, and stays: to remove it is an error while one of them
            # goes through its hooks. But it keeps nothing alive that nobody else has any more.
            weak = weakref.WeakMethod(self._before_step)

            def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
                keep_off = weak()
                if keep_off is not None:
                    keep_off()

            register_optimizer_step_pre_hook(before_step)

    def watch(self, copy: Copy) -> None:
        self._copy = copy

    def _before_step(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.keep_off()

    def guarded(self, captured: Captured) -> frozenset[int]:
        """The items that only an optimizer's step changes.

        It is looked up again when one of them moves. Should one have left its optimizer meanwhile,
        and be changed by something else, then that is noticed as any such change is.
        """
        known, addresses = self._known, captured.addresses
        if (
            known is None
            or known.layout is not captured.layout
            or any(addresses[index] != at for index, at in known.addresses.items())
        ):
            guarded = self._find(addresses)
            where = {index: addresses[index] for index in guarded}
            known = self._known = _Known(captured.layout, guarded, where)
        return known.guarded

    def _find(self, addresses: list[int]) -> frozenset[int]:
        theirs = set()
        for optimizer in self._optimizers:
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
            theirs |= {getattr(t, "_local_tensor", t).data_ptr() for t in tensors}
        theirs.discard(0)  # Those have nothing in them.
        return frozenset(index for index, at in enumerate(addresses) if at in theirs)


def after_first_step(optimizers: list[torch.optim.Optimizer], act: Callable[[], None]) -> None:
    """Do something once, after the first step of one of these: then its state is there."""
    waiting = weakref.WeakSet(optimizers)
    weak = weakref.WeakMethod(act)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in waiting:
            waiting.clear()
            once = weak()
            if once is not None:
                once()

    register_optimizer_step_post_hook(after)
