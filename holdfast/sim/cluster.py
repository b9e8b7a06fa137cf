"""Puts hosts, agents, streams and a coordinator together and runs them.

A host outlives its agents: what comes back after a crash is a new node on the same host, with the
images that are still in its memory. Every event, action and fault is logged, and every check is made
by `invariants`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import IO

import msgspec

from holdfast.core.replay import Entry
from holdfast.messages.actions import AnyAction, Diagnose, Finish
from holdfast.messages.checkpoints import ImageId
from holdfast.messages.events import VerdictReached
from holdfast.messages.hangs import Proof
from holdfast.messages.records import Terms
from holdfast.messages.supply import RequestId, SupplyTerms
from holdfast.messages.units import NodeId, Seconds, Time
from holdfast.messages.wire import PROTOCOL, Hello
from holdfast.sim import look
from holdfast.sim.agent import LightAgent, SimAgent
from holdfast.sim.clock import START, SimClock
from holdfast.sim.coordinator import SimCoordinator
from holdfast.sim.data import SimData
from holdfast.sim.faults import Faults
from holdfast.sim.function import SimFunctions
from holdfast.sim.invariants import Check, Invariants
from holdfast.sim.keeper import SimStorage
from holdfast.sim.network import SILENCE_S, Network, SimStream
from holdfast.sim.rank import AT_EXIT, save_and_ask
from holdfast.sim.rates import SCHEDULES, Chance
from holdfast.sim.supervised import SupervisedAgent
from holdfast.sim.supply import SimPlatform
from holdfast.sim.supply_faults import SupplyFaults
from holdfast.sim.training import SimRound, Training

COARSE_FROM = 200
"""Number of nodes from which what the workers of one node do at about the same time is done at once."""

SUPERVISED_UP_TO = 64
"""Largest number of nodes whose agents have the real supervisor."""

LIVE_WITHIN_S: Seconds = 240.0
"""After everything is healed, training must advance within this time."""

ENDS_WITHIN_S: Seconds = 120.0
"""After the job is over, its platform has no node left within this time."""

PROOFS: dict[str, Proof] = {"stopped": "stopped", "gil": "gil", "left": "left"}
"""What an examination can prove of a stuck rank, by how it is stuck."""
GROUP_TIMEOUT_S: Seconds = 180.0
"""Process group timeout of the simulated script."""

LOOK_EVERY = 4096
"""Steps of the simulation between two looks at the wall clock."""


@dataclass(frozen=True, kw_only=True)
class SimSettings:
    """One simulation, complete: the same settings give the same event log."""

    seed: int
    nodes: int
    spares: int
    min_nodes: int
    hours: float
    slots: int = 8
    faults: str = "default"
    fault_rate: float = 1.0
    """How many times as often as `faults` says nodes fail."""
    check: Check = "round"
    liveness: bool = False
    node_unit: int = 1
    segment: int = 1
    max_restarts: int | None = None
    join_limit_s: Seconds | None = None
    switch_size: int = 32
    step_s: Seconds = 5.0
    save_every: int = 60
    """Steps between two checkpoints; 0 for a script that never says that it saves."""
    last_step: int | None = None
    """The script is done after it."""
    bug_step: int | None = None
    """A rank raises at this step, each time."""
    stop_step: int | None = None
    """A rank stops the job at this step."""
    checkpoints: bool = False
    """Scripts save, restore and ask with Holdfast."""
    data: bool = False
    """Scripts with checkpoints use data sets too."""
    records: int | None = None
    """Records of the leased data set; None draws it."""
    inprocess: bool = False
    """Scripts train in a restartable function."""
    node_check: bool = False
    exclude_stragglers: bool = False
    light: bool = False
    """Use the light agents, however few nodes there are."""
    save_deadline_s: Seconds = 10.0
    supply: SupplyTerms | None = None
    """A platform provides the nodes, on these terms; None if they come by themselves."""
    stop_at_s: Seconds | None = None
    """When a visitor stops the job."""

    @property
    def supervised(self) -> bool:
        """Whether agents have the real supervisor."""
        return self.nodes <= SUPERVISED_UP_TO and not self.light

    @property
    def coarse(self) -> bool:
        return self.nodes >= COARSE_FROM

    @property
    def init_s(self) -> Seconds:
        return 2.0 if self.coarse else 0.2

    @property
    def restore_s(self) -> Seconds:
        return 4.0 if self.coarse else 0.1

    @property
    def report_s(self) -> Seconds:
        """Return how often an agent reports progress: the more nodes, the more seldom."""
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
            node_check=self.node_check,
            exclude_stragglers=self.exclude_stragglers,
            supply=self.supply or SupplyTerms(),
        )


@dataclass(eq=False)
class Host:
    """A machine: agents come and go on it."""

    name: str
    address: str
    switch: str
    domain: str
    agent: SimAgent | None = None
    agents: int = 0
    """Number of agents so far."""
    cut_until: float = 0.0
    replaced: NodeId = field(default_factory=lambda: NodeId(""))
    """Node of the agent before, if its launcher saw it end."""
    request: RequestId = ""
    """Of the platform's node that runs on it."""
    unfit: bool = False
    """It fails every node check."""
    images: dict[ImageId, bool] = field(default_factory=dict)
    """Images in its memory, and whether each verifies."""


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


