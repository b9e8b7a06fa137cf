"""Simulates restartable functions: how processes leave them, are parked, and enter them again.

A `SimRank` is a process in one place of one round. A parked process that gets another place goes on as
another `SimRank` with the same pid; signals for the former one strike the process where it is now. Its
agent gives orders (`messages.local`), which a process hears a moment later, if it hears at all.

    entering ──▶ inside ──▶ returned ──▶ released ──▶ the script goes on, and ends
                   │            │
                   └────────────┴──▶ leaving ──▶ parked ──▶ entering, as another SimRank

Functions keep their state in place: processes that stay go on from the newest step that one of them
has, unless the script restores with Holdfast's checkpoints.
"""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING, Literal

from holdfast.messages import local
from holdfast.messages.actions import StopWorkers
from holdfast.messages.events import WorkerExited
from holdfast.messages.local import ToFunction
from holdfast.messages.records import Raised
from holdfast.messages.units import Rank, RoundNumber, Seconds

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster
    from holdfast.sim.rank import SimRank

Stage = Literal[
    "outside", "entering", "inside", "returned", "leaving", "parked", "elsewhere", "released"
]

HEARS_AFTER_S: Seconds = 0.0005
DEAF = ("stopped", "gil")
"""How processes are stuck that hear no orders."""
TORN = 0.1
"""Share of processes that leave their function in the middle of a change to their state."""
UNHEARD_DISMISSALS = 0.03
"""Share of parked processes that do not end when they are dismissed."""
BROKEN = Raised(
    type="RuntimeError",
    message="[gloo] Connection closed by peer",
    where="ddp.py:7",
    traceback="RuntimeError: [gloo] Connection closed by peer",
)
"""What a function raises whose process groups were aborted."""

Living = tuple[RoundNumber, int]
"""Round and step of the state that a process has in place."""


class SimFunctions:
    """What all processes did with their functions."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.counts: Counter[str] = Counter()
        self._given: dict[tuple[RoundNumber, Rank], int] = {}
        """The process that each rank was given to."""
        self._returned: dict[RoundNumber, set[Rank]] = {}
        self._released: set[tuple[RoundNumber, Rank]] = set()
        self._entered: dict[RoundNumber, list[Living | None]] = {}
        self.unfit: set[int] = set()
        """Processes that an order said to end."""
        self.killed: set[int] = set()
        """Processes that their agents killed."""

    def told_to_stop(self, agent: SimAgent, order: StopWorkers) -> None:
        """Note which processes an order wants to be ended."""
        if order.round != agent.round or not agent.busy or order.grace_s <= 0:
            return
        for one in [*agent.ranks.values(), *agent.parked.values()]:
            named = order.leave_s <= 0 or one.rank in order.replace
            if named and one.round.number == order.round:
                self.unfit.add(one.pid)

    def death_told(self, event: WorkerExited) -> None:
        """Check that nobody is told of a death that was the agent's doing."""
        pid = self._given.get((event.round, event.rank))
        own = event.signal != signal.SIGKILL or pid not in self.killed
        what = f"rank {event.rank} of round {event.round} is told to have died, and was killed"
        self._cluster.invariants.demand(own, what)

    def given(self, one: SimRank) -> None:
        """Check that no other process has the rank."""
        holder = self._given.setdefault((one.round.number, one.rank), one.pid)
        what = f"rank {one.rank} of round {one.round.number} is held by {holder} and {one.pid}"
        self._cluster.invariants.demand(holder == one.pid, what)
        kept = one.pid in self.unfit
        self._cluster.invariants.demand(
            not kept, f"process {one.pid} was to be replaced, and stays"
        )

    def entered(self, one: SimRank, living: Living | None) -> None:
        """Go on from the newest state in place, once all ranks have said what they have."""
        round, training = one.round, self._cluster.training
        told = self._entered.setdefault(round.number, [])
        told.append(living)
        if len(told) < round.size:
            return
        newest = max((found for found in told if found is not None), default=None)
        if newest is None:
            training.go_on_from_saved(round, round.size)
        else:
            self.counts["went on from living state"] += 1
            training.ready(round, round.size, newest[1], newest[0])

    def returned(self, one: SimRank) -> None:
        self.counts["returned"] += 1
        self._returned.setdefault(one.round.number, set()).add(one.rank)

    def released(self, one: SimRank) -> None:
        """Check that all ranks have returned, and that each is released once."""
        self.counts["released"] += 1
        number, demand = one.round.number, self._cluster.invariants.demand
        returned = len(self._returned.get(number, ()))
        what = f"rank {one.rank} is released when {returned} of {one.round.size} have returned"
        demand(returned == one.round.size, what)
        twice = (number, one.rank) in self._released
        demand(not twice, f"rank {one.rank} of round {number} is released twice")
        self._released.add((number, one.rank))
        newer = [n for n in self._cluster.training.rounds if n > number and self._entered.get(n)]
        demand(not newer, f"rank {one.rank} of round {number} is released, others run {newer}")


