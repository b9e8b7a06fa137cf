"""Simulates the agent of a node.

`SimAgent` is what every simulated agent has: a stream on which events are numbered and kept until they
are acknowledged, a backoff when the stream breaks, and what can befall a node. It decides nothing.
What it does with orders is for its kinds: up to 64 nodes `sim.supervised` drives the real supervisor;
beyond, `LightAgent` does the same in a few lines, without stall detection and injected faults.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from holdfast.agent.function import ATOMIC_FLOOR_S
from holdfast.agent.node_sampler import READ_EVERY_S, interval_s
from holdfast.agent.processes import Exit
from holdfast.agent.requests import ScriptRequests
from holdfast.agent.shards import NodeShards
from holdfast.clock import JobClock
from holdfast.core.leases import lease_s
from holdfast.messages import actions, local
from holdfast.messages.actions import Finish, NodeAction, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeSampled,
    NodeWarm,
    Progress,
    RankRaised,
    RanksReturned,
    WorkerExited,
    WorkersKilled,
    WorkerStarted,
)
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.messages.records import NodeSpec, Part, Raised, RankProgress
from holdfast.messages.requests import FindState, OpenData, TakeShards
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time
from holdfast.messages.usage import NodeUsage
from holdfast.messages.wire import (
    PROTOCOL,
    Ack,
    Beat,
    EvidenceTaken,
    Hello,
    Lease,
    Sent,
    Welcome,
)
from holdfast.sim import look
from holdfast.sim.keeper import SimKeeper
from holdfast.sim.network import BEAT_S, Downward, SimStream, Upward
from holdfast.sim.nodecheck import SimTester
from holdfast.sim.rank import SimRank
from holdfast.sim.rates import Chance
from holdfast.sim.training import NEVER, SimRound

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster, Host

FIRST_PAUSE_S: Seconds = 0.01
LONGEST_PAUSE_S: Seconds = 1.0
LAST_WORD_LIMIT_S: Seconds = 2.0
LEAVE_LIMIT_S: Seconds = 2.0
"""How long an agent without a stream waits for a coordinator that would order it to finish."""
OWN_GRACE_S: Seconds = 30.0


class SimAgent:
    """The agent of one node, from its start to its end."""

    detects_stalls = False

    def __init__(self, cluster: Cluster, host: Host, node: NodeId) -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.host = host
        self.node = node
        self.request = host.request
        self.rng = Random(f"{cluster.settings.seed} {node}")
        """Its own, so that one agent's draws do not depend on what others do."""
        self.chance = Chance(self.rng, cluster.schedule)
        self.skew = self.rng.uniform(-0.002, 0.002)
        self.dead = False
        self.paused_until = 0.0
        self.warm = False
        self.leaving = ""
        """Why it was told to leave, if it was."""
        self.finishing: Finish | None = None
        """The order to end, once there was one."""
        self.stream: SimStream | None = None
        self.streams = 0
        """Number of streams that it has opened."""
        self.killed = RoundNumber(0)
        """The last round whose ranks were killed: they run no code any more."""
        self.lease_over = False
        """Its ranks are paused: others may have their places."""
        self.beats: list[float] = []
        """When it sent each beat that is simulated."""
        self.beat_ago_s = self.rng.uniform(0.0, BEAT_S)
        """How long ago its last beat was at any moment."""
        self.lost_at = 0.0
        """When its last stream broke."""
        self.beat_at = 0.0
        """When the last beat was sent that was answered, while it cannot be reached."""
        self.silence_s: Seconds = 0.0
        """How long the coordinator waits for a silent node, as far as it was told."""
        self.connected_at: float | None = None
        self.unacked: deque[Sent] = deque()
        self.acked_number = 0
        self.number = 0
        self.pause_s = FIRST_PAUSE_S
        self.running: SimRound | None = None
        self.ranks: dict[Rank, SimRank] = {}
        """Ranks that have a process."""
        self.parked: dict[int, SimRank] = {}
        """Processes that have left their function and wait to enter it again, by pid."""
        self._told_usage: NodeUsage | None = None
        self.port = cluster.next_port()
        self.keeper = SimKeeper(self)
        self.tester = SimTester(self)

    # ---- what its kinds do in their own way ----

    @property
    def round(self) -> RoundNumber:
        """The last round that it was told to start."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        raise NotImplementedError

    def act(self, order: NodeAction) -> None:
        """Carry out an order of the coordinator."""
        raise NotImplementedError

    def resumed(self, sent: list[AnyEvent]) -> None:
        """Note a new stream, on which these events were sent again."""
        raise NotImplementedError

    def keeps(self, one: SimRank) -> bool:
        """Return whether it knows of a process that is parked."""
        raise NotImplementedError

    def run(self, act: Callable[..., None], *arguments: Any) -> None:
        """Run code of this agent."""
        act(*arguments)

    def first_step(self) -> None:
        """Note that all ranks of its round have finished their first step."""
        for one in list(self.ranks.values()):
            one.tell(local.Stepped())

    # ---- time ----

    def at(self) -> Time:
        """Return job time as this agent sees it."""
        return Time(self.clock.now + self.skew)

    def later(self, delay: Seconds, act: Callable[..., None], *arguments: Any) -> None:
        """Do something later, unless the agent has died by then; not while it is paused."""
        self.clock.after(delay, self._wake, act, arguments)

    def _wake(self, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.dead:
            return
        if self.paused_until > self.clock.now:
            self.clock.at(self.paused_until, self._wake, act, arguments)
        else:
            self.run(act, *arguments)

    # ---- its stream ----

    def knock(self) -> None:
        if self.stream is not None:
            return
        if self.host.cut_until > self.clock.now or not self.cluster.coordinator.up:
            self._knock_later()
            return
        self.streams += 1
        self.stream = SimStream(self, self.streams)
        about = {"node": self.node, "round": self.round, "busy": self.busy}
        about |= {"stream": self.streams, "acked": self.acked_number}
        hello = Hello(protocol=PROTOCOL, token="", terms=self.cluster.terms, **about)  # type: ignore[arg-type]
        beat: list[Upward] = [self._beat()] if self.lease_over else []
        self.cluster.network.send_up(self.stream, [hello, *beat])

    def _knock_later(self) -> None:
        self.later(self.pause_s, self.knock)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def stream_lost(self, stream: SimStream) -> None:
        if self.stream is stream and not self.dead:
            self.stream, self.connected_at = None, None
            self.lost_at = self.clock.now
            self._knock_later()

    def hear(self, stream: SimStream, message: Downward) -> None:
        if self.dead or self.stream is not stream:
            return
        if isinstance(message, Ack):
            self.acked(message.number)
        elif isinstance(message, Welcome):
            self._welcomed(stream, message)
        elif isinstance(message, Lease):
            self._lent(message)
        else:
            self.ordered(message)

    def ordered(self, order: NodeAction) -> None:
        if isinstance(order, Finish) and self.finishing is None:
            self.finishing = order
        if isinstance(order, StartWorkers) and self.finishing is None:
            self.cluster.invariants.part_offered(self, order.part)
        if isinstance(order, StopWorkers) and self.cluster.functions is not None:
            self.cluster.functions.told_to_stop(self, order)
        self.run(self.act, order)

    def _welcomed(self, stream: SimStream, welcome: Welcome) -> None:
        self.acked(welcome.acked)
        self.connected_at = self.clock.now
        self.pause_s = FIRST_PAUSE_S
        if self.unacked:
            self.cluster.network.send_up(stream, list(self.unacked))
        self.run(self.resumed, [sent.event for sent in self.unacked])
        self.silence_s = look.silence_s(self.cluster.coordinator.job)
        self.later(BEAT_S, self.reachable_again)
        if self.number == 0:
            spec, replaces = self._spec(), self.host.replaced
            self.report(NodeJoined, spec=spec, store_port=self.port, replaces=replaces)
            self.keeper.tell_images()
            if self.leaving:
                self._tell_leaving()
            self.later(self.chance.warm_up_s(), self._warmed)
            self.later(READ_EVERY_S, self._sample_machine)

    def _spec(self) -> NodeSpec:
        host = self.host
        return NodeSpec(
            host=host.name,
            address=host.address,
            slots=self.cluster.settings.slots,
            pid=1000 + host.agents,
            switch=host.switch,
            domain=host.domain,
            keeper_port=1,
            test_port=2,
            request=self.request,
        )

    def _warmed(self) -> None:
        self.warm = True
        self.report(NodeWarm)

    def _sample_machine(self) -> None:
        """Report the machine's use: CPUs are busy while ranks run."""
        usage = NodeUsage(
            cpu=0.7 if self.ranks else 0.1,
            cpus=8.0,
            memory_used_bytes=(4 + len(self.ranks)) << 30,
            memory_bytes=64 << 30,
            received_bytes_per_s=1e9 * len(self.ranks),
            sent_bytes_per_s=1e9 * len(self.ranks),
        )
        if usage != self._told_usage:
            self._told_usage = usage
            self.report(NodeSampled, usage=usage)
        self.later(interval_s(self.cluster.settings.nodes), self._sample_machine)

    def acked(self, number: int) -> None:
        self.acked_number = max(number, self.acked_number)
        while self.unacked and self.unacked[0].number <= number:
            self.unacked.popleft()

    def report(self, kind: Callable[..., AnyEvent], **fields: Any) -> None:
        """Send an event about this node, of now."""
        self.say(kind(at=self.at(), node=self.node, **fields))

    def say(self, *events: AnyEvent) -> None:
        if self.dead:
            return
        sent = []
        for event in events:
            if isinstance(event, WorkersKilled):
                self.killed = event.round
            if isinstance(event, WorkerExited) and self.cluster.functions is not None:
                self.cluster.functions.death_told(event)
            self.number += 1
            sent.append(Sent(number=self.number, event=event))
        self.unacked.extend(sent)
        if self.connected_at is not None and self.stream is not None:
            self.cluster.network.send_up(self.stream, list(sent))

    def tell(self, message: EvidenceTaken) -> None:
        """Say something that is not worth saying twice."""
        if self.connected_at is not None and self.stream is not None and not self.dead:
            self.cluster.network.send_up(self.stream, [message])

    # ---- its lease ----

    def unreachable(self) -> None:
        """Note that no beat will be answered from now on, for a while."""
        now, coordinator = self.clock.now, self.cluster.coordinator
        if now >= self.unreachable_until:
            hears = coordinator.up and coordinator.stands_until <= now
            since = self.lost_at if hears and self.connected_at is None else now
            self.beat_at = since - self.beat_ago_s
        self.clock.at(max(now, self.beat_at + lease_s(self.silence_s)), self.look_at_lease)

    @property
    def unreachable_until(self) -> float:
        return max(self.host.cut_until, self.paused_until)

    def look_at_lease(self) -> None:
        """Pause the ranks if the lease is over; workers do that even if their agent stands."""
        now, until = self.clock.now, self.beat_at + lease_s(self.silence_s)
        if self.dead or self.lease_over or now < until or self.unreachable_until <= now:
            return
        self.lease_over = True
        self.cluster.invariants.paused += 1
        self.cluster.training.hold(self.running, ("lease", self.node))
        self.run(self.pause_ranks)

    def reachable_again(self) -> None:
        """Beat, now that it can be answered; a stream that the cut broke is opened anew by itself."""
        if self.lease_over and self.connected_at is not None and self.stream is not None:
            self.cluster.network.send_up(self.stream, [self._beat()])
            self.later(BEAT_S, self.reachable_again)

    def _beat(self) -> Beat:
        self.beats.append(self.clock.now)
        return Beat(number=len(self.beats))

    def _lent(self, lease: Lease) -> None:
        late = self.clock.now >= self.beats[lease.beat - 1] + lease.for_s
        if late or not self.lease_over or self.unreachable_until > self.clock.now:
            return
        if not self.busy or lease.round == self.round:
            self.lease_over = False
            self.cluster.invariants.ranks_go_on(self)
            self.cluster.training.release(self.running, ("lease", self.node))
            self.run(self.let_ranks_go_on)

    def pause_ranks(self) -> None:
        """Do what the agent does when its lease is over."""

    def let_ranks_go_on(self) -> None:
        """Do what the agent does when its lease is renewed."""

    # ---- its end ----

    def told_to_leave(self, reason: str) -> None:
        """Take a SIGTERM: tell the coordinator, which will order it to finish."""
        if self.leaving or self.finishing is not None:
            return
        self.leaving = reason
        if self.number > 0:
            self._tell_leaving()
        if self.connected_at is None:
            finish = Finish(node=self.node, code=EXIT_TRY_AGAIN, reason=reason, grace_s=OWN_GRACE_S)
            self.later(LEAVE_LIMIT_S, self.ordered, finish)

    def _tell_leaving(self) -> None:
        self.report(NodeLeaving, reason=self.leaving, code=EXIT_TRY_AGAIN)

    def leave(self, order: Finish, latest: float | None = None) -> None:
        """End once the coordinator has the last word, or has had its time."""
        self.cluster.invariants.node_leaves(self)
        latest = self.clock.now + LAST_WORD_LIMIT_S if latest is None else latest
        if self.unacked and self.clock.now < latest:
            self.later(0.05, self.leave, order, latest)
            return
        self.die()
        self.cluster.agent_ended(self, order)

    def die(self, silently: bool = False) -> None:
        """End its process, and its workers with it; silently when the whole host is gone."""
        if self.dead:
            return
        self.dead = True
        self.host.replaced = NodeId("") if silently else self.node
        self.cluster.training.break_(self.running)
        for one in [*self.ranks.values(), *self.parked.values()]:
            one.gone(Exit(signal=9))
        if self.stream is not None and silently:
            self.stream.open_below = False
            self.cluster.silence(self.stream)
        elif self.stream is not None:
            self.cluster.network.close_below(self.stream)


