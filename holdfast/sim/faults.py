"""Makes faults happen: each kind of fault is a function that does it to one host.

When they happen is drawn here too: for each kind one sequence of moments for the whole cluster, each
with a host picked at random, which amounts to one for each host and is much cheaper.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.messages.chaos import Injection
from holdfast.messages.events import HealthFound
from holdfast.messages.health import HealthResult, Verdict
from holdfast.messages.records import Raised
from holdfast.messages.requests import ExcludeNode, StopJob
from holdfast.messages.units import Rank
from holdfast.sim.coordinator import CrashPoint
from holdfast.sim.rank import PARTING, SimRank
from holdfast.sim.training import SimRound

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster, Host

CASCADE_AT_MOST = 256
"""Ranks that are seen to fail in the wake of another; further ones hang until they are stopped."""

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
RETURNS_WITHIN_S = 3.0
"""Between the first and the last rank whose restartable function returns."""
_WHILE_DEPARTING = (
    *("agent", "host", "reset", "cut", "pause", "signal", "signal", "parked", "parked"),
    *("leave", "flap", "coordinator", "coordinator"),
)
"""What happens while ranks leave their functions."""

_HANGS = ("hang", "gil", "stopped", "stopped")
_INJECTED: tuple[str, ...] = (
    *("kill", "term", "stop", "cont", "hang", "gil", "segfault", "abort", "exception", "exit"),
    *("slow", "diskfull", "kill-keeper", "kill-coordinator"),
)
"""What the injector does without a real process; the agent's own death and cuts happen as faults."""


def raised(type: str, message: str, where: str) -> Raised:
    return Raised(type=type, message=message, where=where, traceback=f"{type}: {message}")


