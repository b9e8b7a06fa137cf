"""Computes what the workers of the rounds really do: the truth that the coordinator only hears about.

Training is synchronous: a round steps once all its ranks are ready, and stands still as soon as one of
them is gone or does not move. Its step is therefore a function of time, anchored anew when the pace
changes or when a pause ends. What happens at a certain step (a save, a bug, an injected fault, the
script's end) is planned from that function.

Every round notes the step that it went on from and the round that had saved it, so the history of
committed steps can be followed back from any round (`History`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.messages import losses
from holdfast.messages.losses import Loss
from holdfast.messages.records import Part, RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber, Time

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster
    from holdfast.sim.rank import SimRank
    from holdfast.sim.tuning import SimLoader

NEVER = float("inf")
SAVE_SHARE = 0.2
"""Of the time of a step, what a save takes the script."""
BATCH = 8
"""Samples of a step of one rank."""
LOSS_EVERY = 3
"""Steps of a process from one loss that its script tells to the next."""
STANDING_STEPS = 4.0
"""A worker takes what is longer than so many steps for a pause."""


def loss_after(step: int) -> Loss:
    """Return the loss of a step: now and then it is no number."""
    return losses.written(math.nan if step % 7 == 0 else 10.0 / step)


@dataclass(eq=False)
class SimRound:
    """One round as its workers live it."""

    number: RoundNumber
    size: int
    store: tuple[str, int]
    base: int
    """The step at which its workers went on."""
    pace_s: Seconds
    source: RoundNumber = RoundNumber(0)
    """The round that had saved the base; 0 for a start from nothing."""
    members: dict[NodeId, SimAgent] = field(default_factory=dict)
    claims: dict[Rank, NodeId] = field(default_factory=dict)
    """First ranks of the parts that agents took on."""
    ranks: dict[Rank, SimRank] = field(default_factory=dict)
    """Ranks that have a process now."""
    left: dict[Rank, None] = field(default_factory=dict)
    """Ranks that exited with 0 before their scripts had ended."""
    started: int = 0
    ready: int = 0
    """Ranks that have restored what there was to restore."""
    first_at: float = NEVER
    anchor_at: float = NEVER
    """When the anchor step was finished."""
    anchor: int = 0
    """A step, counted from the first of this round."""
    held: dict[Hashable, None] = field(default_factory=dict)
    """Nodes and ranks that stand still: the others wait for them."""
    held_at: float = NEVER
    longest_s: Seconds = 0.0
    """The longest that a step took."""
    stands: list[tuple[int, Seconds, Seconds]] = field(default_factory=list)
    """Times that it stood still and went on: the last step finished before, how long it stood, and
    how much of it a worker takes for a pause."""
    broken_at: float = NEVER
    version: int = 0
    """Number of changes of pace; what was planned under an older one is void."""
    traps: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    """Injected faults that wait for a step."""
    meetings: dict[str, dict[Rank, None]] = field(default_factory=dict)
    """Ranks that joined each barrier."""
    loaders: dict[Rank, SimLoader] = field(default_factory=dict)
    settled: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Changes of loader settings that ranks asked about: at which step, and the answer."""

    def steps(self, now: float) -> int:
        """Return how many steps were finished by then."""
        until = min(now, self.broken_at, self.held_at)
        if until < self.first_at:
            return 0
        return self.anchor + max(0, int((until - self.anchor_at) / self.pace_s + 1e-9))

    def step(self, now: float) -> int:
        return self.base + self.steps(now) if self.first_at <= now else 0

    def time_of(self, steps: int) -> float:
        """Return when a step of this round is finished, counted from its first; of the last one
        before the round stood still, when it went on."""
        if steps <= 1:
            return self.first_at
        return self.anchor_at + (steps - self.anchor) * self.pace_s

    def finished_at(self, steps: int) -> float:
        """Return when a step was really finished, as the workers' pages say."""
        stood_s = sum(seconds for done, seconds, _ in self.stands if done >= steps)
        return self.time_of(steps) - (stood_s if steps > 1 else 0.0)

    def pause_s(self, steps: int | None = None) -> Seconds:
        """Return how long workers had paused by the end of that step, or by now."""
        return sum((s for done, _, s in self.stands if steps is None or done < steps), 0.0)

    def trained_s(self, steps: int) -> Seconds:
        """Return the time of the steps after the first, without what a worker takes for pauses."""
        return max(0.0, self.finished_at(steps) - self.first_at - self.pause_s(steps))

    @property
    def stands_since(self) -> float:
        """When its ranks began to wait for one that is gone or does not move."""
        return min(self.broken_at, self.held_at)


@dataclass
class Segment:
    """The steps that one round contributed to the history: all beyond its base, up to its last."""

    base: int
    source: RoundNumber
    last: int


