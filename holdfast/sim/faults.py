"""Makes faults happen: each kind of fault is a function that does it to one host.

When they happen is drawn here too: for each kind one stream of moments for the whole cluster, each
with a host picked at random, which is the same as one for each host and much cheaper.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.messages.actions import Finish
from holdfast.messages.events import ExcludeAsked
from holdfast.messages.records import Raised
from holdfast.messages.units import Rank
from holdfast.sim.coordinator import CrashPoint
from holdfast.sim.rates import FaultName
from holdfast.sim.training import SimRound

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster, Host

CASCADE_AT_MOST = 256
"""Of more ranks than that, only some are seen to fail: the others hang until they are stopped."""

_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM)
_ERRORS = (
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "train.py:88"),
    ("ValueError", "loss is nan", "train.py:120"),
    ("OSError", "[Errno 5] Input/output error", "data.py:31"),
)
_CRASH_POINTS: tuple[CrashPoint, ...] = (
    "before the journal",
    "after the journal",
    "half-way through the actions",
)


def raised(type: str, message: str, where: str) -> Raised:
    return Raised(type=type, message=message, where=where, traceback=f"{type}: {message}")


class Mishaps:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng = cluster.rng
        self.schedule = cluster.schedule
        self.over = False
        self.counts: dict[str, int] = {}
        self._kinds: dict[FaultName, Callable[[Host, SimAgent], None]] = {
            "signal": self._signal,
            "exception": self._exception,
            "oom": self._oom,
            "exit": self._exit,
            "agent": self._agent,
            "host": self._host,
            "switch": self._switch,
            "pause": self._pause,
            "cut": self._cut,
            "reset": self._reset,
            "slow": self._slow,
            "flap": self._flap,
            "leave": self._leave,
            "exclude": self._exclude,
        }

    def plan(self) -> None:
        """Draw the first fault of each kind; each draws its next."""
        for name in self._kinds:
            self._plan_next(name)
        if self.schedule.coordinator_crashes:
            self._plan_crash()
        for host in self.cluster.hosts:
            if self.rng.random() < self.schedule.bad_hosts:
                self._plan_bad(host)

    def _plan_next(self, name: FaultName) -> None:
        rate = self.schedule.rates.get(name, 0.0) * len(self.cluster.hosts)
        if rate > 0:
            self.cluster.clock.after(self.rng.expovariate(rate / 3600), self._strike, name)

    def _strike(self, name: FaultName) -> None:
        if self.over:
            return
        host = self.rng.choice(self.cluster.hosts)
        if host.agent is not None and not host.agent.dead:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.cluster.log.fault(self.cluster.clock.now, name, host.agent.node)
            self._kinds[name](host, host.agent)
        self._plan_next(name)

    def _plan_crash(self) -> None:
        mean_s = 3600 / self.schedule.coordinator_crashes
        self.cluster.clock.after(self.rng.expovariate(1 / mean_s), self._crash_coordinator)

    def _crash_coordinator(self) -> None:
        if self.over:
            return
        point = self.rng.choice(_CRASH_POINTS)
        self.counts["coordinator"] = self.counts.get("coordinator", 0) + 1
        self.cluster.log.fault(self.cluster.clock.now, f"coordinator, {point}", "")
        self.cluster.coordinator.crash(point)
        self._plan_crash()

    def _plan_bad(self, host: Host) -> None:
        mean_s = 3600 / self.schedule.bad_host_rate
        self.cluster.clock.after(self.rng.expovariate(1 / mean_s), self._bad_again, host)

    def _bad_again(self, host: Host) -> None:
        if self.over:
            return
        if host.agent is not None:
            self._kill(host.agent, sign=signal.SIGBUS)
        self._plan_bad(host)

    # ---- workers ----

    def _kill(
        self,
        agent: SimAgent,
        code: int | None = None,
        sign: int | None = None,
        oom: bool = False,
        error: Raised | None = None,
    ) -> None:
        training = self.cluster.training
        if not agent.workers or (sign is None and training.highest_now() == 0):
            return  # A script that fails before its first step ends the job: once is enough.
        round = agent.running
        rank = self.rng.choice(list(agent.workers))
        agent.worker_dies(rank, code=code, signal=sign, oom=oom, raised=error)
        if round is not None and self.rng.random() < self.schedule.cascade:
            self.cascade(round)

    def cascade(self, round: SimRound) -> None:
        """The other ranks fail in the collective that they shared with the one that is gone."""
        left = CASCADE_AT_MOST
        error = raised("RuntimeError", "[gloo] Connection closed by peer", "ddp.py:7")
        for agent in round.members.values():
            if agent.running is not round:
                continue
            for rank in agent.workers:
                delay_s = self.rng.uniform(0.001, 0.8)
                agent.later(delay_s, self._fail_in_wake, agent, round, rank, error)
                left -= 1
                if left == 0:
                    return

    def _fail_in_wake(self, agent: SimAgent, round: SimRound, rank: Rank, error: Raised) -> None:
        if agent.running is round:
            agent.worker_dies(rank, code=1, raised=error)

    def _signal(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, sign=self.rng.choice(_SIGNALS))

    def _exception(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, code=1, error=raised(*self.rng.choice(_ERRORS)))

    def _oom(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, sign=signal.SIGKILL, oom=True)

    def _exit(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, code=self.rng.choice((2, 3, 134, 201)))

    def bug(self, round: SimRound) -> None:
        """The script raises at a certain step, whatever the round."""
        wanted = Rank(self.cluster.training.script.bug_rank % round.size)
        for agent in round.members.values():
            if agent.running is round and wanted in agent.workers:
                self.cluster.watch.bug_struck()
                agent.worker_dies(wanted, code=1, raised=raised("KeyError", "7", "model.py:3"))
                return

    def done(self, round: SimRound) -> None:
        """The script is at its end: all ranks exit with 0, not all at once."""
        for agent in round.members.values():
            if agent.running is round:
                for rank in list(agent.workers):
                    agent.later(self.rng.uniform(0.0, 0.5), self._exit_well, agent, round, rank)

    def _exit_well(self, agent: SimAgent, round: SimRound, rank: Rank) -> None:
        if agent.running is round and agent.stopping is None:
            agent.worker_dies(rank, code=0)

    # ---- nodes ----

    def _agent(self, host: Host, agent: SimAgent) -> None:
        agent.die()
        self.cluster.come_back(host, self.cluster.chance.away_s())

    def _host(self, host: Host, agent: SimAgent) -> None:
        agent.die(silently=True)
        self.cluster.come_back(host, self.cluster.chance.away_s())

    def _switch(self, host: Host, agent: SimAgent) -> None:
        """All hosts of a switch are cut off at the same moment, some for good."""
        until_s = self.rng.uniform(*self.schedule.cut_s)
        for other in self.cluster.hosts:
            if other.switch == host.switch and other.agent is not None:
                if self.rng.random() < 0.3:
                    self._host(other, other.agent)
                else:
                    self.cluster.cut(other, until_s, whole=True)

    def _pause(self, host: Host, agent: SimAgent) -> None:
        self.cluster.pause(agent, self.rng.uniform(*self.schedule.pause_s))

    def _cut(self, host: Host, agent: SimAgent) -> None:
        whole = self.rng.random() < 0.5
        self.cluster.cut(host, self.rng.uniform(*self.schedule.cut_s), whole)

    def _reset(self, host: Host, agent: SimAgent) -> None:
        if agent.stream is not None:
            self.cluster.network.reset(agent.stream)

    def _slow(self, host: Host, agent: SimAgent) -> None:
        self.cluster.training.slow_down(agent, self.rng.uniform(1.1, 4.0))
        lasts_s = self.rng.uniform(*self.schedule.slow_s)
        self.cluster.clock.after(lasts_s, self.cluster.training.slow_down, agent, None)

    def _flap(self, host: Host, agent: SimAgent) -> None:
        """Gone and back, several times in a row."""
        self._flap_again(host, self.rng.randrange(2, 6))

    def _flap_again(self, host: Host, times: int) -> None:
        if self.over or times == 0:
            return
        if host.agent is not None and not host.agent.dead:
            host.agent.die()
            self.cluster.come_back(host, self.rng.uniform(0.05, 2.0))
        self.cluster.clock.after(self.rng.uniform(0.5, 6.0), self._flap_again, host, times - 1)

    def _leave(self, host: Host, agent: SimAgent) -> None:
        """Preemption: SIGTERM, and some time later the host is gone, whatever it did."""
        agent.later(0.0, agent.told_to_leave, "preempted")
        self.cluster.clock.after(self.rng.uniform(5.0, 60.0), self._preempt, host, agent)

    def _preempt(self, host: Host, agent: SimAgent) -> None:
        if not agent.dead:
            agent.die(silently=True)
            self.cluster.come_back(host, self.cluster.chance.away_s())

    def _exclude(self, host: Host, agent: SimAgent) -> None:
        if not agent.workers or isinstance(agent.stopping, Finish):
            return
        rank = next(iter(agent.workers))
        event = ExcludeAsked(
            at=agent.at(), node=agent.node, round=agent.round, rank=rank, reason="ECC errors"
        )
        agent.later(0.0, agent.say, event)
