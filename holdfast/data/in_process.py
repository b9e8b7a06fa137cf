"""Iterates over batches that the training process reads itself.

There is no torch loader beneath: it would add its own time to each batch and nothing else. As of
torch's, its time is seen by torch's profiler and is a phase of a step (`worker.torch_hooks.phases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

_PROFILED_AS: Final = "enumerate(DataLoader)#ElasticDataLoader.__next__"


class InProcessBatches:
    def __init__(self, read: Callable[[Any], Any], requests: Iterator[Any]) -> None:
        self._read, self._requests = read, requests

    def __iter__(self) -> InProcessBatches:
        return self

    def __next__(self) -> Any:
        if torch.autograd._profiler_enabled():
            with torch.autograd.profiler.record_function(_PROFILED_AS):
                return self._read(next(self._requests))
        return self._read(next(self._requests))
