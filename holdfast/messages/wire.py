"""Defines the envelopes around events and actions on the stream between an agent and the coordinator.

An agent greets with the job's token, then sends its events numbered from 1 and keeps each until it is
acknowledged. After a broken stream it sends the unacknowledged events again, and the coordinator drops
duplicates. Actions have no number: an agent that reconnects reports its state and gets what it missed.

Beats go up, and each is answered with a Lease: see `core.leases`.

A change to any message that can travel here needs a new PROTOCOL: see `docs/compatibility.md`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from holdfast.messages.actions import NodeAction
from holdfast.messages.chaos import Injection, InjectionReport
from holdfast.messages.events import AnyEvent
from holdfast.messages.evidence import RankEvidence, Verdict
from holdfast.messages.records import Terms
from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport, SuspicionReport
from holdfast.messages.supply import RequestId, Sighting, SupplyPlan
from holdfast.messages.tuning import LoaderConfig, TuningChange
from holdfast.messages.units import (
    Count,
    ExitCode,
    Int64,
    Listed,
    NodeCount,
    NodeId,
    Rank,
    RoundNumber,
    Seconds,
    Text,
    Time,
    Word,
)

PROTOCOL = 6


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    protocol: int
    token: str
    node: NodeId
    round: RoundNumber
    busy: bool
    terms: Terms
    """Terms this node was started with; the first node's terms open the job."""
    version: Word = ""
    """Version of Holdfast."""
    job_id: Word = ""
    """Id of the job as the agent knows it; empty before its first welcome."""
    acked: Count = 0
    """Number of the newest event that the agent was told is in the journal."""
    stream: Count = 1
    """Counts the streams that the agent has opened."""
    address: Word = ""
    """Address and port of the agent's end of the stream."""


class AskWhy(Struct, frozen=True, kw_only=True, tag=True):
    """Ask where every rank is and which ranks wait for which. Answered: Why."""


class AskFault(Struct, frozen=True, kw_only=True, tag=True):
    """Inject a fault. Answered: FaultTaken, once the nodes have reported, or after a while."""

    injection: Injection
    by: Word = ""


class AskHang(Struct, frozen=True, kw_only=True, tag=True):
    """Decide about a rank that others wait for. Answered: HangNoted."""

    rank: Rank
    act: bool
    """Whether to end it now; otherwise it is left alone."""


class AskTune(Struct, frozen=True, kw_only=True, tag=True):
    """Change the settings of a data set's loaders. Answered: TuneTaken, once all ranks have changed,
    or after a while."""

    dataset: Word = ""
    """Empty if the job has only one."""
    config: LoaderConfig = LoaderConfig()
    auto: bool = False
    """Whether to search for a micro-batch from there."""
    by: Word


class AskStatus(Struct, frozen=True, kw_only=True, tag=True):
    """Ask where the job stands. Answered: StatusTold."""


class AskScale(Struct, frozen=True, kw_only=True, tag=True):
    """Change the number of nodes. Answered: ScaleTaken, or Rejected with a reason."""

    min_nodes: NodeCount
    max_nodes: NodeCount
    spares: NodeCount | None = None
    """None to leave it as it is."""
    by: Word = ""


class AskStop(Struct, frozen=True, kw_only=True, tag=True):
    """End the whole job, with its newest snapshots saved. Answered: StopTaken."""

    code: ExitCode
    reason: Text
    by: Word = ""


class AskExclude(Struct, frozen=True, kw_only=True, tag=True):
    """Go on without a node, whose host is not let in again. Answered: ExcludeTaken, or Rejected."""

    node: NodeId
    reason: Text
    by: Word = ""


class AskSave(Struct, frozen=True, kw_only=True, tag=True):
    """Write the newest snapshots in memory to storage now. Answered: SaveTaken, or Rejected."""

    by: Word = ""


