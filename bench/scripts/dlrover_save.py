"""DLRover's flash checkpoint to memory, timed; run with the Python that has DLRover in it.

It writes JSON to the file it is told: what each `save_checkpoint` took, how much of that went into the
metadata, and a `memcpy` of as many bytes beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from checkpoints import states
from checkpoints.timing import alternate
from checkpoints.yardsticks import Memory
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tries", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    tensors = states.tensors(args.size, args.count)
    memory = Memory(sum(tensor.nbytes for tensor in tensors.values()))
    checkpointer = DdpCheckpointer(str(args.folder))
    metadata = _Metadata(checkpointer._engine._shm_handler.metadata)
    steps = iter(range(1, 1000))
    first: list[float] = []

    def save() -> float:
        began = time.perf_counter()
        checkpointer.save_checkpoint(next(steps), tensors, storage_type=StorageType.MEMORY)
        seconds = time.perf_counter() - began
        first.append(seconds)
        return seconds

    def metadata_of_last() -> float:
        seconds, metadata.seconds = metadata.seconds, 0.0
        return seconds

    contestants = {"memcpy": memory.memcpy, "save": save, "metadata": metadata_of_last}
    samples = alternate(args.tries, contestants)
    saved = checkpointer._engine.get_state_dict_from_memory()[1]["model_states"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    args.to.write_text(json.dumps({**samples, "first": first[:1]}))
    del saved
    checkpointer._engine._shm_handler.unlink()
    os._exit(0)


class _Metadata:
    """Counts what DLRover spends on telling its agent what is where."""

    def __init__(self, shared: Any) -> None:
        self.seconds = 0.0
        self._set = shared.set
        shared.set = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._set(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began


if __name__ == "__main__":
    main()
