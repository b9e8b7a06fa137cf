"""One job, from its first event to its last.

`handle` takes an event and the time and returns actions, in the order in which they are to be carried
out. The event goes to every machine that handles it in the job's present state; what they decide is
carried out by `core.transitions`, and then the job settles: it judges, freezes, ends or closes, if it
may. An event that decides nothing changes nothing beyond the machines that heard it.

An event that does not fit is refused with a reason, and counted. `docs/states.md` has the table of
all states and events, printed by `table`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from msgspec.structs import replace

from holdfast.core.decisions import Refused
from holdfast.core.machine import Effects, Machine, Rule
from holdfast.core.machine import tell as moment
from holdfast.core.state import MACHINES, Job, opened
from holdfast.core.states import ALWAYS, AnyState, Ended, Gathering, StateName
from holdfast.core.transitions import STEPS, carry_out, settle
from holdfast.core.view import earliest
from holdfast.messages.actions import AnyAction, CloseJob
from holdfast.messages.events import AnyEvent, CoordinatorRestarted, JobOpened, Tick
from holdfast.messages.records import Terms
from holdfast.messages.units import Time

__all__ = ["MACHINES", "Job", "deadline", "decide", "handle", "opened", "table", "validate"]


def handle(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; each action names itself and the event that it follows from."""
    actions = decide(job, event, now)
    cause = job.cause
    return [replace(one, id=f"{cause}.{i}", cause=cause) for i, one in enumerate(actions)]


def decide(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; the same actions, without their ids."""
    job.events += 1
    actions: list[AnyAction] = []
    refusals: list[str] = []
    decisions = False
    kind = type(event)
    own = _OWN.get(kind)
    listeners = job.listeners.get(kind, ()) if own is None else ()
    for rule, handler in listeners:
        if not isinstance(job.state, rule.states):
            refusals.append(rule.refusal)
            continue
        decided = handler(job, event, now)
        if isinstance(decided, Refused):
            refusals.append(decided.reason)
        else:
            decisions = decisions or any(type(effect) in STEPS for effect in decided)
            actions += carry_out(job, decided, now)
    if own is not None:
        decisions = True
        actions += carry_out(job, own(job), now)
    elif len(refusals) == len(listeners):
        refused = f"{kind.__name__}: {refusals[0] if refusals else 'nothing handles it'}"
        job.refused[refused] = job.refused.get(refused, 0) + 1
    return actions + settle(job, now) if decisions else actions


def deadline(job: Job) -> Time | None:
    """When the job next wants a Tick."""
    short_until = job.state.short_until if isinstance(job.state, Gathering) else None
    due = earliest(short_until, *(ask(job) for ask in job.hearers["deadline"]))
    pause = job.recovery.ticks_after
    return due if due is None or pause is None else max(due, pause)


def validate(job: Job) -> None:
    """Assert every invariant of the job and of the machines in it."""
    for machine in job.machines:
        machine.validate(job)


# ---- events that are the job's own ---------------------------------------------------------------


def on_restarted(job: Job) -> Effects:
    """Give every node time to come back; a job that is over closes again."""
    if isinstance(job.state, Ended):  # It died with the last event written and not acted upon.
        return [CloseJob(code=job.state.result.code, reason=job.state.result.reason)]
    return [moment(Machine.coordinator_restarted)]


def on_tick(job: Job) -> Effects:
    return [moment(Machine.tick)]


_OWN: dict[type, Callable[[Job], Effects]] = {CoordinatorRestarted: on_restarted, Tick: on_tick}


# ---- the table ---------------------------------------------------------------------------------


def table() -> list[tuple[str, dict[StateName, str]]]:
    """List for each event, by state, the functions that take it, or why it is refused."""
    job = opened(JobOpened(at=Time(0.0), job="", terms=Terms()))
    found: dict[str, dict[StateName, str]] = {}
    for event in get_args(AnyEvent):
        own, listeners = _OWN.get(event), job.listeners.get(event, [])
        cells = {state.name: _cell(state, listeners) for state in ALWAYS}
        if own is not None:
            cells = dict.fromkeys(cells, f"job.{own.__name__}")
        found[event.__name__] = cells
    return sorted(found.items())


def _cell(state: type[AnyState], listeners: list[tuple[Rule, Any]]) -> str:
    names = [
        f"{handler.__func__.__module__.split('.')[2]}.{handler.__name__}"
        for rule, handler in listeners
        if issubclass(state, rule.states)
    ]
    refusal = listeners[0][0].refusal if listeners else "nothing handles it"
    return ", ".join(names) or f"refused: {refusal}"
