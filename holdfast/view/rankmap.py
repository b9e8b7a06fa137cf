"""Says in one character what each rank does now, so that ten thousand ranks are ten kilobytes.

r running             w waiting for others      c saving           s slow
h holds the others    i starting                f finished         - not there
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core import report
from holdfast.core.commits.state import Commits
from holdfast.core.hangs import rules as hangs
from holdfast.core.hangs.state import Hangs
from holdfast.core.job import Job
from holdfast.core.stragglers.windows import Stragglers
from holdfast.core.view import RankState
from holdfast.messages.units import NodeId, Rank


class NodeRow(NamedTuple):
    """A node and its ranks, as far as a map shows them."""

    node: NodeId
    host: str
    state: str
    first_rank: int
    """-1 for a node without ranks."""
    ranks: int
    sample: None
    """What its machine was busy with, once agents say so."""
    warm: bool
    """Whether a rank given to it would start at once."""


def ranks(job: Job) -> str:
    """Describe every rank of the newest round."""
    if job.world is None and job.result is None:
        return "-" * len(job.ranks)
    known = job.of(Hangs)
    held = set(hangs.suspects(known)) if known.suspicion is not None else set()
    waiting = hangs.waiting(known)
    saving = _saving(job)
    slow = {
        rank
        for rank, speed in job.of(Stragglers).ranks.items()
        if speed.relative.flagged or speed.individual.flagged
    }
    return "".join(
        _letter(rank, state, held, waiting, saving, slow) for rank, state in job.ranks.items()
    )


def _letter(
    rank: Rank,
    state: RankState,
    held: set[Rank],
    waiting: set[Rank],
    saving: set[NodeId],
    slow: set[Rank],
) -> str:
    if state.finished:
        return "f"
    if not state.stepped:
        return "i"
    if rank in held:
        return "h"
    if rank in waiting:
        return "w"
    if state.node in saving:
        return "c"
    return "s" if rank in slow else "r"


def _saving(job: Job) -> set[NodeId]:
    """Nodes that have not sealed a snapshot which others have."""
    found: set[NodeId] = set()
    for book in job.of(Commits).books.values():
        newest = book.snapshots[-1] if book.snapshots else None
        if newest is None or newest.counts or newest.id.round != job.membership.round:
            continue
        if newest.sealed_by:
            found |= job.membership.placed.keys() - newest.sealed_by.keys()
    return found


def nodes(job: Job) -> list[NodeRow]:
    """List all nodes, with their places in the world."""
    first: dict[NodeId, int] = {}
    count: dict[NodeId, int] = {}
    for rank, state in job.ranks.items():
        first[state.node] = min(first.get(state.node, rank), rank)
        count[state.node] = count.get(state.node, 0) + 1
    found = []
    for node in job.membership.nodes():
        candidate = job.membership.find(node)
        assert candidate is not None
        found.append(
            NodeRow(
                node,
                candidate.spec.host,
                report.node_state(job, node),
                first.get(node, -1),
                count.get(node, 0),
                None,
                candidate.warm,
            )
        )
    return found
