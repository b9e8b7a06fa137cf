"""A job in words and numbers: what `status`, `incidents`, `goodput` and the summary say.

Everything here is derived from the job's state at a given time, so it is the same whether the job is
running, over, or replayed from its journal on another machine.
"""

from __future__ import annotations

from typing import Any, get_args

from msgspec import to_builtins

from holdfast.core import drills
from holdfast.core.job import Job
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Span
from holdfast.core.recovery.rules import subject
from holdfast.core.stragglers import windows as stragglers
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.records import Cause, Incident
from holdfast.messages.units import Seconds, Time

CAUSES: tuple[Cause, ...] = get_args(Cause)


def status(job: Job, now: Time, alive: bool) -> dict[str, Any]:
    """Where the job stands. `alive` is whether somebody is still running it."""
    state: str = job.state
    if not alive and state != "ended":
        state = "lost"
    ranks = _ranks(job)
    world = job.membership.world
    pace = job.pace.per_s if job.pace is not None and state == "running" else None
    return {
        "job": job.name,
        "state": state,
        "round": job.membership.round,
        "world_size": world.size if world is not None else len(job.ranks),
        "step": job.highest,
        "steps_per_s": None if pace is None else round(pace, 3),
        "wall_s": round(_until(job, now) - job.opened_at, 3),
        "restarts": job.recovery.restarts,
        "nodes": [_node(job, node, ranks.get(node, [])) for node in job.membership.nodes()],
        "checkpoints": _checkpoints(job),
        "excluded": job.excluded,
        "faults": to_builtins(drills.faults(job)),
        "last_incident": incident_line(job, job.incidents[-1]) if job.incidents else None,
        "exit_code": job.ended.code if job.ended else None,
        "reason": job.ended.reason if job.ended else None,
    }


def _ranks(job: Job) -> dict[str, list[dict[str, Any]]]:
    """By node: how far each rank is, and how fast beside the best and beside its own best."""
    found: dict[str, list[dict[str, Any]]] = {}
    scores = stragglers.scores(job.stragglers)
    for number, rank in job.ranks.items():
        score = scores.get(number, stragglers.RankScores(None, None))
        shown = {
            "rank": number,
            "pid": rank.pid,
            "step": rank.step,
            "finished": rank.finished,
            "score": _rounded(score.relative),
            "own_score": _rounded(score.individual),
            "straggler": score.straggler,
        }
        found.setdefault(rank.node, []).append(shown)
    return found


def _checkpoints(job: Job) -> list[dict[str, Any]]:
    """What each checkpointer has in memory and on storage."""
    found = []
    for name, book in job.commits.books.items():
        whole = [s.id.step for s in book.snapshots if s.counts and s.alive]
        found.append(
            {
                "checkpointer": name,
                "in_memory": max(whole, default=None),
                "on_storage": book.stored.step if book.stored is not None else None,
                "writing": book.writing.snapshot.step if book.writing is not None else None,
                "failures": book.failures,
            }
        )
    return found


