"""When to try again after a fault, and when to give up.

A fault is judged by what failed (its signature), where training stood (the step) and whether the job
ever advanced. The rules, in order:

1. An exception or a bad exit code before the job's first step is the user's bug: it would fail again,
   so the job ends with 1 at once. With `--max-restarts` the user asked for torchrun's way, and it is
   tried again within that number.
2. With `--max-restarts`, that many restarts and no more; then the job ends with 1.
3. The same signature at the same step SAME_LIMIT times in a row ends the job with 93: a requeue would
   only repeat it.
4. STUCK_LIMIT faults of any signature in a row without a new highest step end it with 93 too.
5. Else try again, on the cheapest rung of the ladder that can repair it.

Hangs at the same step are the same, however the ranks stood. A hang that may only be a slow script is
never counted by rules 3 and 4: a healthy job is not given up, however often it was doubted.

A broken collective whose cause was not found (a peer that never came, a connection that was closed) is
no bug of the rank that raised it: rule 1 does not apply, nor does rule 3 before the first step.

A SIGKILL or SIGTERM that was not the out-of-memory killer's comes from outside: no script sends it to
itself at a certain step. It says nothing about the script, so rule 3 does not count it and rule 4 has
a much larger limit for it.

Steps say nothing if no rank knows where the script resumed, because each process then counts its own:
a job that advances by 50 steps each time would seem to fail at step 50 again and again. Rule 3 does not
count such a fault, and rule 4 has the larger limit for it.

Where processes stay (restartable functions), the same failure in the same rank, or at the same step, is
met by entering the function again REENTER_LIMIT times; then that rank's process is replaced, as often;
then all processes are. A rank that is stopped or keeps the GIL is replaced at once. What fails in
processes that stayed may fail because they stayed: rule 3 counts it only if all were new. Faults from
outside are no reason to replace a process. A broken collective is often heard of before its cause:
while that is unknown, the failure is taken for the one that came last.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.core import ladder
from holdfast.core.faults import Fault, subject
from holdfast.core.ladder import Resources, Rung, Stop
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_FAILED
from holdfast.messages.units import Rank, StepNumber

SAME_LIMIT = 3
STUCK_LIMIT = 30
STUCK_LIMIT_OUTSIDE = 300
REENTER_LIMIT = 3
"""Faults in a row with the same signature in the same rank after which its process is replaced, and as
many again after which all processes are."""


class FaultHistory(Struct):
    """What the rules remember from one fault to the next."""

    restarts: int = 0
    signature: str = ""
    step: StepNumber | None = None
    same: int = 0
    """How often in a row the signature above was seen at the step above."""
    best_step: StepNumber = StepNumber(0)
    stuck: int = 0
    """Faults of the job's own in a row without a new highest step."""
    stuck_outside: int = 0
    """The same for faults that came from outside, or at unknown steps."""
    rank: Rank | None = None
    storm: int = 0
    """How often in a row the signature above was seen in this rank, or at the step above."""


class Keeping(Struct, frozen=True):
    """Which processes stay when a round with restartable functions breaks."""

    any: bool = True
    without: tuple[Rank, ...] = ()
    """Ranks whose processes are replaced."""


def keeping(history: FaultHistory, fault: Fault) -> Keeping:
    """Choose the processes that stay: fewer and fewer while the same failure comes again."""
    rank = history.rank if fault.unexplained else fault.rank
    again = history.storm if fault.unexplained or _again(history, fault) else 0
    if again >= 2 * REENTER_LIMIT:
        return Keeping(any=False)
    unfit = fault.stuck or again >= REENTER_LIMIT
    return Keeping(without=(rank,) if unfit and rank is not None else ())


def _again(history: FaultHistory, fault: Fault) -> bool:
    """Return whether the same came last, in the same rank or at the same step.

    A bug shows in all ranks, and any of them may be the first to raise.
    """
    same_place = fault.rank == history.rank or fault.step == history.step
    return _signature(fault) == history.signature and same_place


def _signature(fault: Fault) -> str:
    return "hangs" if fault.kind == "hang" else fault.signature


def judge(
    history: FaultHistory,
    fault: Fault,
    there: Resources,
    highest: StepNumber,
    max_restarts: int | None,
    comparable: bool = True,
    fresh: bool = True,
) -> Rung:
    """Choose a rung for a fault.

    `highest` is the highest step that the job ever finished, `comparable` whether the fault's step
    can be compared with those of earlier rounds, `fresh` whether all processes of the round were new.
    """
    if fault.wanted:
        return ladder.cheapest(fault, there)
    if not fault.doubtful:
        _remember(history, fault, highest, max_restarts, comparable, fresh)
    stop = _stop(history, fault, highest, max_restarts)
    if stop is not None:
        return stop
    history.restarts += 1
    return ladder.cheapest(fault, there)


def _stop(
    history: FaultHistory, fault: Fault, highest: StepNumber, limit: int | None
) -> Stop | None:
    what = f"{subject(fault)}: {fault.signature}"
    if fault.kind == "hang" and fault.detail:
        what = fault.detail
    own = fault.kind in ("exit", "exception") and not fault.wake
    if highest == 0 and limit is None and own:
        return Stop(EXIT_FAILED, f"{what}, before the first step")
    if limit is not None and history.restarts >= limit:
        return Stop(EXIT_FAILED, f"{what}; {limit} restarts allowed and used")
    if history.same >= SAME_LIMIT:
        reason = f"{what} at step {fault.step}, {history.same} times in a row"
        return Stop(EXIT_DO_NOT_REQUEUE, reason)
    if history.stuck >= STUCK_LIMIT or history.stuck_outside >= STUCK_LIMIT_OUTSIDE:
        count = history.stuck + history.stuck_outside
        reason = f"{what}; {count} faults in a row without a step beyond {highest}"
        return Stop(EXIT_DO_NOT_REQUEUE, reason)
    return None


def _remember(
    history: FaultHistory,
    fault: Fault,
    highest: StepNumber,
    max_restarts: int | None,
    comparable: bool,
    fresh: bool,
) -> None:
    advanced = comparable and highest > history.best_step
    history.best_step = highest
    if advanced:
        history.stuck = history.stuck_outside = 0
    if fault.outside or not comparable:
        history.stuck_outside += 1
    else:
        history.stuck += 1
    # Before the job's first step, torchrun's number decides if there is one.
    unsaid = highest == 0 and (max_restarts is not None or fault.unexplained)
    countable = comparable and not fault.outside and not unsaid
    if fault.outside:
        history.storm = 0
    else:
        history.storm = history.storm + 1 if _again(history, fault) else 1
    signature = _signature(fault)
    repeated = signature == history.signature and fault.step == history.step
    before = history.same if repeated else 0
    history.same = before + fresh if countable else 0
    history.signature, history.step, history.rank = signature, fault.step, fault.rank


def validate(history: FaultHistory, max_restarts: int | None) -> None:
    assert max_restarts is None or history.restarts <= max_restarts, "more restarts than allowed"
    assert history.same <= SAME_LIMIT, "the same failure went on"
    assert history.stuck <= STUCK_LIMIT, "stuck for ever"
    assert history.stuck_outside <= STUCK_LIMIT_OUTSIDE, "stuck for ever"
