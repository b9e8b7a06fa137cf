"""One job, from its first event to its last.

`handle` takes an event and the time and returns actions, in the order in which they are to be carried
out. The event goes to every machine that handles it in the job's present state; what they decide is
carried out by `core.transitions`; then the job settles: it judges, freezes, ends or closes, if it may.

An event that does not fit is refused with a reason, and counted. `docs/states.md` has the table of
all states and events, printed by `table`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.decisions import Refused
from holdfast.core.machine import Effects, Machine, Rule, on
from holdfast.core.machine import tell as moment
from holdfast.core.state import MACHINES, Job, opened
from holdfast.core.states import ALWAYS, AnyState, Ended, Gathering, StateName
from holdfast.core.transitions import carry_out, settle
from holdfast.core.view import View, earliest
from holdfast.messages.actions import AnyAction, CloseJob
from holdfast.messages.events import AnyEvent, CoordinatorRestarted, JobOpened, Tick
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
    listeners = _listeners(tuple(map(type, job.machines))).get(type(event), ())
    for listener in listeners:
        if not isinstance(job.state, listener.rule.states):
            refusals.append(listener.rule.refusal)
            continue
        decided = listener.handle(listener.machine_of(job), job, event, now)
        if isinstance(decided, Refused):
            refusals.append(decided.reason)
        else:
            actions += carry_out(job, decided, now)
    if len(refusals) == len(listeners):
        refused = f"{type(event).__name__}: {refusals[0] if refusals else 'nothing handles it'}"
        job.refused[refused] = job.refused.get(refused, 0) + 1
    return actions + settle(job, now)


def deadline(job: Job) -> Time | None:
    """When the job next wants a Tick."""
    short_until = job.state.short_until if isinstance(job.state, Gathering) else None
    due = earliest(short_until, *(machine.deadline(job) for machine in job.machines))
    pause = job.recovery.ticks_after
    return due if due is None or pause is None else max(due, pause)


def validate(job: Job) -> None:
    """Assert every invariant of the job and of the machines in it."""
    for machine in job.machines:
        machine.validate(job)


# ---- who handles what --------------------------------------------------------------------------


class Listener(Struct, frozen=True):
    """One handler of one event, and the machine that it belongs to; None: the job itself."""

    rule: Rule
    handle: Callable[..., Any]
    machine: type[Machine] | None = None

    @property
    def name(self) -> str:
        room = self.handle.__module__.removeprefix("holdfast.core.").partition(".")[0]
        return f"{room}.{self.handle.__name__}"

    def machine_of(self, job: Job) -> Machine | None:
        return None if self.machine is None else job.of(self.machine)


@on(JobOpened, refusal="the job is open already")
def on_opened_again(_: None, job: View, event: JobOpened, now: Time) -> Effects:
    raise AssertionError("no state takes it")


@on(CoordinatorRestarted, *ALWAYS, refusal="")
def on_restarted(_: None, job: View, event: CoordinatorRestarted, now: Time) -> Effects:
    """Give every node time to come back; a job that is over closes again."""
    if isinstance(job.state, Ended):  # It died with the last event written and not acted upon.
        return [CloseJob(code=job.state.result.code, reason=job.state.result.reason)]
    return [moment(Machine.coordinator_restarted)]


@on(Tick, *ALWAYS, refusal="")
def on_tick(_: None, job: View, event: Tick, now: Time) -> Effects:
    return [moment(Machine.tick)]


@cache
def _listeners(machines: tuple[type[Machine], ...]) -> dict[type, tuple[Listener, ...]]:
    """Find all handlers by the event they take, in the order in which they are asked."""
    found: dict[type, tuple[Listener, ...]] = {}
    marked: list[tuple[type[Machine] | None, Any]] = [
        *((machine, one) for machine in machines for one in vars(machine).values()),
        *((None, one) for one in (on_opened_again, on_restarted, on_tick)),
    ]
    for machine, handler in marked:
        rule = getattr(handler, "rule", None)
        if isinstance(rule, Rule):
            found[rule.event] = (*found.get(rule.event, ()), Listener(rule, handler, machine))
    return found


def table() -> list[tuple[str, dict[StateName, str]]]:
    """List for each event, by state, the functions that take it, or why it is refused."""
    rows = []
    for event, listeners in sorted(_listeners(MACHINES).items(), key=lambda one: one[0].__name__):
        cells = {state.name: _cell(state, listeners) for state in ALWAYS}
        rows.append((event.__name__, cells))
    return rows


def _cell(state: type[AnyState], listeners: tuple[Listener, ...]) -> str:
    names = [one.name for one in listeners if issubclass(state, one.rule.states)]
    return ", ".join(names) or f"refused: {listeners[0].rule.refusal}"