class SimEntry:
    """One process's entry into its function, and how it leaves it."""

    def __init__(self, functions: SimFunctions, one: SimRank, before: SimRank | None) -> None:
        self.one = one
        self.agent = one.agent
        self.functions = functions
        self.stage: Stage = "outside"
        self.living: Living | None = None
        self._unheard: list[ToFunction] = []
        """Orders that it hears when it moves again."""
        if before is not None and before.entry is not None:
            self.living = before.entry.living
            self.stage, before.entry.stage = "entering", "elsewhere"
            self.functions.counts["entered again"] += 1

    @property
    def departed(self) -> bool:
        """Whether no code of the function runs in this place any more."""
        return self.stage in ("leaving", "parked", "elsewhere")

    @property
    def stays(self) -> bool:
        """Whether its process can be kept when the round breaks."""
        return self.stage not in ("outside", "released", "elsewhere")

    # ---- its function ----

    def begin(self) -> None:
        """Come to the function: at once if the process was parked, else when the script does."""
        if self.stage == "entering":
            self._enter()
        else:
            self.agent.later(self.agent.rng.uniform(0.001, 0.05), self._reach)

    def _reach(self) -> None:
        if self.one.exit is not None:
            return
        if self.one.stuck:
            self.agent.later(0.05, self._reach)
            return
        self.one.opens_function()
        self._enter()

    def _enter(self) -> None:
        self.stage = "inside"
        if self.agent.cluster.training.script.checkpoints:
            self.one.restore()
        else:
            self.functions.entered(self.one, self.living)

    def raises(self, error: Raised) -> None:
        """Have the function raise, and leave it."""
        if self.stage == "inside" and self.one.stuck not in DEAF:
            self.functions.counts["raised"] += 1
            self._tell(local.FunctionRaised(raised=error, at=self.agent.clock.now))
            self._leave()

    def returns(self) -> None:
        """Have the function return, and wait for the other ranks."""
        self.stage = "returned"
        self.functions.returned(self.one)
        self._tell(local.FunctionReturned())

    # ---- orders ----

    def order(self, order: ToFunction) -> None:
        """Take an order of the agent."""
        self.agent.later(HEARS_AFTER_S, self._obey, order)

    def _obey(self, order: ToFunction) -> None:
        if self.one.exit is not None:
            return
        if self.one.stuck in DEAF:
            self._unheard.append(order)
        elif isinstance(order, local.Leave):
            if self.stage in ("entering", "inside", "returned"):
                self._leave(told=True)
        elif isinstance(order, local.Release):
            if self.stage == "returned":
                self._go_on()
        elif isinstance(order, local.Dismiss) and self.stage == "parked":
            self.functions.counts["dismissed"] += 1
            if self.agent.rng.random() >= UNHEARD_DISMISSALS:
                self.agent.later(self.agent.rng.uniform(0.002, 0.05), self.one.die, 75)

    def moves_again(self) -> None:
        """Hear what was ordered while the process did not move."""
        unheard, self._unheard = self._unheard, []
        for order in unheard:
            self.order(order)

    def _go_on(self) -> None:
        self.functions.released(self.one)
        self.stage = "released"
        self._tell(local.FunctionClosed())
        self.agent.cluster.faults.end_soon(self.one)

    # ---- leaving ----

    def _leave(self, told: bool = False) -> None:
        """Leave the function, sooner or later or never."""
        was_inside, self.stage = self.stage != "entering", "leaving"
        cluster, agent, one = self.agent.cluster, self.agent, self.one
        cluster.training.break_(one.round)
        self._note_state()
        departure = agent.chance.departure()
        how = departure.how
        self.functions.counts[f"left: {how}"] += 1
        if told and was_inside and departure.raises:
            self._tell(local.FunctionRaised(raised=BROKEN, at=agent.clock.now))
        if how == "late":
            self._tell(local.LeavingPostponed())
        if how == "dies":
            agent.later(departure.took_s, one.die, None, int(signal.SIGSEGV))
        elif how == "unfit":
            agent.later(departure.took_s, self._is_unfit)
        elif how != "never":
            agent.later(departure.took_s, self._left)
        cluster.faults.departing(agent)

    def _note_state(self) -> None:
        """Note which state the process has in place."""
        round = self.one.round
        steps = round.steps(self.agent.clock.now)
        if steps:
            self.living = (round.number, round.base + steps)
            if self.agent.rng.random() < TORN:
                self.living = None
        elif round.ready == round.size:
            self.living = (round.source, round.base) if round.base else None

    def _left(self) -> None:
        if self.one.exit is None and self.one.stuck in DEAF:
            self.agent.later(0.05, self._left)  # It was stopped on its way.
        elif self.one.exit is None and self.stage == "leaving":
            self.stage, self.one.stuck = "parked", ""
            self.one.give_up_place()
            self.agent.parked[self.one.pid] = self.one
            self.one.hear(local.FunctionLeft())

    def _is_unfit(self) -> None:
        """Have a hook raise when the function has been left: the process ends."""
        if self.one.exit is None and self.stage == "leaving":
            self.stage = "outside"
            self.one.hear(local.FunctionClosed())
            error = Raised(type="UnfitProcess", message="x", where="train.py:9", traceback="x")
            self.one.die(1, raised=error)

    def _tell(self, message: local.FromWorker) -> None:
        self.agent.later(0.0, self._say, message)

    def _say(self, message: local.FromWorker) -> None:
        if self.one.exit is None:
            self.one.hear(message)
