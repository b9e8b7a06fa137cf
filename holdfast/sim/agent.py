"""A simulated agent: does with orders what `holdfast.agent.supervisor` and `.stream` do.

It starts workers, which takes time; it stops them, which takes time too and sometimes all the grace;
it numbers its events and keeps them until they are acknowledged; it knocks again with a backoff when
its stream broke, and says by its hello in which round it is. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.messages.actions import Finish, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeWarm,
    Progress,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, Part, Raised, RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time
from holdfast.messages.wire import PROTOCOL, Ack, Hello, Sent, Welcome
from holdfast.sim.network import Downward, Stream
from holdfast.sim.training import SimRound

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster, Host

FIRST_PAUSE_S: Seconds = 0.01
LONGEST_PAUSE_S: Seconds = 1.0
LAST_WORD_LIMIT_S: Seconds = 2.0
OWN_GRACE_S: Seconds = 30.0
EXIT_TRY_AGAIN = 75


class SimAgent:
    def __init__(self, cluster: Cluster, host: Host, node: NodeId) -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.host = host
        self.node = node
        self.skew = cluster.rng.uniform(-0.002, 0.002)
        self.dead = False
        self.paused_until = 0.0
        self.warm = False
        self.leaving = False
        # its stream
        self.stream: Stream | None = None
        self.connected_at: float | None = None
        self.unacked: deque[Sent] = deque()
        self.number = 0
        self.pause_s = FIRST_PAUSE_S
        # its workers
        self.round = RoundNumber(0)
        self.part: Part | None = None
        self.running: SimRound | None = None
        self.workers: dict[Rank, None] = {}
        self.starting = False
        self.stopping: StopWorkers | Finish | None = None
        self.finished: Finish | None = None
        self.ended: list[RankProgress] = []
        self.stop_asked = False
        self.slowest_stop_s: Seconds | None = None
        self.port = cluster.next_port()
        self.told_steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.workers) or self.starting

    def at(self) -> Time:
        """Job time as this agent sees it."""
        return Time(self.clock.now + self.skew)

    def later(self, delay: Seconds, act: Callable[..., None], *arguments: Any) -> None:
        """Do something later, unless it has died by then; not while it is paused."""
        self.clock.after(delay, self._wake, act, arguments)

    def _wake(self, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.dead:
            return
        if self.paused_until > self.clock.now:
            self.clock.at(self.paused_until, self._wake, act, arguments)
            return
        act(*arguments)

    # ---- its stream ----

    def knock(self) -> None:
        network = self.cluster.network
        if self.stream is not None:
            return
        if self.host.cut_until > self.clock.now or not self.cluster.coordinator.up:
            self.later(self.pause_s, self.knock)
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
            return
        self.stream = Stream(self)
        hello = Hello(
            protocol=PROTOCOL,
            token="",
            node=self.node,
            round=self.round,
            busy=self.busy,
            terms=self.cluster.terms,
        )
        network.send_up(self.stream, [hello])

    def stream_lost(self, stream: Stream) -> None:
        if self.stream is not stream or self.dead:
            return
        self.stream, self.connected_at = None, None
        self.later(self.pause_s, self.knock)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def hear(self, stream: Stream, message: Downward) -> None:
        if self.dead or self.stream is not stream:
            return
        if isinstance(message, Ack):
            self.acked(message.number)
        elif isinstance(message, Welcome):
            self._welcomed(stream, message)
        elif isinstance(message, (StartWorkers, StopWorkers, Finish)):
            self._act(message)

    def _welcomed(self, stream: Stream, welcome: Welcome) -> None:
        self.acked(welcome.acked)
        self.connected_at = self.clock.now
        self.pause_s = FIRST_PAUSE_S
        if self.unacked:
            self.cluster.network.send_up(stream, list(self.unacked))
        if self.number == 0:
            self.say(self._join())
            self.later(self.cluster.chance.warm_up_s(), self._warmed)

    def _join(self) -> NodeJoined:
        host = self.host
        spec = NodeSpec(
            host=host.name,
            address=host.address,
            slots=self.cluster.settings.slots,
            pid=1000 + host.agents,
            switch=host.switch,
            domain=host.domain,
        )
        return NodeJoined(at=self.at(), node=self.node, spec=spec, store_port=self.port)

    def _warmed(self) -> None:
        self.warm = True
        self.say(NodeWarm(at=self.at(), node=self.node))

    def acked(self, number: int) -> None:
        while self.unacked and self.unacked[0].number <= number:
            self.unacked.popleft()

    def say(self, *events: AnyEvent) -> None:
        sent = []
        for event in events:
            self.number += 1
            sent.append(Sent(number=self.number, event=event))
        self.unacked.extend(sent)
        if self.connected_at is not None and self.stream is not None:
            self.cluster.network.send_up(self.stream, list(sent))

    # ---- orders ----

    def _act(self, order: StartWorkers | StopWorkers | Finish) -> None:
        if isinstance(order, StartWorkers):
            self._start(order.part)
        elif isinstance(order, Finish) or order.round == self.round:
            self._stop(order)

    def _start(self, part: Part) -> None:
        if part.round <= self.round or isinstance(self.stopping, Finish):
            return
        self.cluster.watch.part_taken(self, part)
        self.round = part.round
        self.part = part
        self.stopping, self.stop_asked = None, False
        self.slowest_stop_s = None
        self.ended, self.told_steps = [], 0
        self.starting = True
        self.running = self.cluster.training.join(self, part)
        ranks = [Rank(part.first_rank + i) for i in range(part.slots)]
        start_s = self.cluster.chance.start_s(self.warm)
        if self.cluster.settings.coarse:
            self.later(start_s, self._begin, part.round, ranks)
            return
        self.later(start_s, self._hand_over, part.round, ranks)

    def _hand_over(self, round: RoundNumber, ranks: list[Rank]) -> None:
        """Processes get their ranks; each script begins in its own time."""
        if round != self.round or not self.starting:
            return
        self.starting = False
        self.workers = dict.fromkeys(ranks)
        for rank in ranks:
            self.later(self.cluster.rng.uniform(0.001, 0.05), self._began, round, [rank])

    def _begin(self, round: RoundNumber, ranks: list[Rank]) -> None:
        if round != self.round or not self.starting:
            return
        self.starting = False
        self.workers = dict.fromkeys(ranks)
        self._began(round, ranks)

    def _began(self, round: RoundNumber, ranks: list[Rank]) -> None:
        ranks = [rank for rank in ranks if rank in self.workers]
        if round != self.round or not ranks:
            return
        at = self.at()
        self.say(
            *[
                WorkerStarted(
                    at=at, node=self.node, round=round, rank=rank, pid=2000 + rank, warm=self.warm
                )
                for rank in ranks
            ]
        )
        assert self.running is not None
        self.cluster.training.rank_started(self.running, len(ranks))
        if len(ranks) == len(self.workers) or ranks[-1:] == [next(reversed(self.workers))]:
            report_s = self.cluster.settings.report_s
            self.later(report_s * self.cluster.rng.uniform(0.5, 1.5), self._sample, round)

    def _sample(self, round: RoundNumber) -> None:
        """Now and then, tell how far everybody has come."""
        if round == self.round and self.workers:
            self.tell_progress()
            self.later(self.cluster.settings.report_s, self._sample, round)

    def tell_progress(self) -> None:
        if self.running is None or not self.workers or self.dead:
            return
        steps = self.running.steps(self.clock.now)
        if steps <= self.told_steps:
            return
        self.told_steps = steps
        ranks = self._progress(list(self.workers))
        self.say(Progress(at=self.at(), node=self.node, round=self.round, ranks=ranks))

    def _progress(self, ranks: list[Rank]) -> tuple[RankProgress, ...]:
        assert self.running is not None
        return self.cluster.training.progress(self.running, ranks, self.skew)

    # ---- deaths ----

    def worker_dies(
        self,
        rank: Rank,
        code: int | None = None,
        signal: int | None = None,
        oom: bool = False,
        raised: Raised | None = None,
    ) -> None:
        """One worker's process is gone, of its own accord."""
        if self.dead or rank not in self.workers:
            return
        if code != 0:
            self.cluster.training.break_(self.running)
        (progress,) = self._progress([rank])
        del self.workers[rank]
        self.ended.append(progress)
        self.say(
            WorkerExited(
                at=self.at(),
                node=self.node,
                round=self.round,
                rank=rank,
                code=code,
                signal=signal,
                oom=oom,
                progress=progress,
                raised=raised,
            )
        )
        if self.stopping is not None and not self.workers:
            self._stopped()

    def _stop(self, order: StopWorkers | Finish) -> None:
        if isinstance(self.stopping, Finish):
            return
        self.stopping = order
        self.starting = False
        if not self.workers:
            self.cluster.training.break_(self.running if isinstance(order, Finish) else None)
            self._stopped()
        elif not self.stop_asked:
            self.stop_asked = True
            took_s, by_itself = self.cluster.chance.stop_s(order.grace_s)
            if by_itself:
                self.slowest_stop_s = took_s
            self.later(took_s, self._all_gone, self.round)
        self.cluster.training.break_(self.running)

    def _all_gone(self, round: RoundNumber) -> None:
        if round != self.round or not self.workers or self.stopping is None:
            return
        self.ended += self._progress(list(self.workers))
        self.workers = {}
        self._stopped()

    def _stopped(self) -> None:
        order, ranks = self.stopping, tuple(self.ended)
        assert order is not None
        if isinstance(order, Finish):
            if self.finished is None:
                self.finished = order
                self.say(NodeLeft(at=self.at(), node=self.node, round=self.round, ranks=ranks))
                self._leave_when_heard(self.clock.now + LAST_WORD_LIMIT_S)
            return
        self.stopping = None
        if self.running is not None:  # Told twice to stop, it says the same twice.
            self.port = self.cluster.next_port()
        self.running = None
        self.say(
            NodeReady(
                at=self.at(),
                node=self.node,
                round=order.round,
                store_port=self.port,
                slowest_stop_s=self.slowest_stop_s,
                ranks=ranks,
            )
        )

    def _leave_when_heard(self, latest: float) -> None:
        if self.unacked and self.clock.now < latest:
            self.later(0.05, self._leave_when_heard, latest)
            return
        assert self.finished is not None
        self.die()
        self.cluster.agent_ended(self, self.finished)

    # ---- what befalls it ----

    def told_to_leave(self, reason: str) -> None:
        """Somebody sends it SIGTERM."""
        if self.leaving or self.finished is not None:
            return
        self.leaving = True
        if self.connected_at is None:
            finish = Finish(node=self.node, code=EXIT_TRY_AGAIN, reason=reason, grace_s=OWN_GRACE_S)
            self._stop(finish)
        elif self.number > 0:
            self.say(NodeLeaving(at=self.at(), node=self.node, reason=reason, code=EXIT_TRY_AGAIN))

    def die(self, silently: bool = False) -> None:
        """Its process is gone, and its workers with it; silently when the whole host is."""
        if self.dead:
            return
        self.dead = True
        self.cluster.training.break_(self.running)
        stream = self.stream
        if stream is None:
            return
        if silently:
            stream.open_below = False
            self.cluster.silence(stream)
        else:
            self.cluster.network.close_below(stream)
