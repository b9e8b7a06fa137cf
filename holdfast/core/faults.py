"""Faults, reduced to what the rules of recovery look at.

A fault is what broke a round: a worker's death, a hang, a lost node, or a change of the world that
Holdfast makes itself and that costs the same.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.collectives import Difference, told
from holdfast.core.view import RankState
from holdfast.messages.broken_collectives import is_broken_collective
from holdfast.messages.events import RankRaised, WorkerExited
from holdfast.messages.records import FaultKind, Incident, Raised
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

WANTED = frozenset({"leave", "exclude", "resize", "requeue"})
"""Changes that Holdfast makes itself: never judged, never counted against the job."""

_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Fault(Struct, frozen=True, kw_only=True):
    kind: FaultKind
    node: NodeId
    rank: Rank | None = None
    round: RoundNumber
    step: StepNumber
    signature: str
    detail: str = ""
    at: Time
    gone_at: Time | None = None
    """When the process of a script that had raised was gone; None for other faults."""
    outside: bool = False
    """The fault came from outside and says nothing about the script."""
    wake: bool = False
    """Looks like the consequence of another rank's end."""
    victim: str = ""
    """The failure that showed the fault, where another rank's early end was blamed for it."""
    stuck: bool = False
    """The rank cannot even leave its function: its process is stopped, or keeps the GIL."""
    doubtful: bool = False
    """May be no fault at all: a script that is only slow."""
    examination: int = 0
    """Number of the examination that found it; 0 if none did."""

    @property
    def wanted(self) -> bool:
        return self.kind in WANTED

    @property
    def unexplained(self) -> bool:
        """The consequence of something that was not found: it says nothing about the script."""
        return self.wake and not self.victim


def death(event: WorkerExited, step: StepNumber) -> Fault:
    """Read a worker's death: of which kind it was, and its signature."""
    kind: FaultKind = "exit"
    signature, detail, outside, wake = f"exit code {event.code}", "", False, False
    at, gone_at = event.at, None
    if event.signal is not None:
        kind = "oom" if event.oom else "signal"
        name = signal_name(event.signal)
        signature = "killed by the out-of-memory killer" if event.oom else f"killed by {name}"
        outside = event.signal in _OUTSIDE and not event.oom
        wake = event.signal == signal.SIGABRT
    elif event.raised is not None:
        kind, detail = "exception", event.raised.traceback
        signature, wake = _exception(event.raised)
        if event.raised_at is not None:
            at, gone_at = min(event.raised_at, event.at), event.at
    return Fault(
        kind=kind,
        node=event.node,
        rank=event.rank,
        round=event.round,
        step=step,
        signature=signature,
        detail=detail or event.log_tail,
        at=at,
        gone_at=gone_at,
        outside=outside,
        wake=wake,
    )


def is_unfit(event: WorkerExited) -> bool:
    """Return whether a hook or a check of its restartable function ended the process."""
    return event.raised is not None and event.raised.type == "UnfitProcess"


def raised(event: RankRaised, step: StepNumber) -> Fault:
    """Read the end of a restartable function whose process lives."""
    signature, wake = _exception(event.raised)
    return Fault(
        kind="exception",
        node=event.node,
        rank=event.rank,
        round=event.round,
        step=step,
        signature=signature,
        detail=event.raised.traceback or event.log_tail,
        at=event.at,
        wake=wake,
    )


def _exception(raised: Raised) -> tuple[str, bool]:
    """Return an exception's signature, and whether it may be the consequence of another rank's end."""
    return f"{raised.type} at {raised.where}", is_broken_collective(raised)


def blame_early_exit(wake: Fault, ranks: Mapping[Rank, RankState]) -> Fault:
    """Blame the rank that ended well before the others for what they failed in, if there is one.

    A rank that waits for one that has gone fails in the collective they shared, and names itself.
    """
    finished = [(state.step, rank) for rank, state in ranks.items() if state.finished]
    if not finished:
        return wake
    step, rank = min(finished)
    others = f" (and {len(finished) - 1} more)" if len(finished) > 1 else ""
    sentence = (
        f"rank {rank}{others} ended with exit code 0 at step {step} while others still trained;"
        f" {subject(wake)} failed in a collective that needed it"
    )
    return replace(
        wake,
        kind="exit",
        node=ranks[rank].node,
        rank=rank,
        step=step,
        signature="exit code 0 while others still trained",
        detail=f"{sentence}\n{wake.detail}",
        victim=f"{subject(wake)} {wake.signature}",
    )


def is_aborted_by_backend(event: WorkerExited) -> bool:
    """Return whether a collective's backend ended a rank because another's data did not fit."""
    return event.signal == signal.SIGABRT and "collective mismatch" in event.log_tail


def blame_mismatch(
    wake: Fault,
    odd: tuple[int, ...],
    found: Difference | None,
    ranks: Mapping[Rank, RankState],
    place: str = "",
) -> Fault:
    """Blame the rank whose collective did not match the others'; nobody without a majority."""
    guilty = Rank(odd[0]) if odd else None
    state = ranks.get(guilty) if guilty is not None else None
    said = [f"rank {guilty} called another collective than the others"]
    if found is not None:
        said = [told(found)]
    if place:
        said.append(f"rank {guilty} was in {place}")
    said.append(f"{subject(wake)} {'was' if wake.kind == 'signal' else 'raised'} {wake.signature}")
    return replace(
        wake,
        kind="hang",
        node=state.node if state is not None else NodeId(""),
        rank=guilty,
        step=state.step if state is not None else wake.step,
        signature="hang: collectives that can never meet",
        detail="; ".join(said),
        wake=False,
    )


def lost_node(node: NodeId, round: RoundNumber, step: StepNumber, why: str, at: Time) -> Fault:
    """Describe the loss of a whole node."""
    return Fault(
        kind="node",
        node=node,
        round=round,
        step=step,
        signature=f"lost: {why}",
        at=at,
        outside=True,
    )


def wanted(
    kind: FaultKind, node: NodeId, round: RoundNumber, step: StepNumber, why: str, at: Time
) -> Fault:
    """Describe a change of the world that is no fault: a node comes, goes or is sent away."""
    return Fault(kind=kind, node=node, round=round, step=step, signature=why, at=at, outside=True)


def culprit(one: Fault, other: Fault) -> Fault:
    """Choose which of two faults of one round caused the other.

    When one rank dies, the others fail in the collective they shared with it: a death that is not a
    broken collective comes before one that is, then the earliest.
    """
    return min(one, other, key=lambda fault: (fault.wake, fault.at))


def subject(fault: Fault | Incident) -> str:
    """Name the rank or node that the fault befell."""
    if fault.rank is None and not fault.node:
        return "the job"
    return f"node {fault.node}" if fault.rank is None else f"rank {fault.rank}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
