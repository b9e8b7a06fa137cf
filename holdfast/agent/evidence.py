"""Looks closely at workers that stand still, before anybody ends them.

Everything is taken from outside and within a limit: stacks by py-spy, the process's state from the
kernel, what the vitals say, the last lines of the log. Only the flight recorder needs the worker's
help; the thread that beats writes it to a file, unless something holds the interpreter's lock. Where
py-spy may not look, the worker is asked for its stacks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.diagnosis import flight, stacks
from holdfast.diagnosis.stacks import Stacks, Subject
from holdfast.errors import HoldfastError
from holdfast.messages.evidence import Collective, RankEvidence, fit
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber
from holdfast.shm.vital_signs import Signs, Vitals

log = logging.getLogger("holdfast.agent")

DUMP_LIMIT_S = 0.3
LOOK_AGAIN_S = 0.02


@dataclass(frozen=True)
class Examined:
    """A worker that somebody wants to look at."""

    rank: Rank
    pid: int
    vitals: Vitals
    step: StepNumber
    stepped_at: float
    flight: Path
    log_tail: str
    stacks_fd: int | None = None
    """What it writes its stacks to when it is asked for them; None when it cannot be."""


async def examine(
    node: NodeId, round: RoundNumber, workers: Sequence[Examined], limit_s: float
) -> list[RankEvidence]:
    """All that can be seen of these workers within the limit."""
    now = time.monotonic()
    signs = {worker.rank: worker.vitals.read() for worker in workers}
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.flight.unlink(missing_ok=True)
        worker.vitals.want_dump()
    with contextlib.ExitStack() as files:
        subjects = [_subject(worker, signs[worker.rank], files) for worker in workers]
        found, _ = await asyncio.gather(
            stacks.collect(subjects, limit_s),
            _await_dumps(workers, min(DUMP_LIMIT_S, limit_s)),
        )
    return [
        fit(_evidence(node, round, worker, signs[worker.rank], now, found[worker.pid]))
        for worker in workers
    ]


def _subject(worker: Examined, signs: Signs, files: contextlib.ExitStack) -> Subject:
    """Its file for stacks stays open, also if it ends meanwhile."""
    told = None if worker.stacks_fd is None else os.dup(worker.stacks_fd)
    if told is not None:
        files.callback(os.close, told)
    return Subject(worker.pid, signs.thread, told)


async def _await_dumps(workers: Sequence[Examined], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not all(w.flight.exists() for w in workers):
        await asyncio.sleep(LOOK_AGAIN_S)


def _evidence(
    node: NodeId, round: RoundNumber, worker: Examined, signs: Signs, now: float, seen: Stacks
) -> RankEvidence:
    """What its vitals said at that time, before anybody had paused it to look at it."""
    collectives, missing = _collectives(worker.flight)
    return RankEvidence(
        node=node,
        round=round,
        rank=worker.rank,
        pid=worker.pid,
        process_state=seen.state,
        step=worker.step,
        sections=tuple(section.name for section in signs.sections if section.own),
        beat_age_s=max(0.0, now - signs.beat_at) if signs.beat_at else None,
        since_step_s=max(0.0, now - worker.stepped_at) if worker.stepped_at else None,
        stacks=seen.threads,
        stack_source=seen.source,
        collectives=collectives,
        log_tail=worker.log_tail,
        missing=(*seen.missing, *missing),
    )


def _collectives(path: Path) -> tuple[tuple[Collective, ...] | None, tuple[str, ...]]:
    try:
        return flight.read(path.read_bytes()), ()
    except FileNotFoundError:
        return None, ("the flight recorder was not dumped in time",)
    except (OSError, HoldfastError) as error:
        return None, (f"the flight recorder cannot be read: {error}",)
