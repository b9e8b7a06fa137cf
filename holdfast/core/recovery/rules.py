"""What to do about a fault.

A fault is judged by what failed (its signature), where training stood (the step) and whether the job
ever advanced. The rules, in order:

1. An exception or a bad exit code before the job's first step is the user's bug: it would fail again,
   so the job ends with 1 at once. With `--max-restarts` the user asked for torchrun's way, and it is
   tried again within that number.
2. With `--max-restarts`, that many restarts and no more; then the job ends with 1.
3. The same signature at the same step SAME_LIMIT times in a row ends the job with 93: a requeue would
   only repeat it.
4. STUCK_LIMIT faults of any signature in a row without a new highest step end it with 93 too.
5. Else try again.

Hangs at the same step are the same, however the ranks stood. A rank that hangs may only be slow; each
time it is given several times as long, so there are SAME_LIMIT_SLOW times before rule 3 ends the job.

A SIGKILL or SIGTERM that was not the out-of-memory killer's comes from outside: no script sends it to
itself at a certain step. It says nothing about the script, so rule 3 does not count it and rule 4 has
a much larger limit for it.

Several ranks die of one fault: when one is killed, the others fail in the collective they shared with
it. The culprit is found among all deaths of the round: a death that is not a broken collective before
one that is, then the earliest.
"""

from __future__ import annotations

import re
import signal

from msgspec import Struct

from holdfast.messages.events import WorkerExited
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_FAILED
from holdfast.messages.records import FaultKind, Incident, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

SAME_LIMIT = 3
SAME_LIMIT_SLOW = 5
STUCK_LIMIT = 30
STUCK_LIMIT_OUTSIDE = 300

WANTED = frozenset({"leave", "exclude", "resize"})
"""Changes that we make ourselves: never judged, never counted against the job."""

_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_BROKEN_COLLECTIVE = re.compile(
    r"connection (reset|closed|refused)|broken pipe|\bgloo\b|\bnccl\b|socket timeout"
    r"|^(Dist\w*Error|FencedError|RequestTimeout|StoreTimeout)\b",
    re.IGNORECASE,
)


class Fault(Struct, frozen=True, kw_only=True):
    """One death, reduced to what the rules look at."""

    kind: FaultKind
    node: NodeId
    rank: Rank | None
    round: RoundNumber
    step: StepNumber
    signature: str
    detail: str
    at: Time
    outside: bool
    wake: bool
    """Looks like the consequence of another rank's death."""
    doubtful: bool = False
    """May be none: a script that is only slow."""


class Again(Struct, frozen=True):
    """Try again in a new round."""


class Stop(Struct, frozen=True):
    """Give up, with the launcher's exit code and the reason."""

    code: int
    reason: str


class Recovery(Struct):
    """What the rules remember from one fault to the next."""

    terms: Terms
    restarts: int = 0
    signature: str = ""
    step: StepNumber = StepNumber(-1)
    same: int = 0
    """How often in a row the signature above was seen at the step above."""
    best_step: StepNumber = StepNumber(0)
    stuck: int = 0
    """Faults of the job's own in a row without a new highest step."""
    stuck_outside: int = 0
    """The same for deaths that came from outside."""


def fault_of(event: WorkerExited, step: StepNumber) -> Fault:
    """Read a death: what kind it was and what its signature is."""
    kind: FaultKind = "exit"
    signature, detail, outside, wake = f"exit code {event.code}", "", False, False
    if event.signal is not None:
        name = signal_name(event.signal)
        kind = "oom" if event.oom else "signal"
        signature = "killed by the out-of-memory killer" if event.oom else f"killed by {name}"
        outside = event.signal in _OUTSIDE and not event.oom
        wake = event.signal == signal.SIGABRT
    elif event.raised is not None:
        raised = event.raised
        kind = "exception"
        signature = f"{raised.type} at {raised.where}"
        detail = raised.traceback
        wake = bool(_BROKEN_COLLECTIVE.search(f"{raised.type}: {raised.message}"))
    return Fault(
        kind=kind,
        node=event.node,
        rank=event.rank,
        round=event.round,
        step=step,
        signature=signature,
        detail=detail or event.log_tail,
        at=event.at,
        outside=outside,
        wake=wake,
    )


