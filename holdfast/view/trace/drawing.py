"""Decides what of a job is in its trace, and where.

    marks        rounds and incidents, through the whole trace
    job          incidents with the phases of their repair; saves by tier; speed
    one group for each node
                 a track for each of its ranks: what it did, by cause, with the round, the step that it
                 had finished before and the number of steps; a mark where an incident began
                 where a hang was examined, the collectives that its ranks waited in
                 the load of its machine, in a job of few nodes

A rank that moves to another node goes on there. An arrow leads from the rank that failed, through the
incident, to that rank's first step after it; if a whole node failed, from its first rank.

The size is bounded whatever the job is: `MOST_SLICES` slices of ranks of 150 to 220 bytes. What is
too short to fit is merged with its neighbours into a slice that says how much of it went to what.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from holdfast.messages.evidence import RankEvidence
from holdfast.messages.records import Cause
from holdfast.messages.reports import IncidentReport
from holdfast.messages.units import NodeId, Time
from holdfast.view.follower import Follower
from holdfast.view.history.checkpoints import SaveEntry, TierEntry
from holdfast.view.history.timeline import RankBlock, ShownSpan
from holdfast.view.trace.format import Rows, TraceFile

MOST_SLICES = 220_000
MOST_OF_RANK = 20_000
LEAST_OF_RANK = 16
MOST_EXAMINED = 2_000
"""Ranks whose evidence is read, of all incidents together."""
LOADS_OF = 64
"""Nodes up to which the load of each is drawn."""
MIXED_FROM = 0.9
"""A merged slice has the name of a cause that has at least this share of it."""

JOB = 1
INCIDENTS, SAVES = 1, 10_000
"""First tracks of their kinds in the job's group; the saves of the next tier begin so much higher."""

COLOURS: Mapping[str, str] = {
    "productive": "good",
    "redo": "terrible",
    "checkpoint": "thread_state_iowait",
    "restore": "thread_state_iowait",
    "evaluation": "vsync_highlight_color",
    "detect": "bad",
    "stop": "bad",
    "rendezvous": "bad",
    "start": "thread_state_runnable",
    "init": "thread_state_runnable",
    "wait": "grey",
    "idle": "grey",
    "other": "yellow",
    "unknown": "black",
}
"""Colours of chrome://tracing, by its own names; Perfetto has its own for each name of a slice."""


def node_group(index: int) -> int:
    """Number of a node's group; it is never that of a track in the group."""
    return 10 * index + 11


def rank_track(rank: int) -> int:
    """Number of a rank's track."""
    return 10 * rank + 10


def waits_track(rank: int) -> int:
    """Number of the track of the collectives that a rank waited in: the one after the rank's."""
    return rank_track(rank) + 5


class Drawn(NamedTuple):
    """A slice that an arrow may be bound to."""

    begin_us: int
    end_us: int
    track: tuple[int, int]


def write_trace(follower: Follower, out: BinaryIO, evidence: Path | None = None) -> TraceFile:
    """Draw a job; `evidence` is the folder in which its incidents' evidence is."""
    opened_at = follower.job.opened_at
    about = {"job": follower.name, "source": "holdfast", "opened_at": _clock(opened_at)}
    trace = TraceFile(out, opened_at, about)
    _JobDrawing(follower, trace, evidence).draw()
    trace.close()
    return trace


