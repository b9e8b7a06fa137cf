"""Gives a map-style data set the terms on which it is used: name, shuffling, seed, number of
epochs.

class Lines(ElasticDataset):
    size = 1_000_000
    def read_sample(self, index): ...

for epoch, batches in ...: see `ElasticDataLoader`, which takes these terms from the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch.utils.data import Dataset

from holdfast.errors import UsageError


class ElasticDataset(Dataset):  # type: ignore[misc]
    """Map-style data set with a name and an order.

    Subclass it with `read_sample` and a `size`, or give it a `source`. An `ElasticDataLoader` over
    it takes name, shuffling and seed from it where it is not told otherwise.

    - `source`: anything with __getitem__ and __len__.
    - `name`: name of the data set in states, errors and reports.
    - `size`: number of records; that of the source, or the class's `size`, if it is not given.
    - `epochs`: number of epochs, 0 without end: what `ElasticDataLoader.epochs` iterates over by
      default.
    - `shuffle`, `seed`: as of `ElasticDataLoader`.
    """

    size: int | None = None

    def __init__(
        self,
        source: Sequence[Any] | None = None,
        *,
        name: str = "data",
        size: int | None = None,
        epochs: int = 0,
        shuffle: bool | Literal["shards", "records"] = False,
        seed: int = 0,
    ) -> None:
        self.source, self.name = source, name
        self.epochs, self.shuffle, self.seed = epochs, shuffle, seed
        if size is not None:
            self.size = size
        if self.size is None and source is not None:
            self.size = len(source)
        if type(self.size) is not int or self.size < 1:
            raise UsageError(
                f"data set {name!r}: size={self.size!r} is no whole number from 1 on: give it a source "
                "or a size"
            )
        if source is None and type(self).read_sample is ElasticDataset.read_sample:
            raise UsageError(
                f"data set {name!r}: give it a source, or implement read_sample(index)"
            )

    def read_sample(self, index: int) -> Any:
        """Return the record at an `index`."""
        assert self.source is not None
        return self.source[index]

    def where(self, index: int) -> str | None:
        """Return the file of the record at an `index`, for errors; None if there is none."""
        where = getattr(self.source, "where", None)
        return where(index) if where is not None else None

    def __getitem__(self, index: int) -> Any:
        return self.read_sample(index)

    def __len__(self) -> int:
        assert self.size is not None
        return self.size
