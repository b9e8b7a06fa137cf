"""The rank page: shared memory in which a worker leaves its progress and signs of life for its
agent.

A write costs well under a microsecond and no system call, so every step can be noted; and since the
memory outlives the writer, the agent knows the exact last step of a worker that was killed.
Progress is a ring of slots with a sequence number that says which one is valid: a writer that dies
in the middle of a slot has not yet published it, and a reader has several writes' time before its
slot is reused.

All times are on the machine's monotonic clock.
"""

from __future__ import annotations

import os

from msgspec import Struct

from holdfast.kernel import Mapping
from holdfast.shm.traps import TRAP_LOG_BYTES, TrapLog
from holdfast.shm.vital_signs import VITALS_BYTES, Vitals

PROGRESS_BYTES = 4096
_TRAPS_AT = PROGRESS_BYTES + VITALS_BYTES
_SPRUNG_AT = _TRAPS_AT + TRAP_LOG_BYTES
PAGE_BYTES = _SPRUNG_AT + TRAP_LOG_BYTES
_SLOT_WORDS = 15
_FIRST_SLOT = 8
_SLOTS = 32


class PageState(Struct, frozen=True):
    """A worker's progress."""

    step: int
    steps: int
    """Number of steps that this process finished."""
    first_at: float
    last_at: float
    checkpoint_s: float
    restore_s: float
    saves: int = 0
    """Number of checkpoints that this process finished."""
    pause_s: float = 0.0
    """Time between steps that was neither a step nor booked above."""
    step_s: float = 0.0
    """Usual time from one finished step to the next; 0 while it is unknown."""
    resumed: int = 0
    """What it knows of the step that it resumed at: an index of `messages.records.RESUMED`."""
    samples: int = 0
    """Records that the script had been given by its last step; 0 if nobody counts them."""
    trained_s: float = 0.0
    """Time of the steps after its first one, without what was booked or paused between them."""
    evaluation_s: float = 0.0
    loss: float = 0.0
    """The newest loss that the script told."""
    loss_steps: int = 0
    """Number of steps that this process had finished with the step of that loss; 0 if none was told."""


class RankPage:
    """One process's mapping of the page; the worker writes, the agent reads."""

    def __init__(self, fd: int) -> None:
        self._mapping = Mapping(fd, PAGE_BYTES)
        progress = self._mapping.view[:PROGRESS_BYTES]
        self._ints = progress.cast("Q")
        self._floats = progress.cast("d")
        progress.release()
        self.vitals = Vitals(self._mapping.view[PROGRESS_BYTES:_TRAPS_AT])
        self.traps = TrapLog(self._mapping.view[_TRAPS_AT:_SPRUNG_AT])
        self.sprung = TrapLog(self._mapping.view[_SPRUNG_AT:])

    def write(
        self,
        step: int,
        steps: int,
        first_at: float,
        last_at: float,
        checkpoint_s: float,
        restore_s: float,
        saves: int = 0,
        pause_s: float = 0.0,
        step_s: float = 0.0,
        resumed: int = 0,
        samples: int = 0,
        trained_s: float = 0.0,
        evaluation_s: float = 0.0,
        loss: float = 0.0,
        loss_steps: int = 0,
    ) -> None:
        ints, floats = self._ints, self._floats
        sequence = ints[0] + 1
        slot = _FIRST_SLOT + _SLOT_WORDS * (sequence % _SLOTS)
        ints[slot] = step
        ints[slot + 1] = steps
        floats[slot + 2] = first_at
        floats[slot + 3] = last_at
        floats[slot + 4] = checkpoint_s
        floats[slot + 5] = restore_s
        ints[slot + 6] = saves
        floats[slot + 7] = pause_s
        floats[slot + 8] = step_s
        ints[slot + 9] = resumed
        ints[slot + 10] = samples
        floats[slot + 11] = trained_s
        floats[slot + 12] = evaluation_s
        floats[slot + 13] = loss
        ints[slot + 14] = loss_steps
        ints[0] = sequence

    def read(self) -> PageState:
        while True:
            sequence = self._ints[0]
            slot = _FIRST_SLOT + _SLOT_WORDS * (sequence % _SLOTS)
            ints = self._ints[slot : slot + _SLOT_WORDS]
            floats = self._floats[slot : slot + _SLOT_WORDS]
            state = PageState(
                step=ints[0],
                steps=ints[1],
                first_at=floats[2],
                last_at=floats[3],
                checkpoint_s=floats[4],
                restore_s=floats[5],
                saves=ints[6],
                pause_s=floats[7],
                step_s=floats[8],
                resumed=ints[9],
                samples=ints[10],
                trained_s=floats[11],
                evaluation_s=floats[12],
                loss=floats[13],
                loss_steps=ints[14],
            )
            # The slot just read is overwritten _SLOTS writes later, which begins one earlier.
            if self._ints[0] - sequence < _SLOTS - 1:
                return state

    def reset(self) -> None:
        """Forget everything, while the worker does not write: another rank begins with it."""
        sequence = self._ints[0] + 1
        for word in range(_FIRST_SLOT, _FIRST_SLOT + _SLOT_WORDS * _SLOTS):
            self._ints[word] = 0
        self._ints[0] = sequence
        self.vitals.reset()
        self.traps.reset()
        self.sprung.reset()

    def detach(self) -> None:
        """Stop writing, in a process forked from the worker."""
        own = memoryview(bytearray(PROGRESS_BYTES))
        self._ints, self._floats = own.cast("Q"), own.cast("d")
        self.vitals.detach()

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self.vitals.close()
        self.traps.close()
        self.sprung.close()
        self._mapping.close()


def create_page() -> int:
    """Create an anonymous page and return its file descriptor: nothing of it can be left behind."""
    fd = os.memfd_create("holdfast-rank-page", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd
