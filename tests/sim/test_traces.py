"""The light model of an agent does what the real supervisor does.

Both go through the same job and the same faults; what differs is timing. So for each node the order of
what it joins, starts, stops and leaves has to be the same, and for each of its rounds what else was
said and ordered. How often progress is told is left out, and so are orders that are repeated because a
node takes long to stop, and what only the supervisor has: stall detection and injected faults.
"""

import io
import json
from collections import defaultdict
from random import Random

import pytest

from holdfast.messages.requests import ExcludeNode
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.sim.faults import raised
from holdfast.sim.rank import PARTING
from holdfast.sim.rates import SCHEDULES, Schedule

ORDERED = {
    *("NodeJoined", "NodeReady", "NodeLeaving", "NodeLeft", "StreamEnded", "NodeResumed"),
    *("LeaseEnded", "StartWorkers", "StopWorkers", "Finish"),
}
"""What has to come in the same order."""
ONLY_SUPERVISED = {"RanksStalled", "Progress", "Examine"}
BY_CHANCE = {"CommitCheckpoint", "CheckpointWritten"}
"""Done by the node that happens to be the last to write its shards."""
WHEN_SLOW = {"WorkersKilled"}
SPACING_S = 45.0
AWAY = Schedule(rates={}, away_s=(10.0, 10.0))
"""A host is away until its silence was noticed and the others have stopped, however long that takes:
the next round begins without it."""


def a_rank(cluster, host):
    agent = host.agent
    ranks = [] if agent is None or agent.dead else list(agent.ranks.values())
    return ranks[-1] if ranks else None


def on_rank(act):
    def fault(cluster, host):
        one = a_rank(cluster, host)
        if one is not None:
            act(one)

    return fault


def on_agent(act):
    def fault(cluster, host):
        if host.agent is not None and not host.agent.dead:
            act(cluster, host, host.agent)

    return fault


FAULTS = {
    "kill": on_rank(lambda one: one.die(signal=9)),
    "oom": on_rank(lambda one: one.die(signal=9, oom=True)),
    "exit": on_rank(lambda one: one.die(code=3)),
    "exception": on_rank(lambda one: one.die(code=1, raised=raised("ValueError", "nan", "a.py:1"))),
    "exclude": on_rank(
        lambda one: one.agent.later(0.0, one.ask, PARTING, ExcludeNode(reason="ECC"))
    ),
    "agent": on_agent(lambda cluster, host, agent: cluster.faults.strike("agent", host)),
    "host": on_agent(lambda cluster, host, agent: cluster.faults.strike("host", host)),
    "reset": on_agent(lambda cluster, host, agent: cluster.faults.strike("reset", host)),
    "pause": on_agent(lambda cluster, host, agent: cluster.pause(agent, 0.8)),
    "cut": on_agent(lambda cluster, host, agent: cluster.cut(host, 0.8, whole=True)),
    "long cut": on_agent(lambda cluster, host, agent: cluster.cut(host, 9.0, whole=False)),
    "leave": on_agent(lambda cluster, host, agent: agent.told_to_leave("preempted")),
    "coordinator": lambda cluster, host: cluster.coordinator.crash("after the journal"),
}


def trace(seed: int, light: bool, **settings) -> dict[str, list]:
    """What each node said and was told, as far as it must not depend on timing."""
    log = io.BytesIO()
    rng = Random(seed)
    names = rng.sample(sorted(FAULTS), 4)
    settings = SimSettings(
        seed=seed,
        nodes=3,
        spares=1,
        min_nodes=2,
        hours=(SPACING_S * (len(names) + 2)) / 3600,
        slots=2,
        faults="none",
        check="every",
        step_s=0.3,
        save_every=5,
        light=light,
        **settings,
    )
    cluster = Cluster(settings, log)
    for number, name in enumerate(names, 1):
        host = cluster.hosts[rng.randrange(len(cluster.hosts))]
        cluster.clock.after(SPACING_S * number, FAULTS[name], cluster, host)
    cluster.run()
    return _by_node(log.getvalue().decode().splitlines())


def _by_node(lines: list[str]) -> dict[str, list]:
    orders: dict[str, list] = defaultdict(list)
    said: dict[str, set] = defaultdict(set)
    for line in lines:
        what, _, text = line.partition(" ")
        if what == "fault":
            continue
        message = json.loads(text)
        message = message["event"] if what == "event" else message
        kind, node = message["type"], message.get("node") or "coordinator"
        if kind in BY_CHANCE:
            node = "any"
        part = message.get("part") or message.get("snapshot") or message
        round = part.get("round")
        if kind in ORDERED:
            if kind != "StopWorkers" or orders[node][-1:] != [(kind, round)]:
                orders[node].append((kind, round))
        elif kind not in ONLY_SUPERVISED | WHEN_SLOW:
            of_rank = kind in ("WorkerStarted", "WorkerExited", "RankRaised")
            about = (round, message["rank"], message.get("again", False)) if of_rank else None
            said[node].add((kind, about))
    nodes = sorted({*orders, *said} - {"coordinator"})
    return {node: [orders[node], sorted(said[node], key=str)] for node in nodes}


@pytest.mark.parametrize("seed", range(16))
def test_the_light_model_and_the_supervisor_leave_the_same_traces(seed, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "none", AWAY)
    saves = seed % 2 == 1
    light, real = (trace(seed, light, checkpoints=saves, data=saves) for light in (True, False))
    assert light == real


@pytest.mark.parametrize("seed", range(16))
def test_they_do_so_with_processes_that_stay(seed, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "none", AWAY)
    saves = seed % 2 == 1
    about = {"checkpoints": saves, "data": saves, "inprocess": True, "last_step": 700}
    light, real = (trace(seed, light, **about) for light in (True, False))
    assert light == real
    assert any(("ReleaseRanks", None) in said for _, said in real.values())
