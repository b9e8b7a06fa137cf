"""Checks what must be true, whatever happens.

Every event that the core took in, every action it answered with, every part that an agent takes on and
every replay is compared with what really happened in `training` and on storage. `--check every` looks
at the whole state after each event, `round` only when a round was frozen, broken or came back.

Of the design's seven invariants, (1) to (3) are checked by `keeper.SimStorage` with every change of
storage, and here against what the core believes; (4) here, on the history of steps behind each round
and the steps that incidents report as lost; (5) and (6) by `cluster`, which heals everything and
demands progress; (7) by `bug_struck`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.recovery.rules import SAME_LIMIT, STUCK_LIMIT
from holdfast.messages.actions import AnyAction, Finish, StartWorkers, StopWorkers
from holdfast.messages.events import AnyEvent, CheckpointWritten, Tick
from holdfast.messages.records import Part, World
from holdfast.messages.supply import SupplyPlan
from holdfast.messages.units import NodeId, RoundNumber, Time
from holdfast.sim import look
from holdfast.sim.training import loss_after

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster, Host

Check = Literal["every", "round", "never"]

TICKS_AT_ONCE = 50
FENCED_WITHIN_S = 3.0
"""A node that is not in the job any more is told so within this time after it is back."""


class Violated(AssertionError):
    """An invariant does not hold; the message says which, when and under which seed."""


class Invariants:
    """All checks of one simulation."""

    def __init__(self, cluster: Cluster, check: Check) -> None:
        self.cluster = cluster
        self.check = check
        self.violated: Violated | None = None
        """The first violation: agents take exceptions in their tasks for faults of their own."""
        self.checked = 0
        self.duplicates = 0
        """Events that came twice and were dropped by their number."""
        self.replays = 0
        self.paused = 0
        """Times that an agent paused its ranks because its lease was over."""
        self.rounds = 0
        self.frozen: dict[RoundNumber, World] = {}
        self._mark: tuple[object, ...] = ()
        self._ticks: list[float] = []
        self._bugs = 0
        self._bug_highest = -1
        self._strangers: dict[NodeId, float] = {}
        self._barred: dict[str, list[NodeId]] = {}
        """Hosts that are not let in again, and who was a member when that was decided."""
        self._written: dict[tuple[str, int], RoundNumber] = {}
        """Which round wrote which step of a checkpointer."""
        self._asked: set[str] = set()
        """Requests that were ever asked for."""
        self._sound: set[RoundNumber] = set()
        """Rounds whose history was checked; it does not change any more."""

    def demand(self, holds: bool, what: str) -> None:
        self.checked += 1
        if not holds:
            settings = self.cluster.settings
            at = self.cluster.clock.now
            violated = Violated(f"seed {settings.seed}, at {at:.3f} s: {what} ({settings})")
            self.violated = self.violated or violated
            raise violated

    # ---- the core ----

    def event_handled(self, job: Job, event: AnyEvent, actions: list[AnyAction], now: Time) -> None:
        world, number = look.world(job), look.round_number(job)
        if world is not None and number not in self.frozen:
            self._froze(world)
        if type(event) is Tick:
            self._ticked(now)
        if self.check == "never":
            return
        if type(event) is CheckpointWritten:
            self.check_written(event)
        for action in actions:
            self._action(job, action)
        stepped, broken = look.unstepped(job) == 0, look.is_broken(job)
        mark = (number, world is None, stepped, broken, look.ended(job) is None)
        if self.check == "every" or mark != self._mark:
            self._mark = mark
            self._state(job, event, now)

    def planned(self, plan: SupplyPlan) -> None:
        """Check that the core never asks for a name that it has asked for, nor beyond a budget."""
        if plan.whole:
            return
        names = {wish.id for wish in plan.ask}
        again = names & self._asked
        self.demand(not again, f"requests {sorted(again)} were asked for twice")
        self._asked |= names
        spent = look.overspent(self.cluster.coordinator.job)
        self.demand(not spent, spent)

    def _froze(self, world: World) -> None:
        self.rounds += 1
        newest = max(self.frozen, default=0)
        self.demand(world.round == newest + 1, f"round {world.round} follows {newest}")
        self.frozen[world.round] = world
        self.frozen.pop(RoundNumber(world.round - 50), None)
        host = self.host_of(world.places[0].node)
        self.demand(world.store_address == host.address, "the store is not where rank 0 is")

    def _ticked(self, now: float) -> None:
        self._ticks = [at for at in self._ticks if at > now - 0.2]
        self._ticks.append(now)
        self.demand(len(self._ticks) < TICKS_AT_ONCE, "the core asks for ticks without end")

    def check_written(self, event: CheckpointWritten) -> None:
        """Check that no other round has committed the same step."""
        snapshot = event.snapshot
        if event.error:
            return
        first = self._written.setdefault((snapshot.checkpointer, snapshot.step), snapshot.round)
        self.demand(first == snapshot.round, f"two rounds committed step {snapshot.step}")

    def _state(self, job: Job, event: AnyEvent, now: Time) -> None:
        what = type(event).__name__
        try:
            jobs.validate(job)
        except AssertionError as error:
            self.demand(False, f"after {what}: {error}")
        for host in look.excluded(job):
            self._barred.setdefault(host, look.known(job))
        world, number, training = look.world(job), look.round_number(job), self.cluster.training
        size = look.rank_count(job)
        if world is not None:
            self.demand(world == self.frozen[number], f"{what} changed the frozen round {number}")
            self.demand(list(look.ranks(job)) == list(range(world.size)), "ranks have gaps")
            for node, host in look.placed_hosts(job).items():
                out = node not in self._barred.get(host, (node,)) and not look.is_absent(job, node)
                self.demand(not out, f"excluded {node} is in")
        real = training.rounds.get(number)
        if world is not None and look.unstepped(job) < size:
            stepped = real is not None and real.first_at <= now
            self.demand(stepped, f"{what}: ranks of round {number} stepped before they could")
        if real is not None and look.unstarted(job) < size:
            started = size - look.unstarted(job)
            self.demand(started <= real.started, f"{what}: more ranks started than there are")
        highest = training.highest_now()
        self.demand(look.highest_step(job) <= highest, f"{what}: a step that nobody took")
        told = look.loss(job)
        if told is not None:
            real_loss = loss_after(told.step)
            self.demand(
                told.value == real_loss, f"{what}: the loss of another step than {told.step}"
            )
        seconds, due = look.booked_s(job, now)
        self.demand(abs(seconds - due) <= 1e-6 * max(1.0, due), f"{seconds} s booked of {due} s")
        self._waits_for_something(job, what)
        self._incidents(job)
        self._history(job)

    def _waits_for_something(self, job: Job, what: str) -> None:
        """A job without a world goes on when a node is ready or when a deadline passes."""
        nodes, stops = look.node_count(job), look.is_stopping_nodes(job)
        if look.ended(job) is not None or look.world(job) is not None or nodes == 0:
            return
        self.demand(not look.is_broken(job) or stops, f"{what}: a fault nobody will judge")
        waits = stops or jobs.deadline(job) is not None
        self.demand(waits, f"{what}: {nodes} nodes wait for nothing")

    def _incidents(self, job: Job) -> None:
        newest = look.breaking_incidents(job)[-2:]
        if len(newest) > 1:
            one, other = newest
            later = one.round < other.round or "requeue" in (one.kind, other.kind)
            self.demand(later, f"round {other.round} was broken twice")
        for incident in newest:
            in_order = incident.fault_at <= incident.opened_at + 1e-9
            self.demand(in_order, f"incident {incident.id} was noticed before it happened")
            if incident.closed_at is not None and incident.back_at is not None:
                self.demand(incident.back_at >= incident.fault_at, "back before the fault")

    def _history(self, job: Job) -> None:
        """Each step is trained once in the history behind the round in force, and what has to be
        trained again is reported as lost."""
        storage, training = self.cluster.storage, self.cluster.training
        for snapshot in look.stored(job):
            there = storage.committed.get(snapshot.step) == snapshot.round
            self.demand(there, f"step {snapshot.step} is held to be stored and is not")
        number = look.round_number(job)
        self.check_history(number)
        real, fault, resumed_at = (
            training.rounds.get(number),
            look.last_fault(job),
            look.resumed_at(job),
        )
        if real is None or resumed_at is None or look.world(job) is None:
            return
        self.demand(resumed_at == real.base, f"went on from {real.base}, not {resumed_at}")
        fault = look.last_fault(job)
        if fault is not None and fault.round < number:
            lost = max(0, fault.step - real.base)
            self.demand(fault.lost_steps == lost, f"{lost} steps lost, {fault.lost_steps} reported")

    def check_history(self, round: RoundNumber) -> None:
        """Each step behind a round's state was trained once: the pieces of all rounds join up."""
        if round not in self._sound:
            untrained = self.cluster.training.history.untrained(round)
            self.demand(not untrained, f"history of round {round}: {untrained}")
            if round in self.cluster.training.history.segments:
                self._sound.add(round)

    def _action(self, job: Job, action: AnyAction) -> None:
        world = look.world(job)
        if isinstance(action, StartWorkers):
            self.checked += 1
            part, frozen = action.part, self.frozen.get(action.part.round)
            if frozen is None or (part.world_size, part.store_port) != (
                frozen.size,
                frozen.store_port,
            ):
                self.demand(False, f"a part that is not of round {part.round}")
        elif isinstance(action, StopWorkers):
            in_force = world is not None and world.round == action.round
            self.demand(not in_force, "a round in force is stopped")
        elif isinstance(action, Finish):
            gone = look.ended(job) is not None or not look.is_member(job, action.node)
            self.demand(gone, f"{action.node} is told to finish and stays a member")

    # ---- agents ----

    def part_offered(self, agent: SimAgent, part: Part) -> None:
        """Check a part that an agent is told to start, unless it was told before."""
        if part.round <= agent.round:
            return
        self.demand(not agent.busy, f"{agent.node} starts a round on top of another")
        world = self.frozen.get(part.round)
        self.demand(world is not None, f"round {part.round} was never frozen")
        assert world is not None
        size, store = world.size, (world.store_address, world.store_port)
        self.demand(
            (part.world_size, part.store_address, part.store_port) == (size, *store),
            f"{agent.node} was told another world of round {part.round}",
        )
        excluded = look.excluded(self.cluster.coordinator.job)
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

    def rank_begins(self, agent: SimAgent, round: RoundNumber) -> None:
        """Check that no rank of another round runs anywhere when a script begins."""
        self.demand(not agent.lease_over, f"{agent.node} begins round {round} without a lease")
        for other, older in self._running():
            same = older == round
            self.demand(same, f"{other.node} runs round {older} while round {round} begins")

    def node_leaves(self, agent: SimAgent) -> None:
        """Check that a node that says that it is done has ended all its processes."""
        left = [one.pid for one in [*agent.ranks.values(), *agent.parked.values()]]
        self.demand(agent.dead or not left, f"{agent.node} leaves, and processes {left} do not")

    def ranks_go_on(self, agent: SimAgent) -> None:
        """Check that no other round began while a node's ranks were paused."""
        newest = max(self.frozen, default=agent.round)
        if agent.ranks:
            self.demand(agent.round == newest, f"{agent.node} goes on in round {agent.round}")

    def _running(self) -> Iterator[tuple[SimAgent, RoundNumber]]:
        for host in self.cluster.hosts:
            agent = host.agent
            if agent is None or agent.dead or agent.lease_over or agent.killed == agent.round:
                continue
            for round in {one.round.number for one in agent.ranks.values()}:
                yield agent, round

    def _was_member(self, node: NodeId, world: World) -> bool:
        return any(place.node == node for place in world.places)

    def look_around(self) -> None:
        """Check that fenced nodes that are connected were told to finish, and that each parked
        process is known to its agent."""
        for host in self.cluster.hosts:
            if host.agent is not None and not host.agent.dead:
                for one in host.agent.parked.values():
                    known = host.agent.keeps(one)
                    self.demand(known, f"{host.agent.node} has forgotten process {one.pid}")
        coordinator, now = self.cluster.coordinator, self.cluster.clock.now
        runs_since = max(coordinator.up_since, coordinator.stands_until)
        away = not coordinator.up or coordinator.closed is not None
        if away or now - runs_since < FENCED_WITHIN_S:
            self._strangers.clear()
            return
        strangers: dict[NodeId, float] = {}
        for host in self.cluster.hosts:
            agent = host.agent
            if agent is None or agent.dead or agent.connected_at is None or agent.unacked:
                continue
            if max(agent.paused_until, host.cut_until) > now or agent.number == 0:
                continue
            if agent.finishing is None and not look.is_member(coordinator.job, agent.node):
                since = strangers[agent.node] = self._strangers.get(agent.node, now)
                self.demand(
                    now - since < FENCED_WITHIN_S, f"{agent.node} is fenced and was not told"
                )
        self._strangers = strangers

    def bug_struck(self) -> None:
        """Check that the same failure at the same step does not repeat for ever."""
        highest = look.highest_step(self.cluster.coordinator.job)
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
        self.demand(not cluster.errors, f"an agent failed: {cluster.errors}")
        job, now = cluster.coordinator.job, cluster.clock.now
        if self.check != "never":
            self._state(job, Tick(at=now), now)
        productive = look.productive_s(job)
        slack_s = 0.01 * self.rounds * look.rank_count(job)
        most = cluster.training.stepping_s() * 1.001 + slack_s
        self.demand(productive <= most, f"{productive} s productive, only {most} s were possible")
        if cluster.data is not None:
            cluster.data.at_end()
        closed, ended = cluster.coordinator.closed, look.ended(job)
        if closed is not None and ended is not None:
            same = look.is_closed(job) and closed.code == ended.code
            self.demand(same, "closed with another code")

    def host_of(self, node: NodeId) -> Host:
        number = int(node.partition(":")[0][1:])
        return self.cluster.hosts[number]


def _difference(before: bytes, after: bytes) -> str:
    one, other = msgspec.json.decode(before), msgspec.json.decode(after)
    parts = [key for key in one if one[key] != other.get(key)]
    return ", ".join(f"{key}: {one[key]!r} not {other.get(key)!r}" for key in parts)[:2000]
