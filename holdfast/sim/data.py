"""Simulates how scripts use data sets, and checks that each record is used once.

Two data sets are used in a job with checkpoints. Of the leased one, each rank uses some of the shards
that it took from its agent just before a save, and some just after it: those are undone by a restore.
The one in lockstep advances with each step. What a checkpoint would contain of either is kept by round
and step, and given to the coordinator when a round has restored it. Scripts are simulated; a node's
stock of shards (`holdfast.agent.shards`) is the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from holdfast.messages.data import DataSpec, Span, Used
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import (
    AnyAnswer,
    DataOpened,
    Denied,
    OpenData,
    ShardsTaken,
    TakeShards,
)
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import Rank, RoundNumber, StepNumber
from holdfast.sim import look

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster
    from holdfast.sim.rank import SimRank
    from holdfast.sim.training import SimRound

OPENING, TAKING = 5, 6
"""Channels of the script's threads that open the data sets, and take shards."""
MICRO_BATCH = 3
SHARDS = 300
"""Shards of an epoch, where the number of records is given."""
MOST_AT_ONCE = 4
"""Shards that a rank takes at once."""

Mark = tuple[int, int]
"""Epoch and position that a round in lockstep has come to."""
Save = tuple[RoundNumber, int]
"""Round and step of a checkpoint."""