def _node(job: Job, node: Any, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    m = job.membership
    candidate = m.placed.get(node) or m.busy.get(node) or m.waiting[node]
    place = "placed" if node in m.placed else "busy" if node in m.busy else "waiting"
    if job.checking.check is not None and node in job.checking.check.owed:
        place = "testing"
    return {"node": node, "host": candidate.spec.host, "state": place, "ranks": ranks}


def goodput(job: Job, now: Time) -> dict[str, Any]:
    """The ledger: seconds by cause, over all ranks; they add up to wall_s × ranks."""
    until = _until(job, now)
    wall_s = until - job.opened_at
    seconds = books.seconds_until(job.ledger, until)
    total = books.rank_seconds(job.ledger, until)
    ranks = total / wall_s if wall_s > 0 else float(len(job.ranks))
    whole = round(ranks)
    return {
        "job": job.name,
        "wall_s": round(wall_s, 6),
        "ranks": whole if abs(ranks - whole) < 0.005 else round(ranks, 3),
        "seconds": {cause: round(seconds.get(cause, 0.0), 6) for cause in CAUSES},
        "goodput": round(seconds.get("productive", 0.0) / total, 6) if total > 0 else 0.0,
    }


def incidents(job: Job) -> list[dict[str, Any]]:
    """Each fault: what, where, what was done, and what it cost."""
    return [
        {
            "id": incident.id,
            "kind": incident.kind,
            "node": incident.node,
            "rank": incident.rank,
            "round": incident.round,
            "step": incident.step,
            "at": incident.fault_at,
            "signature": incident.signature,
            "action": incident.action,
            "phases": {name: round(s, 6) for name, s in phases(incident).items()},
            "lost_s": _rounded(lost_s(incident)),
            "lost_steps": incident.lost_steps,
            "also": incident.also,
            "detail": incident.detail,
            "injected": drills.injected_by(job, incident) or None,
        }
        for incident in job.incidents
    ]


def phases(incident: Incident) -> dict[str, Seconds]:
    """How long each part of the repair took, in order, as far as it came; together what was lost.

    Clocks of several nodes tell these moments, which need not agree to the millisecond."""
    marks = [
        ("detect", incident.opened_at),
        ("stop", incident.stopped_at),
        ("rendezvous", incident.frozen_at),
        ("start", incident.started_at),
        ("first_step", incident.back_at),
    ]
    found: dict[str, Seconds] = {}
    before = incident.fault_at
    for name, mark in marks:
        if mark is None:
            break
        until = mark if incident.back_at is None else min(mark, incident.back_at)
        found[name] = max(0.0, until - before)
        before = max(before, until)
    return found


def lost_s(incident: Incident) -> Seconds | None:
    """From the fault to the first good step, or to whatever ended the incident instead."""
    end = incident.back_at or incident.closed_at
    return None if end is None else max(0.0, end - incident.fault_at)


def incident_line(job: Job, incident: Incident) -> str:
    """One incident in one line."""
    line = f"{_what(incident)} at step {incident.step}"
    injected = drills.injected_by(job, incident)
    if injected:
        line += f" [injected: {injected}]"
    if incident.closed_at is None:
        return f"{line}: being repaired"
    if incident.back_at is None:
        return f"{line}: {incident.action}"
    shown = ", ".join(
        f"{name.replace('_', ' ')} {took:.2f}"
        for name, took in phases(incident).items()
        if name != "rendezvous" or took >= 0.005
    )
    return f"{line}: back in {lost_s(incident):.2f} s ({shown}), {incident.lost_steps} steps redone"


def _what(incident: Incident) -> str:
    if incident.kind == "storage":
        return f"{incident.signature} ({incident.detail})"
    if incident.kind == "hang" and incident.detail:
        return incident.detail  # The verdict, which names ranks and lines.
    verb = {"exception": "raised ", "exit": "ended with "}.get(incident.kind, "")
    return f"{subject(incident)} {verb}{incident.signature}"


def summary(job: Job, now: Time) -> list[str]:
    """What `holdfast run` prints at the end."""
    books_now = goodput(job, now)
    lines = [_headline(job)]
    spent = sorted(books_now["seconds"].items(), key=lambda item: -item[1])
    total = sum(books_now["seconds"].values())
    if job.highest and total:
        shown = ", ".join(f"{cause} {s / total:.1%}" for cause, s in spent if s / total >= 0.001)
        lines.append(
            f"{job.highest} steps in {books_now['wall_s']:.1f} s on {books_now['ranks']} ranks,"
            f" goodput {books_now['goodput']:.1%} ({shown})"
        )
    many = len(job.incidents)
    if many > 10:
        lines.append(f"{many} incidents, the last 10 of them (`holdfast incidents` has all):")
    lines += [f"incident {i.id}: {incident_line(job, i)}" for i in job.incidents[-10:]]
    return lines


def _headline(job: Job) -> str:
    if job.ended is None:
        return f"job {job.name}: not ended properly"
    code, reason = job.ended.code, job.ended.reason
    if code == 0:
        return f"job {job.name} finished"
    advice = {
        EXIT_TRY_AGAIN: " (try again)",
        EXIT_DO_NOT_REQUEUE: " (do not requeue: it would fail again)",
    }.get(code, "")
    return f"job {job.name} ended with exit code {code}{advice}: {reason}"


def trace(job: Job, spans: list[Span]) -> dict[str, Any]:
    """The job in the trace format that Perfetto and chrome://tracing open."""
    zero = job.opened_at
    events: list[dict[str, Any]] = [_named(0, f"job {job.name}"), _named(1, "ranks")]
    events += [_thread(rank) for rank in sorted({span.rank for span in spans})]
    for span in spans:
        steps = span.cause in ("productive", "redo")
        name = f"{span.cause} to step {span.step}" if steps else span.cause
        where: dict[str, Any] = {"round": span.round, "step": span.step}
        events.append(_slice(1, span.rank, name, span.cause, span.begin, span.end, zero, where))
    for incident in job.incidents:
        end = incident.back_at or incident.closed_at or incident.opened_at
        arguments = {"line": incident_line(job, incident), "also": incident.also}
        name = f"incident {incident.id}: {incident.signature}"
        events.append(_slice(0, 0, name, "incident", incident.fault_at, end, zero, arguments))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(
    pid: int,
    tid: int,
    name: str,
    category: str,
    begin: Time,
    end: Time,
    zero: Time,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": round((begin - zero) * 1e6),
        "dur": max(1, round((end - begin) * 1e6)),
        "args": arguments,
    }


def _named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}


def _thread(rank: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "pid": 1,
        "tid": rank,
        "name": "thread_name",
        "args": {"name": f"rank {rank}"},
    }


def _until(job: Job, now: Time) -> Time:
    return job.ended.at if job.ended is not None and job.closed else now


def _rounded(seconds: Seconds | None) -> Seconds | None:
    return None if seconds is None else round(seconds, 6)
