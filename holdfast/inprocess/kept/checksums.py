"""Computes checksums of tensors by their bits, where they are.

In host memory it is xxh3. On a device it is a sum of all 32-bit words, each times a pseudo-random
odd number that follows from its place, modulo 2**64: a flipped bit always changes it, and so does
an exchange of two words. The numbers of ranks are compared with each other only, and all ranks hold
a tensor on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash

CHUNK_BYTES = 16 << 20
"""Bytes that are summed at once; a device needs six times as much memory meanwhile."""

_MIX = -7046029254386353131  # The golden ratio times 2**64, as a signed number.
_WORD = 4


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in the order of its elements; a view if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a signed 64-bit checksum of these tensors, in this order."""
    host = xxhash.xxh3_64()
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        data = bytes_of(tensor)
        if data.is_cpu:
            host.update(memoryview(data.numpy()))
        else:
            devices.setdefault(data.device, []).append(data)
    for theirs in devices.values():
        host.update(int(weighted_sum(theirs).item()).to_bytes(8, "little", signed=True))
    return int.from_bytes(host.digest(), "little", signed=True)


def weighted_sum(data: list[torch.Tensor]) -> torch.Tensor:
    """Return the weighted sum of bytes that are all on one device, as a tensor there."""
    device = data[0].device
    largest = min(CHUNK_BYTES, sum(one.numel() for one in data))
    weights = _weights(-(-largest // _WORD), device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunk in _chunks(data):
        words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % _WORD)).view(torch.int32)
        products = words.to(torch.int64).mul_(weights[: words.numel()])
        total = total * _MIX + products.sum() + chunk.numel()
    return total


def _weights(count: int, device: torch.device) -> torch.Tensor:
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX
    return mixed.bitwise_xor_(mixed >> 29).bitwise_or_(1)


def _chunks(data: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield all bytes in pieces of at most `CHUNK_BYTES`; small tensors are joined."""
    joined: list[torch.Tensor] = []
    size = 0
    for one in data:
        for piece in one.split(CHUNK_BYTES):
            if size + piece.numel() > CHUNK_BYTES:
                yield torch.cat(joined)
                joined, size = [], 0
            joined.append(piece)
            size += piece.numel()
    if size:
        yield torch.cat(joined)
