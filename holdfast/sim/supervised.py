"""Drives the agent's real supervisor, over a simulated starter, keeper, stream and node test.

What the supervisor is made of is real: the worker monitor, the reporter, the stall detector, requests,
the fault injector. What they see of a process is computed: its page and its vital signs are functions
of what `training` says at that moment. Their code runs on the agent's `SimLoop`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.agent.contention import Reading
from holdfast.agent.function import RestartableFunction
from holdfast.agent.life import Counters
from holdfast.agent.processes import WorkerProcess
from holdfast.agent.supervisor import Supervisor
from holdfast.agent.worker import Worker
from holdfast.agent.worker_monitor import WorkerMonitor
from holdfast.messages.actions import Finish, NodeAction, StopWorkers
from holdfast.messages.chaos import FAULTS, Sprung, Trap
from holdfast.messages.events import AnyEvent
from holdfast.messages.local import Assign, DeviceUsed, Loaded, ToFunction, TrapSprung
from holdfast.messages.records import Part, Raised
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber
from holdfast.shm.rank_page import PageState
from holdfast.shm.vital_signs import LEFT_OUT, RING, WARM_UP, Signs, Times
from holdfast.sim.agent import AgentClock, SimAgent
from holdfast.sim.loop import SimLoop
from holdfast.sim.rank import AT_EXIT, SimRank
from holdfast.sim.training import SimRound, loss_after

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster, Host

SHARES = {"forward": 0.4, "backward": 0.6}
"""Of a step, what each phase takes the rank itself."""
HUNG_AT, COLLECTIVE_AT = "train.py:7 (hang)", "train.py:9 (step)"
"""Lines of the script at which a rank hangs, and waits for the others."""
DEATHS: dict[str, signal.Signals] = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
}


class SupervisedAgent(SimAgent):
    """An agent whose supervisor is the real one. To it, the agent is its stream as well."""

    detects_stalls = True

    def __init__(self, cluster: Cluster, host: Host, node: NodeId) -> None:
        super().__init__(cluster, host, node)
        self.loop = SimLoop(cluster.clock, self, cluster.errors)
        self.send = self.say
        self.drained = asyncio.Event()
        self.supervisor = self.loop.enter(self._supervisor)

    def _supervisor(self) -> Supervisor:
        parts: dict[str, Any] = {
            "clock": AgentClock(self),
            "stream": self,
            "table": Idle(),
            "pool": Idle(),
            "snapshots": self.keeper,
            "starter": SimStarter(self),
            "tester": self.tester,
            "system": SimSystem(self),
            "hang_terms": self.cluster.terms.hangs,
            "save_deadline_s": self.cluster.settings.save_deadline_s,
        }
        supervisor = Supervisor(node=self.node, **parts)
        supervisor.finished.add_done_callback(lambda done: self.leave(done.result()))
        return supervisor

    @property
    def round(self) -> RoundNumber:
        return self.supervisor.round

    @property
    def busy(self) -> bool:
        return self.supervisor.busy

    def keeps(self, one: SimRank) -> bool:
        workers = self.supervisor._workers
        known = [*workers.parked.values(), *workers.running.values()]
        return any(cast(SimRank, worker.process) is one for worker in known)

    def run(self, act: Callable[..., None], *arguments: Any) -> None:
        self.loop.enter(act, *arguments)

    def act(self, order: NodeAction) -> None:
        self.supervisor.act(order)
        stops = isinstance(order, StopWorkers) and order.round == self.round
        if stops or isinstance(order, Finish):
            self.cluster.training.break_(self.running)

    def resumed(self, sent: list[AnyEvent]) -> None:
        self.supervisor.resumed(sent)

    def pause_ranks(self) -> None:
        self.supervisor.pause()

    def let_ranks_go_on(self) -> None:
        self.supervisor.go_on()

    def fall_silent(self, seconds: Seconds) -> None:
        self.cluster.cut(self.host, seconds, whole=True)


class Idle:
    """Stands for the process table and the pool of standbys: there are no real processes."""

    def end_strays(self) -> None:
        pass

    def refill(self) -> None:
        pass

    def learn(self, loaded: Loaded) -> None:
        pass

    def note_device(self, process: WorkerProcess, report: DeviceUsed) -> None:
        pass

    def note_failure(self, raised: Raised) -> None:
        pass


class SimSystem:
    """What the stall detector sees of the machine."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent

    def now(self) -> float:
        return float(self._agent.clock.now)

    def call_later(self, delay_s: Seconds, act: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, act)

    def process_state(self, pid: int) -> str:
        return "T" if self.stuck(pid) == "stopped" else "S"

    def is_frozen(self, pid: int) -> bool:
        return False

    def contention(self, pid: int, now: float) -> Reading:
        return Reading(now, {})

    def observer(self, pid: int, store_port: int) -> SimObserver:
        return SimObserver(self, pid)

    def stuck(self, pid: int) -> str:
        ranks = self._agent.ranks.values()
        return next((one.stuck for one in ranks if one.pid == pid), "")


