"""Makes the answers of the API from what a follower knows: plain values, ready to be JSON.

`docs/web.md` describes each. Times are seconds since 1970. An answer about a job of any size takes
well under a tenth of a second, because it reads what was collected on the way and not the journal.
"""

from __future__ import annotations

import time
from typing import Any, Final

from msgspec import to_builtins
from msgspec.structs import asdict

from holdfast.core import report
from holdfast.core.commits import restoring
from holdfast.core.commits.state import Commits
from holdfast.core.job import Job
from holdfast.core.report import incident_report
from holdfast.messages.records import Incident
from holdfast.messages.units import Time
from holdfast.view import rankmap, torchrun
from holdfast.view.follower import Follower
from holdfast.view.history.timeline import Fold, RankBlock, ShownSpan

MOST_INCIDENTS: Final = 2000
"""Incidents of a timeline, at most: the newest."""
MOST_SAVES: Final = 300


def now(follower: Follower, lost_today_s: float | None) -> dict[str, Any]:
    """Where the job stands."""
    job, at, alive = follower.job, follower.now, follower.alive
    status = to_builtins(report.status(job, at, alive, with_nodes=False))
    del status["nodes"]
    goodput = report.goodput(job, at)
    lost = {cause: s for cause, s in goodput.seconds.items() if cause != "productive" and s}
    answer = {
        "status": status,
        "now": at,
        "alive": alive,
        "goodput": {
            "goodput": goodput.goodput,
            "lost_s": lost,
            "lost_today_s": lost_today_s,
            "unknown_since": goodput.unknown_since,
        },
        "map": {"nodes": rankmap.nodes(job), "ranks": rankmap.ranks(job)},
        "loss": status["loss"],
    }
    if follower.behind:
        answer["loading"] = round(follower.progress, 4)
    return answer


def lost_today(follower: Follower) -> float | None:
    """Rank-seconds since midnight that were not productive; of a job that is over, on its last day.
    None if not all of that day was read yet."""
    at = end_of(follower)
    midnight = time.mktime((*time.localtime(at)[:3], 0, 0, 0, 0, 0, -1))
    since = max(midnight, follower.job.opened_at)
    if at <= since:
        return 0.0
    if follower.history.since > since:
        return None
    (seconds,) = follower.history.timeline.seconds(since, at, 1, at)
    return round(sum(s for cause, s in seconds.items() if cause != "productive"), 3)


# ---- timeline ----


def timeline(
    follower: Follower,
    since: float | None,
    until: float | None,
    width: int,
    first: int,
    count: int | None,
    fold: Fold,
) -> dict[str, Any]:
    """What ranks did in a time."""
    job, now = follower.job, end_of(follower)
    since = job.opened_at if since is None else max(since, job.opened_at)
    until = now if until is None else min(until, now)
    known = follower.history.timeline
    blocks = _blocks(job, known.ranks, fold)
    shown = [block for block in blocks if block.first_rank >= first][:count]
    lanes = known.lanes(since, until, width, shown, now)
    return {
        "from": since,
        "to": until,
        "opened_at": job.opened_at,
        "now": now,
        "ranks": known.ranks,
        "lanes": [
            {
                "name": lane.name,
                "first_rank": lane.first_rank,
                "ranks": lane.ranks,
                "spans": [_span(span) for span in lane.spans],
            }
            for lane in lanes
        ],
        "rounds": [
            [round(at, 3), number] for at, number in follower.history.rounds if since <= at <= until
        ][-MOST_INCIDENTS:],
        "incidents": [
            _marked(incident, now)
            for incident in job.incidents
            if incident.fault_at <= until and _end(incident, now) >= since
        ][-MOST_INCIDENTS:],
    }


def end_of(follower: Follower) -> float:
    """The time up to which the job is accounted for: its end, or now."""
    job = follower.job
    return job.result.at if job.result is not None and job.state.name == "ended" else follower.now


