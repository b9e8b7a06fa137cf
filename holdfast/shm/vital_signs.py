"""A worker's signs of life, in shared memory beside its progress page.

Three kinds of sign, because they say different things when they stop:

- *marks*: the script came to another phase of a step (data, forward, backward, optimizer), finished a
  step, or called `holdfast.heartbeat`. The time between two marks is booked to the phase that the
  first one began, its longest and its latest durations are kept, and so deadlines can be learnt.
- *sections* that are open, with when they were entered. They nest, overlap, and may be of any thread.
- *beats*: a thread of ours had its turn. When beats stop and the process is not stopped, something
  holds the interpreter's lock. With each beat it notes what the training thread is doing: whether it
  waits in a collective, where it stands, and in how many different pieces of code it was seen since
  the last mark.

Marks are of the thread that trains: the main one, or whichever took the last step. The first few steps
of a process take long for reasons of their own (compilers, caches, first connections); nothing is
learnt from them.

The worker writes, its agent reads; a write costs well under a microsecond. A reader may see a mark and
its time from two moments: it looks again before it acts.
"""

from __future__ import annotations

from _thread import get_ident, get_native_id
from typing import Final

from msgspec import Struct

VITALS_BYTES: Final = 16 << 10

START, DATA, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, STEP = range(7)
PHASES: Final = ("start", "data", "forward", "backward", "optimizer", "between", "step")
"""What a script does between two marks; "step" is from one finished step to the next."""
OWN_WORK: Final = (FORWARD, BACKWARD, OPTIMIZER)
"""Phases of which it is told, beside how long the script was in them, how long they took the rank
itself: on its GPU if it has one, and without what it was seen to wait for others."""
NO, IN_COLLECTIVE, IN_BACKWARD = range(3)
"""Whether the training thread waits for others."""
WITH_GRADIENTS, ALSO_IN_FORWARD, LEFT_OUT = range(3)
"""Where the times of ranks' own work have waiting in them that was not seen: where gradients are
reduced; in the forward pass as well, as each rank has only a part of the model; or nowhere."""
MOST_SECTIONS: Final = 24
"""Different names of sections; further ones are not watched."""
MOST_OPEN: Final = 16
RING: Final = 32
WARM_UP: Final = 5
"""Steps of a process after which what it needs for a phase is what it always needs."""
WARM_UP_DEVICE: Final = 50
"""The same with a GPU, whose queue takes steps in at once until it is full."""
FIRST_STEP: Final = "first step"
"""From a script's begin to the end of its first step; the agent measures it."""

_BEAT_AT, _BEATS, _WAITS, _CODES = 0, 1, 2, 3
_MARK_AT, _MARKS, _PHASE = 4, 5, 6
_WANTED, _DUMPED, _WAITING = 7, 8, 9
_PLACE, _PLACE_AT, _THREAD = 10, 11, 12
_STEPS, _STEP_AT, _WARM = 13, 14, 15
_OPEN: Final = 16
"""Open sections: pairs of name (plus one; 0 is a free place) and when it was entered."""
_OTHERS: Final = 1 << 32
"""Added to the name of a section that another thread than the training one is in."""
_TIMES: Final = _OPEN + 2 * MOST_OPEN
_TIME_WORDS: Final = 2 + RING
"""For each phase and section: how often, the longest, and a ring of the latest."""
_NAMES_BYTES: Final = 32
_OWN: Final = len(PHASES) + MOST_SECTIONS
"""Where the times of own work are, after those of phases and sections."""
_NAMES_AT: Final = 8 * (_TIMES + _TIME_WORDS * (_OWN + len(OWN_WORK)))
assert _NAMES_AT + _NAMES_BYTES * MOST_SECTIONS <= VITALS_BYTES


class Times(Struct, frozen=True):
    """How long something took, as far as it was seen to end."""

    count: int
    longest_s: float
    latest_s: tuple[float, ...]
    """The last few, the newest last."""


class Open(Struct, frozen=True, order=True):
    """A section that somebody is in."""

    entered_at: float
    name: str
    own: bool = True
    """It is the training thread that is in it."""


class Signs(Struct, frozen=True):
    """What a worker's vitals say at one moment; times are of the machine's monotonic clock."""

    beat_at: float
    waits: bool
    """The training thread was last seen in a collective, or in a backward pass, which has some."""
    in_backward: bool
    codes: int
    """How many pieces of code the training thread was seen in since the last mark."""
    place: int
    """Stands for the line it was last seen at; the same line has the same number in all processes."""
    place_at: float
    """Since when it is seen there."""
    thread: int
    """The kernel's number of the training thread; 0 for the main one."""
    mark_at: float
    marks: int
    phase: str
    steps: int
    step_at: float
    """When the last step was finished."""
    warm: bool
    """The first few steps are over."""
    sections: tuple[Open, ...]
    """The oldest first."""


def section_name(name: str) -> str:
    """What a section is called in the vitals: not too long, and not as a phase."""
    if name in PHASES or name == FIRST_STEP:
        name = f"{name} (section)"
    return name.encode(errors="replace")[: _NAMES_BYTES - 1].decode(errors="ignore")


