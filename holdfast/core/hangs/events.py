"""What agents report of late ranks, what examinations find, and what follows from it.

    RanksStalled ──▶ a suspicion opens ──▶ Diagnose: all ranks are examined, none is stopped
    VerdictReached ──▶ proven, twice ──▶ the round is broken
                   └── not proven ──▶ another look later; acted on when waiting makes no sense any more
    RanksStalled, without late ranks ──▶ the suspicion closes, and the pause is learnt from

Looks come at growing distances while a suspicion is open. After a suspicion that came to nothing
the next one is looked into a little later, so that a script that pauses all the time is not
examined all the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.decisions import BreakRound, Effect, Note, Refused
from holdfast.core.faults import Fault
from holdfast.core.hangs import limits, rules
from holdfast.core.hangs.rules import Outlook, Scene
from holdfast.core.hangs.state import Hangs, LateRank, Suspicion, remembered
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS, Running
from holdfast.core.view import View, earliest
from holdfast.messages.actions import Announce, Diagnose, EndProcess
from holdfast.messages.events import (
    HangDecided,
    HangsRemembered,
    Progress,
    RanksStalled,
    VerdictReached,
    WorkerExited,
)
from holdfast.messages.hangs import Memory, Paces
from holdfast.messages.records import JobResult, Place, Terms, World
from holdfast.messages.units import NodeId, Seconds, Time

STALE_S: Seconds = 10.0
"""An older report waited for a coordinator that was gone; the agent repeats it if it still holds."""
LOOKS_S: tuple[Seconds, ...] = (0.0, 0.3, 0.3, 0.4, 0.5, 1.0, 2.0, 5.0)
"""Distances between the first looks; later ones double up to the longest."""
LOOK_MOST_S: Seconds = 60.0
ANSWER_S: Seconds = 5.0
"""An examination without a verdict after this long was lost with its coordinator."""
TELL_AFTER_S: Seconds = 10.0
TELL_FACTOR = 1.5
"""A place that was waited for before is told of when it takes longer than ever by this factor."""
MOVED_S: Seconds = 0.5
"""If the oldest mark of all late ranks is newer by this much, the job has moved on meanwhile."""
REST_S: Seconds = 0.5
REST_MOST_S: Seconds = 5.0
FORGET = 0.9
"""Decay of a section's longest duration with each report, so that it follows what is usual now."""
EXIT = "exit"
"""Where a rank is whose script has ended and whose process has not."""


