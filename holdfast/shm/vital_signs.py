"""A worker's signs of life, in shared memory beside its progress.

Three kinds of signs, because they mean different things when they stop:

- *marks*: the script reached another phase of a step (data, forward, backward, optimizer), finished
  a step, or called `holdfast.heartbeat`. The time between two marks belongs to the phase that the
  first one began; the longest and the latest durations of each are kept, to tell what is usual.
- *sections* that are open, with the time they were entered. They nest, overlap, and belong to any
  thread.
- *beats*: the heartbeat thread got the GIL. When beats stop and the process is not stopped, another
  thread keeps it. Each beat notes what the training thread is doing: whether it waits for other ranks
  or for its data loader, since when it is at its line, and in how many different code objects it was
  seen since the last mark. If it stays between two marks for more than a beat, its place in the user's
  code is noted too.

Marks belong to the training thread: the main thread, or the one that took the last step. The first few
steps of a process take long for reasons of their own (compilers, caches, first connections); it is warm
after them.

The worker writes and its agent reads, without locks; a write costs well under a microsecond. A
reader may see a mark and its time from two moments, so it looks again before it acts.
"""

from __future__ import annotations

from _thread import get_ident, get_native_id
from typing import Final

from msgspec import Struct

from holdfast.messages.hangs import FIRST_STEP

VITALS_BYTES: Final = 16 << 10

START, DATA, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, STEP = range(7)
PHASES: Final = ("start", "data", "forward", "backward", "optimizer", "between", "step")
"""Phases between two marks; "step" is the time from one finished step to the next."""
OWN_WORK: Final = (FORWARD, BACKWARD, OPTIMIZER, BETWEEN)
"""Phases whose own work is also timed: on the GPU if there is one, and without visible waits for
other ranks. Of the time between phases there is one duration for each step, and none with a GPU."""
NO, IN_COLLECTIVE, IN_BACKWARD, IN_LOADER = range(4)
"""Whether the training thread waits for other ranks, or for the workers of its data loader."""
WITH_GRADIENTS, ALSO_IN_FORWARD, LEFT_OUT = range(3)
"""Which times of own work include invisible waits: those where gradients are reduced; the forward
pass as well, because the model is sharded; or none."""
UNWATCHED: Final = "unwatched"
"""Name of the section in which a rank is never late."""
MOST_SECTIONS: Final = 24
"""Different section names; further ones are not watched."""
MOST_OPEN: Final = 16
RING: Final = 32
WARM_UP: Final = 5
"""Steps of a process after which its phases take their usual time."""
WARM_UP_DEVICE: Final = 50
"""The same with a GPU, whose queue accepts steps at once until it is full."""

_BEAT_AT, _BEATS, _WAITS, _CODES = 0, 1, 2, 3
_MARK_AT, _MARKS, _PHASE = 4, 5, 6
_WANTED, _DUMPED, _WAITING = 7, 8, 9
_LINE, _LINE_AT, _THREAD = 10, 11, 12
_STEPS, _STEP_AT, _WARM = 13, 14, 15
_OPEN: Final = 16
"""Open sections: pairs of name index plus one (0: free) and entry time."""
_OTHERS: Final = 1 << 32
"""Added to the name index of a section that belongs to another thread than the training one."""
_TIMES: Final = _OPEN + 2 * MOST_OPEN
_TIME_WORDS: Final = 2 + RING
"""For each phase and section: the count, the longest, and a ring of the latest durations."""
_NAMES_BYTES: Final = 32
_OWN: Final = len(PHASES) + MOST_SECTIONS
"""Index of the first time of own work, after phases and sections."""
_NAMES_AT: Final = 8 * (_TIMES + _TIME_WORDS * (_OWN + len(OWN_WORK)))
_PLACE: Final = _NAMES_AT // 8 + _NAMES_BYTES // 8 * MOST_SECTIONS
"""The place: a sequence number that is odd while it is written, and the marks until it was."""
_GROUP_TIMEOUT: Final = _PLACE + 2
_LENT: Final = _PLACE + 3
_PLACE_AT: Final = 8 * (_PLACE + 4)
_PLACE_BYTES: Final = 120
assert _PLACE_AT + _PLACE_BYTES <= VITALS_BYTES


class Times(Struct, frozen=True):
    """Completed durations of one phase or section."""

    count: int
    longest_s: float
    latest_s: tuple[float, ...]
    """Latest durations, newest last."""


class OpenSection(Struct, frozen=True, order=True):
    """A section that a thread is in."""

    entered_at: float
    name: str
    own: bool = True
    """Whether it belongs to the training thread."""


