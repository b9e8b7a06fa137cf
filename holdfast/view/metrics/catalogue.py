"""Lists every metric of a job, once: its name, kind, unit and where its values come from.

Names and units follow the conventions of Prometheus: base units, the unit in the name, `_total` for
what only grows. Each metric is for one job, which its label names.

The number of series is bounded. Ranks have series of their own only in a small job; beyond that there
is one for each node, and beyond `MOST_NODES` there are only sums. Labels with words of users in them
are left out, except for the names of checkpointers, of which a script has a few.

A counter must never fall: Prometheus would take that for a restart and count all of it again. So time
is counted when the ledger has booked it, and an incident when it is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import get_args

from holdfast.core.ledger.books import Ledger
from holdfast.messages.reports import (
    CAUSES,
    CheckpointerReport,
    JobState,
    NodeReport,
    NodeState,
    RankReport,
    StatusReport,
    SupplyReport,
)
from holdfast.messages.usage import NodeUsage
from holdfast.view.metrics.model import Facts, Metric, Values

MOST_RANKS = 256
"""Ranks up to which each has series of its own."""
MOST_NODES = 2000
MOST_CHECKPOINTERS = 20


def _one(get: Callable[[Facts], float | None]) -> Values:
    """Make a metric of one value from a function of the facts."""
    return lambda facts: [({}, get(facts))]


def _status(get: Callable[[StatusReport], float | None]) -> Values:
    return lambda facts: [({}, get(facts.status))]


def _info(facts: Facts) -> Iterable[tuple[dict[str, str], float]]:
    supply = facts.status.supply
    return [({"platform": supply.platform if supply is not None else "none"}, 1.0)]


def _states(facts: Facts) -> Iterable[tuple[dict[str, str], float]]:
    return [({"state": state}, float(facts.status.state == state)) for state in get_args(JobState)]


def _seconds(facts: Facts) -> Iterable[tuple[dict[str, str], float]]:
    booked = facts.follower.job.of(Ledger).seconds
    return [({"cause": cause}, booked.get(cause, 0.0)) for cause in CAUSES if cause != "unknown"]


def _unbooked(facts: Facts) -> float:
    """Return the time whose cause is open: it may still turn out to be any of them."""
    booked = facts.follower.job.of(Ledger).seconds
    known = sum(seconds for cause, seconds in booked.items() if cause != "unknown")
    return max(0.0, sum(facts.goodput.seconds.values()) - known)


def _incidents(facts: Facts) -> Iterable[tuple[dict[str, str], float]]:
    # While one is open, another culprit may be found.
    counts = Counter(one.kind for one in facts.incidents if one.lost_s is not None)
    return [({"kind": kind}, float(count)) for kind, count in sorted(counts.items())]


def _nodes(facts: Facts) -> Iterable[tuple[dict[str, str], float]]:
    counts = Counter(node.state for node in facts.status.nodes)
    return [({"state": state}, float(counts[state])) for state in get_args(NodeState)]


def _stragglers(status: StatusReport) -> float:
    return sum(rank.straggler is not None for node in status.nodes for rank in node.ranks)


def _saves(facts: Facts) -> dict[tuple[str, str], tuple[float, int, float, int | None]]:
    """Find the newest save of each checkpointer and tier: time, step, seconds, size."""
    found: dict[tuple[str, str], tuple[float, int, float, int | None]] = {}
    for save in facts.follower.history.checkpoints.saves():
        for tier, entry in save.tiers.items():
            if not entry.error:
                key = (save.checkpointer, tier)
                found[key] = (entry.at, save.step, entry.seconds, entry.size_bytes)
    named = list(dict.fromkeys(name for name, _ in found))[:MOST_CHECKPOINTERS]
    return {key: value for key, value in found.items() if key[0] in named}


def _of_saves(get: Callable[[float, tuple[float, int, float, int | None]], float | None]) -> Values:
    def values(facts: Facts) -> Iterable[tuple[dict[str, str], float | None]]:
        for (name, tier), newest in _saves(facts).items():
            yield {"checkpointer": name, "tier": tier}, get(facts.now, newest)

    return values


def _of_checkpointers(get: Callable[[CheckpointerReport], float]) -> Values:
    return lambda facts: [
        ({"checkpointer": one.checkpointer}, get(one))
        for one in facts.status.checkpoints[:MOST_CHECKPOINTERS]
    ]


def _positions(facts: Facts) -> Iterable[tuple[dict[str, str], float]]:
    supply = facts.status.supply
    counts = supply.counts.items() if supply is not None else ()
    return [({"status": status}, float(count)) for status, count in counts]


def _of_supply(get: Callable[[SupplyReport], float]) -> Values:
    def values(facts: Facts) -> Iterable[tuple[dict[str, str], float | None]]:
        supply = facts.status.supply
        return [] if supply is None else [({}, get(supply))]

    return values


def _of_ranks(get: Callable[[RankReport], float | None]) -> Values:
    """Give each rank a series, if there are few."""

    def values(facts: Facts) -> Iterable[tuple[dict[str, str], float | None]]:
        ranks = [rank for node in facts.status.nodes for rank in node.ranks]
        if len(ranks) <= MOST_RANKS:
            for rank in ranks:
                yield {"rank": str(rank.rank)}, get(rank)

    return values


def _of_nodes(get: Callable[[NodeReport], float | None]) -> Values:
    def values(facts: Facts) -> Iterable[tuple[dict[str, str], float | None]]:
        if len(facts.status.nodes) <= MOST_NODES:
            for node in facts.status.nodes:
                yield {"node": node.node, "host": node.host}, get(node)

    return values


def _gpus(facts: Facts) -> Iterable[tuple[dict[str, str], float | None]]:
    if sum(len(n.usage.gpus) for n in facts.status.nodes if n.usage is not None) > MOST_NODES:
        return
    for node in facts.status.nodes:
        for index, gpu in enumerate(node.usage.gpus if node.usage is not None else ()):
            yield {"node": node.node, "host": node.host, "gpu": str(index)}, gpu.busy


def _usage(get: Callable[[NodeUsage], float | None]) -> Values:
    return _of_nodes(lambda node: None if node.usage is None else get(node.usage))


def _lowest(node: NodeReport) -> float | None:
    known = [s for rank in node.ranks for s in (rank.score, rank.own_score) if s is not None]
    return min(known, default=None)


def _node_step(node: NodeReport) -> float | None:
    return min((rank.step for rank in node.ranks), default=None)


METRICS: tuple[Metric, ...] = (
    Metric(
        "holdfast_job",
        "info",
        "",
        "The job, and the platform that provides its nodes.",
        _info,
        ("platform",),
    ),
    Metric(
        *("holdfast_up", "gauge", "", "Whether a process runs the job."),
        _one(lambda facts: float(facts.follower.alive)),
    ),
    Metric(
        "holdfast_job_state",
        "gauge",
        "",
        "1 for the state that the job is in.",
        _states,
        ("state",),
    ),
    Metric(
        *("holdfast_last_event_timestamp_seconds", "gauge", "seconds"),
        "Time of the newest event that was read.",
        _one(lambda facts: facts.follower.known_until),
    ),
    Metric(
        *("holdfast_goodput_ratio", "gauge", "ratio"),
        "Share of all rank-seconds that were steps finished for the first time.",
        _one(lambda facts: facts.goodput.goodput),
    ),
    Metric(
        *("holdfast_rank_seconds", "counter", "seconds"),
        "Time of all ranks by cause, as soon as its cause is certain.",
        _seconds,
        ("cause",),
    ),
    Metric(
        *("holdfast_rank_unbooked_seconds", "gauge", "seconds"),
        "Time of all ranks whose cause is not certain yet; with the causes, wall clock times ranks.",
        _one(_unbooked),
    ),
    Metric(
        *("holdfast_wall_seconds", "gauge", "seconds", "Time since the job opened."),
        _status(lambda status: status.wall_s),
    ),
    Metric(
        *(
            "holdfast_incidents",
            "counter",
            "",
            "Faults and what else went wrong, by kind, once over.",
        ),
        _incidents,
        ("kind",),
    ),
    Metric(
        *("holdfast_incidents_open", "gauge", "", "Incidents that are being repaired."),
        _one(lambda facts: sum(one.lost_s is None for one in facts.incidents)),
    ),
    Metric(
        *("holdfast_restarts", "counter", "", "Rounds that a fault made necessary."),
        _status(lambda status: status.restarts),
    ),
    Metric(
        *("holdfast_requeues", "counter", "", "How often the platform started the job again."),
        _status(lambda status: status.requeues),
    ),
    Metric(
        *("holdfast_lost_steps", "counter", "", "Steps that had to be taken again."),
        _one(lambda f: sum(one.lost_steps for one in f.incidents if one.lost_s is not None)),
    ),
    Metric(
        *("holdfast_step", "gauge", "", "Highest step that was ever finished."),
        _status(lambda status: status.step),
    ),
    Metric(
        *("holdfast_round", "gauge", "", "Number of the newest round."),
        _status(lambda status: status.round),
    ),
    Metric(
        *("holdfast_world_size", "gauge", "", "Ranks of the round in force."),
        _status(lambda status: status.world_size),
    ),
    Metric(
        *("holdfast_steps_per_second", "gauge", "", "Speed in the latest minutes of training."),
        _status(lambda status: status.steps_per_s),
    ),
    Metric(
        *("holdfast_samples_per_second", "gauge", "", "Samples of all ranks, as the steps."),
        _status(lambda status: status.samples_per_s),
    ),
    Metric(
        *("holdfast_loss", "gauge", "", "Loss that the script told last in the newest round."),
        _status(lambda status: None if status.loss is None else float(status.loss)),
    ),
    Metric(
        *("holdfast_loss_step", "gauge", "", "Step that had this loss."),
        _status(lambda status: status.loss_step),
    ),
    Metric(
        *("holdfast_samples", "counter", "", "Samples of steps finished for the first time."),
        _one(lambda facts: facts.goodput.samples),
    ),
    Metric(
        *("holdfast_no_step_seconds", "gauge", "seconds"),
        "Time since the last finished step, once that is longer than usual; else 0.",
        _status(lambda status: status.no_step_s or 0.0),
    ),
    Metric(
        *("holdfast_suspected_hang", "gauge", ""),
        "1 while a rank is suspected to hold the others up.",
        _status(lambda status: float(status.suspicion is not None)),
    ),
    Metric(
        *("holdfast_straggler_ranks", "gauge", "", "Ranks that are slow."), _status(_stragglers)
    ),
    Metric(
        "holdfast_nodes",
        "gauge",
        "",
        "Nodes by what they do; waiting ones are spares.",
        _nodes,
        ("state",),
    ),
    Metric(
        *("holdfast_nodes_excluded", "gauge", "", "Hosts that may not take part any more."),
        _status(lambda status: len(status.excluded)),
    ),
    Metric(
        *("holdfast_nodes_suspect", "gauge", "", "Nodes that faults point at."),
        _status(lambda status: len(status.suspects)),
    ),
    Metric(
        *("holdfast_checkpoint_step", "gauge", "", "Step of the newest save that is in a tier."),
        _of_saves(lambda now, newest: newest[1]),
        ("checkpointer", "tier"),
    ),
    Metric(
        *("holdfast_checkpoint_age_seconds", "gauge", "seconds"),
        "Time since the newest save was whole in a tier.",
        _of_saves(lambda now, newest: max(0.0, now - newest[0])),
        ("checkpointer", "tier"),
    ),
    Metric(
        *("holdfast_checkpoint_duration_seconds", "gauge", "seconds"),
        "How long that save took to get there.",
        _of_saves(lambda now, newest: newest[2]),
        ("checkpointer", "tier"),
    ),
    Metric(
        *("holdfast_checkpoint_size_bytes", "gauge", "bytes"),
        "Size of that save, where it is known.",
        _of_saves(lambda now, newest: newest[3]),
        ("checkpointer", "tier"),
    ),
    Metric(
        *("holdfast_checkpoint_failures", "gauge", "", "Failed writes to storage in a row."),
        _of_checkpointers(lambda one: one.failures),
        ("checkpointer",),
    ),
    Metric(
        *("holdfast_checkpoint_saves_skipped", "counter", "", "Saves that were skipped."),
        _of_checkpointers(lambda one: one.skipped),
        ("checkpointer",),
    ),
    Metric(
        *("holdfast_checkpoint_saves_failed", "counter", ""),
        "Saves that failed before they were whole in memory.",
        _of_checkpointers(lambda one: one.failed),
        ("checkpointer",),
    ),
    Metric(
        *("holdfast_supply_nodes_wanted", "gauge", "", "Nodes that are wanted of the platform."),
        _of_supply(lambda supply: supply.wanted),
    ),
    Metric(
        *("holdfast_supply_connected", "gauge", "", "Whether the platform's supplier is there."),
        _of_supply(lambda supply: float(supply.connected)),
    ),
    Metric(
        "holdfast_supply_nodes",
        "gauge",
        "",
        "Nodes wanted, by how far they are.",
        _positions,
        ("status",),
    ),
    Metric(
        *("holdfast_refused_events", "counter", "", "Events that did not fit and were refused."),
        _status(lambda status: sum(status.refused.values())),
    ),
    Metric(
        *("holdfast_failed_tasks", "counter", ""),
        "Background tasks that raised and were started again.",
        _status(lambda status: sum(status.failed_tasks.values())),
    ),
    Metric(
        *("holdfast_rank_step", "gauge", "", "Last finished step of a rank, in a small job."),
        _of_ranks(lambda rank: rank.step),
        ("rank",),
    ),
    Metric(
        *("holdfast_rank_speed_ratio", "gauge", "ratio"),
        "Speed of a rank relative to the fastest, in a small job.",
        _of_ranks(lambda rank: rank.score),
        ("rank",),
    ),
    Metric(
        *("holdfast_node_step", "gauge", "", "Lowest finished step of a node's ranks."),
        _of_nodes(_node_step),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_speed_ratio", "gauge", "ratio"),
        "Lowest speed of a node's ranks, relative to the fastest rank or to their own best.",
        _of_nodes(_lowest),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_cpu_ratio", "gauge", "ratio", "CPU time in use, of what the node may."),
        _usage(lambda usage: usage.cpu),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_memory_used_bytes", "gauge", "bytes", "Memory in use."),
        _usage(lambda usage: usage.memory_used_bytes if usage.memory_bytes else None),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_memory_limit_bytes", "gauge", "bytes", "Memory that the node may use."),
        _usage(lambda usage: usage.memory_bytes or None),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_network_receive_bytes_per_second", "gauge", ""),
        "Received from the network, RDMA included.",
        _usage(lambda usage: usage.received_bytes_per_s),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_network_transmit_bytes_per_second", "gauge", ""),
        "Sent to the network, RDMA included.",
        _usage(lambda usage: usage.sent_bytes_per_s),
        ("node", "host"),
    ),
    Metric(
        *("holdfast_node_gpu_ratio", "gauge", "ratio", "Time in which a kernel ran on a GPU."),
        _gpus,
        ("node", "host", "gpu"),
    ),
)