class SimObserver:
    """What the kernel counts of a rank's process: CPU time if its script loops."""

    def __init__(self, system: SimSystem, pid: int) -> None:
        self._system = system
        self._pid = pid

    def sample(self, thread: int, now: float, strictly: bool, locks: bool) -> Counters:
        stuck = self._system.stuck(self._pid)
        return Counters(ran_ns=int(now * 1e9) if stuck == "loop" else 0, locked=stuck == AT_EXIT)

    def is_at_lock(self, thread: int) -> bool:
        return self._system.stuck(self._pid) == AT_EXIT


class SimStarter:
    """Gives ranks to simulated processes, and promises a port for the store of the next round."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self.port = self

    @property
    def number(self) -> int:
        return self._agent.port

    def renew_port(self) -> None:
        self._agent.port = self._agent.cluster.next_port()

    async def start(self, part: Part, monitor: WorkerMonitor) -> None:
        agent = self._agent
        agent.running = agent.cluster.training.join(agent, part)
        vacant = []
        for local_rank in range(part.slots):
            parked = monitor.workers.parked.get(local_rank)
            if parked is None or parked.process.exit is not None:
                vacant.append(local_rank)
            else:
                self._start_rank(part, local_rank, monitor, parked)
        if vacant:
            await asyncio.sleep(agent.chance.start_s(agent.warm))
        for local_rank in vacant:
            self._start_rank(part, local_rank, monitor)

    def _start_rank(
        self,
        part: Part,
        local_rank: int,
        monitor: WorkerMonitor,
        parked: Worker | None = None,
    ) -> None:
        """Give a rank to a process, as `agent.starting` does."""
        agent = self._agent
        assert agent.running is not None
        before = cast(SupervisedRank, parked.process) if parked is not None else None
        rank = Rank(part.first_rank + local_rank)
        one = SupervisedRank(agent, agent.running, rank, local_rank, before)
        worker = SimWorker.of(one, part.round)
        worker.local_rank = local_rank
        if parked is not None:
            worker.succeed(parked)
        monitor.expect(worker)
        if parked is not None and one.function is not None:
            assign = Assign(env={}, entry="script", agent_pid=0, round=part.round)
            one.function.enter(assign, ())
        monitor.follow(worker)
        agent.later(agent.rng.uniform(0.001, 0.05), one.begin)


class SimWorker(Worker):
    """A worker whose process is simulated."""

    @classmethod
    def of(cls, one: SupervisedRank, round: RoundNumber) -> SimWorker:
        parts: dict[str, Any] = {"process": one, "runtime": one, "_oom_kills": 0}
        parts["output"] = SimOutput()
        nowhere = Path("/nonexistent")
        return cls(round=round, rank=one.rank, error_file=nowhere, flight=nowhere, **parts)

    def raised(self) -> Raised | None:
        return self._raised

    def kill(self) -> None:
        functions = cast(SimRank, self.process).agent.cluster.functions
        if functions is not None:
            functions.killed.add(self.process.pid)
        super().kill()

    def memory_ran_out(self) -> bool:
        return cast(SimRank, self.process).oom

    def examined(self) -> None:
        """Have nothing to look at: there is no process with stacks."""


class SimOutput:
    """What a rank prints: nothing."""

    def tail(self) -> str:
        return ""

    def drain(self) -> None:
        pass

    close = drain


class SupervisedRank(SimRank):
    """A rank's process, with what its agent holds of it: control socket, page, restartable function."""

    def __init__(
        self,
        agent: SimAgent,
        round: SimRound,
        rank: Rank,
        local_rank: int = 0,
        before: SupervisedRank | None = None,
    ) -> None:
        super().__init__(agent, round, rank, local_rank, before)
        self.warm = agent.warm
        self.function: RestartableFunction | None = before.function if before is not None else None
        self.page = SimPage(self)

    def opens_function(self) -> None:
        self.function = RestartableFunction(SimOrders(self))

    def read_all(self) -> None:
        """Hear what it still had to say: there is nothing, as it was heard at once."""

    def close(self) -> None:
        if self.function is not None:
            self.function.close()


class SimOrders:
    """The way of orders to a restartable function: its process may have got another place."""

    def __init__(self, one: SupervisedRank) -> None:
        self._one: SimRank = one

    def send(self, message: ToFunction, fds: Sequence[int] = ()) -> None:
        while self._one.next is not None:
            self._one = self._one.next
        if self._one.entry is not None and not isinstance(message, Assign):
            self._one.entry.order(message)

    def close(self) -> None:
        pass


