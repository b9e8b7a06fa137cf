"""Examines workers that show no progress, before they are stopped, and sends what it saw.

Everything is taken from outside and within a limit: stacks by py-spy, the process state from the
kernel, the vital signs, the last lines of the log. Only the flight recorder needs the worker's
help; its heartbeat thread writes it to a file, unless another thread keeps the GIL. Where py-spy
may not read, the worker writes its stacks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.diagnosis import flight, stacks
from holdfast.diagnosis.flight import Recorded
from holdfast.diagnosis.stacks import Stacks, Subject
from holdfast.errors import HoldfastError
from holdfast.messages.evidence import Collective, RankCollectives, RankEvidence, fit
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber
from holdfast.messages.wire import EvidenceTaken
from holdfast.shm.vital_signs import Signs, Vitals

DUMP_LIMIT_S = 0.3
LOOK_AGAIN_S = 0.02
MOST_LAST = 8
"""Most collectives that are told of a worker that failed."""


@dataclass(frozen=True)
class Examined:
    """A worker to examine."""

    rank: Rank
    pid: int
    vitals: Vitals
    step: StepNumber
    stepped_at: float
    flight: Path
    log_tail: str
    stacks_fd: int | None = None
    """The file it writes its stacks to on request; None if it cannot."""
    ended: bool = False
    """Whether its script has ended."""
    returned: bool = False
    """Whether its restartable function has returned, and not on all ranks yet."""
    locked: bool = False
    """Whether every thread waits for a lock that only this process could release."""
    idle_s: Seconds | None = None
    """How long nothing of it has moved; None if unknown."""


@dataclass(frozen=True)
class Departed:
    """A worker whose process is gone, and whose script had ended."""

    rank: Rank
    pid: int
    step: StepNumber
    flight: Path


async def examine(
    node: NodeId,
    round: RoundNumber,
    workers: Sequence[Examined],
    limit_s: float,
    native: bool = True,
) -> list[RankEvidence]:
    """Return all that can be seen of these workers within the limit; without native stacks none of
    them is paused."""
    if not workers:
        return []
    now = asyncio.get_running_loop().time()
    signs = {worker.rank: worker.vitals.read() for worker in workers}
    for worker in workers:
        if not worker.ended:  # Its last dump may be the only one: its heartbeat may have ended.
            _remove(worker.flight)
        worker.vitals.want_dump()
    with contextlib.ExitStack() as files:
        subjects = [_subject(worker, signs[worker.rank], files) for worker in workers]
        found, _ = await asyncio.gather(
            stacks.collect(subjects, limit_s, native),
            _await_dumps(workers, now + min(DUMP_LIMIT_S, limit_s)),
        )
    evidence = [
        fit(_evidence(node, round, worker, signs[worker.rank], now, found[worker.pid]))
        for worker in workers
    ]
    for worker in workers:
        if not worker.ended:  # A dump that is there when it ends is its last.
            _remove(worker.flight)
    return evidence


def of_departed(node: NodeId, round: RoundNumber, gone: Sequence[Departed]) -> list[RankEvidence]:
    """Return what is left of workers that have ended: the collectives that they had entered."""
    found = []
    for one in gone:
        recorded, missing = _recorded(one.flight)
        evidence = RankEvidence(
            node=node,
            round=round,
            rank=one.rank,
            pid=one.pid,
            process_state="X",
            step=one.step,
            ended=True,
            collectives=None if recorded is None else recorded.collectives,
            pairs=None if recorded is None else recorded.pairs,
            evicted=recorded is not None and recorded.evicted,
            world=1 if recorded is None else recorded.world,
            missing=missing,
        )
        found.append(fit(evidence))
    return found


def last_collectives(path: Path) -> tuple[Collective, ...]:
    """Return the newest collectives that a worker entered before its script failed, if it said so."""
    recorded, _ = _recorded(path)
    return () if recorded is None else recorded.collectives[:MOST_LAST]


async def last_of(workers: Sequence[Examined]) -> tuple[RankCollectives, ...]:
    """Return the newest collectives of these workers, as far as they say so in time."""
    for worker in workers:
        worker.vitals.want_dump()  # A dump that is there is its last: its script has just failed.
    await _await_dumps(workers, asyncio.get_running_loop().time() + DUMP_LIMIT_S)
    found = [(one.rank, _recorded(one.flight)[0]) for one in workers]
    return tuple(
        RankCollectives(rank=rank, last=seen.collectives[:MOST_LAST], place=seen.place)
        for rank, seen in found
        if seen is not None and seen.collectives
    )


def messages(number: int, evidence: Sequence[RankEvidence]) -> list[EvidenceTaken]:
    """Split evidence into one message a rank: a frame has a size limit, and a node may have many
    ranks."""
    if not evidence:
        return [EvidenceTaken(examination=number, evidence=())]
    last = len(evidence) - 1
    return [
        EvidenceTaken(examination=number, evidence=(one,), more=index < last)
        for index, one in enumerate(evidence)
    ]


def _subject(worker: Examined, signs: Signs, files: contextlib.ExitStack) -> Subject:
    """Keep its file for stacks open, even if the worker ends meanwhile."""
    stacks_fd = None if worker.stacks_fd is None else os.dup(worker.stacks_fd)
    if stacks_fd is not None:
        files.callback(os.close, stacks_fd)
    return Subject(worker.pid, signs.thread, stacks_fd)


async def _await_dumps(workers: Sequence[Examined], until: float) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < until and not all(worker.flight.exists() for worker in workers):
        await asyncio.sleep(LOOK_AGAIN_S)


def _evidence(
    node: NodeId, round: RoundNumber, worker: Examined, signs: Signs, now: float, seen: Stacks
) -> RankEvidence:
    """Put together what was seen; the vital signs are from before py-spy paused the worker."""
    recorded, missing = _recorded(worker.flight)
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
        ended=worker.ended,
        returned=worker.returned,
        locked=worker.locked,
        idle_s=worker.idle_s,
        left_s=_left_s(signs, now),
        stacks=seen.threads,
        stack_source=seen.source,
        collectives=None if recorded is None else recorded.collectives,
        blocked=recorded is not None and recorded.blocked,
        pairs=None if recorded is None else recorded.pairs,
        evicted=recorded is not None and recorded.evicted,
        world=1 if recorded is None else recorded.world,
        loaders=seen.loaders,
        log_tail=worker.log_tail,
        missing=(*seen.missing, *missing),
    )


def _left_s(signs: Signs, now: float) -> Seconds | None:
    """Return how long the process group lets a waiting rank wait; None if that is unknown."""
    if not signs.waits or not signs.group_timeout_s:
        return None
    return max(0.0, signs.group_timeout_s - (now - signs.line_at))


def _recorded(path: Path) -> tuple[Recorded | None, tuple[str, ...]]:
    try:
        return flight.read(path.read_bytes()), ()
    except FileNotFoundError:
        return None, ("the flight recorder was not dumped in time",)
    except (OSError, HoldfastError) as error:
        return None, (f"the flight recorder cannot be read: {error}",)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
