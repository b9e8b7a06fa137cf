"""Shows frameworks a sampler of an `ElasticDataLoader`, which has no use for one itself.

They look at a loader's sampler to set its epoch and to count the records of a rank. It is a
DistributedSampler, because frameworks (Lightning) replace any other by one of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import proxy

from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    from holdfast.data.loader import ElasticDataLoader


class LoaderSampler(DistributedSampler):  # type: ignore[misc]
    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = proxy(loader)

    @property
    def num_replicas(self) -> int:
        return int(self._loader._world().size)

    @property
    def rank(self) -> int:
        return int(self._loader._world().rank)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader._division(self._loader.position).positions)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the records that this rank has left of the epoch."""
        division = self._loader._division(self._loader.position)
        for _, _, _, records, _ in self._loader._requests(division, deque()):
            yield from records