def _blocks(job: Job, ranks: int, fold: Fold) -> list[RankBlock]:
    if fold == "rank":
        return [RankBlock(f"rank {rank}", rank, 1) for rank in range(ranks)]
    rows = [row for row in rankmap.nodes(job) if row.ranks]
    found = [
        RankBlock(row.node, row.first_rank, row.ranks)
        for row in sorted(rows, key=lambda row: row.first_rank)
    ]
    shown = sum(block.ranks for block in found)
    if shown < ranks:  # Of a world that was larger once.
        found.append(RankBlock(f"ranks {shown} to {ranks - 1}", shown, ranks - shown))
    return found


def _span(span: ShownSpan) -> list[Any]:
    begin, end = round(span.begin, 3), round(span.end, 3)
    if len(span.shares) == 1:
        return [begin, end, next(iter(span.shares))]
    shares = {cause: round(share, 3) for cause, share in span.shares.items() if share >= 0.0005}
    return [begin, end, shares]


def _marked(incident: Incident, now: float) -> list[Any]:
    return [
        incident.id,
        round(incident.fault_at, 3),
        round(_end(incident, now), 3),
        incident.kind,
    ]


def _end(incident: Incident, now: float) -> float:
    return incident.back_at or incident.closed_at or now


# ---- goodput ----


def goodput(follower: Follower, buckets: int) -> dict[str, Any]:
    """Rank-seconds by cause, over time and in all."""
    job, until = follower.job, end_of(follower)
    since = job.opened_at
    found = report.goodput(job, follower.now)
    answer: dict[str, Any] = to_builtins(found)
    step = (until - since) / buckets
    parts = follower.history.timeline.seconds(since, until, buckets, until) if step > 0 else []
    answer["buckets"] = [
        [
            round(since + number * step, 3),
            round(since + (number + 1) * step, 3),
            {cause: rounded for cause, s in part.items() if (rounded := round(s, 3)) > 0},
        ]
        for number, part in enumerate(parts)
    ]
    answer["total"] = answer.pop("seconds")
    answer["torchrun"] = to_builtins(torchrun.estimate(job, found))
    return answer


# ---- incidents ----


def incidents(follower: Follower, before: int | None, limit: int) -> dict[str, Any]:
    """The newest incidents in short, the newest first."""
    job = follower.job
    last = len(job.incidents) if before is None else min(before - 1, len(job.incidents))
    chosen = job.incidents[max(0, last - limit) : max(0, last)][::-1]
    seen = _seen(job)
    return {"total": len(job.incidents), "incidents": [short(job, one, seen) for one in chosen]}