class _JobDrawing:
    def __init__(self, follower: Follower, trace: TraceFile, evidence: Path | None) -> None:
        self._follower = follower
        self._history = follower.history
        self._trace = trace
        self._evidence = evidence
        self._now = follower.now
        self._ranks: dict[int, list[Drawn]] = {}
        """Slices of the ranks that an arrow begins or ends at."""
        self._groups: dict[NodeId, int] = {}
        self._homes: dict[int, list[tuple[Time, NodeId]]] = {}
        """Nodes that each rank was on, with the time from which on."""
        self._waited: dict[tuple[int, int], int] = {}
        """End of the last slice on each track of collectives."""

    def draw(self) -> None:
        incidents = self._follower.incidents()
        self._trace.group(JOB, f"job {self._follower.name}", 0)
        self._homes = _by_rank(self._history.seats.stays())
        failed = {one.id: self._failed_rank(one) for one in incidents}
        self._draw_nodes({rank for rank in failed.values() if rank is not None})
        self._draw_rounds()
        self._draw_saves(self._history.checkpoints.saves())
        self._draw_speed()
        self._draw_incidents(incidents, failed)
        self._draw_collectives(incidents)

    # ---- ranks ----

    def _draw_nodes(self, with_arrows: set[int]) -> None:
        for stay in self._history.seats.stays():
            self._group(stay.node, stay.first_rank)
        ranks = self._history.timeline.ranks
        width = max(LEAST_OF_RANK, min(MOST_OF_RANK, MOST_SLICES // max(1, ranks)))
        rounds = [at for at, _ in self._history.rounds]
        for rank in range(ranks):
            homes = self._homes.setdefault(rank, [(self._follower.job.opened_at, NodeId(""))])
            for node in dict.fromkeys(node for _, node in homes):
                self._trace.track(self._group(node), rank_track(rank), f"rank {rank}")
            drawn = self._ranks.setdefault(rank, []) if rank in with_arrows else None
            self._draw_rank(rank, homes, width, rounds, drawn)
        if len(self._groups) <= LOADS_OF:
            self._draw_loads()

    def _group(self, node: NodeId, order: int = 0) -> int:
        """Return a node's group; ranks before the first round are on no node yet."""
        if node not in self._groups:
            self._groups[node] = group = node_group(len(self._groups))
            self._trace.group(group, f"node {node}" if node else "no node yet", order + 1)
        return self._groups[node]

    def _track(self, rank: int, at: float) -> tuple[int, int]:
        """Return the track that a rank was on at a time."""
        homes = self._homes[rank]
        node = homes[max(0, bisect_right(homes, at, key=lambda home: home[0]) - 1)][1]
        return self._group(node), rank_track(rank)

    def _failed_rank(self, incident: IncidentReport) -> int | None:
        """Return the rank that failed, or the first one of the node that did."""
        if incident.rank is not None:
            return incident.rank
        for rank, homes in sorted(self._homes.items()):
            index = bisect_right(homes, incident.at, key=lambda home: home[0]) - 1
            if index >= 0 and homes[index][1] == incident.node:
                return rank
        return None

    def _draw_rank(
        self,
        rank: int,
        homes: list[tuple[Time, NodeId]],
        width: int,
        rounds: list[Time],
        drawn: list[Drawn] | None,
    ) -> None:
        timeline, opened_at = self._history.timeline, self._follower.job.opened_at
        block = RankBlock(f"rank {rank}", rank, 1)
        lanes = timeline.lanes(opened_at, self._now, width, [block], self._now)
        spans = list(_cut([span for lane in lanes for span in lane.spans], homes))
        for span, after in zip_longest(spans, spans[1:]):
            begin, end = self._trace.us(span.begin), self._trace.us(span.end)
            if begin == end:
                continue
            track = self._track(rank, span.begin)
            round = bisect_right(rounds, span.begin)
            told: dict[str, Any] = {"round": self._history.rounds[round - 1][1]} if round else {}
            name, category, shares = _named(span)
            told |= _steps(span, after) | ({"shares": shares} if shares else {})
            self._trace.slice(track, name, category, begin, end, told, COLOURS.get(category, ""))
            if drawn is not None:
                drawn.append(Drawn(begin, end, track))

    def _draw_loads(self) -> None:
        for node, series in self._history.usage.nodes.items():
            if node not in self._groups:
                continue
            for at, point in series.points():
                shares = [("CPU", point.cpu), ("memory", point.memory), ("GPU", point.gpu)]
                for name, share in shares:
                    if share is not None:
                        value = {"%": round(100 * share, 1)}
                        self._trace.number(self._groups[node], name, at, value)
                if point.network_bytes_per_s is not None:
                    value = {"MB/s": round(point.network_bytes_per_s / 1e6, 3)}
                    self._trace.number(self._groups[node], "network", at, value)

    # ---- the job ----

    def _draw_rounds(self) -> None:
        for at, number in self._history.rounds:
            self._trace.moment((JOB, INCIDENTS), f"round {number}", at, whole=True)

    def _draw_speed(self) -> None:
        for at, point in self._history.speed.points():
            if point.steps_per_s is not None:
                self._trace.number(JOB, "speed", at, {"steps/s": round(point.steps_per_s, 4)})

    def _draw_saves(self, saves: Iterable[SaveEntry]) -> None:
        tiers = (("memory", "in memory"), ("peer", "copied"), ("storage", "on storage"))
        for number, (tier, what) in enumerate(tiers, 1):
            rows, first = Rows(), number * SAVES
            found = [(save, entry) for save in saves if (entry := save.tiers.get(tier))]
            for save, entry in sorted(found, key=lambda one: one[1].at - one[1].seconds):
                begin, end = self._lasted(entry.at - entry.seconds, entry.at)
                track = (JOB, first + rows.take(begin, end))
                name = f"step {save.step} {'failed' if entry.error else what}"
                self._trace.slice(track, name, f"save-{tier}", begin, end, _told_of(save, entry))
            for row in range(len(rows)):
                self._trace.track(JOB, first + row, f"saves {what}")

    def _lasted(self, begin: float, end: float) -> tuple[int, int]:
        """Return a time as the trace counts it, and at least the shortest that can be seen."""
        begin_us = self._trace.us(begin)
        return begin_us, max(begin_us + 1, self._trace.us(end))

    def _draw_incidents(
        self, incidents: Iterable[IncidentReport], failed: Mapping[int, int | None]
    ) -> None:
        rows = Rows()
        for incident in sorted(incidents, key=lambda one: one.at):
            begin, end = self._lasted(incident.at, _end(incident))
            track = (JOB, INCIDENTS + rows.take(begin, end))
            name = f"incident {incident.id}: {incident.signature}"
            told: dict[str, Any] = {
                "line": incident.line,
                "kind": incident.kind,
                "action": incident.action,
            }
            told |= {"at": _clock(incident.at), "round": incident.round, "step": incident.step}
            if incident.also:
                told["also"] = "; ".join(incident.also[:10])
            self._trace.slice(track, name, "incident", begin, end, told, "terrible")
            self._draw_phases(incident, track, end)
            mark = {"line": incident.line}
            self._trace.moment(track, name, incident.at, mark, whole=True)
            rank = failed[incident.id]
            if rank is not None and rank in self._homes:
                self._trace.moment(self._track(rank, incident.at), name, incident.at, mark)
                self._draw_arrow(incident, rank, track, end)
        for row in range(max(1, len(rows))):
            self._trace.track(JOB, INCIDENTS + row, "incidents")

    def _draw_phases(self, incident: IncidentReport, track: tuple[int, int], end_us: int) -> None:
        at: float = incident.at
        for phase, seconds in incident.phases.items():
            begin_us, until_us = self._trace.us(at), min(self._trace.us(at + seconds), end_us)
            if begin_us < until_us:
                told = {"incident": incident.id, "round": incident.round}
                name = phase.replace("_", " ")
                self._trace.slice(track, name, "phase", begin_us, until_us, told)
            at += seconds

    def _draw_arrow(
        self, incident: IncidentReport, rank: int, track: tuple[int, int], back: int
    ) -> None:
        if incident.lost_s is None or not incident.rung:
            return
        slices, fault = self._ranks.get(rank, []), self._trace.us(incident.at)
        before, after = _within(slices, fault), _within(slices, back)
        if before is not None and after is not None and fault < back:
            points = [(before.track, fault), (track, fault + (back - fault) // 2)]
            name = f"incident {incident.id}: from the fault to the first step"
            self._trace.arrow(incident.id, name, [*points, (after.track, back)])

    # ---- what hung ranks waited in ----

    def _draw_collectives(self, incidents: Iterable[IncidentReport]) -> None:
        """Draw what was seen when hangs were examined, each up to the end of its incident's round."""
        if self._evidence is None:
            return
        left = MOST_EXAMINED
        for incident in incidents:
            folder = self._evidence / str(incident.id)
            if left <= 0 or not folder.is_dir():
                continue
            seen = incident.at + incident.phases.get("detect", 0.0)
            for path in sorted(folder.glob("rank_*.json"))[:left]:
                left -= 1
                with suppress(OSError, msgspec.DecodeError):
                    found = msgspec.json.decode(path.read_bytes(), type=RankEvidence)
                    self._draw_waits(found, incident, seen)

    def _draw_waits(self, found: RankEvidence, incident: IncidentReport, seen: float) -> None:
        open = [one for one in found.collectives or () if one.state != "completed"]
        if not open:
            return
        track = (self._group(found.node), waits_track(found.rank))
        self._trace.track(*track, f"rank {found.rank}: collectives")
        one = max(open, key=lambda each: each.age_s or 0.0)
        begin, end = self._lasted(seen - (one.age_s or 0.0), seen)
        begin = max(begin, self._waited.get(track, 0))
        if begin >= end:
            return
        self._waited[track] = end
        told = {"group": one.group, "number": one.number, "sizes": one.sizes}
        told |= {"state": one.state, "incident": incident.id, "open": len(open)}
        told |= {"round": incident.round, "step": incident.step}
        name = f"waits in {one.op} {one.number}"
        self._trace.slice(track, name, "collective", begin, end, told)


def _clock(at: Time) -> str:
    """Return a time as people write it."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")


def _told_of(save: SaveEntry, entry: TierEntry) -> dict[str, Any]:
    told: dict[str, Any] = {"step": save.step, "round": save.round, "verified": entry.verified}
    if entry.size_bytes:
        told["size_bytes"] = entry.size_bytes
    if entry.error:
        told["error"] = entry.error
    return told


def _steps(span: ShownSpan, after: ShownSpan | None) -> dict[str, int]:
    """Return the step that was finished before a span, and how many were in it, as far as known."""
    if not span.step:
        return {}
    count = after.step - span.step if after is not None else 0
    return {"step": span.step} | ({"steps": count} if count > 0 else {})


def _by_rank(
    stays: Iterable[tuple[Time, int, int, NodeId]],
) -> dict[int, list[tuple[Time, NodeId]]]:
    """List the nodes that each rank was on, with the time from which on."""
    found: dict[int, list[tuple[Time, NodeId]]] = {}
    for since, first_rank, slots, node in stays:
        for rank in range(first_rank, first_rank + slots):
            homes = found.setdefault(rank, [])
            if not homes or homes[-1][1] != node:
                homes.append((since, node))
    return found


def _cut(spans: Iterable[ShownSpan], homes: list[tuple[Time, NodeId]]) -> Iterator[ShownSpan]:
    """Cut spans where their rank moved to another node."""
    moves = [at for at, _ in homes[1:]]
    for span in spans:
        begin = span.begin
        for at in moves:
            if begin < at < span.end:
                yield span._replace(begin=begin, end=at)
                begin = at
        yield span._replace(begin=begin)


def _named(span: ShownSpan) -> tuple[str, str, dict[Cause, float]]:
    """Return the name of a slice, its category, and the shares if it is mixed."""
    cause, share = max(span.shares.items(), key=lambda item: item[1])
    if len(span.shares) == 1:
        return cause, cause, {}
    shares = {one: part for one, s in span.shares.items() if (part := round(s, 4)) > 0}
    return (cause if share >= MIXED_FROM else f"mostly {cause}"), cause, shares


def _end(incident: IncidentReport) -> float:
    took_s = sum(incident.phases.values()) if incident.lost_s is None else incident.lost_s
    return incident.at + took_s


def _within(slices: list[Drawn], us: int) -> Drawn | None:
    """Find the slice that a time lies in."""
    index = bisect_right(slices, us, key=lambda one: one.begin_us) - 1
    return slices[index] if index >= 0 and us < slices[index].end_us else None
