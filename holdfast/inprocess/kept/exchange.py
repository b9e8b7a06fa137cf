"""Carries rows of numbers between all ranks, and parts of a state from rank to rank.

It uses the default process group, and tensors on the device that its backend carries. Bytes go in
buckets, so that neither side needs memory for a second copy of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from holdfast.inprocess.kept.checksums import bytes_of
from holdfast.inprocess.kept.parts import PartContents, StatePart, decode_contents

BUCKET_BYTES = 64 << 20
_ON_HOST = frozenset({"gloo", "mpi", "ucc"})

Cut = tuple[int, int, int]
"""A tensor's number, and the range of its bytes."""


class RankExchange:
    """The ranks of the default process group; this one alone where there is none."""

    def __init__(self) -> None:
        self._joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._joined else 0
        self.world_size = dist.get_world_size() if self._joined else 1
        self._device = _device_of_group() if self._joined else torch.device("cpu")

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return the rows of all ranks, which are of the same length."""
        if not self._joined:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [[int(number) for number in one] for one in torch.stack(rows).tolist()]

    def add(self, row: Sequence[int]) -> list[int]:
        """Return the sums of all ranks' rows, which are of the same length."""
        if not self._joined:
            return list(row)
        sums = torch.tensor(row, dtype=torch.int64, device=self._device)
        dist.all_reduce(sums)
        return [int(number) for number in sums.tolist()]

    # ---- parts ----

    def send(self, part: StatePart, to: list[int]) -> None:
        data = part.contents.encoded()
        self._send(torch.tensor([len(data)], dtype=torch.int64), to)
        self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)
        for cuts in _buckets([item.size_bytes for item in part.contents.items]):
            pieces = [bytes_of(part.locals[n])[start:stop] for n, start, stop in cuts]
            self._send(torch.cat([piece.to(self._device) for piece in pieces]), to)

    def receive_contents(self, source: int) -> PartContents:
        size = int(self._receive(1, torch.int64, source).item())
        data = self._receive(size, torch.uint8, source)
        return decode_contents(data.cpu().numpy().tobytes())

    def receive(self, contents: PartContents, targets: Sequence[torch.Tensor], source: int) -> None:
        """Fill the tensors of a part whose contents were received."""
        filling: dict[int, torch.Tensor] = {}
        sizes = [item.size_bytes for item in contents.items]
        for cuts in _buckets(sizes):
            total = sum(stop - start for _, start, stop in cuts)
            bucket, at = self._receive(total, torch.uint8, source), 0
            for number, start, stop in cuts:
                # Those bytes themselves where the tensor is contiguous, else a copy of them.
                data = filling.pop(number, None)
                data = bytes_of(targets[number]) if data is None else data
                data[start:stop].copy_(bucket[at : at + stop - start])
                at += stop - start
                if stop < sizes[number]:
                    filling[number] = data
                else:
                    _write_back(data, targets[number])

    def _send(self, tensor: torch.Tensor, to: Iterable[int]) -> None:
        tensor = tensor.to(self._device)
        sends = [dist.P2POp(dist.isend, tensor, rank) for rank in to]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    def _receive(self, count: int, dtype: torch.dtype, source: int) -> torch.Tensor:
        found = torch.empty(count, dtype=dtype, device=self._device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, found, source)]):
            work.wait()
        return found


def _write_back(data: torch.Tensor, target: torch.Tensor) -> None:
    """Copy bytes into a tensor that is not contiguous."""
    if target.numel() and not target.is_contiguous():
        target.copy_(data.view(target.dtype).reshape(target.shape))


def _buckets(sizes: Sequence[int]) -> Iterator[list[Cut]]:
    """Cut tensors of these sizes into buckets."""
    cuts: list[Cut] = []
    room = BUCKET_BYTES
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            cuts.append((number, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield cuts
                cuts, room = [], BUCKET_BYTES
    if cuts:
        yield cuts


def _device_of_group() -> torch.device:
    """Return the device whose tensors the default group carries: an accelerator, or else the host."""
    pairs = [one.split(":") for one in str(dist.get_backend_config()).split(",")]
    kinds = [kind for kind, backend in pairs if backend not in _ON_HOST]
    if not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
