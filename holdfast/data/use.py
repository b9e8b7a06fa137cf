"""Tells the job what a loader uses, without ever making it wait.

The coordinator is told once a round from where a data set goes on, and now and then which positions
were used up to which step: `holdfast data audit` is made of that. Steps in a row that used the same
number of positions are one segment, so an undisturbed epoch is a few of them.
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar
from weakref import WeakKeyDictionary

from holdfast.data.link import JobLink
from holdfast.errors import DataError, HoldfastError, UsageError
from holdfast.messages.data import DataSpec, Span, Used
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import OpenData
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import StepNumber

TELL_EVERY_S = 0.1
"""The agent reports less often; but what a process has not told dies with it."""
TELL_AT_SAVE_AFTER_S = 0.02


class Segments:
    """Positions that were used and not told yet, by step."""

    def __init__(self) -> None:
        self._done: list[Used] = []
        self._open: dict[int, _OpenSegment] = {}
        """The segment that grows, of each line."""

    def add(self, line: int, start: int, stop: int, records: int, step: int) -> None:
        """Note positions that were handed out after that step; none are noted for no records."""
        segment = self._open.get(line)
        if segment is not None and segment.takes(start, stop, records, step):
            return
        if segment is not None:
            self._done += self._open.pop(line).used(line)
        if records:
            self._open[line] = _OpenSegment(start, stop, records, step)

    def drain(self) -> tuple[Used, ...]:
        """Return all segments and forget them."""
        for line in sorted(self._open):
            self._done += self._open[line].used(line)
        done, self._done, self._open = tuple(self._done), [], {}
        return done


class _OpenSegment:
    """Steps that used the same number of positions each, and the step that is being added up."""

    def __init__(self, start: int, stop: int, records: int, step: int) -> None:
        self.start, self.stop, self.records = start, start, 0
        self.first_step, self.last_step = step, step
        self.each = 0
        """Positions of a step; 0 while none is complete."""
        self.step, self.step_stop, self.step_records = step, stop, records

    def takes(self, start: int, stop: int, records: int, step: int) -> bool:
        """Add positions; False if they begin another segment."""
        if start != self.step_stop or not records:
            return False
        if step == self.step:
            self.step_stop, self.step_records = stop, self.step_records + records
            return True
        if step != self.step + 1 or not self._complete_step():
            return False
        self.step, self.step_stop, self.step_records = step, stop, records
        return True

    def _complete_step(self) -> bool:
        """Join the step that was added up to the others; False if it used another number."""
        size = self.step_stop - self.stop
        if self.each and size != self.each:
            return False
        self.each, self.stop = size, self.step_stop
        self.records, self.last_step = self.records + self.step_records, self.step
        return True

    def used(self, line: int) -> list[Used]:
        found = []
        whole = self._complete_step()
        if self.records:
            found.append(self._used(line, self.start, self.stop, self.first_step, self.records))
        if not whole:
            self.last_step = self.step
            found.append(self._used(line, self.stop, self.step_stop, self.step, self.step_records))
        return found

    def _used(self, line: int, start: int, stop: int, first_step: int, records: int) -> Used:
        return Used(
            span=Span(line, start, stop),
            first_step=StepNumber(first_step),
            last_step=StepNumber(self.last_step),
            records=records,
        )


class UseReport:
    """What one loader tells of its data set in one round."""

    def __init__(self, link: JobLink, spec: DataSpec, before: SpanSet, resumed: bool) -> None:
        self._link, self.spec = link, spec
        self.round = link.round
        self._segments = Segments()
        self._told_at = time.monotonic()
        self._opened = threading.Event()
        self._refused: DataError | None = None
        request = OpenData(
            spec=spec,
            resumed="whole" if resumed else "fresh",
            used=before.pack(),
            step=StepNumber(link.step),
        )
        name = f"holdfast-data-{spec.name}"
        threading.Thread(target=self._open, args=[request], name=name, daemon=True).start()

    def _open(self, request: OpenData) -> None:
        try:
            self._link.open(request)
            self._opened.set()
        except DataError as refused:
            self._refused = refused
        except HoldfastError:
            # The agent is gone or the round is over, so this process ends soon, and not by our doing.
            pass

    def check(self) -> None:
        """Raise what the coordinator has against the data set."""
        if self._refused is not None:
            raise self._refused

    def delivered(self, records: int) -> None:
        """Count records that the script is given, for the job's speed."""
        self._link.delivered(records)

    def used(self, line: int, start: int, stop: int, records: int) -> None:
        """Note positions that are handed out now; tell of them if it is time."""
        self._segments.add(line, start, stop, records, self._link.step)
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self.tell()

    def saved(self) -> None:
        """Tell what was used, because the state is saved now; not if that was told just before."""
        if time.monotonic() - self._told_at >= TELL_AT_SAVE_AFTER_S:
            self.tell()

    def tell(self) -> None:
        """Tell what was used, once the coordinator knows the data set."""
        if not self._opened.is_set():
            return
        self._told_at = time.monotonic()
        used = self._segments.drain()
        if used:
            self._link.tell(DataUsed(dataset=self.spec.name, used=used))


class _ProcessLoaders:
    """What loaders of this process have open: they have no other way to find each other."""

    claims: ClassVar[WeakKeyDictionary[object, tuple[int, str, object]]] = WeakKeyDictionary()
    """Round, name and terms of each loader that is alive."""
    reports: ClassVar[dict[tuple[int, str], UseReport]] = {}
    """By round and name."""


def claim_name(link: JobLink, loader: object, name: str, terms: object) -> None:
    """Note that a loader has a name in this round; UsageError if another one uses it for other data.

    `terms` is what loaders that read the same data set in the same order have in common: one of the
    same terms was made again by the script, for another epoch.
    """
    mine = link.round, name, terms
    for claim in list(_ProcessLoaders.claims.values()):
        if claim[:2] == mine[:2] and claim != mine:
            raise UsageError(
                f"two data loaders of this script have the name {name!r}, and their data sets or "
                'orders differ: give each one its own name, as in ElasticDataLoader(..., name="train") '
                'and ElasticDataLoader(..., name="validation", task="evaluation")'
            )
    _ProcessLoaders.claims[loader] = mine


def report_of(link: JobLink, spec: DataSpec, before: SpanSet, resumed: bool) -> UseReport:
    """Return the report of a data set in this round; the first loader of it opens the data set.

    Loaders that follow in the same process go on with that report: what they use was not used before
    the round, whatever state they begin with.
    """
    key = link.round, spec.name
    found = _ProcessLoaders.reports.get(key)
    if found is None or found.spec != spec:
        for old in [old for old in _ProcessLoaders.reports if old[0] != link.round]:
            del _ProcessLoaders.reports[old]
        found = _ProcessLoaders.reports[key] = UseReport(link, spec, before, resumed)
    return found