class Signs(Struct, frozen=True):
    """A worker's signs of life at one moment; times are on the machine's monotonic clock."""

    beat_at: float
    waits: bool
    """Whether the last beat saw the training thread in a collective or a backward pass."""
    in_backward: bool
    loads: bool
    """Whether it saw the training thread wait for the workers of its data loader."""
    codes: int
    """Number of code objects that the training thread was seen in since the last mark."""
    line_at: float
    """When the training thread was first seen at the line where it was seen last."""
    place: str
    """That line, or the one of the user's code that led there; empty until it is known."""
    group_timeout_s: float
    """Timeout of the process group that the training thread waits in, or is about to create; 0 if
    unknown."""
    thread: int
    """Thread id of the training thread; 0 for the main thread."""
    mark_at: float
    marks: int
    phase: str
    steps: int
    step_at: float
    """When the last step finished."""
    warm: bool
    """Whether the first few steps are over."""
    sections: tuple[OpenSection, ...]
    """Oldest first."""


def section_name(name: str) -> str:
    """Return a section's name as the vitals keep it: short, and different from every phase."""
    if name in PHASES or name == FIRST_STEP:
        name = f"{name} (section)"
    return name.encode(errors="replace")[: _NAMES_BYTES - 1].decode(errors="ignore")


class Vitals:
    """One process's view of the vital signs: the worker's or the agent's."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._ints = view.cast("Q")
        self._floats = view.cast("d")
        self.trainer = get_ident()
        """In the worker: the thread whose marks count."""
        self.warm_up = WARM_UP

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self._view.release()

    def reset(self) -> None:
        """Forget everything, while nobody writes but the heartbeat."""
        self._view[:] = bytes(VITALS_BYTES)

    def detach(self) -> None:
        """Stop writing, in a process forked from the worker."""
        self._view = memoryview(bytearray(VITALS_BYTES))
        self._ints = self._view.cast("Q")
        self._floats = self._view.cast("d")

    # ---- the worker's side ----

    def mark(self, phase: int, now: float) -> None:
        """End the current phase and begin another."""
        last = self._floats[_MARK_AT]
        if last:
            self.took(self._ints[_PHASE], now - last)
        self.go_on(phase, now)

    def go_on(self, phase: int, now: float) -> None:
        """Begin a phase when the time until now is already booked, as a section."""
        ints = self._ints
        self._floats[_MARK_AT] = now
        ints[_PHASE] = phase
        ints[_CODES] = 0
        ints[_MARKS] += 1

    def took(self, what: int, seconds: float) -> None:
        """Book the duration of a phase or section."""
        ints, floats = self._ints, self._floats
        at = _TIMES + _TIME_WORDS * what
        count = ints[at]
        floats[at + 2 + count % RING] = seconds
        ints[at] = count + 1
        if seconds > floats[at + 1]:
            floats[at + 1] = seconds

    def took_itself(self, phase: int, seconds: float) -> None:
        """Book how long a phase's own work took."""
        self.took(_OWN + OWN_WORK.index(phase), seconds)

    def stepped(self, now: float, took_s: float | None) -> None:
        """Note that the calling thread finished a training step (None: the first of its process)."""
        ints = self._ints
        if get_ident() != self.trainer:
            self.trainer = get_ident()
            ints[_THREAD] = get_native_id()
        if took_s is not None:
            self.took(STEP, took_s)
        ints[_STEPS] += 1
        self._floats[_STEP_AT] = now
        if not ints[_WARM] and ints[_STEPS] >= self.warm_up:
            ints[_WARM] = 1

    def name_section(self, index: int, name: str) -> None:
        at = _NAMES_AT + _NAMES_BYTES * index
        data = section_name(name).encode()
        self._view[at : at + len(data)] = data

    def enter(self, index: int, now: float, own: bool = True) -> int:
        """Open a section and return its slot for `leave`, -1 if none is free. Not thread-safe."""
        ints = self._ints
        for place in range(MOST_OPEN):
            if ints[_OPEN + 2 * place] == 0:
                self._floats[_OPEN + 2 * place + 1] = now
                ints[_OPEN + 2 * place] = index + 1 + (0 if own else _OTHERS)
                return place
        return -1

    def leave(self, place: int) -> None:
        if place >= 0:
            self._ints[_OPEN + 2 * place] = 0

    def beat(self, now: float, waits: int, codes: int, line: int = 0) -> None:
        """Note a beat, and what it saw of the training thread (waits: NO, IN_...; line: any number
        that changes when it moves)."""
        ints = self._ints
        if line != ints[_LINE]:
            ints[_LINE] = line
            self._floats[_LINE_AT] = now
        ints[_WAITS] = waits
        ints[_CODES] = codes
        ints[_BEATS] += 1
        self._floats[_BEAT_AT] = now

    def note_place(self, place: str, marks: int) -> None:
        """Note where in the user's code the training thread was after so many marks."""
        ints, data = self._ints, place.encode(errors="replace")[:_PLACE_BYTES]
        ints[_PLACE] += 1
        ints[_PLACE + 1] = marks
        self._view[_PLACE_AT : _PLACE_AT + _PLACE_BYTES] = data.ljust(_PLACE_BYTES, b"\0")
        ints[_PLACE] += 1

    def note_group_timeout(self, seconds: float) -> None:
        """Note after how long the process group ends a rank that waits in it."""
        self._floats[_GROUP_TIMEOUT] = seconds

    @property
    def warm(self) -> bool:
        """Whether the first few steps are over."""
        return bool(self._ints[_WARM])

    @property
    def waiting(self) -> int:
        """Which times of own work include invisible waits (WITH_GRADIENTS, ...)."""
        return int(self._ints[_WAITING])

    @waiting.setter
    def waiting(self, where: int) -> None:
        self._ints[_WAITING] = where

    @property
    def marks(self) -> int:
        return int(self._ints[_MARKS])

    # ---- the agent's side ----

    def read(self) -> Signs:
        """Return the current signs."""
        ints, floats = self._ints, self._floats
        sections = []
        for place in range(MOST_OPEN):
            entered, named = floats[_OPEN + 2 * place + 1], ints[_OPEN + 2 * place]
            if named:
                name = self._name(named % _OTHERS - 1)
                sections.append(OpenSection(entered, name, own=named < _OTHERS))
        return Signs(
            beat_at=floats[_BEAT_AT],
            waits=ints[_WAITS] in (IN_COLLECTIVE, IN_BACKWARD),
            in_backward=ints[_WAITS] == IN_BACKWARD,
            loads=ints[_WAITS] == IN_LOADER,
            codes=ints[_CODES],
            line_at=floats[_LINE_AT],
            place=self._place(),
            group_timeout_s=floats[_GROUP_TIMEOUT],
            thread=ints[_THREAD],
            mark_at=floats[_MARK_AT],
            marks=ints[_MARKS],
            phase=PHASES[min(ints[_PHASE], len(PHASES) - 1)],
            steps=ints[_STEPS],
            step_at=floats[_STEP_AT],
            warm=self.warm,
            sections=tuple(sorted(sections)),
        )

    def times(self) -> dict[str, Times]:
        """Return the completed durations of all phases and sections."""
        found = {}
        for what in range(len(PHASES) + MOST_SECTIONS):
            times = self._times(what)
            if times is not None:
                name = PHASES[what] if what < len(PHASES) else self._name(what - len(PHASES))
                found[name] = times
        return found

    def own_times(self) -> dict[str, Times]:
        """Return how long the own work of phases took."""
        found = ((phase, self._times(_OWN + n)) for n, phase in enumerate(OWN_WORK))
        return {PHASES[phase]: times for phase, times in found if times is not None}

    def _times(self, what: int) -> Times | None:
        at = _TIMES + _TIME_WORDS * what
        count = self._ints[at]
        if not count:
            return None
        ring = list(self._floats[at + 2 : at + 2 + min(count, RING)])
        oldest = count % RING if count > RING else 0
        return Times(count, self._floats[at + 1], (*ring[oldest:], *ring[:oldest]))

    def _name(self, index: int) -> str:
        return self._text(_NAMES_AT + _NAMES_BYTES * index, _NAMES_BYTES)

    def _place(self) -> str:
        """Return the place; empty if there was a mark since, or it is being written."""
        ints = self._ints
        before = ints[_PLACE]
        place = self._text(_PLACE_AT, _PLACE_BYTES)
        valid = before % 2 == 0 and ints[_PLACE] == before and ints[_PLACE + 1] == ints[_MARKS]
        return place if valid else ""

    def _text(self, at: int, size: int) -> str:
        return bytes(self._view[at : at + size]).rstrip(b"\0").decode(errors="ignore")

    # ---- the lease on the round ----

    def lend(self, until: float) -> None:
        """In the agent: let the worker run until then."""
        self._floats[_LENT] = until

    def lease_is_over(self, now: float) -> bool:
        """In the worker: return whether another process may have this rank by now."""
        until = self._floats[_LENT]
        return bool(until and until < now)

    # ---- asking the heartbeat thread for a dump ----

    def want_dump(self) -> None:
        """In the agent: ask the worker to write its flight recorder to its file."""
        self._ints[_WANTED] += 1

    @property
    def dump_wanted(self) -> bool:
        return bool(self._ints[_WANTED] != self._ints[_DUMPED])

    def dumped(self) -> None:
        self._ints[_DUMPED] = self._ints[_WANTED]