class HangsMachine(Hangs, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> HangsMachine:
        return cls(terms.hangs)

    # ---- events ----

    @on(RanksStalled, Running, refusal="no round is in force")
    def on_stalled(self, job: View, event: RanksStalled, now: Time) -> Effects | Refused:
        if event.round != job.membership.round or event.node not in job.membership.placed:
            return Refused(reason="the node is not in the round in force")
        if now - event.at > STALE_S:
            return Refused(reason="the report is too old")
        for pause in event.pauses:
            limits.note_pause(self, pause)
        for rank in [r for r, one in self.late.items() if one.node == event.node]:
            del self.late[rank]
        for stall in event.stalls:
            one = job.ranks.get(stall.rank)
            if one is not None and one.node == event.node and not one.finished:
                self.late[stall.rank] = LateRank(event.node, stall, event.at, not one.stepped)
        return self._follow(job, now)

    @on(VerdictReached, Running, refusal="no round is in force")
    def on_verdict(self, job: View, event: VerdictReached, now: Time) -> Effects | Refused:
        suspicion = self.suspicion
        if suspicion is None or event.examination != suspicion.examination:
            return Refused(reason="nothing is suspected any more")
        before = suspicion.verdict
        same = before is not None and (before.proof, before.guilty) == (event.proof, event.guilty)
        if event.proof is None:
            suspicion.proven_at = None
        elif not same:
            suspicion.proven_at = now
        suspicion.verdict, suspicion.reached_at = event, now
        suspicion.asked_at = None
        suspicion.looks += 1
        suspicion.look_at = Time(now + self._next_look_s(suspicion))
        return self._decide(job, now)

    @on(HangDecided, Running, refusal="no round is in force")
    def on_decided(self, job: View, event: HangDecided, now: Time) -> Effects | Refused:
        rank = job.ranks.get(event.rank)
        if rank is None or rank.finished:
            return Refused(reason="there is no such rank, or it has finished")
        if not event.act:
            self.spared.append(event.rank)
            limits.trust(self, self.place_of(event.rank))
            return NONE
        standing = self.late.get(event.rank)
        at = standing.marked_at if standing is not None else now
        said = f"; {self.verdict.sentence}" if self.verdict is not None else ""
        fault = Fault(
            kind="hang",
            node=rank.node,
            rank=event.rank,
            round=job.membership.round,
            step=rank.step,
            signature="hang: ended by `holdfast hang`",
            detail=f"rank {event.rank} was ended by `holdfast hang`{said}",
            at=at,
            outside=True,
            examination=self.suspicion.examination if self.suspicion is not None else 0,
        )
        return [BreakRound(fault=fault)]

    @on(HangsRemembered, *ALWAYS)
    def on_remembered(self, job: View, event: HangsRemembered, now: Time) -> Effects:
        self.memory = Memory(places={**event.memory.places, **self.memory.places})
        return NONE

    @on(Progress, *ALWAYS)
    def on_progress(self, job: View, event: Progress, now: Time) -> Effects:
        paces = event.paces
        if paces is None:
            return NONE
        if paces.step_s is not None:
            self.step_s[event.node] = paces.step_s
        for name, longest_s in paces.longest_s.items():
            self.longest_s[name] = max(longest_s, FORGET * self.longest_s.get(name, 0.0))
        return NONE

    # ---- moments ----

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        self._forget_round()
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        self._forget_round()
        return NONE

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        self.step_s.pop(node, None)
        return NONE

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        if self.late.pop(event.rank, None) is None:
            return NONE
        return self._follow(job, now) if isinstance(job.state, Running) else NONE

    def coordinator_restarted(self, job: View, now: Time) -> Effects:
        if self.suspicion is not None and self.suspicion.asked_at is not None:
            self.suspicion.asked_at, self.suspicion.look_at = None, now
        return NONE

    def tick(self, job: View, now: Time) -> Effects:
        return self._decide(job, now) if isinstance(job.state, Running) else NONE

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        return {"paces": paces(self)}

    def deadline(self, job: View) -> Time | None:
        suspicion = self.suspicion
        if suspicion is None or not isinstance(job.state, Running):
            return None
        if suspicion.asked_at is not None:
            look_at = Time(suspicion.asked_at + ANSWER_S)
        else:
            look_at = suspicion.look_at or suspicion.since
        act_at = rules.acts_at(suspicion, rules.outlook(self, scene(job)))
        return earliest(look_at, act_at, self._tell_at(suspicion))

    def validate(self, job: View) -> None:
        rules.validate(self)

    # ---- the suspicion ----

    def _follow(self, job: View, now: Time) -> list[Effect]:
        """Open or close the suspicion as the late ranks demand."""
        if not self.terms.detect:
            return []
        if not rules.is_suspicious(self, scene(job)):
            return self._close(now)
        since = min(standing.marked_at for standing in self.late.values())
        effects: list[Effect] = []
        if self.suspicion is not None and since > self.suspicion.since + MOVED_S:
            effects = self._close(now)
        if self.suspicion is None:
            self.suspicion = Suspicion(since, look_at=max(now, self.rested_at))
        self._note_news(self.suspicion, now)
        return [*effects, *self._decide(job, now)]

    def _note_news(self, suspicion: Suspicion, now: Time) -> None:
        """Look again soon if the ranks stand otherwise than at the last report."""
        late = sorted(self.late.items())
        news = tuple((r, one.stall.kind, one.is_silent(self.terms)) for r, one in late)
        if news != suspicion.news and suspicion.look_at is not None and suspicion.looks:
            soon = max(now, Time(suspicion.reached_at + rules.CONFIRM_S))
            suspicion.look_at = min(suspicion.look_at, soon)
        suspicion.news = news

    def _close(self, now: Time) -> list[Effect]:
        """Note that the job goes on by itself, and learn from it."""
        suspicion, self.suspicion = self.suspicion, None
        if suspicion is None:
            return []
        self.rest_s = min(REST_MOST_S, max(REST_S, 2 * self.rest_s))
        self.rested_at = Time(now + self.rest_s)
        verdict, waited_s = suspicion.verdict, now - suspicion.since
        if verdict is not None and verdict.guilty and verdict.place:
            limits.note_wait(self, verdict.place, waited_s)
        if not suspicion.told:
            return []
        who = f"rank {verdict.guilty[0]}" if verdict is not None and verdict.guilty else "the job"
        return [Announce(text=f"{who} has moved on by itself after {waited_s:.0f} s")]

    def _decide(self, job: View, now: Time) -> list[Effect]:
        """Act on the suspicion, look again, or tell people about it: whatever is due."""
        suspicion = self.suspicion
        if suspicion is None or not self.terms.detect:
            return []
        if (end := self._end_of_process(job)) is not None:
            return end
        ahead = rules.outlook(self, scene(job))
        if rules.is_due(suspicion, ahead, now):
            return self._act(job, ahead)
        return [*self._look(job, suspicion, ahead, now), *self._tell(job, suspicion, now)]

    def _end_of_process(self, job: View) -> list[Effect] | None:
        """End the process of a rank that hangs on its way out; its script has ended well."""
        for rank, standing in self.late.items():
            if standing.stall.kind == "locked" and standing.stall.where == EXIT:
                del self.late[rank]
                if not rules.is_suspicious(self, scene(job)):
                    self.suspicion = None
                note = Note(
                    kind="ending",
                    node=standing.node,
                    rank=rank,
                    round=job.membership.round,
                    step=job.ranks[rank].step,
                    signature="hangs after its script has ended: " + rules.how("locked"),
                    action="its process was ended; the rank counts as finished",
                )
                end = EndProcess(node=standing.node, round=job.membership.round, rank=rank)
                return [note, end]
        return None

    def _act(self, job: View, ahead: Outlook) -> list[Effect]:
        """Break the round."""
        assert self.suspicion is not None
        standing = self.late.get(ahead.rank) if ahead.rank is not None else None
        rank = job.ranks.get(ahead.rank) if ahead.rank is not None else None
        if ahead.proof is None and standing is not None:
            silent_s = max(0.0, (ahead.act_at or 0.0) - standing.still_since)
            limits.grant_more(self, standing.stall.place, silent_s, job.highest)
        fault = Fault(
            kind="hang",
            node=rank.node if rank is not None else NodeId(""),
            rank=ahead.rank,
            round=job.membership.round,
            step=rank.step if rank is not None else job.highest,
            signature=rules.signature(ahead.proof),
            detail=rules.sentence(self, ahead),
            at=standing.marked_at if standing is not None else self.suspicion.since,
            outside=ahead.proof == "stopped",
            stuck=ahead.proof in ("stopped", "gil"),
            doubtful=ahead.proof is None,
            examination=self.suspicion.examination,
        )
        return [BreakRound(fault=fault)]

    def _look(self, job: View, suspicion: Suspicion, ahead: Outlook, now: Time) -> list[Effect]:
        """Have all ranks examined, if that is due."""
        if suspicion.asked_at is not None:
            if now - suspicion.asked_at < ANSWER_S:
                return []
            suspicion.asked_at = None
            suspicion.look_at = now
        due = suspicion.look_at is None or now >= suspicion.look_at
        acting = ahead.act_at is not None and now >= ahead.act_at
        if not due and not acting:
            return []
        self.examinations += 1
        suspicion.examination, suspicion.asked_at, suspicion.look_at = self.examinations, now, None
        return [
            Diagnose(
                examination=self.examinations,
                round=job.membership.round,
                nodes=tuple(job.membership.placed),
                world_size=len(job.ranks),
                finished=tuple(rank for rank, one in job.ranks.items() if one.finished),
                native=acting,
            )
        ]

    def _next_look_s(self, suspicion: Suspicion) -> Seconds:
        if suspicion.proven_at is not None:
            return rules.CONFIRM_S
        if suspicion.looks < len(LOOKS_S):
            return LOOKS_S[suspicion.looks]
        doublings = min(suspicion.looks - len(LOOKS_S) + 1, 10)
        return min(LOOK_MOST_S, LOOKS_S[-1] * float(1 << doublings))

    def _tell_at(self, suspicion: Suspicion) -> Time | None:
        """When people are told; a place that they know is told of when it takes longer than ever."""
        if suspicion.told or suspicion.verdict is None:
            return None
        known = remembered(self, suspicion.verdict.place)
        return Time(suspicion.since + max(TELL_AFTER_S, TELL_FACTOR * known.waited_s))

    def _tell(self, job: View, suspicion: Suspicion, now: Time) -> list[Effect]:
        tell_at = self._tell_at(suspicion)
        if tell_at is None or now < tell_at:
            return []
        suspicion.told = True
        return [Announce(text=rules.line(self, scene(job), now))]

    def _forget_round(self) -> None:
        self.late.clear()
        self.spared.clear()
        self.suspicion = None


def scene(job: View) -> Scene:
    """Gather what the rules need to know of the job."""
    return Scene(job.unfinished, len(job.ranks) - job.unfinished, job.highest)


def paces(hangs: Hangs) -> Paces:
    """Return the usual durations over all ranks, for the workers of the next round."""
    steps = sorted(hangs.step_s.values())
    return Paces(steps[len(steps) // 2] if steps else None, dict(hangs.longest_s))
