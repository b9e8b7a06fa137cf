"""How a rank that is past its deadline stands there: see `StallKind`.

What its vitals say comes from within; from outside the kernel tells whether the process is stopped,
and what its training thread did since the last look: processor time, bytes read and written. So a
backward pass that computes is told from one that waits for the others' gradients, and a save to slow
storage, however it is made, from a rank that does nothing: it moves bytes now and then, or the kernel
lets nobody disturb it until the storage has answered (state D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.messages.hangs import LINES, StallKind
from holdfast.shm.vital_signs import Signs

OLD_BEAT_S: Final = 1.0
BUSY_CODES: Final = 3
"""A thread that was seen in so many pieces of code since its last mark is not stuck in one."""
BUSY_SHARE: Final = 0.5
ROOTED_S: Final = 1.0
"""Who was seen at one line for so long stands there."""


@dataclass(frozen=True)
class Effort:
    """What a thread has done so far, as the kernel counts it."""

    cpu_s: float = 0.0
    moved_bytes: int = 0
    """Read and written."""


@dataclass(frozen=True)
class Lately:
    """What it did since the last look."""

    cpu_share: float = 0.0
    moved: bool = False
    """It has read or written something: since the last look, or in the later half of its silence."""


def lately(before: Effort, now: Effort, seconds: float) -> Lately:
    share = (now.cpu_s - before.cpu_s) / seconds if seconds > 0 else 0.0
    return Lately(share, now.moved_bytes > before.moved_bytes)


def kind(state: str, signs: Signs, did: Lately, now: float, for_s: float) -> StallKind:
    """How a rank stands that gave no sign of progress for so long."""
    if state == "T":
        return "stopped"
    if state in ("t", "D"):
        return "busy"  # Somebody looks at it with a debugger; or storage does not answer.
    if now - signs.beat_at > max(OLD_BEAT_S, for_s / 2):
        return "gil"
    computes = signs.in_backward and did.cpu_share > BUSY_SHARE
    if signs.waits and not computes and is_rooted(signs, now):
        return "waits"
    busy = signs.waits or did.moved or signs.codes >= BUSY_CODES
    return "busy" if busy else "still"


def place(signs: Signs, now: float) -> int:
    """Where one that is still stands: see `Stall.place`."""
    if is_rooted(signs, now):
        return signs.place
    return signs.place // LINES * LINES if signs.codes == 1 else 0


def is_rooted(signs: Signs, now: float) -> bool:
    """Whether it was seen at one and the same line for a while."""
    return now - signs.place_at > ROOTED_S


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def effort(pid: int, thread: int) -> Effort:
    """What a thread has done so far; what the kernel does not tell counts as nothing."""
    folder = f"/proc/{pid}/task/{thread or pid}"
    return Effort(_cpu_s(f"{folder}/schedstat"), _moved_bytes(f"{folder}/io"))


def _cpu_s(path: str) -> float:
    try:
        with open(path) as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _moved_bytes(path: str) -> int:
    try:
        with open(path) as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
        return sum(int(counts[n]) for n in ("rchar", "wchar", "read_bytes", "write_bytes"))
    except (OSError, ValueError, KeyError):
        return 0