class Vitals:
    """One side's view of them."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._ints = view.cast("Q")
        self._floats = view.cast("d")
        self.trainer = get_ident()
        """Worker: the thread whose marks count."""
        self.warm_up = WARM_UP

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self._view.release()

    def detach(self) -> None:
        """In a process that was forked from the worker: nothing it does is a sign of the worker."""
        self._view = memoryview(bytearray(VITALS_BYTES))
        self._ints = self._view.cast("Q")
        self._floats = self._view.cast("d")

    # ---- the worker's side ----

    def mark(self, phase: int, now: float) -> None:
        """What was under way is over, and this begins."""
        ints, floats = self._ints, self._floats
        last = floats[_MARK_AT]
        if last:
            self.took(ints[_PHASE], now - last)
        floats[_MARK_AT] = now
        ints[_PHASE] = phase
        ints[_CODES] = 0
        ints[_MARKS] += 1

    def go_on(self, phase: int, now: float) -> None:
        """The same, when what was under way has been booked already: as a section."""
        self._floats[_MARK_AT] = now
        self._ints[_PHASE] = phase
        self._ints[_CODES] = 0
        self._ints[_MARKS] += 1

    def took(self, what: int, seconds: float) -> None:
        """Book how long a phase or section took."""
        ints, floats = self._ints, self._floats
        at = _TIMES + _TIME_WORDS * what
        count = ints[at]
        floats[at + 2 + count % RING] = seconds
        ints[at] = count + 1
        if seconds > floats[at + 1]:
            floats[at + 1] = seconds

    def took_itself(self, phase: int, seconds: float) -> None:
        """Book how long a phase took the rank itself."""
        self.took(_OWN + OWN_WORK.index(phase), seconds)

    def stepped(self, now: float, took_s: float | None) -> None:
        """The calling thread finished a training step; None: its process's first."""
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
            for phase in range(len(PHASES)):
                self._floats[_TIMES + _TIME_WORDS * phase + 1] = 0.0

    def name_section(self, index: int, name: str) -> None:
        at = _NAMES_AT + _NAMES_BYTES * index
        data = section_name(name).encode()
        self._view[at : at + len(data)] = data

    def enter(self, index: int, now: float, own: bool = True) -> int:
        """A section is entered; the place to give back when it is left, -1 when there is none.

        Not by two threads at once."""
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

    def beat(self, now: float, waits: int, codes: int, place: int = 0) -> None:
        """A thread of ours had its turn, and saw how the training thread stands (NO, IN_...)."""
        ints = self._ints
        if place != ints[_PLACE]:
            ints[_PLACE] = place
            self._floats[_PLACE_AT] = now
        ints[_WAITS] = waits
        ints[_CODES] = codes
        ints[_BEATS] += 1
        self._floats[_BEAT_AT] = now

    @property
    def warm(self) -> bool:
        """The first few steps are over."""
        return bool(self._ints[_WARM])

    @property
    def waiting(self) -> int:
        """Where there is waiting in the times of own work (WITH_GRADIENTS, ...)."""
        return int(self._ints[_WAITING])

    @waiting.setter
    def waiting(self, where: int) -> None:
        self._ints[_WAITING] = where

    @property
    def marks(self) -> int:
        return int(self._ints[_MARKS])

    # ---- the agent's side ----

    def read(self) -> Signs:
        ints, floats = self._ints, self._floats
        sections = []
        for place in range(MOST_OPEN):
            entered, named = floats[_OPEN + 2 * place + 1], ints[_OPEN + 2 * place]
            if named:
                name = self._name(named % _OTHERS - 1)
                sections.append(Open(entered, name, own=named < _OTHERS))
        return Signs(
            beat_at=floats[_BEAT_AT],
            waits=ints[_WAITS] != NO,
            in_backward=ints[_WAITS] == IN_BACKWARD,
            codes=ints[_CODES],
            place=ints[_PLACE],
            place_at=floats[_PLACE_AT],
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
        """Of all phases and sections that were seen to end."""
        found = {}
        for what in range(len(PHASES) + MOST_SECTIONS):
            times = self._times(what)
            if times is not None:
                name = PHASES[what] if what < len(PHASES) else self._name(what - len(PHASES))
                found[name] = times
        return found

    def own_times(self) -> dict[str, Times]:
        """What phases took the rank itself."""
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
        at = _NAMES_AT + _NAMES_BYTES * index
        return bytes(self._view[at : at + _NAMES_BYTES]).rstrip(b"\0").decode(errors="replace")

    # ---- asking the beating thread ----

    def want_dump(self) -> None:
        """Agent: have the worker write its flight recorder to its file."""
        self._ints[_WANTED] += 1

    @property
    def dump_wanted(self) -> bool:
        return bool(self._ints[_WANTED] != self._ints[_DUMPED])

    def dumped(self) -> None:
        self._ints[_DUMPED] = self._ints[_WANTED]