class AgentClock(JobClock):
    """Job time as one agent sees it; its machine's monotonic clock is the simulated one."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent

    def now(self) -> Time:
        return self._agent.at()

    def at(self, monotonic: float) -> Time:
        return Time(monotonic + self._agent.skew)


class LightAgent(SimAgent):
    """Does with orders what the supervisor does, as cheaply as possible."""

    def __init__(self, cluster: Cluster, host: Host, node: NodeId) -> None:
        super().__init__(cluster, host, node)
        self._round = self._ready_after = RoundNumber(0)
        self._starting = self._stop_asked = self._left = False
        self._stopping: StopWorkers | Finish | None = None
        self._ended: list[RankProgress] = []
        self._slowest_stop_s: Seconds | None = None
        self._told_steps = 0
        self._raised: dict[Rank, Raised] = {}
        self._departing: dict[int, float] = {}
        """Processes that leave their function, and until when each may take."""
        self._dismissed: dict[int, SimRank] = {}
        """Processes that were parked and are told to end."""
        self._ending: set[int] = set()
        """Processes that are told to end although they may be leaving their function."""
        self._left_from: dict[int, float] = {}
        """When each process was told to leave, or raised."""
        self._slowest_leave_s: Seconds | None = None
        parts = (node, AgentClock(self), self.say, self._reply)
        self._requests = ScriptRequests(*parts)
        self._shards = NodeShards(*parts, now=lambda: self.clock.now)

    @property
    def round(self) -> RoundNumber:
        return self._round

    @property
    def busy(self) -> bool:
        return bool(self.ranks) or self._starting or bool(self._dismissed)

    def keeps(self, one: SimRank) -> bool:
        return True

    def act(self, order: NodeAction) -> None:
        if isinstance(order, StartWorkers):
            self._start(order.part)
        elif isinstance(order, Finish) or (
            isinstance(order, StopWorkers) and order.round == self._round
        ):
            self._stop(order)
        elif isinstance(order, actions.Answered):
            self._requests.answered(order)
        elif isinstance(order, actions.LendShards):
            self._shards.lent(order)
        elif isinstance(order, actions.ReleaseRanks):
            self._release(order)
        elif isinstance(order, actions.Examine):
            self.tell(EvidenceTaken(examination=order.examination, evidence=()))
        elif isinstance(order, actions.TestNode) and not isinstance(self._stopping, Finish):
            self.tester.act(order)
        elif isinstance(
            order, actions.WriteRankFiles | actions.CommitCheckpoint | actions.CheckpointSettled
        ):
            self.keeper.act(order)

    def resumed(self, sent: list[AnyEvent]) -> None:
        self._requests.ask_again(sent)
        self._shards.ask_again()

    def _reply(self, rank: Rank, message: local.ScriptReply) -> None:
        if rank in self.ranks:
            self.ranks[rank].reply(message)

    # ---- a round begins ----

    def _start(self, part: Part) -> None:
        if part.round <= self._round or isinstance(self._stopping, Finish):
            return
        self._round = part.round
        self._stopping, self._stop_asked, self._slowest_stop_s = None, False, None
        self._ended, self._told_steps = [], 0
        self._departing.clear()
        self._ending.clear()
        self._left_from.clear()
        self._slowest_leave_s = None
        self._starting = True
        self.tester.end()
        self.keeper.begin_round(part)
        self._shards.begin_round(part)
        self.running = self.cluster.training.join(self, part)
        stay = {one.local_rank: one for one in self.parked.values()}
        for local_rank in sorted(stay):
            self._give(self.running, part, local_rank, stay[local_rank])
        vacant = [slot for slot in range(part.slots) if slot not in stay]
        wait_s = self.chance.start_s(self.warm) if vacant else 0.0
        self.later(wait_s, self._hand_over, part, self.running, vacant)

    def _hand_over(self, part: Part, round: SimRound, slots: list[int]) -> None:
        """Give processes their ranks; each script begins in its own time, but for large worlds."""
        if round.number != self._round or not self._starting:
            return
        self._starting = False
        for slot in slots:
            self._give(round, part, slot)
        if self.cluster.begins_coarsely:
            self.say(*[self._started(one) for one in self.ranks.values()])
            round.started += part.slots
            self.cluster.training.go_on_from_saved(round, part.slots)
        report_s = self.cluster.settings.report_s
        self.later(report_s * self.rng.uniform(0.5, 1.5), self._sample, round)

    def _give(
        self, round: SimRound, part: Part, local_rank: int, parked: SimRank | None = None
    ) -> None:
        """Give a rank to a process; one that is parked enters its function again."""
        one = SimRank(self, round, Rank(part.first_rank + local_rank), local_rank, parked)
        one.on_exit = lambda end: self._exited(one, end)
        one.hear = lambda message: self._hear_worker(one, message)
        if not self.cluster.begins_coarsely:
            self.later(self.rng.uniform(0.001, 0.05), one.begin)

    def _started(self, one: SimRank) -> WorkerStarted:
        return WorkerStarted(
            at=self.at(),
            node=self.node,
            round=self._round,
            rank=one.rank,
            pid=one.pid,
            warm=self.warm or one.again,
            again=one.again,
        )

    def _hear_worker(self, one: SimRank, message: local.FromWorker) -> None:
        if isinstance(message, local.Began):
            self.say(self._started(one))
        elif isinstance(message, local.Stepped):
            self._tell_progress()
        elif isinstance(message, local.Died):
            self._raised[one.rank] = message.raised
        elif isinstance(message, local.OpenCheckpointer):
            self.keeper.opened(message)
        elif isinstance(message, local.ImageWhole):
            self.keeper.whole(one.rank, message)
        elif isinstance(message, local.ImageMissed):
            self.keeper.missed(one.rank, message)
        elif isinstance(message, local.DataUsed):
            self._shards.heard(one.rank, message)
        elif isinstance(message, local.Ask):
            self._asked(one.rank, message)
        elif isinstance(message, local.FunctionRaised):
            self._function_raised(one, message)
        elif isinstance(message, local.FunctionReturned):
            self._function_returned()
        elif isinstance(message, local.FunctionLeft):
            self._function_left(one)
        elif isinstance(message, local.LeavingPostponed) and one.pid in self._departing:
            self._departing[one.pid] = self.clock.now + ATOMIC_FLOOR_S

    def _asked(self, rank: Rank, message: local.Ask) -> None:
        round, request = self._round, message.request
        if isinstance(request, TakeShards):
            self._shards.ask(rank, message)
            return
        if isinstance(request, OpenData):
            self._shards.opened(request.spec)
        if isinstance(request, FindState) and request.tried is None and rank == 0:
            ask = lambda: self._requests.ask(round, rank, message)  # noqa: E731
            self.keeper.look(round, request.checkpointer, ask)
        else:
            self._requests.ask(round, rank, message)

    # ---- progress ----

    def first_step(self) -> None:
        if self.cluster.settings.coarse:
            self._tell_progress()
        else:
            super().first_step()

    def _sample(self, round: SimRound) -> None:
        """Tell how far its ranks have come, now and then."""
        if round is self.running and self.ranks:
            self._tell_progress()
            self._shards.look()
            self.later(self.cluster.settings.report_s, self._sample, round)

    def _tell_progress(self) -> None:
        if self.running is None or not self.ranks:
            return
        steps = self.running.steps(self.clock.now)
        if steps > self._told_steps:
            self._told_steps = steps
            self.report(Progress, round=self._round, ranks=self._progress(list(self.ranks)))

    def _progress(
        self, ranks: list[Rank], until: float | None = None, round: SimRound | None = None
    ) -> tuple[RankProgress, ...]:
        round = round or self.running
        assert round is not None
        return self.cluster.training.progress(round, ranks, self.skew, until)

    # ---- restartable functions ----

    def _function_raised(self, one: SimRank, message: local.FunctionRaised) -> None:
        if one.pid in self._departing:
            return  # It was told to leave.
        self._departing[one.pid], self._left_from[one.pid] = NEVER, self.clock.now
        (progress,) = self._progress([one.rank])
        event = RankRaised(
            at=Time(message.at + self.skew),
            node=self.node,
            round=self._round,
            rank=one.rank,
            progress=progress,
            raised=message.raised,
        )
        self.keeper.ended(one.rank, False, lambda: self.say(event))

    def _function_returned(self) -> None:
        entries = [one.entry for one in self.ranks.values()]
        returned = [entry for entry in entries if entry is not None and entry.stage == "returned"]
        if len(returned) == self.cluster.settings.slots and self._stopping is None:
            self.report(RanksReturned, round=self._round)

    def _release(self, order: actions.ReleaseRanks) -> None:
        for one in list(self.ranks.values()):
            if order.round == self._round and one.entry is not None:
                one.entry.order(local.Release())

    def _leave_function(self, one: SimRank, order: StopWorkers) -> None:
        assert one.entry is not None
        if one.pid not in self._departing:
            self._left_from[one.pid] = self.clock.now
            one.entry.order(local.Leave(round=order.round, why=order.why))
        self._departing[one.pid] = self.clock.now + order.leave_s
        self.later(order.leave_s, self._give_up, one)

    def _give_up(self, one: SimRank) -> None:
        """Kill a process that does not leave its function in time."""
        until = self._departing.get(one.pid)
        if until is None or one.exit is not None or self.ranks.get(one.rank) is not one:
            return
        if until > self.clock.now:
            self.later(until - self.clock.now, self._give_up, one)
        else:
            self._end([one])

    def _function_left(self, one: SimRank) -> None:
        (progress,) = self._progress([one.rank])
        self._ended.append(progress)
        self._requests.forget(one.rank)
        self._shards.forget(one.rank)
        if one.pid in self._ending:
            self._dismissed[one.pid] = one
            self.later(0.0, one.send, signal.SIGKILL)
            return
        if one.pid in self._left_from:
            took_s = self.clock.now - self._left_from[one.pid]
            self._slowest_leave_s = max(took_s, self._slowest_leave_s or 0.0)
        if self._stopping is not None and not self.busy:
            self._stopped(self._stopping)

    def _dismiss(self, parked: list[SimRank], why: str, grace_s: Seconds) -> None:
        for one in parked:
            assert one.entry is not None
            self._dismissed[one.pid] = one
            one.entry.order(local.Dismiss(why=why))
            self.later(grace_s, one.send, signal.SIGKILL)

    # ---- and ends ----

    def _exited(self, one: SimRank, end: Exit) -> None:
        """Tell the end of a worker that was not asked to end, after what it saved is sealed."""
        if one.entry is not None and one.entry.stage == "parked":
            if self._dismissed.pop(one.pid, None) is not None and not self.busy:
                assert self._stopping is not None
                self._stopped(self._stopping)
            return
        (progress,) = self._progress([one.rank], one.seen_until(), one.round)
        self._ended.append(progress)
        self._requests.forget(one.rank)
        self._shards.forget(one.rank)
        event = WorkerExited(
            at=self.at(),
            node=self.node,
            round=one.round.number,
            rank=one.rank,
            code=end.code,
            signal=end.signal,
            oom=one.oom,
            progress=progress,
            raised=self._raised.pop(one.rank, None),
        )
        self.keeper.ended(one.rank, end.code == 0, lambda: self.say(event))
        if self._stopping is not None and not self.busy:
            self._stopped(self._stopping)

    def _stop(self, order: StopWorkers | Finish) -> None:
        stopping = isinstance(self._stopping, StopWorkers) and isinstance(order, StopWorkers)
        if stopping and order.grace_s <= 0.0 and self.ranks:
            self.report(WorkersKilled, round=self._round)
            self._end([one for one in self.ranks.values() if one.pid in self._departing])
        if stopping or isinstance(self._stopping, Finish):
            return
        self._stopping = order
        self._starting = False
        self.tester.end()
        self.cluster.training.break_(self.running)
        stay = self._staying(order)
        if isinstance(order, StopWorkers):
            for one in stay:
                self._leave_function(one, order)
        to_end = [one for one in self.ranks.values() if one not in stay]
        self._ending.update(one.pid for one in to_end)
        if not self.busy:
            self._stopped(order)
        elif to_end and not self._stop_asked:
            self._stop_asked = True
            took_s, by_itself = self.chance.stop_s(order.grace_s)
            if by_itself:
                self._slowest_stop_s = took_s
            self.later(took_s, self._all_gone, self._round)

    def _staying(self, order: StopWorkers | Finish) -> list[SimRank]:
        """Choose the ranks that leave their function; dismiss what is parked and must not stay."""
        parked = list(self.parked.values())
        if isinstance(order, Finish) or order.leave_s <= 0:
            if isinstance(order, Finish) or self._ready_after != order.round:
                why = order.reason if isinstance(order, Finish) else order.why
                self._dismiss(parked, why, order.grace_s)
            return []
        unfit = [one for one in parked if one.rank in order.replace and one.round is self.running]
        self._dismiss(unfit, order.why, order.grace_s)
        return [
            one
            for one in self.ranks.values()
            if one.rank not in order.replace and one.entry is not None and one.entry.stays
        ]

    def _all_gone(self, round: RoundNumber) -> None:
        """End all ranks that do not leave their function."""
        if round == self._round and self.ranks and self._stopping is not None:
            self._end([one for one in self.ranks.values() if one.pid in self._ending])

    def _end(self, ranks: list[SimRank]) -> None:
        if self.running is None:
            return
        self._ended += self._progress([one.rank for one in ranks])
        for one in ranks:
            self._requests.forget(one.rank)
            self._shards.forget(one.rank)
            one.gone(Exit(signal=15))
        if self._stopping is not None and not self.busy:
            self._stopped(self._stopping)

    def _stopped(self, order: StopWorkers | Finish) -> None:
        ranks = tuple(self._ended)
        if isinstance(order, Finish):
            limit_s = 0.0 if order.rejoin else self.cluster.settings.save_deadline_s
            self.keeper.when_settled(limit_s, lambda: self._last_word(order, ranks))
            return
        self._stopping = self.running = None
        if self._ready_after != order.round:  # Told twice to stop, it says the same twice.
            self._ready_after = order.round
            self.port = self.cluster.next_port()
        told = {"store_port": self.port, "slowest_stop_s": self._slowest_stop_s}
        told |= {"parked": len(self.parked), "slowest_leave_s": self._slowest_leave_s}
        self.report(NodeReady, round=order.round, ranks=ranks, **told)

    def _last_word(self, order: Finish, ranks: tuple[RankProgress, ...]) -> None:
        if not self._left:
            self._left = True
            self.report(NodeLeft, round=self._round, ranks=ranks)
            self.leave(order)
