"""Samples records for torch's own DataLoader, at any number of replicas and from any position on.

    sampler = ElasticSampler(dataset, seed=7, pad=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for batch in loader:
        ...
        sampler.advance(32 * world_size)

A sampler sees what a loader draws, which with prefetching is more than what was trained on. So the
script tells it how far training is, and a state without that knowledge is refused rather than
guessed. `ElasticDataLoader` needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Final, Literal

from torch.utils.data import Sampler

from holdfast.data.lockstep import Replicas
from holdfast.data.order import MAX_SIZE, Order
from holdfast.data.state import VERSION, check_agreement, count_in
from holdfast.errors import DataError, UsageError
from holdfast.messages.data import OrderKind

_CHUNK: Final = 8192
"""Positions that are translated into records at once."""
_NAME: Final = "sampler"


class ElasticSampler(Sampler):  # type: ignore[misc]
    """Sampler of this replica's records: those at every `num_replicas`-th position of what is left.

    Each record of an epoch comes once over all replicas. Where these do not divide the records, some
    replicas have one more than others, and so maybe one batch more: ranks that step together would
    wait for each other for ever. So in a process group of several ranks the script has to say what
    is to be done, by `pad` or `drop_last`. `ElasticDataLoader` needs neither.

    - `data_or_size`: a data set with a length, or the number of its records.
    - `num_replicas`, `rank`: by default torch.distributed is asked when an iteration begins, else
      the launcher's RANK and WORLD_SIZE.
    - `shuffle`, `seed`: the order of each epoch follows from the seed.
    - `drop_last`: leave out the last records, so that all replicas have the same number. `pad`: True
      repeats some instead, as torch's DistributedSampler does; False lets numbers differ, for ranks
      that do not wait for each other.
    """

    def __init__(
        self,
        data_or_size: Sized | int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool | None = None,
    ) -> None:
        if drop_last and pad:
            raise UsageError(
                "drop_last and pad exclude each other: leave out the rest, or fill it up"
            )
        size = data_or_size if isinstance(data_or_size, int) else len(data_or_size)
        if size == 0:
            raise DataError("the sampler's data set has no records")
        kind: OrderKind = "records" if shuffle else "plain"
        Order(size, kind, seed, 0)  # Checks them.
        self._size, self._kind, self._seed = size, kind, seed
        self._drop_last, self._pad = drop_last, bool(pad)
        self._rest_decided = drop_last or pad is not None
        self._replicas = num_replicas, rank
        Replicas.of(*self._replicas)
        self._epoch, self._position = 0, 0
        self._drawn: Literal["nothing", "known", "unknown"] = "nothing"
        """Whether records were drawn since the position was set, and whether `advance` followed."""

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Positions of the epoch that all replicas together have used, as `advance` was told."""
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an `epoch`; in the middle of it after a restore, that changes nothing."""
        Order(1, "plain", 0, epoch)  # Checks the number.
        if epoch != self._epoch:
            self._epoch, self._position, self._drawn = epoch, 0, "nothing"

    def advance(self, records: int) -> None:
        """Note that all replicas together have used that many more `records` of the epoch."""
        if type(records) is not int or records < 0:
            raise UsageError(f"advance({records!r}): give a whole number of records from 0 on")
        # The last step of an epoch is smaller, and padding repeats: a script need not know by how much.
        self._position = min(self._position + records, self._size)
        self._drawn = "known" if self._drawn != "nothing" else "nothing"

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position, as plain values."""
        if self._drawn == "unknown":
            raise UsageError(
                "a loader has drawn from this sampler and nobody has said how much of that was "
                "used: call advance(records) after each step, with the records of all replicas, or "
                "use holdfast.data.ElasticDataLoader, which knows"
            )
        place = {"epoch": self._epoch, "position": self._position}
        return {"version": VERSION, **self._agreed(), **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, with any number of replicas."""
        check_agreement(_NAME, state, self._agreed())
        epoch = count_in(_NAME, state, "epoch", MAX_SIZE)
        self._position = count_in(_NAME, state, "position", self._size)
        self._epoch, self._drawn = epoch, "nothing"

    def _agreed(self) -> dict[str, int | str]:
        return {"size": self._size, "order": self._kind, "seed": self._seed}

    def __len__(self) -> int:
        """Count the records that this replica has left of the epoch."""
        world = Replicas.of(*self._replicas)
        left = self._size - self._position
        if self._drop_last:
            return left // world.size
        if self._pad:
            return -(-left // world.size)
        return len(range(world.rank, left, world.size))

    def __iter__(self) -> Iterator[int]:
        if self._position == self._size and self._drawn != "nothing":
            raise UsageError(
                f"all records of epoch {self._epoch} are used: call set_epoch({self._epoch + 1}) first"
            )
        world, start, count = Replicas.of(*self._replicas), self._position, len(self)
        if world.size > 1 and not self._rest_decided and _in_process_group():
            raise UsageError(
                f"ElasticSampler: where {world.size} ranks do not divide the records, some would have "
                "a batch more, and wait for ever for those that have not. Pass pad=True (repeat "
                "records), drop_last=True (leave records out) or pad=False (these ranks do not wait "
                "for each other), or use holdfast.data.ElasticDataLoader: it is exact, and all ranks "
                "have the same number of batches"
            )
        order = Order(self._size, self._kind, self._seed, self._epoch)
        return self._records(order, world, start, count)

    def _records(self, order: Order, world: Replicas, start: int, count: int) -> Iterator[int]:
        left = self._size - start
        positions = range(start + world.rank, self._size, world.size)[:count]
        for at in range(0, len(positions), _CHUNK):
            records = order.records(positions[at : at + _CHUNK])
            self._drawn = "unknown" if self._drawn == "nothing" else self._drawn
            yield from records
        if count > len(positions):
            yield order.record(start + world.rank % left)


def _in_process_group() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())
