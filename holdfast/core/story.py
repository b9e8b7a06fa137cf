"""Follows one incident through the journal: from its first sign to the first step after it.

Every action names the event it follows from, and an event that an agent sends because of an action
names that action. The story of an incident is all that is reached from the event that opened it, until
the event that closed it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from holdfast.core import faults
from holdfast.core.job import Job
from holdfast.core.replay import Entry
from holdfast.messages import actions, events
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import AnyEvent
from holdfast.messages.reports import StoryStep
from holdfast.messages.units import StepNumber, Time


class Handled(Struct, frozen=True):
    """One event as the job handled it, and what it answered with."""

    number: int
    entry: Entry
    actions: tuple[AnyAction, ...]


class Recorder:
    """Collects what a replay handles, and when each incident closed."""

    def __init__(self) -> None:
        self.handled: list[Handled] = []
        self._closed_by: dict[int, int] = {}
        self._open: set[int] = set()
        self._known = 0

    def begin(self, job: Job) -> None:
        self.handled.clear()
        self._closed_by.clear()
        self._open.clear()
        self._known = 0

    def hear(self, job: Job, entry: Entry, actions: Sequence[AnyAction]) -> None:
        self.handled.append(Handled(job.events, entry, tuple(actions)))
        self._open |= {incident.id for incident in job.incidents[self._known :]}
        self._known = len(job.incidents)
        for number in list(self._open):
            if job.incidents[number - 1].closed_at is not None:
                self._open.discard(number)
                self._closed_by[number] = job.events

    def story(self, job: Job, number: int) -> list[StoryStep]:
        """Tell the story of the incident of that number."""
        incident = job.incidents[number - 1]
        opened_by, closed_by = int(incident.cause), self._closed_by.get(number)
        steps: list[StoryStep] = []
        followed: set[str] = set()
        for one in self.handled:
            if one.number < opened_by or (closed_by is not None and one.number > closed_by):
                continue
            event = one.entry.event
            if one.number in (opened_by, closed_by) or event.cause in followed:
                followed |= {action.id for action in one.actions}
                steps += told(one, incident.fault_at)
        return steps


def told(one: Handled, since: Time) -> list[StoryStep]:
    """Tell an event and its actions as steps of a story that began then."""
    return [_event(one, since), *(_action(action, one, since) for action in one.actions)]


def _event(one: Handled, since: Time) -> StoryStep:
    event = one.entry.event
    return StoryStep(
        at=event.at,
        after_s=event.at - since,
        id=str(one.number),
        cause=event.cause,
        kind="event",
        what=type(event).__name__,
        node=getattr(event, "node", None),
        text=_event_text(event),
    )


def _action(action: AnyAction, one: Handled, since: Time) -> StoryStep:
    return StoryStep(
        at=one.entry.at,
        after_s=one.entry.at - since,
        id=action.id,
        cause=action.cause,
        kind="action",
        what=type(action).__name__,
        node=getattr(action, "node", None),
        text=_action_text(action),
    )


def _event_text(event: AnyEvent) -> str:
    if isinstance(event, events.WorkerExited):
        if event.code == 0:
            return f"rank {event.rank} finished"
        fault = faults.death(event, StepNumber(event.progress.step))
        return f"rank {event.rank} {fault.signature}"
    if isinstance(event, events.WorkerStarted):
        how = "a standby" if event.warm else "a fresh process"
        return f"rank {event.rank} began in {how} (pid {event.pid})"
    if isinstance(event, events.Progress):
        steps = ", ".join(f"rank {r.rank} at step {r.step}" for r in event.ranks if r.steps)
        return steps or "no step yet"
    if isinstance(event, events.NodeReady):
        return f"the workers of round {event.round} are gone"
    if isinstance(event, events.RanksStalled):
        return ", ".join(f"rank {s.rank} {s.kind} in {s.where}" for s in event.stalls) or "none"
    if isinstance(event, events.VerdictReached):
        return event.sentence
    return ""


def _action_text(action: AnyAction) -> str:
    if isinstance(action, actions.StartWorkers):
        part = action.part
        last = part.first_rank + part.slots - 1
        return f"ranks {part.first_rank} to {last} of round {part.round}"
    if isinstance(action, actions.StopWorkers):
        return f"round {action.round}: {action.why}"
    if isinstance(action, actions.Finish):
        return f"exit code {action.code}: {action.reason}"
    if isinstance(action, actions.WriteRankFiles):
        return f"step {action.snapshot.step}"
    return ""
