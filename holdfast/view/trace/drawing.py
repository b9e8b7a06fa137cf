"""Decides what of a job is in its trace, and where.

    job          incidents with the phases of their repair; rounds; saves by tier; speed
    one group for each node
                 a track for each of its ranks: what it did, by cause
                 where a hang was examined, the collectives that its ranks waited in
                 the load of its machine, in a job of few nodes

A rank that moves to another node goes on there. An arrow leads from the rank that failed, through the
incident, to that rank's first step after it.

The size is bounded whatever the job is: `MOST_SLICES` slices of ranks, each about a hundred bytes. What
is too short to fit is merged with its neighbours into a slice that says how much of it went to what.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from holdfast.messages.evidence import RankEvidence
from holdfast.messages.records import Cause
from holdfast.messages.reports import IncidentReport
from holdfast.messages.units import NodeId, Time
from holdfast.view.follower import Follower
from holdfast.view.history.checkpoints import SaveEntry
from holdfast.view.history.timeline import RankBlock, ShownSpan
from holdfast.view.trace.format import Rows, TraceFile

MOST_SLICES = 300_000
MOST_OF_RANK = 20_000
LEAST_OF_RANK = 16
MOST_EXAMINED = 2_000
"""Ranks whose evidence is read, of all incidents together."""
LOADS_OF = 64
"""Nodes up to which the load of each is drawn."""
MIXED_FROM = 0.9
"""A merged slice has the name of a cause that has at least this share of it."""

JOB = 0
INCIDENTS, SAVES, COLLECTIVES = 0, 100, 1_000_000
"""First tracks of their kinds; a rank's is its number, and that of its collectives so much higher."""
ROWS = 50
"""Tracks of one kind, at most: what overlaps more than that is drawn on the last."""

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


class Drawn(NamedTuple):
    """A slice that an arrow may be bound to."""

    begin_us: int
    end_us: int
    track: tuple[int, int]


