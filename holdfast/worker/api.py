"""What a script may say about itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.worker import runtime

_BOOKED = ("checkpoint", "restore")


def progress(step: int) -> None:
    """Say that training step `step` (counted from 1 over the whole job) is finished.

    From the first call on, the script's own count is used instead of the optimizer's.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise TypeError(f"holdfast.progress: a step is a whole number from 0 on, not {step!r}")
    worker = runtime.current()
    if worker is not None:
        worker.stepped(step)


@contextmanager
def section(name: str) -> Iterator[None]:
    """Mark a stretch of the script; "checkpoint" and "restore" are booked as such by the ledger."""
    worker = runtime.current()
    if worker is None or name not in _BOOKED:
        yield
        return
    with worker.aside(name):
        yield