def hung(
    node: NodeId,
    rank: Rank | None,
    round: RoundNumber,
    step: StepNumber,
    what: str,
    at: Time,
    *,
    outside: bool = False,
    doubtful: bool = False,
) -> Fault:
    """The fault of a rank that stands still, or of all; `outside` if somebody stopped it."""
    return Fault(
        kind="hang",
        node=node,
        rank=rank,
        round=round,
        step=step,
        signature=what,
        detail="",
        at=at,
        outside=outside,
        wake=False,
        doubtful=doubtful,
    )


def lost_node(node: NodeId, round: RoundNumber, step: StepNumber, reason: str, at: Time) -> Fault:
    """The fault of a whole node that is gone."""
    return Fault(
        kind="node",
        node=node,
        rank=None,
        round=round,
        step=step,
        signature=f"lost: {reason}",
        detail="",
        at=at,
        outside=True,
        wake=False,
    )


def wanted(
    kind: FaultKind, node: NodeId, round: RoundNumber, step: StepNumber, why: str, at: Time
) -> Fault:
    """Not a fault but a change of the world that costs the same: somebody comes, goes or is sent."""
    return Fault(
        kind=kind,
        node=node,
        rank=None,
        round=round,
        step=step,
        signature=why,
        detail="",
        at=at,
        outside=True,
        wake=False,
    )


def subject(fault: Fault | Incident) -> str:
    """Whom it befell."""
    return f"node {fault.node}" if fault.rank is None else f"rank {fault.rank}"


def culprit(one: Fault, other: Fault) -> Fault:
    """Which of two deaths of one round caused the other."""
    return min(one, other, key=lambda fault: (fault.wake, fault.at))


def judge(recovery: Recovery, fault: Fault, highest: StepNumber) -> Again | Stop:
    """Apply the rules to a fault. `highest` is the highest step that the job ever finished."""
    if fault.kind in WANTED:
        return Again()
    _remember(recovery, fault, highest)
    limit = recovery.terms.max_restarts
    what = f"{subject(fault)}: {fault.signature}"
    if fault.kind == "hang" and fault.detail:
        what = fault.detail
    if highest == 0 and limit is None and fault.kind in ("exit", "exception"):
        return Stop(EXIT_FAILED, f"{what}, before the first step")
    if limit is not None and recovery.restarts >= limit:
        return Stop(EXIT_FAILED, f"{what}; {limit} restarts allowed and used")
    if recovery.same >= (SAME_LIMIT_SLOW if fault.doubtful else SAME_LIMIT):
        reason = f"{what} at step {fault.step}, {recovery.same} times in a row"
        return Stop(EXIT_DO_NOT_REQUEUE, reason)
    if recovery.stuck >= STUCK_LIMIT or recovery.stuck_outside >= STUCK_LIMIT_OUTSIDE:
        count = recovery.stuck + recovery.stuck_outside
        reason = f"{what}; {count} faults in a row without a step beyond {highest}"
        return Stop(EXIT_DO_NOT_REQUEUE, reason)
    recovery.restarts += 1
    return Again()


def _remember(recovery: Recovery, fault: Fault, highest: StepNumber) -> None:
    advanced = highest > recovery.best_step
    recovery.best_step = highest
    if advanced:
        recovery.stuck = recovery.stuck_outside = 0
    if fault.outside:
        recovery.stuck_outside += 1
    else:
        recovery.stuck += 1
    # Steps of a job that never finished one are not comparable: torchrun's number decides there.
    countable = not fault.outside and (highest > 0 or recovery.terms.max_restarts is None)
    signature = "hangs" if fault.kind == "hang" else fault.signature
    repeated = signature == recovery.signature and fault.step == recovery.step
    recovery.same = (recovery.same + 1 if repeated else 1) if countable else 0
    recovery.signature, recovery.step = signature, fault.step


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def validate(recovery: Recovery) -> None:
    limit = recovery.terms.max_restarts
    assert limit is None or recovery.restarts <= limit, "more restarts than allowed"
    assert recovery.same <= SAME_LIMIT_SLOW, "the same failure went on"
    assert recovery.stuck <= STUCK_LIMIT, "stuck for ever"
    assert recovery.stuck_outside <= STUCK_LIMIT_OUTSIDE, "stuck for ever"