class History:
    """Which round trained which steps, and from whose state each round went on."""

    def __init__(self) -> None:
        self.segments: dict[RoundNumber, Segment] = {}

    def began(self, round: SimRound) -> None:
        self.segments[round.number] = Segment(round.base, round.source, round.base)

    def reached(self, round: RoundNumber, step: int) -> None:
        segment = self.segments.get(round)
        if segment is not None:
            segment.last = max(segment.last, step)

    def untrained(self, round: RoundNumber) -> str:
        """Say which step behind a round's state was never trained; nothing when all were."""
        segment = self.segments.get(round)
        while segment is not None and segment.source:
            source = self.segments.get(segment.source)
            if source is None or not source.base < segment.base <= source.last:
                return f"round {segment.source} had not trained step {segment.base}"
            segment = source
        return "" if segment is None or segment.base == 0 else f"nobody trained {segment.base}"


class Training:
    """All rounds, and what the job has really achieved."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.clock = cluster.clock
        self.script = cluster.settings
        self._last_step = self.script.last_step
        self.history = History()
        self.rounds: dict[RoundNumber, SimRound] = {}
        self.saved = 0
        """The newest step that a script without Holdfast's checkpoints can go back to."""
        self.saved_by = RoundNumber(0)
        self.highest = 0
        self.newest = RoundNumber(0)
        """Steps of older rounds do not count any more: they are fenced."""
        self.stepped_s = 0.0
        """Rank-seconds that rounds spent between their first step and their end."""
        self.slow: dict[NodeId, float] = {}

    def join(self, agent: SimAgent, part: Part) -> SimRound:
        """Have an agent take on its part of a round."""
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

    def go_on_from_saved(self, round: SimRound, ranks: int) -> None:
        """Have ranks ready at what a script without Holdfast's checkpoints saved by itself."""
        self.ready(round, ranks, self.saved, self.saved_by)

    def ready(self, round: SimRound, ranks: int, base: int, source: RoundNumber) -> None:
        """Note ranks that are ready to train; with the last of them the round steps."""
        round.ready += ranks
        round.base, round.source = base, source
        if round.ready < round.size or round.broken_at < NEVER:
            return
        round.pace_s = self._pace_s(round)
        init_s = self.script.init_s + (self.script.restore_s if round.base else 0.0)
        round.first_at = round.anchor_at = self.clock.now + init_s + round.pace_s
        round.anchor = 1
        self.history.began(round)
        self.clock.at(round.first_at, self._first_step, round, round.version)

    def _pace_s(self, round: SimRound) -> Seconds:
        factors = [self.slow[node] for node in round.members if node in self.slow]
        return self.script.step_s * max(factors, default=1.0)

    def _first_step(self, round: SimRound, version: int) -> None:
        put_off = self.clock.now < round.first_at  # The round stood still in between.
        if round.version != version or round.broken_at < NEVER or round.held or put_off:
            return
        self._cluster.first_step(round)
        self._plan(round)

    # ---- what happens at certain steps ----

    def _plan(self, round: SimRound) -> None:
        script, faults = self.script, self._cluster.faults
        if self._last_step is not None:
            self._plan_at(round, self._last_step, faults.done)
        if script.bug_step is not None and not faults.over:
            self._plan_at(round, script.bug_step, faults.bug)
        if script.stop_step is not None and not faults.over:
            self._plan_at(round, script.stop_step, faults.stop)
        if script.checkpoints and script.save_every:
            self._plan_save(round)
        for trap in round.traps:
            self._plan_at(round, trap[0], self._spring, trap)

    def _plan_at(
        self, round: SimRound, step: int, act: Callable[..., None], *arguments: object
    ) -> None:
        """Have something happen at a step, unless the pace changes before: then it is planned anew."""
        if round.broken_at == NEVER and not round.held:
            when = round.time_of(max(1, step - round.base))
            self.clock.at(when + 1e-6, self._at_step, round, round.version, act, arguments)

    def _at_step(
        self,
        round: SimRound,
        version: int,
        act: Callable[..., None],
        arguments: tuple[object, ...],
    ) -> None:
        if round.version == version and round.broken_at == NEVER:
            act(round, *arguments)

    def _plan_save(self, round: SimRound) -> None:
        every = self.script.save_every
        step = (round.step(self.clock.now) // every + 1) * every
        if self._last_step is None or step <= self._last_step:  # Then its ranks end, one by one.
            self._plan_at(round, step, self._save, step)

    def _save(self, round: SimRound, step: int) -> None:
        self._cluster.save(round, step)
        self._plan_save(round)

    def lay_trap(self, round: SimRound, step: int, act: Callable[[], None]) -> None:
        """Have an injected fault happen once the round has finished a step."""
        trap = (max(step, round.step(self.clock.now) + 1), act)
        round.traps.append(trap)
        if round.first_at <= self.clock.now:
            self._plan_at(round, trap[0], self._spring, trap)

    def _spring(self, round: SimRound, trap: tuple[int, Callable[[], None]]) -> None:
        if trap in round.traps:
            round.traps.remove(trap)
            trap[1]()

    def finish_after(self, steps: int) -> None:
        """Let the script end soon."""
        self._last_step = self.highest_now() + steps
        for round in self.rounds.values():
            round.version += 1
            if round.first_at <= self.clock.now:
                self._plan(round)
            elif round.first_at < NEVER and not round.held:
                self.clock.at(round.first_at, self._first_step, round, round.version)

    # ---- standing still ----

    def break_(self, round: SimRound | None) -> None:
        """Stop a round for good: one of its ranks is gone."""
        if round is None or round.broken_at < NEVER:
            return
        now = self.clock.now
        self._note(round, now)
        if round.first_at <= now:
            self.stepped_s += round.size * self._stepping_s(round, min(now, round.held_at))
        round.broken_at = min(now, round.held_at)
        round.version += 1

    def hold(self, round: SimRound | None, who: Hashable) -> None:
        """Have a node or rank stand still, and with it the whole round."""
        if round is None or round.broken_at < NEVER:
            return
        if not round.held:
            self._note(round, self.clock.now)
            round.held_at = self.clock.now
            round.version += 1
        round.held[who] = None

    def release(self, round: SimRound | None, who: Hashable) -> None:
        if round is None or who not in round.held:
            return
        del round.held[who]
        if round.held or round.broken_at < NEVER:
            return
        now = self.clock.now
        if round.first_at > round.held_at:
            if round.first_at < NEVER:
                round.first_at = round.anchor_at = max(round.first_at, now + round.pace_s)
                self.clock.at(round.first_at, self._first_step, round, round.version)
        else:
            done = round.steps(round.held_at)
            stood_s = now - round.time_of(done)
            round.longest_s = max(round.longest_s, stood_s)
            is_pause = stood_s > STANDING_STEPS * round.pace_s
            round.stands.append((done, stood_s, stood_s if is_pause else 0.0))
            round.anchor, round.anchor_at = done, max(now, round.time_of(done))
            self._plan(round)
        round.held_at = NEVER

    def slow_down(self, agent: SimAgent, factor: float | None) -> None:
        """Make a node slow, and every other with it; None makes it well again."""
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

    # ---- what was achieved ----

    def _note(self, round: SimRound, now: float) -> None:
        step = round.step(now)
        self.history.reached(round.number, step)
        if round.number < self.newest:
            return
        self.highest = max(self.highest, step)
        every = self.script.save_every
        if every and step - step % every > max(self.saved, round.base):
            self.saved, self.saved_by = step - step % every, round.number

    def highest_now(self) -> int:
        for round in self.rounds.values():
            if round.broken_at == NEVER:
                self._note(round, self.clock.now)
        return self.highest

    def stepping_s(self) -> Seconds:
        """Return the rank-seconds in which rounds could step, until now."""
        now = self.clock.now
        alive = [r for r in self.rounds.values() if r.broken_at == NEVER and r.first_at <= now]
        # The first step counts from its beginning; a worker's page tells only of its end.
        return self.stepped_s + sum(
            round.size * self._stepping_s(round, min(now, round.held_at)) for round in alive
        )

    @staticmethod
    def _stepping_s(round: SimRound, until: float) -> Seconds:
        """Return how long a round has stepped by then, without the times that it stood still."""
        whole_s = max(round.first_at, until) - round.first_at
        return whole_s - round.pause_s()

    # ---- what a worker's page says ----

    def progress(
        self, round: SimRound, ranks: list[Rank], skew: float, until: float | None = None
    ) -> tuple[RankProgress, ...]:
        steps = round.steps(self.clock.now if until is None else until)
        if steps == 0:
            return tuple(RankProgress(rank=rank) for rank in ranks)
        last_at = Time(round.finished_at(steps) + skew)
        first_at = Time(round.first_at + skew)
        saves, restore_s = self.saves(round, steps), self.restore_s(round)
        told = self.told(steps)
        return tuple(
            [
                RankProgress(
                    rank=rank,
                    step=StepNumber(round.base + steps),
                    steps=steps,
                    first_at=first_at,
                    last_at=last_at,
                    checkpoint_s=self.saving_s(saves),
                    restore_s=restore_s,
                    pause_s=round.pause_s(steps),
                    step_s=round.pace_s,
                    saves=saves,
                    samples=self.samples(steps),
                    trained_s=round.trained_s(steps),
                    loss=loss_after(round.base + told) if told else None,
                    loss_age=steps - told if told else 0,
                )
                for rank in ranks
            ]
        )

    def samples(self, steps: int) -> int:
        """Return how many samples a rank has used in its first steps."""
        return steps * BATCH

    def told(self, steps: int) -> int:
        """Return after how many of these steps of a process its script told the newest loss."""
        return steps - steps % LOSS_EVERY

    def saves(self, round: SimRound, steps: int) -> int:
        every = self.script.save_every
        return (round.base + steps) // every - round.base // every if every else 0

    def saving_s(self, saves: int) -> Seconds:
        return saves * SAVE_SHARE * self.script.step_s

    def restore_s(self, round: SimRound) -> Seconds:
        return self.script.restore_s if round.base else 0.0