class Cluster:
    """A simulated cluster and the job on it."""

    def __init__(
        self,
        settings: SimSettings,
        log: IO[bytes] | None = None,
        keep: Callable[[Sequence[Entry]], None] | None = None,
    ) -> None:
        """`keep` is given what the coordinator journals, as it does."""
        self.settings = settings
        self.keep = keep
        self.rng = Random(settings.seed)
        self.clock = SimClock()
        self.log = Log(log)
        self.schedule = SCHEDULES[settings.faults].times(settings.fault_rate)
        self.chance = Chance(self.rng, self.schedule)
        self.invariants = Invariants(self, settings.check)
        self.network = Network(self.clock, self.rng, 0.0005, self.schedule.hiccups)
        self.training = Training(self)
        self.storage = SimStorage(self)
        self.data = SimData(self) if settings.data and settings.checkpoints else None
        self.functions = SimFunctions(self) if settings.inprocess else None
        self._ports = 20000
        self._pids = 2000
        self.healing = False
        self.terms = settings.terms()
        self.coordinator = SimCoordinator(self, self.terms)
        self.network.coordinator = self.coordinator
        self.hosts = [self._host(i) for i in range(settings.nodes + settings.spares)]
        self.faults = Faults(self)
        self.platform = SimPlatform(self) if settings.supply is not None else None
        self.wall_s: Seconds = 0.0
        self.alive_after_s: Seconds | None = None
        """Simulated time from the healing until training had advanced."""
        self.errors: list[BaseException] = []
        """Exceptions of agents that no code retrieved."""
        self.on_progress: Callable[[Cluster], None] | None = None

    def _host(self, number: int) -> Host:
        switch = number // self.settings.switch_size
        domain = f"d{number // (2 * self.settings.segment)}" if self.settings.segment > 1 else ""
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        unfit = self.rng.random() < self.schedule.unfit_hosts and not self.healing
        return Host(f"h{number}", address, f"s{switch}", domain, unfit=unfit)

    @property
    def begins_coarsely(self) -> bool:
        """Whether the scripts of a node begin all at once, and restore nothing by themselves."""
        return self.settings.coarse and self.functions is None

    def next_port(self) -> int:
        self._ports = 20000 + (self._ports - 19999) % 40000
        return self._ports

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def agent_of(self, node: NodeId) -> SimAgent | None:
        """Return the agent of a node, if other nodes can reach it now."""
        host = self.invariants.host_of(node) if node else None
        agent = host.agent if host is not None else None
        if agent is None or agent.node != node or agent.host.cut_until > self.clock.now:
            return None
        return None if agent.dead else agent

    def image_at(self, node: NodeId, image: ImageId) -> bool | None:
        """Whether an image on a node verifies; None when there is none, or it cannot be reached."""
        agent = self.agent_of(node)
        return None if agent is None else agent.host.images.get(image)

    def verdict(self, asked: Diagnose, now: Time) -> VerdictReached:
        """Judge which ranks the others wait for, as the diagnosis of real ranks would."""
        agents = [host.agent for host in self.hosts if host.agent is not None]
        ranks = {rank: one for agent in agents for rank, one in agent.ranks.items()}
        hung = {rank: one.stuck for rank, one in sorted(ranks.items()) if one.stuck}
        stuck = {rank: how for rank, how in hung.items() if how != AT_EXIT}
        round = self.training.rounds.get(asked.round)
        if not stuck and round is not None:
            stuck = {rank: "left" for rank in asked.finished if rank in round.left}
        proofs: set[Proof | None] = {PROOFS.get(how) for how in stuck.values()}
        since = min((one.round.stands_since for one in ranks.values()), default=now)
        return VerdictReached(
            at=now,
            examination=asked.examination,
            round=asked.round,
            guilty=tuple(stuck),
            sentence=f"ranks {list(stuck)} do not move",
            proof=proofs.pop() if len(proofs) == 1 else None,
            waiting=tuple(sorted(set(ranks) - set(stuck))) if stuck else (),
            left_s=max(0.0, GROUP_TIMEOUT_S - max(0.0, now - since)),
        )

    # ---- running ----

    def run(self) -> Cluster:
        """Run the whole simulation."""
        begun = time.perf_counter()
        with _quiet_agents():
            self._run()
        self.wall_s = time.perf_counter() - begun
        return self

    def _run(self) -> None:
        if self.platform is not None:
            self.platform.supplier.come_up()
            SupplyFaults(self, self.platform).plan()
        else:
            for host in self.hosts:
                delay_s = self.rng.uniform(0.0, 5.0 if self.settings.coarse else 2.0)
                self.clock.after(delay_s, self.boot, host)
        self.faults.plan()
        if self.settings.stop_at_s is not None:
            self.clock.after(self.settings.stop_at_s, self.coordinator.ask_stop)
        self._look_around()
        end = START + 3600 * self.settings.hours
        self._run_until(end)
        if self.settings.liveness and self.coordinator.closed is None:
            self._prove_liveness()
        if self.platform is not None:
            self._let_platform_end(self.platform)
        self.invariants.at_end()

    def _let_platform_end(self, platform: SimPlatform) -> None:
        """Have the last plan be carried out: then no node may be left."""
        if self.coordinator.closed is None:
            return
        self.healing = self.faults.over = True
        platform.refuses_until = 0.0
        self.clock.after(1.0, platform.supplier.left_alone)
        until = self.clock.now + ENDS_WITHIN_S
        while platform.alive() and self.clock.step(until):
            pass
        left = [node.wish.id for node in platform.alive()]
        self.invariants.demand(not left, f"the job is over, and nodes {left} are left")

    def _run_until(self, until: float, enough: Callable[[], bool] | None = None) -> None:
        steps = 0
        step, coordinator, invariants = self.clock.step, self.coordinator, self.invariants
        while coordinator.closed is None and step(until):
            steps += 1
            if invariants.violated is not None:
                raise invariants.violated
            if steps % LOOK_EVERY == 0 and self.on_progress is not None:
                self.on_progress(self)
            if enough is not None and enough():
                return

    def _look_around(self) -> None:
        """Check what can only be seen over time."""
        self.invariants.look_around()
        self.clock.after(600.0 if self.settings.coarse else 1.0, self._look_around)

    def first_step(self, round: SimRound) -> None:
        """Have agents note that all ranks of a round have finished a step."""
        for agent in round.members.values():
            if agent.running is round and not agent.dead:
                agent.first_step()

    def save(self, round: SimRound, step: int) -> None:
        """Have all ranks of a round save a step."""
        rng = Random(f"{self.settings.seed} {round.number} {step}")
        if self.data is not None:
            self.data.before_save(round, step)
        save_and_ask(round, step, rng, self.schedule.skipped_saves)
        if self.data is not None:
            self.data.after_save(round, step)

    # ---- liveness ----

    def _prove_liveness(self) -> None:
        demand = self.invariants.demand
        self.heal()
        self._run_until(self.clock.now + self.schedule.cut_s[1] + self.schedule.pause_s[1])
        before, healed = look.highest_step(self.coordinator.job), self.clock.now
        self._run_until(healed + LIVE_WITHIN_S, lambda: self._advanced(before))
        alive_after_s = self.clock.now - healed
        self._run_until(healed + LIVE_WITHIN_S, self._all_supplied)
        self._run_until(healed + LIVE_WITHIN_S, self._as_large_as_can_be)
        if look.ended(self.coordinator.job) is None:
            late = f"in {LIVE_WITHIN_S:.0f} s after everything was healed"
            demand(self._advanced(before), f"no step beyond {before} {late}")
            demand(self._as_large_as_can_be(), "nodes wait and the world does not grow")
            if self.platform is not None:
                wrong = self._unsupplied(self.platform)
                demand(not wrong, f"{LIVE_WITHIN_S:.0f} s after everything was healed {wrong}")
            self.alive_after_s = alive_after_s
            self.training.finish_after(20)
        self._run_until(self.clock.now + LIVE_WITHIN_S + 100 * self.settings.step_s)
        demand(self.coordinator.closed is not None, "the job should have ended and did not")

    def _advanced(self, before: int) -> bool:
        job = self.coordinator.job
        return look.highest_step(job) > before and look.state(job) == "running"

    def _as_large_as_can_be(self) -> bool:
        return not look.could_be_larger(self.coordinator.job)

    def _all_supplied(self) -> bool:
        """Whether the platform has what is wanted, and nothing else."""
        return self.platform is None or not self._unsupplied(self.platform)

    def _unsupplied(self, platform: SimPlatform) -> str:
        job = self.coordinator.job
        if platform.strays():
            return f"nodes {sorted(platform.strays())} exist, and nobody wants them"
        if platform.absent():
            return f"nodes {sorted(platform.absent())} are wanted, and not in the job"
        standing, wanted = len(look.standing_requests(job)), look.wanted_count(job)
        return f"{standing} requests stand, {wanted} are wanted" if standing != wanted else ""

    def heal(self) -> None:
        """No more faults; every host that may come comes, and new ones for those that may not."""
        self.faults.over = True
        self.healing = True
        self.log.fault(self.clock.now, "heal", "")
        excluded = look.excluded(self.coordinator.job)
        for host in list(self.hosts):
            host.unfit = False
            for one in list(host.agent.ranks.values()) if host.agent is not None else ():
                one.go_on()
            if self.platform is not None:
                continue
            if host.name in excluded:
                self._replace(host)
            elif host.agent is None or host.agent.dead:
                self.clock.after(self.rng.uniform(0.0, 3.0), self.boot, host)

        if self.platform is not None:
            self.platform.heal()
            self._look_at_what_was_given_up()

    def _look_at_what_was_given_up(self) -> None:
        """Have somebody say that positions that were given up may be asked for again."""
        if look.given_up(self.coordinator.job):
            self.coordinator.ask_scale(*look.scale(self.coordinator.job))
        self.clock.after(5.0, self._look_at_what_was_given_up)

    def _replace(self, host: Host) -> None:
        """Provide a fresh host for one that is not let in again."""
        fresh = self.new_host()
        fresh.switch, fresh.domain = host.switch, host.domain
        self.clock.after(self.rng.uniform(0.0, 3.0), self.boot, fresh)

    # ---- hosts ----

    def new_host(self) -> Host:
        """Provide another machine."""
        self.hosts.append(self._host(len(self.hosts)))
        return self.hosts[-1]

    def boot(self, host: Host) -> None:
        """Start an agent on a host that has none."""
        if host.agent is not None and not host.agent.dead:
            return
        host.agents += 1
        kind = SupervisedAgent if self.settings.supervised else LightAgent
        host.agent = kind(self, host, NodeId(f"{host.name}:{host.agents}"))
        host.agent.knock()

    def come_back(self, host: Host, away_s: Seconds) -> None:
        if self.healing:
            away_s = min(away_s, 3.0)
        if self.platform is not None:
            self.platform.agent_gone(host, away_s)
            return
        self.clock.after(away_s, self.boot, host)

    def agent_ended(self, agent: SimAgent, order: Finish) -> None:
        """Start another agent in the place of one that ended in order, if its launcher would."""
        job = self.coordinator.job
        excluded = agent.host.name in look.excluded(job)
        if self.platform is not None:
            self.platform.agent_finished(agent.host, order)
            return
        if look.ended(job) is not None:
            return
        if self.healing and excluded:
            self._replace(agent.host)
        elif order.rejoin:
            self.come_back(agent.host, self.rng.uniform(0.2, 1.0))
        elif not excluded or self.rng.random() < self.schedule.return_excluded:
            self.come_back(agent.host, self.chance.away_s())

    def pause(self, agent: SimAgent, lasts_s: Seconds) -> None:
        """Have a whole node stand still, without a word to anyone."""
        agent.unreachable()
        agent.paused_until = max(agent.paused_until, self.clock.now + lasts_s)
        self.training.hold(agent.running, agent.node)
        self.coordinator.silent_since(agent.node, agent.beat_at)
        self.clock.at(agent.paused_until, self._unpause, agent)

    def _unpause(self, agent: SimAgent) -> None:
        if agent.unreachable_until <= self.clock.now:
            agent.reachable_again()
            self.training.release(agent.running, agent.node)

    def cut(self, host: Host, lasts_s: Seconds, whole: bool) -> None:
        """Cut a host's network: the whole of it, or only the way to the coordinator."""
        agent = host.agent
        if agent is not None and not agent.dead:
            agent.unreachable()
        host.cut_until = max(host.cut_until, self.clock.now + lasts_s)
        if agent is None or agent.dead:
            return
        self.coordinator.silent_since(agent.node, agent.beat_at)
        if whole:
            self.training.hold(agent.running, agent.node)
        self.clock.at(host.cut_until + 1e-3, self._unpause, agent)
        if agent.stream is not None:
            self.clock.after(SILENCE_S, self._silent, agent.stream)

    def clone(self, agent: SimAgent) -> None:
        """Open a stream as a copy of an agent would: it knows nothing of what came since."""
        if (
            agent.stream is None
            or agent.connected_at is None
            or agent.unreachable_until > self.clock.now
        ):
            return
        copy = SimStream(agent, agent.stream.number)
        hello = Hello(
            protocol=PROTOCOL,
            token="",
            node=agent.node,
            round=agent.round,
            busy=True,
            terms=self.terms,
            stream=copy.number,
        )
        self.network.send_up(copy, [hello])

    def _silent(self, stream: SimStream) -> None:
        agent, now = stream.agent, self.clock.now
        if max(agent.host.cut_until, agent.paused_until) > now:
            self.network.fell_silent(stream)

    def silence(self, stream: SimStream) -> None:
        """Have the coordinator notice a host that is gone without a word by its silence."""
        self.coordinator.silent_since(stream.agent.node, self.clock.now)
        self.clock.after(SILENCE_S, self.coordinator.stream_lost, stream)


@contextmanager
def _quiet_agents() -> Iterator[None]:
    """Keep what simulated agents log about simulated faults off the terminal."""
    logger = logging.getLogger("holdfast.agent")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
