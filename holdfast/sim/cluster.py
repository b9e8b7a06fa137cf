"""Hosts, agents, streams and a coordinator, put together and run.

A host outlives its agents: what comes back after a crash is a new node on the same host. All that
happens is logged, and everything that is asserted is asserted by `invariants`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import IO

import msgspec

from holdfast.core.membership.seating import choose
from holdfast.core.patience import Silence
from holdfast.messages.actions import AnyAction, Finish
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, Seconds
from holdfast.sim.agent import SimAgent
from holdfast.sim.clock import START, SimClock
from holdfast.sim.coordinator import SimCoordinator
from holdfast.sim.faults import Mishaps
from holdfast.sim.invariants import Check, Watch
from holdfast.sim.network import SILENCE_S, Network, Stream
from holdfast.sim.rates import SCHEDULES, Chance
from holdfast.sim.training import Script, SimRound, Training

COARSE_FROM = 200
"""From so many nodes on, what the workers of one node do at about the same time is done at once."""

LIVE_WITHIN_S: Seconds = 240.0
"""After everything is healed, training must advance within this time."""

LOOK_EVERY = 4096
"""Steps of the simulation between two looks at the wall clock."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One simulation, complete: the same settings give the same event log."""

    seed: int
    nodes: int
    spares: int
    min_nodes: int
    hours: float
    slots: int = 8
    faults: str = "default"
    check: Check = "round"
    liveness: bool = False
    node_unit: int = 1
    segment: int = 1
    max_restarts: int | None = None
    join_limit_s: Seconds | None = None
    switch_size: int = 32
    step_s: Seconds = 5.0
    save_every: int = 60
    last_step: int | None = None
    bug_step: int | None = None

    @property
    def coarse(self) -> bool:
        return self.nodes >= COARSE_FROM

    @property
    def report_s(self) -> Seconds:
        """How often an agent tells how far it is: the more nodes, the more seldom."""
        return max(2.0, 0.09 * self.nodes)

    def terms(self) -> Terms:
        return Terms(
            min_nodes=self.min_nodes,
            max_nodes=self.nodes,
            node_unit=self.node_unit,
            segment=self.segment,
            spares=self.spares,
            max_restarts=self.max_restarts,
            join_limit_s=self.join_limit_s,
        )


@dataclass(eq=False)
class Host:
    name: str
    address: str
    switch: str
    domain: str
    agent: SimAgent | None = None
    agents: int = 0
    """How many it has had."""
    cut_until: float = 0.0