class AskEvents(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for what the journal has after the event of a number. Answered: EventsTold, at once if there
    is anything, else when there is, or after a while without."""

    after: Count
    job_id: Word = ""
    """Id of the job that the asker knows; of another one it is told from the first event."""


Question = (
    AskWhy
    | AskFault
    | AskHang
    | AskTune
    | AskStatus
    | AskScale
    | AskStop
    | AskExclude
    | AskSave
    | AskEvents
)


class Visit(Struct, frozen=True, kw_only=True, tag=True):
    """Question of a read-only client that is not a node."""

    protocol: int
    token: str
    question: Question


class Why(Struct, frozen=True, kw_only=True, tag=True):
    verdict: Verdict
    evidence: tuple[RankEvidence, ...]
    """Evidence, as much as fits into one frame."""
    suspicion: SuspicionReport | None
    """What is suspected now; None if the job moves."""
    detects: bool
    """Whether hangs are acted on."""


class HangNoted(Struct, frozen=True, kw_only=True, tag=True):
    text: str


class FaultTaken(Struct, frozen=True, kw_only=True, tag=True):
    taken: tuple[InjectionReport, ...]


class TuneTaken(Struct, frozen=True, kw_only=True, tag=True):
    dataset: str
    change: TuningChange | None
    """What became of the change; None if that is not known yet."""
    line: str
    """The same in words."""


class StatusTold(Struct, frozen=True, kw_only=True, tag=True):
    status: StatusReport
    goodput: GoodputReport
    incident: IncidentReport | None
    """The newest one."""


class ScaleTaken(Struct, frozen=True, kw_only=True, tag=True):
    line: str
    """What is going to happen, in words."""


class StopTaken(Struct, frozen=True, kw_only=True, tag=True):
    line: str


class ExcludeTaken(Struct, frozen=True, kw_only=True, tag=True):
    line: str


class SaveTaken(Struct, frozen=True, kw_only=True, tag=True):
    line: str


class JournalRow(NamedTuple):
    """One event as the journal has it."""

    number: int
    at: float
    node: NodeId | None
    node_number: int | None
    event: str
    """JSON."""


class EventsTold(Struct, frozen=True, kw_only=True, tag=True):
    """Rows of the journal, as many as fit into one frame."""

    job: str
    job_id: Word
    after: Count
    """The number after which they come: that of the question, or 0 if the job is another one."""
    rows: tuple[JournalRow, ...]
    last: Count
    """Number of the newest event in the journal."""


class SupplierHello(Struct, frozen=True, kw_only=True, tag=True):
    """Greeting of a supplier. Answered: SupplierWelcome, then a whole SupplyPlan, then plans."""

    protocol: int
    token: str
    platform: Word
    version: Word = ""
    together: bool = False
    """Whether its nodes are taken away together, as those of one allocation are: then one that is told
    to leave speaks for all of them. Else another is asked for."""


class SupplierWelcome(Struct, frozen=True, kw_only=True, tag=True):
    job: str
    job_id: Word


class Sighted(Struct, frozen=True, kw_only=True, tag=True):
    """What the platform says: see `NodesSighted`. The first of a stream is whole."""

    sightings: Listed[Sighting]
    whole: bool = False
    more: bool = False
    """Whether it goes on in the next message."""


class RequestsDeclined(Struct, frozen=True, kw_only=True, tag=True):
    """The platform does not take requests: see `RequestsRefused`."""

    requests: Listed[RequestId]
    why: Text
    for_good: bool = False


class Welcome(Struct, frozen=True, kw_only=True, tag=True):
    job: str
    job_id: Word
    now: Time
    acked: int
    """Number of this node's newest event in the journal."""
    beat_s: Seconds
    """Interval between two Beats."""
    direct: bool = False
    """Whether no proxy stands between the two ends, so that what the kernel says about the stream is
    about the other process."""


class Rejected(Struct, frozen=True, kw_only=True, tag=True):
    """Refusal of a connection or a question; the coordinator closes the stream."""

    reason: str
    lost: bool = False
    """The coordinator knows nothing of the node's job: its journal is lost, or it has another's."""


class Sent(Struct, frozen=True, kw_only=True, tag=True):
    number: Annotated[int, Meta(ge=1, le=1 << 53)]
    event: AnyEvent


class EvidenceTaken(Struct, frozen=True, kw_only=True, tag=True):
    """An agent's observations of its ranks. It is not an event: no decision depends on it."""

    examination: Int64
    """Number of the examination; a negative one is a question of `holdfast why`."""
    evidence: Listed[RankEvidence]
    more: bool = False
    """Whether more follows from this node."""


class Beat(Struct, frozen=True, kw_only=True, tag=True):
    """Sign of life of an agent. Answered: Lease."""

    number: Count = 0


class Lease(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to a beat: counted from when that was sent, the node keeps its places for so long."""

    beat: Count
    round: RoundNumber
    """Round in which the node has places; 0 if it has none."""
    for_s: Seconds
    """0 if nobody could ever take its places."""
    beat_s: Seconds
    """Interval between two Beats from now on: it grows with the number of nodes."""


class Ack(Struct, frozen=True, kw_only=True, tag=True):
    number: int


FromAgent = Hello | Visit | Sent | EvidenceTaken | Beat
FromSupplier = SupplierHello | Sighted | RequestsDeclined
ToVisitor = (
    Why
    | FaultTaken
    | HangNoted
    | TuneTaken
    | StatusTold
    | ScaleTaken
    | StopTaken
    | ExcludeTaken
    | SaveTaken
    | EventsTold
    | Rejected
)
ToSupplier = SupplierWelcome | SupplyPlan | Rejected
FromCoordinator = Welcome | Rejected | Ack | Lease | NodeAction
