"""Gives a training job its data, each record exactly once an epoch: see `docs/data.md`.

Names are imported when they are first used: some need torch, and readers need their libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazily

if TYPE_CHECKING:
    from holdfast.data.client import LeasedShard as LeasedShard
    from holdfast.data.client import ShardClient as ShardClient
    from holdfast.data.dataset import ElasticDataset as ElasticDataset
    from holdfast.data.leased_loader import LeasedLoader as LeasedLoader
    from holdfast.data.loader import ElasticDataLoader as ElasticDataLoader
    from holdfast.data.lockstep import BatchInfo as BatchInfo
    from holdfast.data.order import Order as Order
    from holdfast.data.sampler import ElasticSampler as ElasticSampler
    from holdfast.data.stream import ElasticIterableDataset as ElasticIterableDataset
    from holdfast.data.stream import StreamRecord as StreamRecord

_HOMES: dict[str, str] = {
    "BatchInfo": "holdfast.data.lockstep",
    "ElasticDataLoader": "holdfast.data.loader",
    "ElasticDataset": "holdfast.data.dataset",
    "ElasticIterableDataset": "holdfast.data.stream",
    "ElasticSampler": "holdfast.data.sampler",
    "LeasedLoader": "holdfast.data.leased_loader",
    "LeasedShard": "holdfast.data.client",
    "Order": "holdfast.data.order",
    "ShardClient": "holdfast.data.client",
    "StreamRecord": "holdfast.data.stream",
}
"""The module of each public name."""

__all__ = [
    "BatchInfo",
    "ElasticDataLoader",
    "ElasticDataset",
    "ElasticIterableDataset",
    "ElasticSampler",
    "LeasedLoader",
    "LeasedShard",
    "Order",
    "ShardClient",
    "StreamRecord",
]

__getattr__, __dir__ = lazily(globals(), _HOMES)
