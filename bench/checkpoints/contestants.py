"""Who is measured: holdfast's checkpointer and writer, and torch's own checkpoints beside them.

Each tells how long training stood still for a save. Then it waits until all that the save set in
motion has come to rest, which is not counted: the next contestant shall not pay for it.
"""

from __future__ import annotations

import gc
import shutil
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import holdfast
from checkpoints.lines import Seconds
from holdfast.checkpoint import AsyncWriter
from holdfast.checkpoint.tickets import Ticket


class SaveFailedError(RuntimeError):
    """A save that is to be timed must be one."""


class Holdfast:
    """`holdfast.Checkpointer`, to memory."""

    def __init__(self, state: dict[str, Any], directory: Path | None = None) -> None:
        self.checkpointer = holdfast.Checkpointer(directory, state, overlap=True)
        self._steps = count(1)

    def block(self) -> Seconds:
        """All is copied when `save` returns."""
        return self._save(block=True)

    def overlap(self) -> Seconds:
        """What only an optimizer's step changes is copied after `save` has returned."""
        return self._save(block=False)

    def begin(self) -> Ticket:
        """An overlapped save, to be waited for elsewhere."""
        return self.checkpointer.save(next(self._steps), to="memory")

    def _save(self, block: bool) -> Seconds:
        began = perf_counter()
        ticket = self.checkpointer.save(next(self._steps), to="memory", block=block)
        seconds = perf_counter() - began
        result = ticket.memory()
        if result.outcome != "saved":
            raise SaveFailedError(f"{result.outcome}: {result.reason}")
        return seconds

    def persist(self) -> tuple[Seconds, Seconds]:
        """How long it took from memory to storage, durable and committed; and from the call on."""
        began = perf_counter()
        ticket = self.checkpointer.save(next(self._steps), to="storage", block=True)
        ticket.memory()
        in_memory = perf_counter()
        result = ticket.storage()
        done = perf_counter()
        if result.outcome != "saved":
            raise SaveFailedError(f"{result.outcome}: {result.reason}")
        return done - in_memory, done - began


class Writer:
    """`holdfast.checkpoint.AsyncWriter`; with an optimizer it copies beside training."""

    def __init__(
        self, state: dict[str, Any], folder: Path, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self._writer = AsyncWriter(optimizers=optimizers)
        self._state = state
        self._at = folder / "writer"

    def save(self) -> Seconds:
        began = perf_counter()
        future = self._writer.save(self._state, checkpoint_id=self._at)
        seconds = perf_counter() - began
        future.result()
        shutil.rmtree(self._at)
        return seconds

    def close(self) -> None:
        self._writer.close()


class Torch:
    """`torch.distributed.checkpoint`, as it is when nothing is said about it."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state = state
        self._at = folder / "dcp"

    def async_save(self) -> Seconds:
        shutil.rmtree(self._at, ignore_errors=True)
        began = perf_counter()
        response = dcp.async_save(self._state, checkpoint_id=self._at, no_dist=True)
        seconds = perf_counter() - began
        getattr(response, "upload_completion", response).result()
        shutil.rmtree(self._at)
        del response
        gc.collect()
        return seconds

    def begin(self) -> Any:
        """An `async_save`, to be waited for elsewhere."""
        shutil.rmtree(self._at, ignore_errors=True)
        response = dcp.async_save(self._state, checkpoint_id=self._at, no_dist=True)
        return getattr(response, "upload_completion", response)

    def save(self) -> Seconds:
        shutil.rmtree(self._at, ignore_errors=True)
        began = perf_counter()
        dcp.save(self._state, checkpoint_id=self._at, no_dist=True)
        return perf_counter() - began

    def load(self) -> Seconds:
        """Into the tensors of the state, which were saved with `save` before."""
        state = {name: getattr(e, "state_dict", lambda e=e: e)() for name, e in self._state.items()}
        began = perf_counter()
        dcp.load(state, checkpoint_id=self._at, no_dist=True)
        for name, entry in self._state.items():
            if hasattr(entry, "load_state_dict"):
                entry.load_state_dict(state[name])
        return perf_counter() - began

    def remove(self) -> None:
        shutil.rmtree(self._at, ignore_errors=True)
