"""Which faults that were asked for happen to whom, and when.

    an injection is asked for ──▶ a plan for each of its ranks
    a round is frozen ──▶ each plan's next few occurrences become traps, laid before a script begins
    a trap is sprung ──▶ it is written down as done, and never laid again

Whom an occurrence befalls and in which step follows from the injection alone, its seed and the world
in force: the same job asked for the same has the same faults. There is no chance in here.

A trap belongs to its round: what was not sprung when the round ended is laid again in the next, and
springs when training comes to that step then. What was to happen at once in a round that is over does
not happen any more.

An incident was injected if somebody had done something of its kind to the same rank or node a moment
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import inf
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.messages.chaos import (
    FAULTS,
    Done,
    FaultName,
    Injection,
    Trap,
    complaint,
)
from holdfast.messages.records import FaultKind, Incident, Place, World
from holdfast.messages.units import NodeId, Rank, Seconds, StepNumber

LOOKAHEAD: Final = 4
"""So many occurrences of each injection are laid at a time: training does not wait for the next."""
MOST_PLANS: Final = 1000
KEPT_DONE: Final = 256
KEPT_SPRUNG: Final = 32
NEAR_S: Final = 60.0
"""An incident so long after an injection is not its doing."""
SKEW_S: Final = 0.5
"""So far clocks may be apart."""
HANG_SKEW_S: Final = 2.0
"""A rank that hangs is found to stand still since its last mark, and that was before."""

_DEATHS: Final[frozenset[FaultKind]] = frozenset({"signal", "oom", "exit", "exception"})
_CAUSES: Final[dict[FaultName, frozenset[FaultKind]]] = {
    **dict.fromkeys(("kill", "term", "segfault", "abort", "oom", "exception", "exit"), _DEATHS),
    **dict.fromkeys(("stop", "hang", "gil", "loop"), frozenset({"hang"})),
    "slow": frozenset({"hang", "straggler", "exclude"}),
    "gpu-error": _DEATHS | {"hang"},
    "netcut": frozenset({"node", "hang"}),
    "stop-agent": frozenset({"node"}),
    "kill-agent": frozenset({"node"}),
    "diskfull": frozenset({"storage"}),
    "kill-keeper": frozenset({"storage"}),
}
"""What comes of a fault where something comes of it."""


class Plan(Struct):
    """One injection, for one rank or node."""

    number: int
    injection: Injection
    visit: int = 0
    """Whose question it was, among those that wait for an answer."""
    sprung: list[int] = field(default_factory=list)
    """The latest occurrences that were sprung, in whatever order ranks came to them."""
    armed: bool = False
    over: bool = False
    """Nothing more will come of it."""
    refused: str = ""
    """Why nothing came of it."""

    @property
    def last(self) -> int:
        return max(self.sprung, default=0)


class Chaos(Struct):
    plans: list[Plan] = field(default_factory=list)
    traps: list[Trap] = field(default_factory=list)
    """Laid in the round in force and not sprung."""
    done: list[Done] = field(default_factory=list)
    """The latest that were injected."""
    count: int = 0
    """How many were injected."""


def opened(schedule: Iterable[Injection]) -> Chaos:
    chaos = Chaos()
    for injection in schedule:
        _plan(chaos, injection, 0)
    return chaos


def _plan(chaos: Chaos, injection: Injection, visit: int) -> list[Plan]:
    targets: list[tuple[int, ...]] = [(rank,) for rank in injection.ranks] or [()]
    plans = []
    for ranks in targets:
        one = replace(injection, ranks=ranks)
        plans.append(Plan(len(chaos.plans) + 1, one, visit))
        chaos.plans.append(plans[-1])
    return plans


# ---- whom and when ------------------------------------------------------------------------------


def pick(seed: int, what: str, occurrence: int, among: int) -> int:
    """A number below `among` that looks like chance and is none."""
    text = f"{seed}/{what}/{occurrence}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") % among


def step_of(injection: Injection, occurrence: int) -> StepNumber:
    """The step in which an occurrence comes; 0: now."""
    every = injection.every
    if every is None:
        return StepNumber(injection.at_step or 0)
    if injection.seed is None:
        return StepNumber(occurrence * every)
    within = pick(injection.seed, f"{injection.kind} when", occurrence, every)
    return StepNumber((occurrence - 1) * every + 1 + within)


def target(injection: Injection, occurrence: int, world: World) -> tuple[NodeId, Rank] | None:
    """Whom an occurrence befalls in that world; None when it has no such rank or node."""
    places = [place for place in world.places if _means(injection.node, place)]
    if injection.ranks:
        (rank,) = injection.ranks
        return next(((p.node, Rank(rank)) for p in places if _has(p, rank)), None)
    if not places:
        return None
    seed = injection.seed or 0
    whom = f"{injection.kind} whom"
    if FAULTS[injection.kind].befalls != "rank":
        place = places[pick(seed, whom, occurrence, len(places))]
        return place.node, place.first_rank
    nth = pick(seed, whom, occurrence, sum(place.slots for place in places))
    for place in places:
        if nth < place.slots:
            return place.node, Rank(place.first_rank + nth)
        nth -= place.slots
    raise AssertionError("a rank beyond the last one was picked")


def _has(place: Place, rank: int) -> bool:
    return place.first_rank <= rank < place.first_rank + place.slots


def _means(name: str, place: Place) -> bool:
    """Whether that is what a user calls a node: its place, its name or its host's."""
    host = place.node.rpartition(":")[0]
    return not name or name in (str(place.group_rank), place.node, host)