def write_trace(follower: Follower, out: BinaryIO, evidence: Path | None = None) -> TraceFile:
    """Draw a job; `evidence` is the folder in which its incidents' evidence is."""
    trace = TraceFile(out, follower.job.opened_at, {"job": follower.name, "source": "holdfast"})
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

    def draw(self) -> None:
        incidents = self._follower.incidents()
        self._trace.group(JOB, f"job {self._follower.name}", JOB)
        self._draw_nodes(_arrow_ranks(incidents))
        self._draw_rounds()
        self._draw_saves(self._history.checkpoints.saves())
        self._draw_speed()
        self._draw_incidents(incidents)
        self._draw_collectives(incidents)

    # ---- ranks ----

    def _draw_nodes(self, with_arrows: set[int]) -> None:
        for stay in self._history.seats.stays():
            if stay.node not in self._groups:
                self._groups[stay.node] = len(self._groups) + 1
                self._trace.group(self._groups[stay.node], f"node {stay.node}", stay.first_rank + 1)
        seats = _by_rank(self._history.seats.stays())
        ranks = self._history.timeline.ranks
        width = max(LEAST_OF_RANK, min(MOST_OF_RANK, MOST_SLICES // max(1, ranks)))
        rounds = [at for at, _ in self._history.rounds]
        for rank in range(ranks):
            homes = seats.get(rank) or [(self._follower.job.opened_at, NodeId(""))]
            for _, node in homes:
                self._trace.track(self._group(node), rank, f"rank {rank}")
            drawn = self._ranks.setdefault(rank, []) if rank in with_arrows else None
            self._draw_rank(rank, homes, width, rounds, drawn)
        if len(self._groups) <= LOADS_OF:
            self._draw_loads()

    def _group(self, node: NodeId) -> int:
        if node not in self._groups:  # Ranks before the first round are nowhere yet.
            self._groups[node] = len(self._groups) + 1
            self._trace.group(self._groups[node], f"node {node}" if node else "no node yet", 1)
        return self._groups[node]

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
        for span in _cut([span for lane in lanes for span in lane.spans], homes):
            node = homes[max(0, bisect_right([at for at, _ in homes], span.begin) - 1)][1]
            track = (self._group(node), rank)
            round = bisect_right(rounds, span.begin)
            number = self._history.rounds[round - 1][1] if round else 0
            name, category, shares = _named(span)
            told = {"round": number} | ({"shares": shares} if shares else {})
            colour = COLOURS.get(category, "")
            self._trace.slice(track, name, category, span.begin, span.end, told, colour)
            if drawn is not None:
                drawn.append(Drawn(self._trace.us(span.begin), self._trace.us(span.end), track))

    def _draw_loads(self) -> None:
        for node, series in self._history.usage.nodes.items():
            if node not in self._groups:
                continue
            for at, point in series.points():
                shares = [("CPU %", point.cpu), ("memory %", point.memory), ("GPU %", point.gpu)]
                for name, share in shares:
                    if share is not None:
                        value = {"%": round(100 * share, 1)}
                        self._trace.number(self._groups[node], name, at, value)
                if point.network_bytes_per_s is not None:
                    value = {"MB/s": round(point.network_bytes_per_s / 1e6, 3)}
                    self._trace.number(self._groups[node], "network MB/s", at, value)

    # ---- the job ----

    def _draw_rounds(self) -> None:
        for at, number in self._history.rounds:
            self._trace.moment((JOB, INCIDENTS), f"round {number}", at, whole=True)

    def _draw_speed(self) -> None:
        for at, point in self._history.speed.points():
            if point.steps_per_s is not None:
                self._trace.number(JOB, "steps/s", at, {"steps/s": round(point.steps_per_s, 4)})

    def _draw_saves(self, saves: Iterable[SaveEntry]) -> None:
        first = SAVES
        for tier, what in (("memory", "in memory"), ("peer", "copied"), ("storage", "on storage")):
            rows = Rows()
            for save in saves:
                entry = save.tiers.get(tier)
                if entry is None:
                    continue
                begin = entry.at - entry.seconds
                row = min(rows.take(begin, max(entry.at, begin + 1e-6)), ROWS - 1)
                track = (JOB, first + row)
                told = {"step": save.step, "round": save.round, "verified": entry.verified}
                if entry.size_bytes:
                    told["size_bytes"] = entry.size_bytes
                if entry.error:
                    told["error"] = entry.error  # type: ignore[assignment]
                name = f"step {save.step} {'failed' if entry.error else what}"
                self._trace.slice(track, name, f"save-{tier}", begin, entry.at, told)
            for row in range(min(len(rows), ROWS)):
                self._trace.track(JOB, first + row, f"saves {what}", first + row)
            first += ROWS

    def _draw_incidents(self, incidents: Iterable[IncidentReport]) -> None:
        rows = Rows()
        for incident in incidents:
            end = _end(incident)
            row = min(rows.take(incident.at, max(end, incident.at + 1e-6)), ROWS - 1)
            track = (JOB, INCIDENTS + row)
            name = f"incident {incident.id}: {incident.signature}"
            told = {"line": incident.line, "kind": incident.kind, "action": incident.action}
            if incident.also:
                told["also"] = "; ".join(incident.also[:10])
            self._trace.slice(track, name, "incident", incident.at, end, told, "terrible")
            begin: float = incident.at
            for phase, seconds in incident.phases.items():
                if seconds > 0:
                    until = min(begin + seconds, end)
                    told_of = {"incident": incident.id, "round": incident.round}
                    name = phase.replace("_", " ")
                    self._trace.slice(track, name, "phase", begin, until, told_of)
                    begin = until
            self._draw_arrow(incident, track, end)
        for row in range(max(1, min(len(rows), ROWS))):
            self._trace.track(JOB, INCIDENTS + row, "incidents", INCIDENTS + row)

    def _draw_arrow(self, incident: IncidentReport, track: tuple[int, int], end: float) -> None:
        if incident.rank is None or incident.lost_s is None or not incident.rung:
            return
        slices = self._ranks.get(incident.rank, [])
        fault, back = self._trace.us(incident.at), self._trace.us(end)
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
        track = (self._group(found.node), COLLECTIVES + found.rank)
        self._trace.track(*track, f"rank {found.rank}: collectives", found.rank)
        rows = {(one.group, one.number): one for one in open}
        begin_after = self._follower.job.opened_at
        for one in sorted(rows.values(), key=lambda each: -(each.age_s or 0.0))[:1]:
            begin = max(begin_after, seen - (one.age_s or 0.0))
            told = {"group": one.group, "number": one.number, "sizes": one.sizes}
            told |= {"state": one.state, "incident": incident.id, "open": len(open)}
            name = f"waits in {one.op} {one.number}"
            self._trace.slice(track, name, "collective", begin, max(seen, begin), told)


def _arrow_ranks(incidents: Iterable[IncidentReport]) -> set[int]:
    return {one.rank for one in incidents if one.rank is not None and one.lost_s is not None}


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
                yield ShownSpan(begin, at, span.shares)
                begin = at
        yield ShownSpan(begin, span.end, span.shares)


def _named(span: ShownSpan) -> tuple[str, str, dict[Cause, float]]:
    """Return the name of a slice, its category, and the shares if it is mixed."""
    cause, share = max(span.shares.items(), key=lambda item: item[1])
    if len(span.shares) == 1:
        return cause, cause, {}
    shares = {one: round(part, 4) for one, part in span.shares.items()}
    return (cause if share >= MIXED_FROM else f"mostly {cause}"), cause, shares


def _end(incident: IncidentReport) -> float:
    took_s = sum(incident.phases.values()) if incident.lost_s is None else incident.lost_s
    return incident.at + took_s


def _within(slices: list[Drawn], us: int) -> Drawn | None:
    """Find the slice that a time lies in."""
    index = bisect_right(slices, us, key=lambda one: one.begin_us) - 1
    return slices[index] if index >= 0 and us < slices[index].end_us else None
