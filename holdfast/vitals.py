"""A worker's signs of life, in shared memory beside its progress page.

Three kinds of sign, because they say different things when they stop:

- *marks*: the script came to another phase of a step (data, forward, backward, optimizer), finished a
  step, or called `holdfast.heartbeat`. The time between two marks is booked to the phase that the
  first one began, its longest and its latest durations are kept, and so deadlines can be learnt.
- *sections* that are open, with when they were entered. They nest, overlap, and may be of any thread.
- *beats*: a thread of ours had its turn. When beats stop and the process is not stopped, something
  holds the interpreter's lock. With each beat it notes what the main thread is doing: whether it waits
  in a collective, and how many different pieces of code it was seen in since the last mark.

The worker writes, its agent reads; a write costs well under a microsecond. A reader may see a mark and
its time from two moments: it looks again before it acts.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

VITALS_BYTES: Final = 16 << 10

START, DATA, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, STEP = range(7)
PHASES: Final = ("start", "data", "forward", "backward", "optimizer", "between", "step")
"""What a script does between two marks; "step" is from one finished step to the next."""
MOST_SECTIONS: Final = 24
"""Different names of sections; further ones are not watched."""
MOST_OPEN: Final = 16
RING: Final = 32

_BEAT_AT, _BEATS, _WAITS, _CODES = 0, 1, 2, 3
_MARK_AT, _MARKS, _PHASE = 4, 5, 6
_WANTED, _DUMPED, _TRAP = 7, 8, 9
_OPEN: Final = 16
"""Open sections: pairs of name (plus one; 0 is a free place) and when it was entered."""
_TIMES: Final = _OPEN + 2 * MOST_OPEN
_TIME_WORDS: Final = 3 + RING
"""For each phase and section: how often, longest, longest since it was last looked, ring."""
_NAMES_BYTES: Final = 32
_NAMES_AT: Final = 8 * (_TIMES + _TIME_WORDS * (len(PHASES) + MOST_SECTIONS))
assert _NAMES_AT + _NAMES_BYTES * MOST_SECTIONS <= VITALS_BYTES


class Times(Struct, frozen=True):
    """How long something took, as far as it was seen to end."""

    count: int
    longest_s: float
    latest_s: tuple[float, ...]
    """The last few, the newest last."""


class Signs(Struct, frozen=True):
    """What a worker's vitals say at one moment; times are of the machine's monotonic clock."""

    beat_at: float
    waits: bool
    """Its main thread was last seen in a collective."""
    codes: int
    """How many pieces of code its main thread was seen in since the last mark."""
    mark_at: float
    marks: int
    phase: str
    sections: tuple[tuple[str, float], ...]
    """Open ones and when they were entered, the oldest first."""


class Vitals:
    """One side's view of them."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._ints = view.cast("Q")
        self._floats = view.cast("d")

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self._view.release()

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

    def took(self, what: int, seconds: float) -> None:
        """Book how long a phase or section took."""
        ints, floats = self._ints, self._floats
        at = _TIMES + _TIME_WORDS * what
        count = ints[at]
        floats[at + 3 + count % RING] = seconds
        ints[at] = count + 1
        if seconds > floats[at + 1]:
            floats[at + 1] = seconds

    def name_section(self, index: int, name: str) -> None:
        at = _NAMES_AT + _NAMES_BYTES * index
        data = name.encode()[: _NAMES_BYTES - 1]
        self._view[at : at + len(data)] = data

    def enter(self, index: int, now: float) -> int:
        """A section is entered; the place to give back when it is left, -1 when there is none."""
        ints = self._ints
        for place in range(MOST_OPEN):
            if ints[_OPEN + 2 * place] == 0:
                self._floats[_OPEN + 2 * place + 1] = now
                ints[_OPEN + 2 * place] = index + 1
                return place
        return -1

    def leave(self, place: int) -> None:
        if place >= 0:
            self._ints[_OPEN + 2 * place] = 0

    def beat(self, now: float, waits: bool, codes: int) -> None:
        self._floats[_BEAT_AT] = now
        self._ints[_BEATS] += 1
        self._ints[_WAITS] = waits
        self._ints[_CODES] = codes

    @property
    def marks(self) -> int:
        return int(self._ints[_MARKS])

    # ---- the agent's side ----

    def read(self) -> Signs:
        ints, floats = self._ints, self._floats
        sections = []
        for place in range(MOST_OPEN):
            index, entered = ints[_OPEN + 2 * place], floats[_OPEN + 2 * place + 1]
            if index:
                sections.append((entered, self._name(index - 1)))
        return Signs(
            beat_at=floats[_BEAT_AT],
            waits=bool(ints[_WAITS]),
            codes=ints[_CODES],
            mark_at=floats[_MARK_AT],
            marks=ints[_MARKS],
            phase=PHASES[min(ints[_PHASE], len(PHASES) - 1)],
            sections=tuple((name, entered) for entered, name in sorted(sections)),
        )

    def times(self) -> dict[str, Times]:
        """Of all phases and sections that were seen to end."""
        found = {}
        for what in range(len(PHASES) + MOST_SECTIONS):
            at = _TIMES + _TIME_WORDS * what
            count = self._ints[at]
            if count:
                ring = list(self._floats[at + 3 : at + 3 + min(count, RING)])
                oldest = count % RING if count > RING else 0
                ring = ring[oldest:] + ring[:oldest]
                name = PHASES[what] if what < len(PHASES) else self._name(what - len(PHASES))
                found[name] = Times(count, self._floats[at + 1], tuple(ring))
        return found

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
