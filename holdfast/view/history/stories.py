"""Tells how each incident was repaired, as `core.story` does, while the journal is followed.

Only what follows from an open incident is kept, so a job of a week needs no second replay to tell the
story of its first fault. A repair of thousands of ranks has thousands of like steps: a story keeps the
first of each kind, and counts the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.core.job import Job
from holdfast.core.replay import Entry
from holdfast.core.story import Handled, told
from holdfast.messages.actions import AnyAction
from holdfast.messages.records import Incident
from holdfast.messages.reports import StoryStep
from holdfast.messages.units import Time

OF_A_KIND = 16
"""Steps of one type that a story keeps, from its begin."""
MOST_STORIES = 2000
"""Stories that are kept: the newest."""


class Story(Struct):
    """What followed from one incident."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Steps that are not kept, by type."""
    _steps: list[StoryStep] = field(default_factory=list)
    _kinds: dict[str, int] = field(default_factory=dict)
    _followed: set[str] = field(default_factory=set)

    def steps(self, incident: Incident) -> list[StoryStep]:
        """Return its steps, timed from the fault as it is known now."""
        return [replace(one, after_s=one.after_s - incident.fault_at) for one in self._steps]

    def follows(self, entry: Entry) -> bool:
        return entry.event.cause in self._followed

    def add(self, one: Handled) -> None:
        self._followed |= {action.id for action in one.actions}
        for step in told(one, Time(0.0)):
            number = self._kinds[step.what] = self._kinds.get(step.what, 0) + 1
            if number <= OF_A_KIND:
                self._steps.append(step)
            else:
                self.left_out[step.what] = number - OF_A_KIND

    def close(self) -> None:
        self._followed.clear()
        self._kinds.clear()


class Stories(Struct):
    """The stories of the newest incidents."""

    _stories: dict[int, Story] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _known: int = 0

    @classmethod
    def after(cls, job: Job) -> Stories:
        """Tell the stories of incidents that are to come."""
        return cls(_known=len(job.incidents))

    def of(self, number: int) -> Story | None:
        """The story of the incident of that number; None if it is too old to be kept."""
        return self._stories.get(number)

    def hear(self, job: Job, entry: Entry, actions: Sequence[AnyAction]) -> None:
        fresh = {incident.id for incident in job.incidents[self._known :]}
        if not fresh and not self._open:
            return
        self._known = len(job.incidents)
        self._stories.update({number: Story() for number in sorted(fresh)})
        while len(self._stories) > MOST_STORIES:
            gone = next(iter(self._stories))
            del self._stories[gone]
            self._open.discard(gone)
        self._open |= fresh & self._stories.keys()
        one = Handled(job.events, entry, tuple(actions))
        for number in list(self._open):
            story = self._stories[number]
            closed = job.incidents[number - 1].closed_at is not None
            if number in fresh or closed or story.follows(entry):
                story.add(one)
            if closed:
                self._open.discard(number)
                story.close()