def short(job: Job, incident: Incident, seen: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """One incident without its details."""
    told = incident_report(job, incident)
    known = _seen(job) if seen is None else seen
    return {
        "id": told.id,
        "kind": told.kind,
        "rank": told.rank,
        "node": told.node,
        "round": told.round,
        "step": told.step,
        "at": told.at,
        "line": told.line,
        "signature": told.signature,
        "lost_s": told.lost_s,
        "lost_steps": told.lost_steps,
        "open": incident.closed_at is None,
        "injected": told.injected,
        "seen_before": _before(known, incident),
    }


def incident(follower: Follower, number: int) -> dict[str, Any] | None:
    """All that the journal has of one incident; None if there is none of that number."""
    job = follower.job
    if not 1 <= number <= len(job.incidents):
        return None
    found = job.incidents[number - 1]
    story = follower.history.stories.of(number)
    return {
        "incident": to_builtins(incident_report(job, found)),
        "open": found.closed_at is None,
        "story": [] if story is None else to_builtins(story.steps(found)),
        "left_out": {} if story is None else dict(story.left_out),
        "seen_before": _before(_seen(job), found),
    }


def _seen(job: Job) -> dict[str, list[int]]:
    """Incidents by what failed."""
    found: dict[str, list[int]] = {}
    for one in job.incidents:
        found.setdefault(alike(one), []).append(one.id)
    return found


def alike(incident: Incident) -> str:
    """What incidents have in common that are the same fault."""
    return f"{incident.kind} {incident.signature}"


def _before(seen: dict[str, list[int]], incident: Incident) -> list[int]:
    """The latest incidents of the same signature before this one."""
    same = seen.get(alike(incident), [])
    return [number for number in same if number < incident.id][-10:]


# ---- checkpoints ----


def checkpoints(follower: Follower) -> dict[str, Any]:
    """What was saved, where it is, and what would be restored now."""
    job = follower.job
    status = report.status(job, follower.now, follower.alive, with_nodes=False)
    saves = follower.history.checkpoints.saves()[-MOST_SAVES:]
    return {
        "checkpointers": to_builtins(status.checkpoints),
        "steps": [
            {
                "checkpointer": save.checkpointer,
                "step": save.step,
                "round": save.round,
                "at": save.at,
                "tiers": {name: asdict(tier) for name, tier in save.tiers.items()},
            }
            for save in saves
        ],
        "would_restore": _would_restore(job),
    }


def _would_restore(job: Job) -> dict[str, Any] | None:
    """What ranks that began now would go on from, for each checkpointer; of several, the newest."""
    found = [
        {"checkpointer": name, "step": best.step, "from": best.where, "why": _why(best.where)}
        for name, book in job.of(Commits).books.items()
        if (best := restoring.best(book)) is not None
    ]
    if not found:
        return None
    return {**max(found, key=lambda one: one["step"]), "all": found}


def _why(where: str) -> str:
    if where == "memory":
        return "the newest state of which every rank's image is in some node's memory"
    return (
        "no newer state is in memory on the nodes; this is the newest that is complete on storage"
    )


# ---- nodes ----


def nodes(follower: Follower) -> dict[str, Any]:
    """Each node: its state, what its checks found, and how fast its ranks were."""
    job, history = follower.job, follower.history
    supply = report.status(job, follower.now, follower.alive, with_nodes=False).supply
    excluded = {**(supply.cordoned if supply is not None else {}), **job.membership.excluded}
    found = []
    for row in rankmap.nodes(job):
        series = history.scores.get(row.node)
        health = history.health.get(row.node, {})
        usage = history.usage.nodes.get(row.node)
        found.append(
            {
                "node": row.node,
                "host": row.host,
                "state": row.state,
                "first_rank": row.first_rank,
                "ranks": row.ranks,
                "warm": row.warm,
                "health": to_builtins(list(health.values())),
                "score": [] if series is None else series.points(),
                "usage": [] if usage is None else [[at, *one] for at, one in usage.points()],
                "cordoned": excluded.get(row.host),
            }
        )
    return {"nodes": found, "excluded": excluded}


def speed(follower: Follower) -> dict[str, Any]:
    """How fast the job was, over time."""
    return {
        "points": [
            [round(at, 3), one.step, one.steps_per_s, one.samples_per_s, one.world_size]
            for at, one in follower.history.speed.points()
        ]
    }


def loss(follower: Follower) -> dict[str, Any]:
    """The losses that the script told, over time."""
    points = follower.history.loss.points()
    return {"points": [[round(at, 3), one.step, one.value] for at, one in points]}


def summary(job: Job, at: Time, alive: bool) -> dict[str, Any]:
    """One job of the list."""
    status = report.status(job, at, alive, with_nodes=False)
    goodput = report.goodput(job, at)
    return {
        "job": status.job,
        "state": status.state,
        "opened_at": status.opened_at,
        "wall_s": status.wall_s,
        "step": status.step,
        "steps_per_s": status.steps_per_s,
        "goodput": goodput.goodput,
        "incidents": len(job.incidents),
        "restarts": status.restarts,
        "world_size": status.world_size,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "last_incident": status.last_incident,
    }
