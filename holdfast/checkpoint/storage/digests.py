"""Digests: xxh3-128 of each block, so that any range can be checked without reading the rest.

They guard against what goes wrong by itself (a torn write, a flipped bit, a wrong file), not against
somebody who wants to deceive; for that there are file permissions and the job's token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

import xxhash

from holdfast.checkpoint.state.layout import BLOCK_BYTES, blocks_of

DIGEST_BYTES: Final = 16


def digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def block_digests(
    view: memoryview, threads: Executor | None = None, went_on: Callable[[], object] = lambda: None
) -> bytes:
    """The digests of all blocks of a view, one after the other."""

    def one(index: int) -> bytes:
        went_on()
        return digest(view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])

    indices = range(blocks_of(len(view)))
    return b"".join(threads.map(one, indices) if threads is not None else map(one, indices))


def digest_of(digests: bytes, block: int) -> bytes:
    return digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
