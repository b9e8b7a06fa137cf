"""Faults, reduced to what the rules of recovery look at.

A fault is what broke a round: a worker's death, a hang, a lost node, or a change of the world that
Holdfast makes itself and that costs the same.
"""

from __future__ import annotations

import re
import signal

from msgspec import Struct

from holdfast.messages.events import WorkerExited
from holdfast.messages.records import FaultKind, Incident
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

WANTED = frozenset({"leave", "exclude", "resize"})
"""Changes that Holdfast makes itself: never judged, never counted against the job."""

_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_BROKEN_COLLECTIVE = re.compile(
    r"connection (reset|closed|refused)|broken pipe|\bgloo\b|\bnccl\b|socket timeout"
    r"|^(Dist\w*Error|FencedError|RequestTimeout|StoreTimeout)\b",
    re.IGNORECASE,
)


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
    """Looks like the consequence of another rank's death."""
    doubtful: bool = False
    """May be no fault at all: a script that is only slow."""

    @property
    def wanted(self) -> bool:
        return self.kind in WANTED


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
        raised = event.raised
        kind, detail = "exception", raised.traceback
        signature = f"{raised.type} at {raised.where}"
        wake = bool(_BROKEN_COLLECTIVE.search(f"{raised.type}: {raised.message}"))
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
    return f"node {fault.node}" if fault.rank is None else f"rank {fault.rank}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
