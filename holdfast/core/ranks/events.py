"""What workers do: they start, finish steps, and exit one way or another.

Reports arrive now and then and tell of the past, in any order between nodes. A report that is older
than what is known already changes nothing.

Steps count from the job's first one. A process that does not know where its script resumed counts from
there. All ranks of a job resume alike, whichever of them reads what they resume from: as soon as one
knows, the steps of all are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from holdfast.core.decisions import Effect, Refused
from holdfast.core.machine import Effects, Machine, on, tell
from holdfast.core.ranks.state import Pace, Ranks
from holdfast.core.states import ALWAYS, LIVE, Running
from holdfast.core.view import RankState, View, rank_in_force
from holdfast.messages.actions import ReleaseRanks
from holdfast.messages.events import (
    NodeLeft,
    NodeReady,
    NodeResumed,
    Progress,
    RankRaised,
    RanksReturned,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.records import Place, RankProgress, Terms, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

NOT_IN_FORCE = Refused(reason="the rank is of another round, or of another node")
PACE_OVER_S = 0.5
"""Reports of rank 0 closer than this give no pace."""


class RanksMachine(Ranks, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> RanksMachine:
        return cls(opened_at=at)

    # ---- events ----

    @on(WorkerStarted, *ALWAYS)
    def on_started(self, job: View, event: WorkerStarted, now: Time) -> Effects | Refused:
        rank = rank_in_force(job, event.node, event.round, event.rank)
        if rank is None or rank.started:
            return NOT_IN_FORCE
        rank.started, rank.pid = True, event.pid
        self.unstarted -= 1
        return [tell(Machine.rank_started, event)]

    @on(Progress, *ALWAYS)
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects:
        return self._all_progressed(job, event.node, event.round, event.ranks)

    @on(NodeReady, *ALWAYS)
    def on_ready(self, job: View, event: NodeReady, now: Time) -> Effects:
        return self._all_progressed(job, event.node, event.round, event.ranks)

    @on(NodeLeft, *ALWAYS)
    def on_left(self, job: View, event: NodeLeft, now: Time) -> Effects:
        return self._all_progressed(job, event.node, event.round, event.ranks)

    @on(WorkerExited, *LIVE, refusal="the job is ending")
    def on_exited(self, job: View, event: WorkerExited, now: Time) -> Effects | Refused:
        rank = rank_in_force(job, event.node, event.round, event.rank)
        if rank is None or rank.finished:
            return NOT_IN_FORCE
        effects = self._all_progressed(job, event.node, event.round, [event.progress])
        if event.code == 0 and isinstance(job.state, Running):
            rank.finished = True
            self.unfinished -= 1
        return [*effects, tell(Machine.rank_exited, event)]

    @on(RankRaised, *LIVE, refusal="the job is ending")
    def on_raised(self, job: View, event: RankRaised, now: Time) -> Effects | Refused:
        if rank_in_force(job, event.node, event.round, event.rank) is None:
            return NOT_IN_FORCE
        return self._all_progressed(job, event.node, event.round, [event.progress])

    @on(RanksReturned, Running, refusal="no round is in force")
    def on_returned(self, job: View, event: RanksReturned, now: Time) -> Effects | Refused:
        """Let the scripts go on once the restartable function has returned on all ranks."""
        assert job.world is not None
        if event.round != job.world.round or event.node not in job.membership.placed:
            return NOT_IN_FORCE
        self.returned[event.node] = event.round
        if not self._all_returned(job):
            return ()
        return [ReleaseRanks(node=node, round=event.round) for node in job.membership.placed]

    def _all_returned(self, job: View) -> bool:
        return job.world is not None and len(self.returned) == len(job.world.places)

    # ---- moments ----

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        # A node that told what the journal lost has its round ended with this event: see membership.
        released = self._all_returned(job) and event.node in self.returned and not event.missing
        return [ReleaseRanks(node=event.node, round=job.membership.round)] if released else ()

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.all = {
            Rank(rank): RankState(place.node)
            for place in world.places
            for rank in range(place.first_rank, place.first_rank + place.slots)
        }
        self.unstarted = self.unstepped = self.unfinished = world.size
        self.known_at = self.pace = self.stepped_at = None
        self.saves = self.unsure = 0
        self.returned.clear()
        return ()

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        return {"opened_at": self.opened_at}

    def validate(self, job: View) -> None:
        ranks = self.all.values()
        assert self.unstarted == sum(not r.started for r in ranks), "miscounted starts"
        assert self.unstepped == sum(not r.stepped for r in ranks), "miscounted steps"
        unsure = sum(r.resumed == "unknown" for r in ranks)
        assert self.unsure == unsure, "miscounted ranks that do not know where they resumed"
        assert self.unfinished == sum(not r.finished for r in ranks), "miscounted ends"
        if job.world is not None:
            assert len(self.all) == job.world.size, "ranks beside the world"

    # ---- progress ----

    def _all_progressed(
        self, job: View, node: NodeId, round: RoundNumber, ranks: Iterable[RankProgress]
    ) -> list[Effect]:
        effects: list[Effect] = []
        for progress in ranks:
            rank = rank_in_force(job, node, round, progress.rank)
            if rank is not None and progress.last_at is not None and progress.steps:
                effects += self._progressed(rank, progress, progress.last_at)
        return effects

    def _progressed(self, rank: RankState, progress: RankProgress, last_at: Time) -> Effects:
        if progress.steps < rank.steps:
            return ()
        first = not rank.stepped
        self.unstepped -= first
        if progress.resumed != "known" and self.known_at is not None:
            progress = replace(progress, step=StepNumber(self.known_at + progress.steps))
        rank.step, rank.steps = progress.step, progress.steps
        self.unsure += (progress.resumed == "unknown") - (rank.resumed == "unknown")
        rank.resumed = progress.resumed
        if progress.resumed == "known":
            self._note_base(rank, StepNumber(max(0, progress.step - progress.steps)))
        self.highest = max(self.highest, progress.step)
        self.stepped_at = max(last_at, self.stepped_at or last_at)
        if progress.rank == 0:
            self.saves = progress.saves
            self._note_pace(progress.step, last_at)
        return [tell(Machine.rank_stepped, progress, first)]

    def _note_base(self, rank: RankState, base: StepNumber) -> None:
        """Note the step that a rank went on from: what lies between it and the fault is lost.

        It changes when a script begins to count for itself after the optimizer hook counted from 0.
        """
        if rank.base == base:
            return
        first, rank.base = rank.base is None, base
        before = self.known_at
        if first and before is not None:
            self.known_at = min(before, base)
        else:
            self.known_at = min(r.base for r in self.all.values() if r.base is not None)
        if self.known_at != before:
            self._place_others(self.known_at)

    def _place_others(self, known_at: StepNumber) -> None:
        """Count the steps of ranks that do not know where they resumed from where the others did."""
        for rank in self.all.values():
            if rank.base is None and rank.stepped:
                rank.step = StepNumber(known_at + rank.steps)
                self.highest = max(self.highest, rank.step)

    def _note_pace(self, step: StepNumber, at: Time) -> None:
        last = self.pace
        if last is None or step <= last.step:
            self.pace = Pace(step, at)
        elif at - last.at >= PACE_OVER_S:
            self.pace = Pace(step, at, (at - last.at) / (step - last.step))