class Faults:
    """Draws faults, and makes them happen."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng = cluster.rng
        self.schedule = cluster.schedule
        self.over = False
        self.counts: dict[str, int] = {}

    def plan(self) -> None:
        """Draw the first fault of each kind; each draws its next."""
        for name in self.schedule.rates:
            self._plan_next(name)
        if self.schedule.coordinator_crashes:
            self._plan_crash()
        for number, host in enumerate(self.cluster.hosts):
            if self.rng.random() < self.schedule.bad_hosts or number < self.schedule.surely_bad:
                self._plan_bad(host)

    def _plan_next(self, name: str) -> None:
        rate = self.schedule.rates[name] * len(self.cluster.hosts)
        self.cluster.clock.after(self.rng.expovariate(rate / 3600), self._strike, name)

    def _strike(self, name: str) -> None:
        if self.over:
            return
        self.strike(name, self.rng.choice(self.cluster.hosts))
        self._plan_next(name)

    def strike(self, name: str, host: Host) -> None:
        """Have a fault befall a host, if an agent is there."""
        if host.agent is not None and not host.agent.dead:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.cluster.log.fault(self.cluster.clock.now, name, host.agent.node)
            getattr(self, f"_{name}")(host, host.agent)

    def _plan_crash(self) -> None:
        mean_s = 3600 / self.schedule.coordinator_crashes
        self.cluster.clock.after(self.rng.expovariate(1 / mean_s), self._crash_coordinator)

    def _crash_coordinator(self) -> None:
        if not self.over:
            self._crash_now()
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
        if sign is None and self.cluster.training.highest_now() == 0:
            return  # A script that fails before its first step ends the job: once is enough.
        one = self._any_rank(agent)
        if one is not None:
            one.die(code=code, signal=sign, oom=oom, raised=error)
            if self.rng.random() < self.schedule.cascade:
                self.cascade(one.round)

    def _any_rank(self, agent: SimAgent) -> SimRank | None:
        return self.rng.choice(list(agent.ranks.values())) if agent.ranks else None

    def cascade(self, round: SimRound) -> None:
        """Have the other ranks fail in the collective that they shared with one that is gone."""
        error = raised("RuntimeError", "[gloo] Connection closed by peer", "ddp.py:7")
        for one in list(round.ranks.values())[:CASCADE_AT_MOST]:
            if not one.stuck:
                delay_s = self.rng.uniform(0.001, 0.8)
                one.agent.later(delay_s, one.die, 1, None, False, error)

    def _signal(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, sign=self.rng.choice(_SIGNALS))

    def _exception(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, code=1, error=raised(*self.rng.choice(_ERRORS)))

    def _oom(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, sign=signal.SIGKILL, oom=True)

    def _exit(self, host: Host, agent: SimAgent) -> None:
        self._kill(agent, code=self.rng.choice((2, 3, 134, 201)))

    def bug(self, round: SimRound) -> None:
        """Have the script raise at a certain step, whatever the round."""
        one = round.ranks.get(Rank(self.cluster.settings.seed % round.size))
        if one is not None:
            self.cluster.invariants.bug_struck()
            one.die(code=1, raised=raised("KeyError", "7", "model.py:3"))

    def done(self, round: SimRound) -> None:
        """Have the script end: all ranks exit with 0, not all at once."""
        functions = self.cluster.functions is not None
        for one in list(round.ranks.values()):
            if functions:
                one.agent.later(one.agent.rng.uniform(0.0, RETURNS_WITHIN_S), one.finish)
                continue
            hangs = one.agent.detects_stalls and self.rng.random() < self.schedule.exit_hangs
            one.agent.later(self.rng.uniform(0.0, 0.5), one.hang_at_exit if hangs else one.finish)

    def end_soon(self, one: SimRank) -> None:
        """Have the script of a rank end whose restartable function has returned everywhere."""
        hangs = one.agent.detects_stalls and one.agent.rng.random() < self.schedule.exit_hangs
        act = one.hang_at_exit if hangs else one.finish
        one.agent.later(one.agent.rng.uniform(0.0, 0.5), act)

    def departing(self, agent: SimAgent) -> None:
        """Have something else happen while a rank of a node leaves its function."""
        if self.over or self.rng.random() >= self.schedule.departing_faults:
            return
        name, after_s = self.rng.choice(_WHILE_DEPARTING), self.rng.uniform(0.0, 0.5)
        if name == "coordinator":
            self.cluster.clock.after(after_s, self._crash_now)
        else:
            host = agent.host if self.rng.random() < 0.5 else self.rng.choice(self.cluster.hosts)
            self.cluster.clock.after(after_s, self._strike_once, name, host)

    def _strike_once(self, name: str, host: Host) -> None:
        if not self.over:
            self.strike(name, host)

    def _crash_now(self) -> None:
        if not self.over:
            point = self.rng.choice(_CRASH_POINTS)
            self.counts["coordinator"] = self.counts.get("coordinator", 0) + 1
            self.cluster.log.fault(self.cluster.clock.now, f"coordinator, {point}", "")
            self.cluster.coordinator.crash(point)

    def _parked(self, host: Host, agent: SimAgent) -> None:
        """Kill a process that waits to enter its function again."""
        if agent.parked:
            self.rng.choice(list(agent.parked.values())).die(signal=signal.SIGKILL)

    def stop(self, round: SimRound) -> None:
        """Have the script stop the job."""
        if round.ranks:
            one = next(iter(round.ranks.values()))
            one.agent.later(0.0, one.ask, PARTING, StopJob(reason="the loss diverged", code=1))

    # ---- ranks that do not move ----

    def _hang(self, host: Host, agent: SimAgent) -> None:
        one = self._any_rank(agent) if agent.detects_stalls else None
        if one is not None:
            one.hang(self.rng.choice(_HANGS))

    # ---- snapshots ----

    def _keeper(self, host: Host, agent: SimAgent) -> None:
        agent.keeper.kill()

    def _disk(self, host: Host, agent: SimAgent) -> None:
        agent.keeper.fail_writes(self.rng.randrange(1, 4))

    def _bitflip(self, host: Host, agent: SimAgent) -> None:
        if host.images:
            host.images[list(host.images)[-1]] = False

    # ---- what people and scripts want ----

    def _inject(self, host: Host, agent: SimAgent) -> None:
        """Have a visitor ask for a fault: now, at a step, or again and again."""
        kind, step = self.rng.choice(_INJECTED), self.cluster.training.highest_now()
        injection = Injection(kind=kind, seed=self.rng.randrange(1000))
        when = self.rng.random()
        if kind != "cont" and when < 0.4:
            injection = replace(injection, at_step=step + self.rng.randrange(2, 40))
        elif kind not in ("cont", "hang", "gil", "stop") and when < 0.5:
            injection = replace(injection, every=self.rng.randrange(100, 200))
        if agent.detects_stalls:
            self.cluster.coordinator.ask_fault(injection)

    def _why(self, host: Host, agent: SimAgent) -> None:
        self.cluster.coordinator.ask_why()
        self.cluster.coordinator.ask_save()

    def _decide(self, host: Host, agent: SimAgent) -> None:
        """Have a person decide about a rank, whether anything is suspected or not."""
        one = self._any_rank(agent)
        if one is not None and agent.detects_stalls:
            self.cluster.coordinator.ask_hang(one.rank, act=self.rng.random() < 0.3)

    def _exclude(self, host: Host, agent: SimAgent) -> None:
        """Have a script exclude its node, or every second time a person."""
        one = self._any_rank(agent)
        if one is None:
            return
        if self.counts["exclude"] % 2:
            agent.later(0.0, one.ask, PARTING, ExcludeNode(reason="ECC errors"))
        else:
            self.cluster.coordinator.ask_exclude(agent.node)

    def _health(self, host: Host, agent: SimAgent) -> None:
        """Have the node's own checks find something."""
        verdict: Verdict = "fail" if self.rng.random() < 0.5 else "warn"
        found = HealthResult("gpu-ecc", verdict, "GPU 3 has uncorrectable errors", 0.1)
        if agent.number:
            agent.later(
                0.0, agent.say, HealthFound(at=agent.at(), node=agent.node, results=(found,))
            )

    # ---- nodes ----

    def _agent(self, host: Host, agent: SimAgent) -> None:
        agent.die()
        self.cluster.come_back(host, self.cluster.chance.away_s())

    def _host(self, host: Host, agent: SimAgent) -> None:
        agent.die(silently=True)
        host.images.clear()
        self.cluster.come_back(host, self.cluster.chance.away_s())

    def _switch(self, host: Host, agent: SimAgent) -> None:
        """Cut all hosts of a switch off at the same moment, some for good."""
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

    def _isolate(self, host: Host, agent: SimAgent) -> None:
        """Cut the coordinator off from everybody."""
        lasts_s = self.rng.uniform(*self.schedule.cut_s)
        for other in self.cluster.hosts:
            self.cluster.cut(other, lasts_s, whole=False)

    def _stand(self, host: Host, agent: SimAgent) -> None:
        """Have the coordinator not run for a while."""
        self.cluster.coordinator.stand(self.rng.uniform(*self.schedule.pause_s))

    def _clone(self, host: Host, agent: SimAgent) -> None:
        """Have another process greet with the id of a node that is connected."""
        self.cluster.clone(agent)

    def _reset(self, host: Host, agent: SimAgent) -> None:
        if agent.stream is not None:
            self.cluster.network.reset(agent.stream)

    def _slow(self, host: Host, agent: SimAgent) -> None:
        self.cluster.training.slow_down(agent, self.rng.uniform(1.1, 4.0))
        lasts_s = self.rng.uniform(*self.schedule.slow_s)
        self.cluster.clock.after(lasts_s, self.cluster.training.slow_down, agent, None)

    def _flap(self, host: Host, agent: SimAgent) -> None:
        """Have an agent die and come back, several times in a row."""
        self._flap_again(host, self.rng.randrange(2, 6))

    def _flap_again(self, host: Host, times: int) -> None:
        if self.over or times == 0:
            return
        if host.agent is not None and not host.agent.dead:
            host.agent.die()
            self.cluster.come_back(host, self.rng.uniform(0.05, 2.0))
        self.cluster.clock.after(self.rng.uniform(0.5, 6.0), self._flap_again, host, times - 1)

    def _leave(self, host: Host, agent: SimAgent) -> None:
        """Preempt a host: SIGTERM, and some time later it is gone, whatever it did."""
        agent.later(0.0, agent.told_to_leave, "preempted")
        self.cluster.clock.after(self.rng.uniform(5.0, 60.0), self._preempt, host, agent)

    def _preempt(self, host: Host, agent: SimAgent) -> None:
        if not agent.dead:
            agent.die(silently=True)
            host.images.clear()
            self.cluster.come_back(host, self.cluster.chance.away_s())
