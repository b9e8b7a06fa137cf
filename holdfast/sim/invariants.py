"""What must be true, whatever happens.

Looks at every event that the core took in, every action it answered with, every part that an agent
takes on and every replay, and compares with what really happened in `training`. `--check every` looks
at the whole state after each event, `round` only when a round was frozen, broken or came back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.core.recovery.rules import SAME_LIMIT, STUCK_LIMIT
from holdfast.core.states import Ended, Stopping
from holdfast.messages.actions import AnyAction, Finish, StartWorkers, StopWorkers
from holdfast.messages.events import AnyEvent, Tick
from holdfast.messages.records import Part, World
from holdfast.messages.units import NodeId, RoundNumber, Time

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster, Host

Check = Literal["every", "round", "never"]

TICKS_AT_ONCE = 50
FENCED_WITHIN_S = 3.0
"""A node that is not in the job any more is told so within this time after it is back."""


class Violated(AssertionError):
    """An invariant does not hold; the message says which, when and under which seed."""


class Watch:
    def __init__(self, cluster: Cluster, check: Check) -> None:
        self.cluster = cluster
        self.check = check
        self.checked = 0
        self.duplicates = 0
        """Events that came twice and were dropped by their number."""
        self.replays = 0
        self.rounds = 0
        self.frozen: dict[RoundNumber, World] = {}
        self._mark: tuple[object, ...] = ()
        self._ticks: list[float] = []
        self._bugs = 0
        self._bug_highest = -1
        self._strangers: dict[NodeId, float] = {}

    def demand(self, holds: bool, what: str) -> None:
        self.checked += 1
        if not holds:
            settings = self.cluster.settings
            at = self.cluster.clock.now
            raise Violated(f"seed {settings.seed}, at {at:.3f} s: {what} ({settings})")

    # ---- the core ----

    def event_handled(self, job: Job, event: AnyEvent, actions: list[AnyAction], now: Time) -> None:
        m = job.membership
        if job.world is not None and m.round not in self.frozen:
            self._froze(job, job.world)
        if type(event) is Tick:
            self._ticked(now)
        if self.check == "never":
            return
        for action in actions:
            self._action(job, action)
        mark = (
            m.round,
            job.world is None,
            job.unstepped == 0,
            not isinstance(job.state, Stopping),
            job.result is None,
        )
        if self.check == "every" or mark != self._mark:
            self._mark = mark
            self._state(job, event, now)

    def _froze(self, job: Job, world: World) -> None:
        self.rounds += 1
        newest = max(self.frozen, default=0)
        self.demand(world.round == newest + 1, f"round {world.round} follows {newest}")
        self.frozen[world.round] = world
        self.frozen.pop(RoundNumber(world.round - 50), None)
        host = self._host_of(world.places[0].node)
        self.demand(world.store_address == host.address, "the store is not where rank 0 is")

    def _ticked(self, now: float) -> None:
        self._ticks = [at for at in self._ticks if at > now - 0.2]
        self._ticks.append(now)
        self.demand(len(self._ticks) < TICKS_AT_ONCE, "the core asks for ticks without end")

    def _state(self, job: Job, event: AnyEvent, now: Time) -> None:
        what = type(event).__name__
        try:
            jobs.validate(job)
        except AssertionError as error:
            self.demand(False, f"after {what}: {error}")
        m, training = job.membership, self.cluster.training
        if job.world is not None:
            frozen = self.frozen[m.round]
            self.demand(job.world == frozen, f"{what} changed the frozen round {m.round}")
            self.demand(list(job.ranks) == list(range(job.world.size)), "ranks have gaps")
            for node, candidate in m.placed.items():
                self.demand(
                    candidate.spec.host not in job.membership.excluded, f"excluded {node} is in"
                )
        real = training.rounds.get(m.round)
        if job.world is not None and job.unstepped < len(job.ranks):
            stepped = real is not None and real.first_at <= now
            self.demand(stepped, f"{what}: ranks of round {m.round} stepped before they could")
        if real is not None and job.unstarted < len(job.ranks):
            started = len(job.ranks) - job.unstarted
            self.demand(started <= real.started, f"{what}: more ranks started than there are")
        self.demand(job.highest <= training.highest_now(), f"{what}: a step that nobody took")
        self._ledger(job, now)
        self._somebody_is_waited_for(job, what)
        if len(job.incidents) > 1:
            one, other = job.incidents[-2:]
            self.demand(one.round < other.round, f"round {other.round} was broken twice")
        for incident in job.incidents[-2:]:
            in_order = incident.fault_at <= incident.opened_at + 1e-9
            self.demand(in_order, f"incident {incident.id} was noticed before it happened")
            if incident.closed_at is not None and incident.back_at is not None:
                self.demand(incident.back_at >= incident.fault_at, "back before the fault")

    def _somebody_is_waited_for(self, job: Job, what: str) -> None:
        """A job without a world goes on when a node is ready or when a deadline passes."""
        m = job.membership
        if job.result is not None or job.world is not None or m.count() == 0:
            return
        self.demand(
            not isinstance(job.state, Stopping) or bool(m.busy),
            f"{what}: a fault nobody will judge",
        )
        waits = bool(m.busy) or jobs.deadline(job) is not None
        self.demand(waits, f"{what}: {m.count()} nodes wait for nothing")

    def _ledger(self, job: Job, now: Time) -> None:
        seconds = sum(books.seconds_until(job.of(Ledger), now).values())
        due = books.rank_seconds(job.of(Ledger), now)
        self.demand(abs(seconds - due) <= 1e-6 * max(1.0, due), f"{seconds} s booked of {due} s")

    def _action(self, job: Job, action: AnyAction) -> None:
        m = job.membership
        if isinstance(action, StartWorkers):
            self.checked += 1
            part, frozen = action.part, self.frozen.get(action.part.round)
            if frozen is None or (part.world_size, part.store_port) != (
                frozen.size,
                frozen.store_port,
            ):
                self.demand(False, f"a part that is not of round {part.round}")
        elif isinstance(action, StopWorkers):
            self.demand(job.world is None or m.round != action.round, "a round in force is stopped")
        elif isinstance(action, Finish):
            gone = job.result is not None or not m.has(action.node)
            self.demand(gone, f"{action.node} is told to finish and stays a member")

    # ---- agents ----

    def part_taken(self, agent: SimAgent, part: Part) -> None:
        """An agent is about to start its ranks of a round."""
        self.demand(part.round > agent.round, f"{agent.node} goes back to round {part.round}")
        self.demand(not agent.busy, f"{agent.node} starts a round on top of another")
        world = self.frozen.get(part.round)
        self.demand(world is not None, f"round {part.round} was never frozen")
        assert world is not None
        size, store = world.size, (world.store_address, world.store_port)
        self.demand(
            (part.world_size, part.store_address, part.store_port) == (size, *store),
            f"{agent.node} was told another world of round {part.round}",
        )
        excluded = self.cluster.coordinator.job.membership.excluded
        late = agent.host.name in excluded and not self._was_member(agent.node, world)
        self.demand(not late, f"excluded {agent.node} got in")
        kept = part.first_rank != 0 or part.store_port == agent.port
        self.demand(kept, f"{agent.node} does not keep the port that was promised for the store")
        round = self.cluster.training.rounds.get(part.round)
        claimed = None if round is None else round.claims.get(part.first_rank)
        self.demand(claimed in (None, agent.node), f"rank {part.first_rank} was given twice")
        if world.places[part.group_rank].node == agent.node:
            return
        self.demand(False, f"{agent.node} was given the part of another")

    def _was_member(self, node: NodeId, world: World) -> bool:
        return any(place.node == node for place in world.places)

    def look_around(self) -> None:
        """Fenced nodes that are connected must have been told to finish."""
        coordinator, now = self.cluster.coordinator, self.cluster.clock.now
        if not coordinator.up or now - coordinator.up_since < FENCED_WITHIN_S:
            self._strangers.clear()
            return
        strangers: dict[NodeId, float] = {}
        for host in self.cluster.hosts:
            agent = host.agent
            if agent is None or agent.dead or agent.connected_at is None or agent.unacked:
                continue
            if max(agent.paused_until, host.cut_until) > now or agent.number == 0:
                continue
            if not isinstance(agent.stopping, Finish) and not coordinator.job.membership.has(
                agent.node
            ):
                since = strangers[agent.node] = self._strangers.get(agent.node, now)
                self.demand(
                    now - since < FENCED_WITHIN_S, f"{agent.node} is fenced and was not told"
                )
        self._strangers = strangers

    def bug_struck(self) -> None:
        """The same failure at the same step again: it must not go on for ever."""
        highest = self.cluster.coordinator.job.highest
        self._bugs = self._bugs + 1 if highest == self._bug_highest else 1
        self._bug_highest = highest
        limit = STUCK_LIMIT if self.cluster.schedule.rates else SAME_LIMIT
        self.demand(self._bugs <= limit, f"the same failure {self._bugs} times")

    # ---- the coordinator ----

    def replayed(
        self,
        before: bytes,
        after: bytes,
        acked_before: dict[NodeId, int],
        acked_after: dict[NodeId, int],
    ) -> None:
        if before != after:
            self.demand(False, "the journal leads to another state: " + _difference(before, after))
        self.demand(acked_before == acked_after, "the journal knows other acknowledgements")
        self.replays += 1

    def at_end(self) -> None:
        cluster = self.cluster
        job, now = cluster.coordinator.job, cluster.clock.now
        if self.check != "never":
            self._state(job, Tick(at=now), now)
        productive = job.of(Ledger).seconds.get("productive", 0.0)
        most = cluster.training.stepping_s() * 1.001 + 0.01 * self.rounds * len(job.ranks)
        self.demand(productive <= most, f"{productive} s productive, only {most} s were possible")
        ended = cluster.coordinator.closed
        if ended is not None and job.result is not None:
            self.demand(
                isinstance(job.state, Ended) and ended.code == job.result.code,
                "closed with another code",
            )

    def _host_of(self, node: NodeId) -> Host:
        number = int(node.partition(":")[0][1:])
        return self.cluster.hosts[number]


def _difference(before: bytes, after: bytes) -> str:
    one, other = msgspec.json.decode(before), msgspec.json.decode(after)
    parts = [key for key in one if one[key] != other.get(key)]
    return ", ".join(f"{key}: {one[key]!r} not {other.get(key)!r}" for key in parts)[:2000]
