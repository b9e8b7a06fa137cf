"""How long to wait, learnt from what the job was seen to do.

Each deadline is a factor times the longest time observed, and never below a floor. A flag may
override it; none needs to.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.units import Seconds

BEAT_FLOOR_S: Seconds = 1.0
BEATS_PER_S = 1000.0
SILENT_BEATS = 4.0
SILENCE_FACTOR = 2.0
SILENCE_FLOOR_S: Seconds = SILENT_BEATS * BEAT_FLOOR_S
SILENCE_MOST_S: Seconds = 64.0

JOIN_LIMIT_S: Seconds = 600.0
"""How long a job waits below its minimum for nodes that somebody else has to start."""

STOP_FACTOR = 3.0
STOP_FLOOR_S: Seconds = 3.0
STOP_UNKNOWN_S: Seconds = 30.0
LEAVE_FLOOR_S: Seconds = 1.0
LEAVE_UNKNOWN_S: Seconds = 2.0
PATIENCE_FACTOR = 5.0
PATIENCE_FLOOR_S: Seconds = 1.0


def beat_s(nodes: int) -> Seconds:
    """Return how often an agent beats.

    The more nodes, the fewer beats of each, so that beats cost the coordinator the same however many
    there are.
    """
    return max(BEAT_FLOOR_S, nodes / BEATS_PER_S)


def silence_s(nodes: int, longest_s: Seconds) -> Seconds:
    """Return how long a node may be silent before it is given up.

    An agent that was silent for long and came back by itself runs on a busy machine: everybody is
    given twice that time from then on. It grows by doubling, because each growth is written down
    before any node is promised it.
    """
    beats_s = SILENT_BEATS * beat_s(nodes)
    wanted_s = max(beats_s, min(SILENCE_FACTOR * longest_s, SILENCE_MOST_S))
    found_s = SILENCE_FLOOR_S
    while found_s < wanted_s:
        found_s *= 2
    return found_s


class StopPatience(Struct):
    """How long nodes that are stopping are waited for when spares could take their places.

    Survivors have seats and state, so they are preferred; but one whose worker cannot even be killed
    must not hold up the others.
    """

    longest_s: Seconds | None = None

    def observe(self, took_s: Seconds) -> None:
        self.longest_s = max(took_s, self.longest_s or 0.0)

    def limit_s(self) -> Seconds:
        if self.longest_s is None:
            return STOP_UNKNOWN_S
        return max(PATIENCE_FLOOR_S, PATIENCE_FACTOR * self.longest_s)


class LeaveGrace(Struct):
    """How long a worker may take to leave its restartable function before its process is ended.

    What cannot leave costs a standby and no more, so the limit is short.
    """

    longest_s: Seconds | None = None

    def observe(self, took_s: Seconds) -> None:
        self.longest_s = max(took_s, self.longest_s or 0.0)

    def limit_s(self) -> Seconds:
        if self.longest_s is None:
            return LEAVE_UNKNOWN_S
        return max(LEAVE_FLOOR_S, STOP_FACTOR * self.longest_s)


class StopGrace(Struct):
    """How long a worker that handles SIGTERM may take before SIGKILL.

    Only workers that installed a handler get it (the agent sees that in the process's signal mask);
    one that ignores SIGTERM is killed at once. Until a first one was seen to end by itself, it has
    torchrun's 30 s.
    """

    override_s: Seconds | None
    longest_s: Seconds | None = None

    def observe(self, took_s: Seconds) -> None:
        self.longest_s = max(took_s, self.longest_s or 0.0)

    def limit_s(self) -> Seconds:
        if self.override_s is not None:
            return self.override_s
        if self.longest_s is None:
            return STOP_UNKNOWN_S
        return max(STOP_FLOOR_S, STOP_FACTOR * self.longest_s)
