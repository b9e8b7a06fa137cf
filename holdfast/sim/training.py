"""What the workers of the rounds really do: the truth that the coordinator only hears about.

Training is synchronous: a round steps once all its ranks have started, and stands still as soon as
one of them is gone. Its step is therefore a function of time, anchored anew when the pace changes or
when a pause ends. A round goes on from the last checkpoint that was finished before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.messages.records import Part, RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber, Time
from holdfast.sim.clock import SimClock

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent

NEVER = float("inf")


@dataclass
class Script:
    """How the simulated training script behaves."""

    step_s: Seconds
    init_s: Seconds
    restore_s: Seconds
    save_every: int
    """Steps between two checkpoints; 0 for a script that never says that it saves."""
    save_s: Seconds
    last_step: int | None = None
    """The script is done after it."""
    bug_step: int | None = None
    """A rank raises at this step, each time."""
    bug_rank: int = 0


@dataclass(eq=False)
class SimRound:
    """One round as its workers live it."""

    number: RoundNumber
    size: int
    store: tuple[str, int]
    base: int
    """The step at which its workers went on."""
    pace_s: Seconds
    members: dict[NodeId, SimAgent] = field(default_factory=dict)
    claims: dict[Rank, NodeId] = field(default_factory=dict)
    """First ranks of the parts that agents took on."""
    started: int = 0
    first_at: float = NEVER
    anchor_at: float = NEVER
    """A step was finished then, ..."""
    anchor: int = 0
    """... and it was the how-manieth of this round."""
    held: dict[NodeId, None] = field(default_factory=dict)
    """Members that stand still: everybody waits for them."""
    held_at: float = NEVER
    broken_at: float = NEVER
    version: int = 0
    """Counts the changes of pace, so that what was planned for the old one can be told."""

    def steps(self, now: float) -> int:
        """Steps finished by then."""
        until = min(now, self.broken_at, self.held_at)
        if until < self.first_at:
            return 0
        return self.anchor + max(0, int((until - self.anchor_at) / self.pace_s + 1e-9))

    def step(self, now: float) -> int:
        return self.base + self.steps(now) if self.first_at <= now else 0

    def time_of(self, steps: int) -> float:
        """When so many steps will be, or were, finished."""
        if steps <= 1:
            return self.first_at
        return self.anchor_at + (steps - self.anchor) * self.pace_s


class Training:
    """All rounds, and what the job has really achieved."""

    def __init__(self, clock: SimClock, script: Script) -> None:
        self.clock = clock
        self.script = script
        self.rounds: dict[RoundNumber, SimRound] = {}
        self.saved = 0
        """The newest checkpoint."""
        self.highest = 0
        self.newest = RoundNumber(0)
        """Steps and checkpoints of older rounds do not count any more: they are fenced."""
        self.stepped_s = 0.0
        """Rank-seconds that rounds spent between their first step and their end."""
        self.slow: dict[NodeId, float] = {}
        self.on_first_step: Callable[[SimRound], None] = lambda round: None
        self.on_bug: Callable[[SimRound], None] = lambda round: None
        self.on_done: Callable[[SimRound], None] = lambda round: None

    def join(self, agent: SimAgent, part: Part) -> SimRound:
        """An agent takes on its part of a round."""
        round = self.rounds.get(part.round)
        if round is None:
            self.highest_now()
            self.newest = max(self.newest, part.round)
            store = (part.store_address, part.store_port)
            pace_s = self.script.step_s
            round = SimRound(part.round, part.world_size, store, self.saved, pace_s)
            self.rounds[part.round] = round
            for old in [n for n in self.rounds if n < part.round - 20]:
                del self.rounds[old]
        round.members[agent.node] = agent
        round.claims[part.first_rank] = agent.node
        return round

    def rank_started(self, round: SimRound, ranks: int) -> None:
        round.started += ranks
        if round.started < round.size or round.broken_at < NEVER:
            return
        round.base = self.saved
        round.pace_s = self._pace_s(round)
        init_s = self.script.init_s + (self.script.restore_s if round.base else 0.0)
        round.first_at = round.anchor_at = self.clock.now + init_s + round.pace_s
        round.anchor = 1
        self.clock.at(round.first_at, self._first_step, round, round.version)

    def _pace_s(self, round: SimRound) -> Seconds:
        factors = [self.slow[node] for node in round.members if node in self.slow]
        return self.script.step_s * max(factors, default=1.0)

    def _first_step(self, round: SimRound, version: int) -> None:
        if round.version != version or round.broken_at < NEVER or round.held:
            return
        self.on_first_step(round)
        self._plan(round)

    def _plan(self, round: SimRound) -> None:
        """Have the next thing that happens at a certain step happen."""
        for step, act in ((self.script.bug_step, self._bug), (self.script.last_step, self._done)):
            if step is not None and round.broken_at == NEVER and not round.held:
                when = round.time_of(max(1, step - round.base))
                self.clock.at(when + 1e-6, act, round, round.version)

    def _bug(self, round: SimRound, version: int) -> None:
        if round.version == version and round.broken_at == NEVER:
            self.on_bug(round)

    def _done(self, round: SimRound, version: int) -> None:
        if round.version == version and round.broken_at == NEVER:
            self.on_done(round)

    def finish_after(self, steps: int) -> None:
        """Let the script end soon."""
        self.script.last_step = self.highest_now() + steps
        self.script.bug_step = None
        for round in self.rounds.values():
            round.version += 1
            if round.first_at <= self.clock.now:
                self._plan(round)
            elif round.first_at < NEVER and not round.held:
                self.clock.at(round.first_at, self._first_step, round, round.version)

    # ---- standing still ----

    def break_(self, round: SimRound | None) -> None:
        """A rank of the round is gone: it never steps again."""
        if round is None or round.broken_at < NEVER:
            return
        now = self.clock.now
        self._note(round, now)
        if round.first_at <= now:
            until = max(round.first_at, min(now, round.held_at))
            self.stepped_s += round.size * (until - round.first_at)
        round.broken_at = min(now, round.held_at)
        round.version += 1

    def hold(self, agent: SimAgent) -> None:
        """A member stands still; with it the whole round."""
        round = agent.running
        if round is None or round.broken_at < NEVER:
            return
        if not round.held:
            self._note(round, self.clock.now)
            round.held_at = self.clock.now
            round.version += 1
        round.held[agent.node] = None

    def release(self, agent: SimAgent) -> None:
        round = agent.running
        if round is None or agent.node not in round.held:
            return
        del round.held[agent.node]
        if round.held or round.broken_at < NEVER:
            return
        now = self.clock.now
        if round.first_at > round.held_at:
            if round.first_at < NEVER:
                round.first_at = round.anchor_at = max(round.first_at, now + round.pace_s)
                self.clock.at(round.first_at, self._first_step, round, round.version)
        else:
            done = round.steps(round.held_at)
            round.anchor, round.anchor_at = done, max(now, round.time_of(done))
            self._plan(round)
        round.held_at = NEVER

    def slow_down(self, agent: SimAgent, factor: float | None) -> None:
        """A node gets slow, and everybody with it; None makes it well again."""
        if factor is None:
            self.slow.pop(agent.node, None)
        else:
            self.slow[agent.node] = factor
        round = agent.running
        if round is None or round.broken_at < NEVER or round.held:
            return
        now = self.clock.now
        if round.first_at <= now:
            done = round.steps(now)
            round.anchor, round.anchor_at = done, round.time_of(done)
            round.pace_s = self._pace_s(round)
            round.version += 1
            self._plan(round)

    def _note(self, round: SimRound, now: float) -> None:
        if round.number < self.newest:
            return
        step = round.step(now)
        self.highest = max(self.highest, step)
        if self.script.save_every:
            self.saved = max(self.saved, step - step % self.script.save_every)

    def highest_now(self) -> int:
        for round in self.rounds.values():
            if round.broken_at == NEVER:
                self._note(round, self.clock.now)
        return self.highest

    def stepping_s(self) -> Seconds:
        """Rank-seconds in which rounds could step, until now."""
        now = self.clock.now
        alive = [r for r in self.rounds.values() if r.broken_at == NEVER and r.first_at <= now]
        # The first step counts from its beginning; a worker's page tells only of its end.
        return self.stepped_s + sum(round.size * (now - round.first_at) for round in alive)

    # ---- what a worker's page says ----

    def progress(self, round: SimRound, ranks: list[Rank], skew: float) -> tuple[RankProgress, ...]:
        now = self.clock.now
        steps = round.steps(now)
        if steps == 0:
            return tuple(RankProgress(rank=rank) for rank in ranks)
        script, step = self.script, round.base + steps
        last_at = Time(round.time_of(steps) + skew)
        first_at = Time(round.first_at + skew)
        every = script.save_every
        saves = step // every - round.base // every if every else 0
        restore_s = script.restore_s if round.base else 0.0
        return tuple(
            [
                RankProgress(
                    rank=rank,
                    step=StepNumber(step),
                    steps=steps,
                    first_at=first_at,
                    last_at=last_at,
                    checkpoint_s=saves * script.save_s,
                    restore_s=restore_s,
                    saves=saves,
                )
                for rank in ranks
            ]
        )
