"""Decides which rank or node each injected fault strikes, and when.

    an injection is requested ──▶ a plan for each of its ranks
    a round is frozen ──▶ the next few occurrences of each plan become traps, set before scripts start
    a trap has struck ──▶ it is recorded, and never set again

The injection, its seed and the world in force determine what an occurrence strikes and at which step:
the same job with the same requests has the same faults. Nothing here is random.

A trap belongs to its round. One that has not struck when the round ends is set again in the next
round, and strikes when training comes to its step there. A fault requested for "now" ends with its
round.

A fault is never dropped silently. A rank that the round does not have, one that has finished, and a
step that is over are refused when they are requested; if they come about later, or the job ends
before, `status` says so beside the fault.

An incident counts as injected if a fault that causes its kind struck the same rank or node shortly
before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from math import inf
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.core.view import RankState
from holdfast.messages.actions import AnyAction, Inject
from holdfast.messages.chaos import (
    FAULTS,
    Injection,
    InjectionReport,
    Outcome,
    Trap,
    complaint,
    sentence,
)
from holdfast.messages.events import FaultAsked, FaultTold
from holdfast.messages.node_ids import host_of
from holdfast.messages.records import Incident, Place, World
from holdfast.messages.units import NodeId, Rank, Seconds, StepNumber, Time

LOOKAHEAD: Final = 4
"""Occurrences of a repeating injection that are set ahead, so that training never waits for one."""
MAX_PLANS: Final = 1000
SHOWN_NODES: Final = 8
"""Nodes that are named when one is not found."""
KEPT_STRUCK: Final = 1024
KEPT_SPRUNG: Final = 32
NEAR_S: Final = 60.0
"""An incident that begins later after a fault than this was not caused by it."""
SKEW_S: Final = 0.5
"""Tolerated clock skew."""
HANG_SKEW_S: Final = 2.0
"""The same for hangs, which count from the last sign of life before the fault."""
COORDINATOR = NodeId("")


class Plan(Struct):
    """One injection, for one rank or node."""

    number: int
    injection: Injection
    visit: int = 0
    """Number of the request that waits for an answer."""
    sprung: list[int] = field(default_factory=list)
    """The latest occurrences that are over, in the order of their reports."""
    armed: bool = False
    over: bool = False
    refused: str = ""
    """Why it cannot strike, or why the latest occurrence struck nothing."""
    skipped: int = 0
    """Occurrences whose steps were over before their traps were set."""


class Chaos(Struct):
    """All injections of a job."""

    plans: list[Plan] = field(default_factory=list)
    traps: list[Trap] = field(default_factory=list)
    """Set in the round in force, and not sprung."""
    struck: list[tuple[FaultTold, Time]] = field(default_factory=list)
    """The latest faults that were injected, and when that was journaled."""
    count: int = 0
    """Number of faults injected so far."""


def opened(schedule: Iterable[Injection]) -> Chaos:
    chaos = Chaos()
    for injection in schedule:
        _plan(chaos, injection, 0)
    return chaos


def _plan(chaos: Chaos, injection: Injection, visit: int) -> list[Plan]:
    """Add a plan for each rank of an injection."""
    before = len(chaos.plans)
    targets: list[tuple[int, ...]] = [(rank,) for rank in injection.ranks] or [()]
    for ranks in targets:
        chaos.plans.append(Plan(len(chaos.plans) + 1, replace(injection, ranks=ranks), visit))
    return chaos.plans[before:]


# ---- what is struck, and when -------------------------------------------------------------------


def pick(seed: int, what: str, occurrence: int, among: int) -> int:
    """Return a pseudorandom number below `among`."""
    text = f"{seed}/{what}/{occurrence}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") % among


def step_of(injection: Injection, occurrence: int) -> StepNumber:
    """Return the step at which an occurrence strikes; 0: now."""
    every = injection.every
    if every is None:
        return StepNumber(injection.at_step or 0)
    if injection.seed is None:
        return StepNumber(occurrence * every)
    within = pick(injection.seed, f"{injection.kind} when", occurrence, every)
    return StepNumber((occurrence - 1) * every + 1 + within)


def target(injection: Injection, occurrence: int, world: World) -> tuple[NodeId, Rank] | None:
    """Return what an occurrence strikes in that world; None if there is no such rank or node."""
    any_rank = injection.ranks or FAULTS[injection.kind].strikes == "rank"
    found = [
        (place.node, Rank(place.first_rank + index))
        for place in world.places
        if _is_called(place, injection.node)
        for index in range(place.slots if any_rank else 1)
        if not injection.ranks or place.first_rank + index in injection.ranks
    ]
    if not found:
        return None
    return found[pick(injection.seed or 0, f"{injection.kind} whom", occurrence, len(found))]


def _is_called(place: Place, name: str) -> bool:
    """Whether a user may mean this node: by its index, its name or its host's name."""
    return name in ("", str(place.group_rank), place.node, host_of(place.node))


