"""The simulated platform: ten thousand nodes of which two thousand fail at once, and chaos.

The simulation runs the real core; the cost is that of the whole simulation, which has the nodes' part
of the work too, so it bounds the coordinator's from above.
"""

from __future__ import annotations

import time

from harness.setting import Setting, say

from holdfast.messages.supply import SupplyPlan, SupplyTerms
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.sim.invariants import Violated
from holdfast.sim.shapes import supplied
from supplying.lines import Line

NODES = 10_000
FAILED = 2_000
FAIL_AFTER_S = 100.0
CHAOS_JOBS = 500


def run(setting: Setting) -> list[Line]:
    plans = Line("sim", f"plans for {FAILED:,} of {NODES:,} nodes that fail at once", "plans", 1.0)
    cost = Line("sim", f"CPU of the whole simulation of that, {NODES:,} joins included")
    plans_made, cpu_s = _mass_failure()
    plans.values.append(plans_made)
    cost.values.append(cpu_s)
    say(f"sim, {plans.what}: {plans_made}; {cpu_s:.1f} s of CPU")
    chaos = Line("sim", f"{CHAOS_JOBS} jobs in chaos that broke an invariant", "jobs", 0.0)
    chaos.values.append(float(_broken(chaos)))
    return [plans, cost, chaos]


def _mass_failure() -> tuple[float, float]:
    """Count the plans that ask for nodes after a mass failure, and measure CPU time."""
    settings = SimSettings(
        seed=1,
        nodes=NODES,
        spares=0,
        min_nodes=NODES // 2,
        hours=0.05,
        slots=1,
        faults="none",
        check="never",
        supply=SupplyTerms(),
    )
    cluster = Cluster(settings)
    platform, made = cluster.platform, 0
    assert platform is not None
    planned = cluster.invariants.planned

    def count(plan: SupplyPlan) -> None:
        nonlocal made
        made += bool(plan.ask) and cluster.clock.now > failed_at
        planned(plan)

    def fail() -> None:
        for node in platform.alive()[:FAILED]:
            platform.end(node, "evicted")

    failed_at = cluster.clock.now + FAIL_AFTER_S
    cluster.invariants.planned = count  # type: ignore[method-assign]
    cluster.clock.after(FAIL_AFTER_S, fail)
    begun = time.process_time()
    cluster.run()
    return float(made), time.process_time() - begun


def _broken(line: Line) -> int:
    broken = 0
    for seed in range(CHAOS_JOBS):
        try:
            Cluster(supplied(seed, liveness=True)).run()
        except Violated as violation:
            broken += 1
            line.notes.append(str(violation))
            say(f"sim: {violation}")
    return broken