class SimPage:
    """A rank's page, computed when it is read."""

    def __init__(self, one: SimRank) -> None:
        self._one = one
        self.vitals = SimVitals(one)
        self.traps = self.sprung = SimTraps(one)

    def reset(self) -> None:
        """Empty it: a process in another place has a page of its own."""

    def read(self) -> PageState:
        one, round = self._one, self._one.round
        training = one.agent.cluster.training
        steps = round.steps(one.seen_until())
        if steps == 0:
            return PageState(0, 0, 0.0, 0.0, 0.0, 0.0)
        saves, restore_s = training.saves(round, steps), training.restore_s(round)
        times = (round.first_at, round.finished_at(steps), training.saving_s(saves), restore_s)
        asides = (saves, round.pause_s(steps), round.pace_s)
        read, told = (training.samples(steps), round.trained_s(steps)), training.told(steps)
        loss = (float(loss_after(round.base + told)), told) if told else (0.0, 0)
        return PageState(round.base + steps, steps, *times, *asides, 0, *read, 0.0, *loss)


class SimVitals:
    """A rank's vital signs, computed when they are read."""

    waiting = LEFT_OUT

    def __init__(self, one: SimRank) -> None:
        self._one = one
        self._began_at = float(one.agent.clock.now)

    def _steps(self) -> int:
        return self._one.round.steps(self._one.agent.clock.now)

    @property
    def warm(self) -> bool:
        return self._steps() >= WARM_UP

    def read(self) -> Signs:
        one, round, now = self._one, self._one.round, float(self._one.agent.clock.now)
        steps, stands_since = self._steps(), round.stands_since
        stands = stands_since <= now
        step_at = round.time_of(steps) if steps else 0.0
        silent = stands and one.stuck in ("stopped", "gil")
        return Signs(
            beat_at=stands_since if silent else now,
            waits=stands and not one.stuck and steps > 0,
            in_backward=False,
            loads=False,
            codes=1,
            line_at=min(stands_since, one.stuck_at or now, now),
            place=HUNG_AT if one.stuck else COLLECTIVE_AT,
            group_timeout_s=0.0,
            thread=0,
            mark_at=step_at or self._began_at,
            marks=2 * steps,
            phase="backward" if steps else "start",
            steps=steps,
            step_at=step_at,
            warm=steps >= WARM_UP,
            sections=(),
        )

    def lend(self, until: float) -> None:
        """Take no note of the lease: `SimAgent` has the truth of it."""

    def times(self) -> dict[str, Times]:
        steps, round = self._steps(), self._one.round
        if steps < 2:
            return {}
        took_s, longest_s = round.pace_s, max(round.pace_s, round.longest_s)
        forward_s, latest = SHARES["forward"] * took_s, min(steps, RING)
        return {
            "step": Times(steps, longest_s, (took_s,) * latest),
            "forward": Times(steps, forward_s, (forward_s,) * latest),
            "backward": Times(steps, longest_s - forward_s, (took_s - forward_s,) * latest),
        }

    def own_times(self) -> dict[str, Times]:
        """Return what phases take the rank itself: a slow node's take longer than the others'."""
        steps, agent = self._steps(), self._one.agent
        if steps < 2:
            return {}
        training, latest = agent.cluster.training, min(steps, RING)
        own_s = training.script.step_s * training.slow.get(agent.node, 1.0)
        return {p: Times(steps, s * own_s, (s * own_s,) * latest) for p, s in SHARES.items()}


class SimTraps:
    """The traps of a rank, and those that sprang: both logs that agent and worker share."""

    def __init__(self, one: SimRank) -> None:
        self._one = one
        self._sprung: list[bytes] = []

    def append(self, entry: bytes) -> bool:
        """Take a trap from the agent."""
        trap = msgspec.msgpack.decode(entry, type=Trap)
        training = self._one.agent.cluster.training
        training.lay_trap(self._one.round, trap.step, lambda: self._reached(trap))
        return True

    def read(self) -> list[bytes]:
        """Tell the agent which traps sprang since the last call."""
        sprung, self._sprung = self._sprung, []
        return sprung

    def _reached(self, trap: Trap) -> None:
        """Spring a trap at the end of its step, and do to the rank what it says."""
        rank, now = self._one, float(self._one.agent.clock.now)
        if rank.exit is not None or rank.stuck or rank.agent.cluster.healing:
            return
        sprung = Sprung(trap.injection, trap.occurrence, StepNumber(rank.round.step(now)), now)
        self._sprung.append(msgspec.msgpack.encode(sprung))
        rank.tell(TrapSprung())
        if FAULTS[trap.kind].actor == "agent":
            return
        if trap.kind in DEATHS:
            rank.die(signal=DEATHS[trap.kind])
        elif trap.kind in ("stop", "hang", "gil", "loop"):
            rank.hang("stopped" if trap.kind == "stop" else trap.kind)
        elif trap.kind == "exception":
            error = "InjectedFault: asked for"
            rank.die(1, raised=Raised(type="InjectedFault", message="", where="", traceback=error))
        elif trap.kind == "exit":
            rank.die(int(trap.value), done=trap.value == 0)
        elif trap.kind == "slow":
            rank.agent.cluster.training.slow_down(rank.agent, max(1.0, trap.value))
