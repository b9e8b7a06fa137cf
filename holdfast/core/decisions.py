"""What a machine wants of the job beyond its own room.

A machine changes its own state, returns actions for nodes, and returns decisions for everything else.
Only the job carries decisions out, so no machine needs to know another.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from holdfast.core.faults import Fault
from holdfast.messages.actions import AnyAction
from holdfast.messages.records import FaultKind
from holdfast.messages.requests import AnyAnswer
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

Asker = str
"""A request that waits for its answer: rank and channel."""


class Decision(Struct, frozen=True, kw_only=True):
    pass


class Tell(Struct, frozen=True):
    """Let every machine hear of a moment."""

    moment: str
    arguments: tuple[Any, ...] = ()


class Settle(Decision, frozen=True, kw_only=True):
    """See whether the fault can be judged now, or the next round frozen. So it is after any other
    decision."""


class BreakRound(Decision, frozen=True, kw_only=True):
    """Stop the workers of the round; in one that is stopping, blame the likelier culprit."""

    fault: Fault


class LoseNode(Decision, frozen=True, kw_only=True):
    """Strike off a node that is gone."""

    node: NodeId
    why: str
    at: Time


class Repeat(Decision, frozen=True, kw_only=True):
    """Say again to a member what the job's state wants of it: it knows of nothing after that round."""

    node: NodeId
    round: RoundNumber


class SendAway(Decision, frozen=True, kw_only=True):
    """Part with a living node; the others go on in a new round."""

    node: NodeId
    kind: FaultKind
    code: int
    why: str


class Exclude(Decision, frozen=True, kw_only=True):
    """Do not let the host of a member in again."""

    node: NodeId
    why: str


class EndJob(Decision, frozen=True, kw_only=True):
    code: int
    reason: str
    secure: bool = True
    """Write the newest snapshots first."""


class Note(Decision, frozen=True, kw_only=True):
    """Record an incident that breaks no round."""

    kind: FaultKind
    signature: str
    action: str
    node: NodeId = NodeId("")
    rank: Rank | None = None
    round: RoundNumber
    step: StepNumber
    detail: str = ""


class Rescale(Decision, frozen=True, kw_only=True):
    """Want another number of nodes from now on."""

    min_nodes: int
    max_nodes: int
    spares: int


class Requeue(Decision, frozen=True, kw_only=True):
    """Go on with a job whose nodes are all gone, and that may have ended."""

    since: Time


class AnswerRequest(Decision, frozen=True, kw_only=True):
    """Answer a held request, if its asker still waits."""

    asker: Asker
    answer: AnyAnswer


class Refused(Decision, frozen=True, kw_only=True):
    """The event changes nothing. Reasons are counted, so they name no round, rank or node."""

    reason: str


NOT_A_MEMBER = Refused(reason="the node is not a member")

AnyDecision = (
    Tell
    | Settle
    | BreakRound
    | LoseNode
    | Repeat
    | SendAway
    | Exclude
    | EndJob
    | Note
    | Rescale
    | Requeue
    | AnswerRequest
)
Effect = AnyAction | AnyDecision
