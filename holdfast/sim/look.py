"""Reads a job's state for the simulator: the only place in it that knows how the core keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.commits.state import Commits
from holdfast.core.job import Job
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.core.membership.seating import choose
from holdfast.core.recovery.incidents import QUIET
from holdfast.core.shards.account import account
from holdfast.core.shards.state import Shards
from holdfast.core.states import Ended, Stopping
from holdfast.core.suspects.state import Suspects
from holdfast.core.view import JobLoss
from holdfast.messages.checkpoints import SnapshotId
from holdfast.messages.records import Incident, JobResult, World
from holdfast.messages.reports import DataAccount
from holdfast.messages.units import NodeId, RoundNumber, Seconds, Time


def world(job: Job) -> World | None:
    """Return the world in force."""
    return job.world


def round_number(job: Job) -> RoundNumber:
    return job.membership.round


def is_member(job: Job, node: NodeId) -> bool:
    return job.membership.has(node)


def known(job: Job) -> list[NodeId]:
    """Return all nodes that may have workers, or get some."""
    return job.membership.known()


def placed_hosts(job: Job) -> Mapping[NodeId, str]:
    """Return the hosts of the nodes that have a place."""
    return {node: candidate.spec.host for node, candidate in job.membership.placed.items()}


def silence_s(job: Job) -> Seconds:
    """Return how long a node may be silent before it is given up."""
    return job.membership.silence_s


def placed_round(job: Job, node: NodeId) -> RoundNumber:
    """Return the round in which a node has places; 0 if it has none."""
    return job.membership.round_of(node)


def is_absent(job: Job, node: NodeId) -> bool:
    """Whether a member has no stream now."""
    return node in job.membership.absent


def node_count(job: Job) -> int:
    return job.membership.count()


def is_stopping_nodes(job: Job) -> bool:
    """Whether nodes still have workers of a broken round."""
    return bool(job.membership.busy or job.membership.leaving)


def could_be_larger(job: Job) -> bool:
    """Whether the nodes that are there could form a larger world than the one in force."""
    m = job.membership
    size = len(choose({**m.placed, **m.waiting}, m.terms))
    return job.world is None or len(job.world.places) < size


def standing_requests(job: Job) -> Mapping[str, bool]:
    """Return the requests that stand, and whether the node of each is in the job."""
    return {p.request: bool(p.node) for p in job.supply.positions.values() if p.stands}


def wanted_count(job: Job) -> int:
    """Return how many nodes are wanted of the platform, less what it was given up to ask for."""
    return job.supply.wanted(job)


def given_up(job: Job) -> Mapping[int, str]:
    """Return the positions that are not asked for again, and why."""
    return job.supply.given_up


def overspent(job: Job) -> str:
    """Say which position has had more relaunches or memory than it may; nothing if none has."""
    terms = job.supply.terms
    for one in job.supply.positions.values():
        if one.spent > terms.relaunches or one.memory_mib > terms.memory_limit_mib:
            return f"position {one.number} was relaunched {one.spent} times, {one.memory_mib} MiB"
    return ""


def scale(job: Job) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes that are wanted now."""
    return job.terms.min_nodes, job.terms.max_nodes


def excluded(job: Job) -> Mapping[str, str]:
    """Return the hosts that are not let in again."""
    return job.membership.excluded


def suspects(job: Job) -> Mapping[str, str]:
    """Return the hosts that faults point at, and what became of each."""
    return {machine: one.state for machine, one in job.of(Suspects).all.items()}


def state(job: Job) -> str:
    return job.state.name


def ended(job: Job) -> JobResult | None:
    return job.result


def is_closed(job: Job) -> bool:
    return isinstance(job.state, Ended)


def is_broken(job: Job) -> bool:
    """Whether a fault broke the round and was not judged yet."""
    return isinstance(job.state, Stopping)


def rank_count(job: Job) -> int:
    return len(job.ranks)


def ranks(job: Job) -> Iterable[int]:
    return job.ranks


def unstarted(job: Job) -> int:
    return job.unstarted


def unstepped(job: Job) -> int:
    return job.unstepped


def highest_step(job: Job) -> int:
    return job.highest


def loss(job: Job) -> JobLoss | None:
    return job.loss


def incidents(job: Job) -> list[Incident]:
    return job.incidents


def breaking_incidents(job: Job) -> list[Incident]:
    """Return the incidents that broke a round."""
    return [incident for incident in job.incidents if incident.kind not in QUIET]


def last_fault(job: Job) -> Incident | None:
    return job.recovery.last_fault


def resumed_at(job: Job) -> int | None:
    """Return the step from which the ranks of the round went on."""
    return job.resumed_at


def stored(job: Job) -> list[SnapshotId]:
    """Return what the core holds to be on storage."""
    return [book.stored for book in job.of(Commits).books.values() if book.stored is not None]


def accounts(job: Job) -> dict[str, DataAccount]:
    """Return what the committed history has used of each data set."""
    return account(job.of(Shards))


def booked_s(job: Job, now: Time) -> tuple[Seconds, Seconds]:
    """Return the seconds that the ledger has booked, and those that it should have."""
    seconds = sum(books.seconds_until(job.of(Ledger), now).values())
    return seconds, books.rank_seconds(job.of(Ledger), now)


def productive_s(job: Job) -> Seconds:
    return job.of(Ledger).seconds.get("productive", 0.0)
