"""Actions: what is to be done. The core returns them; the coordinator carries each to its node."""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.chaos import Trap
from holdfast.messages.checkpoints import SnapshotId, StoredFile
from holdfast.messages.data import DataName, Span
from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer
from holdfast.messages.supply import SupplyPlan
from holdfast.messages.units import CauseId, Count, NodeId, Rank, RoundNumber, Seconds


class Action(Struct, frozen=True, kw_only=True, tag=True):
    id: CauseId = ""
    cause: CauseId = ""
    """The event that the action follows from."""


class StartWorkers(Action, frozen=True, kw_only=True):
    """Give the ranks of this part to processes of the node."""

    node: NodeId
    part: Part


class Prepare(Action, frozen=True, kw_only=True):
    """There is no place for the node now: have standbys ready for when there is."""

    node: NodeId


class StopWorkers(Action, frozen=True, kw_only=True):
    """End the node's workers of that round, or have them leave their function, then say NodeReady."""

    node: NodeId
    round: RoundNumber
    grace_s: Seconds
    why: str
    look: bool = False
    """Whether to note first which collectives the workers are in: one of them broke."""
    leave_s: Seconds = 0.0
    """How long a worker may take to leave a restartable function; 0: all processes are ended."""
    replace: tuple[Rank, ...] = ()
    """Ranks whose processes are ended at once, whatever they run."""


class Finish(Action, frozen=True, kw_only=True):
    """End whatever runs on the node, say NodeLeft, and exit with that code."""

    node: NodeId
    code: int
    reason: str
    grace_s: Seconds
    rejoin: bool = False
    """Whether the launcher shall start a new agent that joins as another node."""


class Answered(Action, frozen=True, kw_only=True):
    """Tell that rank's script what the coordinator says to its request."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    channel: int
    number: int
    answer: AnyAnswer


class Examine(Action, frozen=True, kw_only=True):
    """Examine the node's workers without stopping them, and send EvidenceTaken."""

    node: NodeId
    examination: int
    limit_s: Seconds
    native: bool = True
    """Whether native stacks are taken where Python's are unclear, which pauses a rank for a moment."""


class ReleaseRanks(Action, frozen=True, kw_only=True):
    """The restartable function has returned on all ranks of the round: their scripts go on."""

    node: NodeId
    round: RoundNumber


class EndProcess(Action, frozen=True, kw_only=True):
    """End the process of a rank whose script has ended, and which hangs on its way out."""

    node: NodeId
    round: RoundNumber
    rank: Rank


class TestNode(Action, frozen=True, kw_only=True):
    """Have a process test this node, alone and with the other of its group, then say NodeTested.

    The same order again with a size of 1: the other will not come, say how it went without it.
    """

    node: NodeId
    check: int
    round: int
    group: int
    rank: int
    size: int
    address: str
    """Where the first of the group has its store."""
    port: int
    limit_s: Seconds


class WriteRankFiles(Action, frozen=True, kw_only=True):
    """Write the images of these ranks to storage, then say RankFilesWritten."""

    node: NodeId
    snapshot: SnapshotId
    ranks: tuple[Rank, ...]
    world_size: int
    alike: bool
    """All ranks share what they should: each writes its slice of that, not all of it."""


class CommitCheckpoint(Action, frozen=True, kw_only=True):
    """All shards are durable: write the manifest, then say CheckpointWritten."""

    node: NodeId
    snapshot: SnapshotId
    world_size: int
    shards: tuple[StoredFile, ...]


class CheckpointSettled(Action, frozen=True, kw_only=True):
    """Nothing more will be done about that snapshot's way to storage."""

    node: NodeId
    snapshot: SnapshotId
    error: str = ""


class LendShards(Action, frozen=True, kw_only=True):
    """Add these shards to those that the node has of a data set."""

    node: NodeId
    round: RoundNumber
    dataset: DataName
    spans: tuple[Span, ...] = ()
    """Each begins with a shard, or is a part of one. Spans that the node has already are said again
    because they may have been lost."""
    heard: Count = 0
    """Number of the node's last report that was taken in. What the node has reported since to have
    used or given back is not lent to it anew, though it may be among these spans."""
    finished: bool = False
    """Nothing more will be lent in this round."""


class Inject(Action, frozen=True, kw_only=True):
    """Inject a fault: now, or when its rank comes to its step."""

    node: NodeId
    """Empty: it strikes the coordinator itself, now."""
    round: RoundNumber
    trap: Trap


class Diagnose(Action, frozen=True, kw_only=True):
    """Have these nodes examine their ranks, and say VerdictReached. For the coordinator itself."""

    examination: int
    round: RoundNumber
    nodes: tuple[NodeId, ...]
    world_size: int
    finished: tuple[Rank, ...] = ()
    """Ranks that have ended well."""
    native: bool = False
    """Whether native stacks are taken: see `Examine`."""


class KeepEvidence(Action, frozen=True, kw_only=True):
    """Keep what an examination saw with an incident. For the coordinator itself."""

    examination: int
    incident: int


class Announce(Action, frozen=True, kw_only=True):
    """Tell the people at the terminal. For the coordinator itself."""

    text: str


class CarryOutPlan(Action, frozen=True, kw_only=True):
    """Have the supplier start and stop nodes, if there is one now. For the coordinator itself."""

    plan: SupplyPlan


class CloseJob(Action, frozen=True, kw_only=True):
    """All nodes are gone and the job is over: the coordinator may end."""

    code: int
    reason: str


NodeAction = (
    Prepare
    | StartWorkers
    | StopWorkers
    | Finish
    | Answered
    | Examine
    | ReleaseRanks
    | EndProcess
    | TestNode
    | WriteRankFiles
    | CommitCheckpoint
    | CheckpointSettled
    | LendShards
    | Inject
)
CoordinatorAction = Diagnose | KeepEvidence | Announce | CarryOutPlan | CloseJob
"""What the coordinator does itself."""
AnyAction = NodeAction | CoordinatorAction
