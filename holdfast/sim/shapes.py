"""Draws small jobs of every shape, one for each seed, for a sweep to run over."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from holdfast.messages.supply import SupplyTerms
from holdfast.sim.cluster import SimSettings

SUPPLIED = 0.25
"""Share of jobs in chaos whose nodes a platform provides."""


def chaos(seed: int, liveness: bool = False) -> SimSettings:
    """Draw a few nodes in a few minutes of chaos, checked after each event."""
    rng = Random(f"shape {seed}")
    unit = rng.choice((1, 1, 1, 2))
    segment = rng.choice((1, 1, 1, 1, 2))
    step = 2 if 2 in (unit, segment) else 1
    nodes = step * rng.randrange(1, 9 if step == 1 else 5)
    least = step * rng.randrange(1, nodes // step + 1)
    step_s = rng.choice((0.05, 0.3, 1.0))
    return SimSettings(
        seed=seed,
        nodes=nodes,
        spares=rng.choice((0, 0, 1, 2, 4)),
        min_nodes=least,
        hours=rng.choice((30, 60, 120)) / 3600,
        slots=rng.randrange(1, 4),
        faults="chaos",
        check="every",
        liveness=liveness,
        node_unit=unit,
        segment=segment,
        max_restarts=rng.choice((None, None, None, None, None, 3, 40)),
        join_limit_s=rng.choice((None, None, None, 5.0, 30.0)),
        switch_size=rng.choice((2, 4)),
        step_s=step_s,
        save_every=rng.choice((0, 5, 20)) * (4 if step_s < 0.1 else 1),
        last_step=rng.choice((None, None, None, 400)),
        bug_step=rng.choice((None,) * 9 + (23,)),
        stop_step=rng.choice((None,) * 11 + (60,)),
        checkpoints=rng.random() < 0.6,
        node_check=rng.random() < 0.2,
        exclude_stragglers=rng.random() < 0.2,
        data=rng.random() < 0.5,
        inprocess=Random(f"inprocess {seed}").random() < 0.25,
        **(_supplied(seed) if segment == 1 else {}),
    )


def _supplied(seed: int) -> dict[str, Any]:
    """Draw whether a platform provides the nodes, and on which terms; it knows of no segments."""
    rng = Random(f"supplied {seed}")
    if rng.random() >= SUPPLIED:
        return {}
    terms = SupplyTerms(
        memory_mib=rng.choice((0, 1024, 1024)),
        memory_limit_mib=4096,
        relaunches=rng.choice((0, 3, 3, 100)),
        critical=rng.choice(((), (), (), (0,))),
        group=rng.choice((1, 1, 1, 2)),
        pending_s=rng.choice((None, None, 20.0, 60.0)),
    )
    return {"supply": terms, "stop_at_s": rng.choice((None,) * 9 + (25.0,))}


def supplied(seed: int, liveness: bool = False) -> SimSettings:
    """Draw a job in chaos whose nodes a platform provides."""
    found = _supplied(seed) or {"supply": SupplyTerms(memory_mib=1024, memory_limit_mib=4096)}
    return replace(chaos(seed, liveness), segment=1, **found)


def restarting(seed: int) -> SimSettings:
    """Draw a few nodes whose ranks train in a restartable function, for some minutes."""
    rng = Random(f"restarting {seed}")
    nodes = rng.randrange(1, 6)
    return SimSettings(
        seed=seed,
        nodes=nodes,
        spares=rng.choice((0, 1, 2)),
        min_nodes=rng.randrange(1, nodes + 1),
        hours=rng.choice((60, 120, 240)) / 3600,
        slots=rng.randrange(1, 4),
        faults="inprocess",
        check="every",
        liveness=True,
        step_s=rng.choice((0.1, 0.5)),
        save_every=rng.choice((0, 5, 20)),
        last_step=rng.choice((None, None, 100)),
        bug_step=rng.choice((None,) * 9 + (23,)),
        max_restarts=rng.choice((None,) * 7 + (20,)),
        checkpoints=rng.random() < 0.4,
        data=rng.random() < 0.5,
        inprocess=True,
        light=rng.random() < 0.2,
    )


def sharing(seed: int) -> SimSettings:
    """Draw four nodes that share a million records for some minutes, in worlds of two to four."""
    rng = Random(f"sharing {seed}")
    return SimSettings(
        seed=seed,
        nodes=4,
        spares=rng.choice((0, 1)),
        min_nodes=2,
        hours=300 / 3600,
        slots=rng.choice((1, 2)),
        faults="data",
        check="round",
        liveness=True,
        step_s=0.5,
        save_every=rng.choice((1, 3)),
        checkpoints=True,
        data=True,
        records=1_000_000,
    )


def partitions(seed: int) -> SimSettings:
    """Draw a few nodes in an hour of cut links, flaps, restarts and copied ids."""
    rng = Random(f"partitions {seed}")
    nodes = rng.randrange(1, 9)
    return SimSettings(
        seed=seed,
        nodes=nodes,
        spares=rng.choice((0, 1, 2)),
        min_nodes=rng.randrange(1, nodes + 1),
        hours=1.0,
        slots=rng.randrange(1, 3),
        faults="partitions",
        check="round",
        liveness=True,
        switch_size=rng.choice((2, 4)),
        step_s=2.0,
        save_every=20,
        checkpoints=rng.random() < 0.5,
    )