class SimData:
    """What all rounds have really used, and what their checkpoints say of it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        rng = Random(f"data {cluster.settings.seed}")
        size, shard = rng.choice((60, 500, 5000)), rng.choice((1, 7, 30))
        if cluster.settings.records is not None:
            size = cluster.settings.records
            shard = -(-size // SHARDS)
        self.leased = DataSpec(
            name="leased",
            sharing="leases",
            size=size,
            shard=shard,
            epochs=rng.choice((0, 1, 2, 3)),
            sub_epochs=rng.choice((1, 3)),
        )
        self.lockstep = DataSpec(
            name="lockstep", sharing="lockstep", size=rng.choice((100, 1000)), epochs=0
        )
        self._used: dict[RoundNumber, SpanSet] = {}
        """What each round has used of the leased set, with what it began with."""
        self._saved: dict[Save, SpanSet] = {}
        self._begun: dict[RoundNumber, tuple[int, Mark]] = {}
        """Step and mark from which each round went on in lockstep."""
        self._marks: dict[Save, Mark] = {}
        self._told: dict[tuple[RoundNumber, Rank], int] = {}
        """The step up to which each first rank of a node has reported."""
        self.finished = 0
        """Rounds in which the leased set was used up."""

    # ---- a round begins ----

    def open(self, one: SimRank, base: int, source: RoundNumber, then: Callable[[], None]) -> None:
        """Have a rank that has restored a checkpoint open both data sets; it takes no step before
        it knows what was used of them."""
        number, save = one.round.number, (source, base)
        self._used.setdefault(number, self._saved.get(save, SpanSet()).copy())
        line, position = self._begun.setdefault(number, (base, self._marks.get(save, (0, 0))))[1]
        step, fresh = StepNumber(base), base == 0
        mine = "fresh" if fresh else "whole" if one.rank == 0 else "part"
        state = self._saved[save].pack() if mine == "whole" else b""
        leased = OpenData(spec=self.leased, resumed=mine, used=state, step=step)  # type: ignore[arg-type]
        all_of = "fresh" if fresh else "whole"
        state = b"" if fresh else SpanSet({line: [0, position]} if position else {}, line).pack()
        lockstep = OpenData(spec=self.lockstep, resumed=all_of, used=state, step=step)  # type: ignore[arg-type]

        def opened_leased(answer: AnyAnswer) -> None:
            if self._is_open(answer):
                self._check_told(one, answer)
                one.ask(OPENING, lockstep, opened_lockstep)

        def opened_lockstep(answer: AnyAnswer) -> None:
            if self._is_open(answer):
                one.has_data = True
                self._take(one)
                then()

        one.ask(OPENING, leased, opened_leased)

    def _take(self, one: SimRank) -> None:
        """Have a rank take shards, for when it uses some."""

        def taken(answer: AnyAnswer) -> None:
            if isinstance(answer, ShardsTaken):
                one.shards += answer.spans
                if not answer.spans:
                    self._check_finished(self._used[one.round.number])

        count = Random(f"{one.agent.node} {one.rank} {len(one.shards)}").randint(1, MOST_AT_ONCE)
        one.ask(TAKING, TakeShards(dataset=self.leased.name, count=count), taken)

    def _is_open(self, answer: AnyAnswer) -> bool:
        denied = isinstance(answer, Denied) and answer.reason == "data set"
        self._cluster.invariants.demand(not denied, f"a data set was denied: {answer}")
        return isinstance(answer, DataOpened)

    def _check_told(self, one: SimRank, answer: AnyAnswer) -> None:
        assert isinstance(answer, DataOpened)
        truth = self._used[one.round.number]
        beyond = [span for span in SpanSet.unpack(answer.used) if truth.without(span)]
        self._cluster.invariants.demand(not beyond, f"told of {beyond}, which was not used")

    # ---- a round saves ----

    def before_save(self, round: SimRound, step: int) -> None:
        """Use shards in the step that is being saved, and note what the checkpoint contains."""
        if round.number not in self._used:
            return
        self._use(round, StepNumber(step - 1))
        self._saved[round.number, step] = self._used[round.number].copy()
        self._marks[round.number, step] = self._mark_at(round.number, step)
        self._tell_lockstep(round, step)
        for old in [save for save in self._saved if save[0] < round.number - 50]:
            del self._saved[old], self._marks[old]

    def after_save(self, round: SimRound, step: int) -> None:
        if round.number in self._used:
            self._use(round, StepNumber(step))

    def _use(self, round: SimRound, step: StepNumber) -> None:
        demand = self._cluster.invariants.demand
        truth = self._used[round.number]
        for one in list(round.ranks.values()):
            if not one.has_data:
                continue
            rng = Random(f"{one.agent.node} {one.rank} {step}")
            few = rng.randint(0, MOST_AT_ONCE)
            spans, one.shards = one.shards[:few], one.shards[few:]
            back = spans[len(spans) - (rng.random() < 0.1) :]
            used = []
            for span in spans[: len(spans) - len(back)]:
                again = truth.within(span)
                demand(not again, f"{again} was used twice in round {round.number}")
                truth.add(span)
                used.append(Used(span, step, step, span.stop - span.start))
            if spans:
                name = self.leased.name
                one.tell(DataUsed(dataset=name, used=tuple(used), returned=tuple(back)))
            self._take(one)

    def _check_finished(self, truth: SpanSet) -> None:
        self.finished += 1
        size, left = self.leased.size or 0, []
        for epoch in range(self.leased.epochs):
            left += truth.without(Span(epoch, 0, size))
        self._cluster.invariants.demand(not left, f"finished, and {left[:5]} was not used")

    def _tell_lockstep(self, round: SimRound, step: int) -> None:
        """Have one rank of each node report what the round has used since its last report."""
        base = self._begun[round.number][0]
        first: dict[str, SimRank] = {}
        for rank in sorted(round.ranks):
            first.setdefault(round.ranks[rank].agent.node, round.ranks[rank])
        for one in first.values():
            if one.has_data:
                since = self._told.get((round.number, one.rank), base)
                used = self._stretches(round.number, since, step)
                self._told[round.number, one.rank] = step
                one.tell(DataUsed(dataset=self.lockstep.name, used=tuple(used)))

    def _mark_at(self, number: RoundNumber, step: int) -> Mark:
        base, (line, position) = self._begun[number]
        for _ in range(step - base):
            line, position = self._after(number, line, position)
        return line, position

    def _after(self, number: RoundNumber, line: int, position: int) -> Mark:
        """Return where a step ends that begins there; it never goes into the next epoch."""
        size = self.lockstep.size or 0
        if position >= size:
            line, position = line + 1, 0
        batch = MICRO_BATCH * self._cluster.training.rounds[number].size
        return line, min(size, position + batch)

    def _stretches(self, number: RoundNumber, since: int, until: int) -> list[Used]:
        """Describe what a round used between two steps, each at one rate."""
        found: list[Used] = []
        line, position = self._mark_at(number, since)
        for step in range(since, until):
            reached = self._after(number, line, position)
            start = position if reached[0] == line else 0
            line, position = reached
            size = position - start
            last = found[-1] if found else None
            joins = last is not None and last.span.line == line
            if last is not None and joins and _rate(last) == size:
                found.pop()
                span = Span(line, last.span.start, position)
                new = Used(span, last.first_step, StepNumber(step), last.records + size)
            else:
                at = StepNumber(step)
                new = Used(Span(line, start, position), at, at, size)
            found.append(new)
        return found

    # ---- at the end ----

    def at_end(self) -> None:
        """Check that the committed history has used each record once, as the job knows it."""
        demand, job = self._cluster.invariants.demand, self._cluster.coordinator.job
        for name, account in look.accounts(job).items():
            demand(account.sound, f"{name} was not used exactly once: {account}")
            newest = account.rounds[-1] if account.rounds else None
            if newest is None or newest.round not in self._begun:
                continue
            for span in self._behind(name, newest.round):
                if span.line >= account.whole_lines:
                    found = next((o for o in account.lines if o.line == span.line), None)
                    once = SpanSet.of(
                        Span(span.line, use.start, use.stop)
                        for use in (found.spans if found is not None else ())
                        if use.times == 1
                    )
                    missing = once.without(span)
                    demand(not missing, f"{name}: {missing} is not in the history")

    def _behind(self, name: str, round: RoundNumber) -> list[Span]:
        """Return what a round went on with."""
        base, (line, position) = self._begun[round]
        if name == self.lockstep.name:
            size = self.lockstep.size or 0
            return [*(Span(e, 0, size) for e in range(line)), Span(line, 0, position)]
        source = self._cluster.training.history.segments.get(round)
        saved = self._saved.get((source.source, base)) if source is not None and base else None
        return list(saved) if saved is not None else []


def _rate(used: Used) -> float:
    return (used.span.stop - used.span.start) / (used.last_step - used.first_step + 1)
