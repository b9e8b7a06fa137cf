"""Reduces the gradients of a DDP module so that a failure leaves them as they were.

DDP copies gradients into buckets, reduces these while the backward pass goes on, and at its end waits
for one bucket after the other and copies it back. If a rank is gone by then, some gradients are means
over the ranks and others are still this rank's own: worthless. This communication hook starts the same
reductions, and waits for all of them before DDP may copy the first one back. A reduction that cannot
even be started does not end the backward pass either. So after a failure all gradients are this rank's
own, and complete.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.inprocess.kept.zones import await_device


class WholeReduction:
    """The communication hook of one DDP module."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._group = module.process_group
        self._factor = 1.0 / dist.get_world_size(self._group)
        self._works: list[Any] = []
        self._error: Exception | None = None
        self.failed = False
        """Whether the last reduction failed, so that gradients are this rank's own, and complete."""
        # torch looks at the hook's annotations, and does not understand those of this module.
        module.register_comm_hook(self, lambda state, bucket: state.reduce(bucket))

    def reduce(self, bucket: Any) -> Any:
        """Start to reduce a bucket; with the last one, wait for all."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._works, self._error, self.failed = [], None, False
        if self._error is None:
            buffer.mul_(self._factor)
            self._start(buffer)
        if bucket.is_last():
            self._await_all()
        future: Any = torch.futures.Future(devices=None if buffer.is_cpu else [buffer.device])
        future.set_result(buffer)
        return future

    def _start(self, buffer: torch.Tensor) -> None:
        try:
            self._works.append(dist.all_reduce(buffer, group=self._group, async_op=True))
        except Exception as error:
            # Whatever a backend raises for a group that was aborted: raised again with the last bucket.
            self._error = error

    def _await_all(self) -> None:
        self.failed = True
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if self._error is not None:
            raise self._error
        await_device()
        self.failed = False


def can_reduce_whole(module: Any) -> bool:
    """Return whether a module's gradients are apart from its buckets, and its hook is free."""
    return (
        isinstance(module, DistributedDataParallel)
        and not module.gradient_as_bucket_view
        and not getattr(module, "_comm_hooks", ())
    )