def _set_traps(chaos: Chaos, plans: Iterable[Plan], world: World, after: int) -> list[AnyAction]:
    """Set the next traps of these plans that lie beyond a step, unless they are set already."""
    known, traps = {trap.key for trap in chaos.traps}, []
    for plan in plans:
        injection = plan.injection
        for occurrence in _upcoming(plan, after):
            if (plan.number, occurrence) in known:
                continue
            found = target(injection, occurrence, world)
            if found is None:
                continue
            trap = Trap(
                injection=plan.number,
                occurrence=occurrence,
                kind=injection.kind,
                node=found[0],
                rank=found[1],
                step=step_of(injection, occurrence),
                value=injection.amount,
                spot=pick(injection.seed or 0, f"{injection.kind} where", occurrence, 1 << 32),
                force=injection.force,
            )
            traps.append(trap)
    chaos.traps += traps
    return _orders(traps, world)


def _upcoming(plan: Plan, after: int) -> Collection[int]:
    """Return the next occurrences of a plan that lie beyond a step."""
    injection = plan.injection
    if plan.over:
        return ()
    if injection.every is None:
        return (1,) if injection.now or step_of(injection, 1) > after else ()
    first = max(max(plan.sprung, default=0) + 1, after // injection.every + 1)
    first += step_of(injection, first) <= after
    return range(first, first + LOOKAHEAD)


def _orders(traps: Iterable[Trap], world: World) -> list[AnyAction]:
    return [Inject(node=trap.node, round=world.round, trap=trap) for trap in traps]


# ---- events -------------------------------------------------------------------------------------


def refusal(
    chaos: Chaos,
    injection: Injection,
    world: World | None,
    highest: StepNumber,
    ranks: Mapping[Rank, RankState],
) -> str:
    """Return why this cannot be done to the job as it is; empty if it can."""
    wrong = complaint(injection)
    if wrong:
        return wrong
    if len(chaos.plans) + max(1, len(injection.ranks)) > MAX_PLANS:
        return (
            f"{len(chaos.plans)} faults were requested of this job already; {MAX_PLANS} is the most"
        )
    if world is None:
        return "no round is in force now; see `holdfast status`" if injection.now else ""
    if absent := _absent(injection, world):
        return absent
    finished = {rank for rank, one in ranks.items() if one.finished}
    for rank in injection.ranks:
        if rank in finished:
            return f"rank {rank} has finished: its script has ended"
    if len(finished) == world.size:
        return "all ranks have finished: their scripts have ended"
    if injection.at_step is not None and injection.at_step <= highest:
        return f"step {injection.at_step} is over: the job has come to step {highest}"
    return ""


def _absent(injection: Injection, world: World) -> str:
    """Return which rank or node of an injection a world does not have; empty if it has all."""
    for rank in injection.ranks:
        if rank >= world.size:
            return f"there is no rank {rank}: this round has ranks 0 to {world.size - 1}"
    if any(_is_called(place, injection.node) for place in world.places):
        return ""
    known = ", ".join(f"{place.group_rank} ({place.node})" for place in world.places[:SHOWN_NODES])
    more = f" and {len(world.places) - SHOWN_NODES} more" if len(world.places) > SHOWN_NODES else ""
    return f"there is no node {injection.node} in this round; it has {known}{more}"


def asked(
    chaos: Chaos, event: FaultAsked, world: World | None, highest: StepNumber, now: Time
) -> list[AnyAction]:
    """Accept an injection that is possible (see `refusal`), and set its first traps."""
    injection = event.injection
    plans = _plan(chaos, injection, event.visit)
    if world is None:
        return []
    orders = _set_traps(chaos, plans, world, 0)
    if injection.kind == "kill-coordinator" and injection.now:
        trap = chaos.traps[-1]
        done = FaultTold(
            at=now, node=trap.node, round=world.round, trap=trap, outcome="done", step=highest
        )
        return told(chaos, done, now)
    return orders


def told(chaos: Chaos, event: FaultTold, now: Time) -> list[AnyAction]:
    """Record what an agent reports of a trap; a repeated report changes nothing."""
    trap = event.trap
    plan = chaos.plans[trap.injection - 1] if trap.injection <= len(chaos.plans) else None
    if plan is None or plan.over or trap.occurrence in plan.sprung:
        return []
    if event.outcome == "armed":
        plan.armed = True
        return []
    if event.outcome == "refused":
        plan.over, plan.refused = True, event.detail
        chaos.traps = [other for other in chaos.traps if other.injection != plan.number]
        return []
    if plan.injection.every is not None and trap not in chaos.traps:
        plan.skipped = max(0, plan.skipped - 1)  # It had sprung before its step was reported.
    plan.sprung = [*plan.sprung, trap.occurrence][-KEPT_SPRUNG:]
    plan.over = plan.injection.every is None
    plan.refused = event.detail
    chaos.traps = [other for other in chaos.traps if other.key != trap.key]
    if event.outcome == "missed":
        return []
    chaos.count += 1
    chaos.struck = [*chaos.struck, (event, now)][-KEPT_STRUCK:]
    if trap.kind != "kill-coordinator":
        return []
    return [Inject(node=COORDINATOR, round=event.round, trap=trap)]


def begin_round(chaos: Chaos, world: World) -> None:
    """Set the traps of a new round; its nodes get them with their workers."""
    chaos.traps = []
    for plan in chaos.plans:
        if plan.injection.now and not plan.over:
            plan.over, plan.refused = True, "its round ended before"
    _set_traps(chaos, chaos.plans, world, 0)


def stepped(chaos: Chaos, world: World, step: StepNumber) -> list[AnyAction]:
    """Set further traps of repeating injections once ranks have finished that step."""
    repeating = [plan for plan in chaos.plans if plan.injection.every is not None]
    before = list(chaos.traps)
    orders = _set_traps(chaos, repeating, world, step)
    if orders:  # A repeating trap that a rank has passed without springing it will not spring.
        numbers = {plan.number for plan in repeating}
        chaos.traps = [t for t in chaos.traps if t.step > step or t.injection not in numbers]
        for plan in repeating:
            plan.skipped += _skipped(plan.number, before, chaos.traps)
    return orders


def _skipped(number: int, before: Iterable[Trap], after: Iterable[Trap]) -> int:
    """Count the occurrences between those that were set and those that are."""
    old = [trap.occurrence for trap in before if trap.injection == number]
    new = [trap.occurrence for trap in after if trap.injection == number]
    return max(0, min(new) - min(old)) if old and new else 0


def resumed(chaos: Chaos, world: World, node: NodeId) -> list[AnyAction]:
    """Repeat the orders to a node whose stream broke: they may be lost."""
    return _orders(set_on(chaos, node), world)


def set_on(chaos: Chaos, node: NodeId) -> tuple[Trap, ...]:
    return tuple(trap for trap in chaos.traps if trap.node == node)


# ---- reports ------------------------------------------------------------------------------------


def injected_by(chaos: Chaos, incident: Incident, step_s: Seconds) -> str:
    """Return the injected fault that caused an incident, in words; empty if none did."""
    skew_s = max(HANG_SKEW_S, 2 * step_s) if incident.kind == "hang" else SKEW_S
    found = (
        _described(event)
        for event, known_at in reversed(chaos.struck)
        # A fault is journaled before it strikes.
        if known_at <= incident.opened_at and _caused(event, incident, skew_s)
    )
    return next(found, "")


def _caused(event: FaultTold, incident: Incident, skew_s: Seconds) -> bool:
    trap = event.trap
    if incident.kind not in FAULTS[trap.kind].causes or incident.round != event.round:
        return False
    near_s = inf if trap.kind == "slow" else NEAR_S  # A slow rank is slow until its round ends.
    if not event.at - skew_s <= incident.fault_at <= event.at + near_s:
        return False
    if incident.kind == "storage":  # These name no node.
        return True
    if FAULTS[trap.kind].strikes == "node" or incident.kind == "exclude":
        return incident.node == trap.node
    return incident.rank == trap.rank


def _described(event: FaultTold) -> str:
    return f"{event.trap.kind} on {event.trap.target} at step {event.step}"


def report(
    chaos: Chaos, plan: Plan, world: World | None, ranks: Mapping[Rank, RankState], ended: bool
) -> InjectionReport:
    """Report what has become of an injection."""
    outcome: Outcome | None = "armed" if plan.armed else None
    line, why, missed = sentence(plan.injection), plan.refused, False
    traps = [trap for trap in chaos.traps if trap.injection == plan.number]
    trap = min(traps, key=lambda trap: trap.step, default=None)
    step = trap.step if trap is not None else StepNumber(0)
    if plan.refused:
        outcome = "refused"
    elif plan.over:
        struck = [event for event, _ in chaos.struck if event.trap.injection == plan.number]
        outcome = "done"
        for event in struck[-1:]:
            line, trap, step = _described(event), event.trap, event.step
    elif ended:
        outcome, why = "missed", "the job ended before"
    elif trap is not None:
        why = _passed(trap, ranks)
        missed = bool(why)
        line += f"; next on {trap.target} at step {step}" if step else f"; on {trap.target}"
        line += f" (missed: {why})" if missed else ""
    elif world is not None and (why := _absent(plan.injection, world)):
        line += f" (not in this round: {why})"
    if plan.skipped:
        line += f"; {plan.skipped} skipped: their steps were over before they could be set"
    return InjectionReport(
        injection=plan.number,
        fault=plan.injection.kind,
        outcome=outcome,
        line=line,
        rank=trap.rank if trap is not None and FAULTS[trap.kind].strikes == "rank" else None,
        node=trap.node if trap is not None else None,
        step=step or None,
        missed=missed,
        why=why,
    )


def _passed(trap: Trap, ranks: Mapping[Rank, RankState]) -> str:
    """Return why a trap will not spring as its rank is now; empty if it may."""
    rank = ranks.get(trap.rank)
    if rank is None:
        return ""
    if rank.finished:
        return f"rank {trap.rank} has finished"
    return f"rank {trap.rank} is past that step" if 0 < trap.step < rank.step else ""


def validate(chaos: Chaos) -> None:
    assert [plan.number for plan in chaos.plans] == list(range(1, len(chaos.plans) + 1))
    keys = [trap.key for trap in chaos.traps]
    assert len(set(keys)) == len(keys), "a trap is set twice"
    for trap in chaos.traps:
        plan = chaos.plans[trap.injection - 1]
        assert not plan.over, "a trap is set for an injection that is over"
        assert trap.occurrence not in plan.sprung, "a trap is set again"
    assert chaos.count >= len(chaos.struck), "miscounted injections"