def _trap(plan: Plan, occurrence: int, world: World) -> Trap | None:
    injection = plan.injection
    found = target(injection, occurrence, world)
    if found is None:
        return None
    node, rank = found
    return Trap(
        injection=plan.number,
        occurrence=occurrence,
        kind=injection.kind,
        node=node,
        rank=rank,
        step=step_of(injection, occurrence),
        value=injection.amount,
        spot=pick(injection.seed or 0, f"{injection.kind} where", occurrence, 1 << 32),
        force=injection.force,
    )


def _upcoming(plan: Plan, world: World, after: int) -> list[Trap]:
    """The next traps of a plan that lie beyond a step."""
    injection = plan.injection
    if plan.over:
        return []
    if injection.every is None:
        occurrences = [1] if step_of(injection, 1) > after or injection.now else []
    else:
        first = max(plan.last + 1, after // injection.every + 1)
        if step_of(injection, first) <= after:
            first += 1
        occurrences = list(range(first, first + LOOKAHEAD))
    traps = [_trap(plan, occurrence, world) for occurrence in occurrences]
    return [trap for trap in traps if trap is not None]


# ---- what happens -------------------------------------------------------------------------------


def refusal(chaos: Chaos, injection: Injection, world: World | None, highest: StepNumber) -> str:
    """Why this cannot be done to the job as it is; empty when it can."""
    wrong = complaint(injection)
    if wrong:
        return wrong
    if len(chaos.plans) + max(1, len(injection.ranks)) > MOST_PLANS:
        return f"this job was asked for {len(chaos.plans)} faults already; that is all it takes"
    if world is None:
        return "no round is in force now; see `holdfast status`" if injection.now else ""
    for rank in injection.ranks:
        if rank >= world.size:
            return f"there is no rank {rank}: this round has ranks 0 to {world.size - 1}"
    if injection.node and not any(_means(injection.node, place) for place in world.places):
        known = ", ".join(f"{place.group_rank} ({place.node})" for place in world.places[:8])
        return f"there is no node {injection.node} in this round; it has {known}"
    if injection.at_step is not None and injection.at_step <= highest:
        return f"step {injection.at_step} is over: the job has come to step {highest}"
    return ""


def asked(chaos: Chaos, injection: Injection, visit: int, world: World | None) -> list[Trap]:
    """Take an injection in; the traps that are to be laid now."""
    traps = []
    for plan in _plan(chaos, injection, visit):
        traps += _upcoming(plan, world, 0) if world is not None else []
    chaos.traps += traps
    return traps


def begin_round(chaos: Chaos, world: World) -> None:
    """Lay the traps of a new round."""
    chaos.traps = []
    for plan in chaos.plans:
        if plan.injection.now and not plan.over:
            plan.over, plan.refused = True, "its round ended before"
        chaos.traps += _upcoming(plan, world, 0)


def moved_on(chaos: Chaos, world: World, step: StepNumber) -> list[Trap]:
    """Ranks have come to that step: lay what comes next of what comes again and again."""
    laid = {(trap.injection, trap.occurrence) for trap in chaos.traps}
    traps = [
        trap
        for plan in chaos.plans
        if plan.injection.every is not None
        for trap in _upcoming(plan, world, step)
        if (trap.injection, trap.occurrence) not in laid
    ]
    if traps:  # What was not sprung although all came by it does not come any more.
        chaos.traps = [t for t in chaos.traps if t.step > step or not _again(chaos, t)] + traps
    return traps


def _again(chaos: Chaos, trap: Trap) -> bool:
    return chaos.plans[trap.injection - 1].injection.every is not None


def laid_on(chaos: Chaos, node: NodeId) -> tuple[Trap, ...]:
    return tuple(trap for trap in chaos.traps if trap.node == node)


def armed(chaos: Chaos, number: int) -> None:
    plan = _plan_of(chaos, number)
    if plan is not None:
        plan.armed = True


def refused(chaos: Chaos, number: int, why: str) -> None:
    plan = _plan_of(chaos, number)
    if plan is not None and not plan.over:
        plan.over, plan.refused = True, why
        chaos.traps = [trap for trap in chaos.traps if trap.injection != number]


def missed(chaos: Chaos, number: int, occurrence: int, why: str) -> None:
    """An occurrence came to nothing; the next one may not."""
    plan = _plan_of(chaos, number)
    if plan is not None and _spring(chaos, plan, occurrence):
        plan.refused = why


def _spring(chaos: Chaos, plan: Plan, occurrence: int) -> bool:
    """An occurrence is over; False when it was before."""
    if plan.over or occurrence in plan.sprung:
        return False
    plan.sprung = [*plan.sprung, occurrence][-KEPT_SPRUNG:]
    plan.over = plan.injection.every is None
    key = (plan.number, occurrence)
    chaos.traps = [t for t in chaos.traps if (t.injection, t.occurrence) != key]
    return True


def happened(chaos: Chaos, done: Done) -> bool:
    """Write an injection down; False when it is known already, or nobody asked for it."""
    plan = _plan_of(chaos, done.injection)
    if plan is None or not _spring(chaos, plan, done.occurrence):
        return False
    plan.refused = ""
    chaos.count += 1
    chaos.done = [*chaos.done, done][-KEPT_DONE:]
    return True


def _plan_of(chaos: Chaos, number: int) -> Plan | None:
    return chaos.plans[number - 1] if 1 <= number <= len(chaos.plans) else None


# ---- what came of it ----------------------------------------------------------------------------


def mark(chaos: Chaos, incidents: Sequence[Incident], step_s: Seconds) -> None:
    """Say of each of these incidents whether it was injected. Steps take that long."""
    for incident in incidents:
        skew_s = max(HANG_SKEW_S, 2 * step_s) if incident.kind == "hang" else SKEW_S
        causes = (done for done in reversed(chaos.done) if _caused(done, incident, skew_s))
        cause = next(causes, None)
        incident.injected = "" if cause is None else told(cause)


def _caused(done: Done, incident: Incident, skew_s: Seconds) -> bool:
    if incident.kind not in _CAUSES.get(done.kind, frozenset()):
        return False
    known = done.known_at <= incident.opened_at  # It is always told before it happens.
    near_s = inf if done.kind == "slow" else NEAR_S  # That one lasts as long as its round.
    soon_after = done.at - skew_s <= incident.fault_at <= done.at + near_s
    if incident.round != done.round or not known or not soon_after:
        return False
    if incident.kind == "storage":  # It does not say where.
        return True
    if FAULTS[done.kind].befalls == "node":
        return incident.node == done.node
    return incident.rank == done.rank or (incident.kind == "exclude" and incident.node == done.node)


def told(done: Done) -> str:
    whom = f"node {done.node}" if FAULTS[done.kind].befalls == "node" else f"rank {done.rank}"
    if FAULTS[done.kind].befalls == "coordinator":
        whom = "the coordinator"
    return f"{done.kind} on {whom} at step {done.step}"


def pending(chaos: Chaos) -> list[tuple[Plan, Trap | None]]:
    """What is still to come, each with the next trap of it that is laid."""
    found = []
    for plan in chaos.plans:
        if not plan.over:
            laid = [trap for trap in chaos.traps if trap.injection == plan.number]
            found.append((plan, min(laid, key=lambda trap: trap.step, default=None)))
    return found


def validate(chaos: Chaos) -> None:
    assert [plan.number for plan in chaos.plans] == list(range(1, len(chaos.plans) + 1))
    keys = [(trap.injection, trap.occurrence) for trap in chaos.traps]
    assert len(set(keys)) == len(keys), "a trap is laid twice"
    for trap in chaos.traps:
        plan = chaos.plans[trap.injection - 1]
        assert not plan.over, "a trap is laid for what is over"
        assert trap.occurrence not in plan.sprung, "a trap is laid again"
    assert chaos.count >= len(chaos.done), "miscounted injections"
