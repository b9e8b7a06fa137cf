"""What is said on a stream between an agent and the coordinator, around events and actions.

An agent greets with the job's token, then sends its events numbered from 1 and keeps each until it is
acknowledged; after a broken stream it sends the rest again, and the coordinator drops what it has.
Actions need no number: an agent that comes back says what it is doing and is told what it missed.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.messages.actions import NodeAction
from holdfast.messages.chaos import Injection, InjectionReport
from holdfast.messages.events import AnyEvent
from holdfast.messages.evidence import RankEvidence, Verdict
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, RoundNumber, Seconds, Time

PROTOCOL = 1


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    protocol: int
    token: str
    node: NodeId
    round: RoundNumber
    busy: bool
    terms: Terms
    """What kind of job this node was started for; the first node's opens the job."""


class AskWhy(Struct, frozen=True, kw_only=True, tag=True):
    """Where does every rank stand now, and who waits for whom? Answered: Why."""


class AskFault(Struct, frozen=True, kw_only=True, tag=True):
    """Inject a fault. Answered: FaultTaken, once the nodes have reported, or after a while."""

    injection: Injection


Question = AskWhy | AskFault


class Visit(Struct, frozen=True, kw_only=True, tag=True):
    """Somebody who is no node has one question."""

    protocol: int
    token: str
    question: Question


class Why(Struct, frozen=True, kw_only=True, tag=True):
    verdict: Verdict
    evidence: tuple[RankEvidence, ...]
    """As much of it as fits into a frame."""
    standing: int
    """Ranks that are past their deadlines."""


class FaultTaken(Struct, frozen=True, kw_only=True, tag=True):
    taken: tuple[InjectionReport, ...]


class Welcome(Struct, frozen=True, kw_only=True, tag=True):
    job: str
    now: Time
    acked: int
    """The newest event of this node that is in the journal."""
    beat_s: Seconds
    """How often to send a Beat when there is nothing else to say."""


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    reason: str


class Sent(Struct, frozen=True, kw_only=True, tag=True):
    number: Annotated[int, Meta(ge=1, le=1 << 53)]
    event: AnyEvent


class EvidenceTaken(Struct, frozen=True, kw_only=True, tag=True):
    """What an agent saw of its ranks. It is not an event: nothing is decided by it."""

    examination: int
    """The incident's number, or a negative one for a visitor's question."""
    evidence: tuple[RankEvidence, ...]
    more: bool = False
    """Whether more of this node's evidence follows."""


class Beat(Struct, frozen=True, kw_only=True, tag=True):
    """I am still here."""


class Ack(Struct, frozen=True, kw_only=True, tag=True):
    number: int


FromAgent = Hello | Visit | Sent | EvidenceTaken | Beat
ToVisitor = Why | FaultTaken | Refused
FromCoordinator = Welcome | Refused | Ack | NodeAction