class Log:
    """The event log: lines of JSON into a file if one is given, and their digest in any case."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self._digest = hashlib.blake2b(digest_size=16)
        self._encoder = msgspec.json.Encoder()

    def event(self, encoded: bytes) -> None:
        self._write(b"event " + encoded + b"\n")

    def action(self, action: AnyAction) -> None:
        self._write(b"action " + self._encoder.encode(action) + b"\n")

    def fault(self, at: float, name: str, node: str) -> None:
        self._write(f"fault {at!r} {name} {node}\n".encode())

    def _write(self, line: bytes) -> None:
        self._digest.update(line)
        if self._file is not None:
            self._file.write(line)

    def digest(self) -> str:
        return self._digest.hexdigest()


@dataclass
class Outcome:
    """What is left of a simulation."""

    settings: Settings
    cluster: Cluster
    wall_s: float
    healed_at_step: int | None = None
    alive_after_s: Seconds | None = None
    """Simulated time from the healing until training had advanced."""
    notes: list[str] = field(default_factory=list)


class Cluster:
    def __init__(self, settings: Settings, log: IO[bytes] | None = None) -> None:
        self.settings = settings
        self.rng = Random(settings.seed)
        self.clock = SimClock()
        self.log = Log(log)
        self.schedule = SCHEDULES[settings.faults]
        self.chance = Chance(self.rng, self.schedule)
        self.watch = Watch(self, settings.check)
        self.network = Network(self.clock, self.rng, 0.0005, self.schedule.hiccups)
        self.training = Training(self.clock, self._script())
        self._ports = 20000
        self.healing = False
        self.terms = settings.terms()
        self.coordinator = SimCoordinator(self, self.terms)
        self.network.coordinator = self.coordinator
        self.hosts = [self._host(i) for i in range(settings.nodes + settings.spares)]
        self.mishaps = Mishaps(self)
        self.training.on_first_step = self._first_step
        self.training.on_bug = self.mishaps.bug
        self.training.on_done = self.mishaps.done

    def _script(self) -> Script:
        s = self.settings
        return Script(
            step_s=s.step_s,
            init_s=2.0 if s.coarse else 0.2,
            restore_s=4.0 if s.coarse else 0.1,
            save_every=s.save_every,
            save_s=0.2 * s.step_s,
            last_step=s.last_step,
            bug_step=s.bug_step,
            bug_rank=s.seed,
        )

    def _host(self, number: int) -> Host:
        switch = number // self.settings.switch_size
        domain = f"d{number // (2 * self.settings.segment)}" if self.settings.segment > 1 else ""
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        return Host(f"h{number}", address, f"s{switch}", domain)

    def next_port(self) -> int:
        self._ports = 20000 + (self._ports - 19999) % 40000
        return self._ports

    # ---- running ----

    def run(self, on_progress: Callable[[Cluster], None] | None = None) -> Outcome:
        begun = time.perf_counter()
        outcome = Outcome(self.settings, self, 0.0)
        for host in self.hosts:
            delay_s = self.rng.uniform(0.0, 5.0 if self.settings.coarse else 2.0)
            self.clock.after(delay_s, self._boot, host)
        self.mishaps.plan()
        self._look_around()
        end = START + 3600 * self.settings.hours
        self._run_until(end, on_progress)
        if self.settings.liveness and self.coordinator.closed is None:
            self._prove_liveness(outcome, on_progress)
        self.watch.at_end()
        outcome.wall_s = time.perf_counter() - begun
        return outcome

    def _run_until(
        self,
        until: float,
        on_progress: Callable[[Cluster], None] | None = None,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        steps = 0
        step, coordinator = self.clock.step, self.coordinator
        while coordinator.closed is None and step(until):
            steps += 1
            if steps % LOOK_EVERY == 0 and on_progress is not None:
                on_progress(self)
            if enough is not None and enough():
                return

    def _look_around(self) -> None:
        """What can only be seen over time."""
        self.watch.look_around()
        self.clock.after(600.0 if self.settings.coarse else 1.0, self._look_around)

    def _first_step(self, round: SimRound) -> None:
        for agent in round.members.values():
            if agent.running is round:
                agent.tell_progress()

    # ---- liveness ----

    def _prove_liveness(
        self, outcome: Outcome, on_progress: Callable[[Cluster], None] | None
    ) -> None:
        self.heal()
        begun = self.clock.now
        self._run_until(begun + self.schedule.cut_s[1] + self.schedule.pause_s[1], on_progress)
        job = self.coordinator.job
        outcome.healed_at_step = before = job.highest
        healed = self.clock.now
        self._run_until(healed + LIVE_WITHIN_S, on_progress, lambda: self._advanced(before))
        alive_after_s = self.clock.now - healed
        self._run_until(healed + LIVE_WITHIN_S, on_progress, self._as_large_as_can_be)
        if self.coordinator.job.result is None:
            self.watch.demand(
                self._advanced(before),
                f"no step beyond {before} in {LIVE_WITHIN_S:.0f} s after everything was healed",
            )
            self.watch.demand(self._as_large_as_can_be(), "nodes wait and the world does not grow")
            outcome.alive_after_s = alive_after_s
            self.training.finish_after(20)
        enough_s = LIVE_WITHIN_S + 100 * self.settings.step_s
        self._run_until(self.clock.now + enough_s, on_progress)
        self.watch.demand(
            self.coordinator.closed is not None, "the job should have ended and did not"
        )

    def _advanced(self, before: int) -> bool:
        job = self.coordinator.job
        return job.highest > before and job.state.name == "running"

    def _as_large_as_can_be(self) -> bool:
        job = self.coordinator.job
        m = job.membership
        size = len(choose({**m.placed, **m.waiting}, self.terms))
        return job.world is not None and len(job.world.places) >= size

    def heal(self) -> None:
        """No more faults; every host that may come comes, and new ones for those that may not."""
        self.mishaps.over = True
        self.healing = True
        self.log.fault(self.clock.now, "heal", "")
        excluded = self.coordinator.job.membership.excluded
        for host in list(self.hosts):
            if host.name in excluded:
                fresh = self._host(len(self.hosts))
                fresh.switch, fresh.domain = host.switch, host.domain
                self.hosts.append(fresh)
                self.clock.after(self.rng.uniform(0.0, 3.0), self._boot, fresh)
            elif host.agent is None or host.agent.dead:
                self.clock.after(self.rng.uniform(0.0, 3.0), self._boot, host)

    # ---- hosts ----

    def _boot(self, host: Host) -> None:
        if host.agent is not None and not host.agent.dead:
            return
        host.agents += 1
        host.agent = SimAgent(self, host, NodeId(f"{host.name}:{host.agents}"))
        host.agent.knock()

    def come_back(self, host: Host, away_s: Seconds) -> None:
        if self.healing:
            away_s = min(away_s, 3.0)
        self.clock.after(away_s, self._boot, host)

    def agent_ended(self, agent: SimAgent, order: Finish) -> None:
        """An agent ended in order; whoever started it may start another."""
        job = self.coordinator.job
        excluded = agent.host.name in job.membership.excluded
        if job.result is not None or (self.healing and excluded):
            return
        if order.rejoin:
            self.come_back(agent.host, self.rng.uniform(0.2, 1.0))
        elif not excluded or self.rng.random() < self.schedule.return_excluded:
            self.come_back(agent.host, self.chance.away_s())

    def pause(self, agent: SimAgent, lasts_s: Seconds) -> None:
        """The whole node stands still, and nobody is told."""
        agent.paused_until = max(agent.paused_until, self.clock.now + lasts_s)
        self.training.hold(agent)
        self.clock.at(agent.paused_until, self._unpause, agent)
        if agent.stream is not None:
            stream = agent.stream
            limit_s = Silence().limit_s(self.settings.nodes)
            self.clock.after(limit_s, self._silent, stream)

    def _unpause(self, agent: SimAgent) -> None:
        if agent.paused_until <= self.clock.now and agent.host.cut_until <= self.clock.now:
            self.training.release(agent)

    def cut(self, host: Host, lasts_s: Seconds, whole: bool) -> None:
        """The host's network is gone: the whole of it, or only the way to the coordinator."""
        host.cut_until = max(host.cut_until, self.clock.now + lasts_s)
        agent = host.agent
        if agent is None or agent.dead:
            return
        if whole:
            self.training.hold(agent)
            self.clock.at(host.cut_until + 1e-3, self._unpause, agent)
        if agent.stream is not None:
            self.clock.after(SILENCE_S, self._silent, agent.stream)

    def _silent(self, stream: Stream) -> None:
        agent, now = stream.agent, self.clock.now
        if max(agent.host.cut_until, agent.paused_until) > now:
            self.network.fell_silent(stream)

    def silence(self, stream: Stream) -> None:
        """A host that is gone without a word is noticed by its silence."""
        self.clock.after(SILENCE_S, self.coordinator.stream_lost, stream)
