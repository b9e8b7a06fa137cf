"""Says what a simulation has shown, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from holdfast.core import report as reports
from holdfast.messages.units import Seconds
from holdfast.sim import look
from holdfast.sim.clock import START
from holdfast.sim.cluster import Cluster

PHASES = ("teardown", "detect", "stop", "rendezvous", "start", "first_step")


def numbers(cluster: Cluster) -> dict[str, Any]:
    """Everything that `holdfast sim --json` prints."""
    settings, coordinator, invariants = cluster.settings, cluster.coordinator, cluster.invariants
    job, now = coordinator.job, cluster.clock.now
    books, ended = reports.goodput(job, now), look.ended(job)
    kinds = Counter(incident.kind for incident in look.incidents(job))
    return {
        "seed": settings.seed,
        "nodes": settings.nodes,
        "spares": settings.spares,
        "ranks": books.ranks,
        "faults": settings.faults,
        "simulated_s": round(now - START, 3),
        "wall_s": round(cluster.wall_s, 3),
        "events": coordinator.events,
        "messages": cluster.network.messages,
        "rounds": look.round_number(job),
        "steps": look.highest_step(job),
        "state": look.state(job),
        "exit_code": ended.code if ended else None,
        "reason": ended.reason if ended else None,
        "injected": dict(sorted(cluster.faults.counts.items())),
        "incidents": {kind: kinds[kind] for kind in sorted(kinds)},
        "functions": _functions(cluster),
        "goodput": books.goodput,
        "seconds": books.seconds,
        "phases": _phases(cluster),
        "invariants_checked": invariants.checked,
        "duplicates_dropped": invariants.duplicates,
        "coordinator_restarts": coordinator.restarts,
        "replays_verified": invariants.replays,
        "advanced_after_healing_s": cluster.alive_after_s,
        "log_digest": cluster.log.digest(),
    }


def _functions(cluster: Cluster) -> dict[str, int]:
    """What processes did with their restartable functions."""
    return dict(sorted(cluster.functions.counts.items())) if cluster.functions is not None else {}


def _phases(cluster: Cluster) -> dict[str, dict[str, Seconds]]:
    taken: dict[str, list[Seconds]] = {name: [] for name in PHASES}
    for incident in look.incidents(cluster.coordinator.job):
        for name, seconds in reports.phases(incident).items():
            taken[name].append(seconds)
    return {
        name: {"median": _quantile(all_, 0.5), "p99": _quantile(all_, 0.99)}
        for name, all_ in taken.items()
        if all_
    }


def _quantile(values: list[Seconds], share: float) -> Seconds:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


def lines(shown: dict[str, Any]) -> list[str]:
    """The same for people."""
    hours = shown["simulated_s"] / 3600
    total = sum(shown["seconds"].values())
    spent = sorted(shown["seconds"].items(), key=lambda item: -item[1])
    ended = "" if shown["exit_code"] is None else f": exit code {shown['exit_code']}"
    reason = f" ({shown['reason']})" if shown["reason"] else ""
    found = [
        f"seed {shown['seed']}: {shown['nodes']} nodes and {shown['spares']} spares,"
        f" {hours:.2f} h simulated in {shown['wall_s']:.1f} s",
        f"job: {shown['state']}{ended}{reason}, {shown['steps']} steps, {shown['rounds']} rounds",
        f"events: {shown['events']} taken in, {shown['messages']} messages,"
        f" {shown['duplicates_dropped']} duplicates dropped",
        f"injected: {_counts(shown['injected'])}",
        f"incidents: {_counts(shown['incidents'])}",
        f"goodput: {shown['goodput']:.2%}",
    ]
    if total:
        found[-1] += f" ({', '.join(f'{c} {s / total:.2%}' for c, s in spent if s / total > 5e-5)})"
    for name, took in shown["phases"].items():
        found.append(f"{name}: median {took['median']:.3f} s, p99 {took['p99']:.3f} s")
    found.append(
        f"invariants: {shown['invariants_checked']} checked; {shown['coordinator_restarts']}"
        f" coordinator restarts, {shown['replays_verified']} replays verified"
    )
    if shown["functions"]:
        found.append(f"restartable functions: {_counts(shown['functions'])}")
    if shown["advanced_after_healing_s"] is not None:
        found.append(f"healed: advanced after {shown['advanced_after_healing_s']:.1f} s")
    found.append(f"event log: {shown['log_digest']}")
    return found


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def sweep_lines(all_found: list[dict[str, Any]], violated: list[str]) -> list[str]:
    """Many seeds in a few lines."""
    ends = Counter("running" if f["exit_code"] is None else f["exit_code"] for f in all_found)
    injected: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for found in all_found:
        injected.update(found["injected"])
        functions.update(found["functions"])
    told = (
        [f"restartable functions: {_counts(dict(sorted(functions.items())))}"] if functions else []
    )
    return [
        f"{len(all_found) + len(violated)} seeds, {len(violated)} of them violated an invariant",
        f"exit codes: {', '.join(f'{code}: {count}' for code, count in ends.most_common())}",
        f"injected: {_counts(dict(sorted(injected.items())))}",
        *told,
        f"events: {sum(f['events'] for f in all_found)},"
        f" rounds: {sum(f['rounds'] for f in all_found)},"
        f" duplicates dropped: {sum(f['duplicates_dropped'] for f in all_found)}",
        f"invariants: {sum(f['invariants_checked'] for f in all_found)} checked,"
        f" {sum(f['replays_verified'] for f in all_found)} replays verified",
        f"simulated {sum(f['simulated_s'] for f in all_found) / 3600:.1f} h"
        f" in {sum(f['wall_s'] for f in all_found):.1f} s",
    ]
