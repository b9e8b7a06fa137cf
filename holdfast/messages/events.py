"""Events: what happened. They come from agents over the wire, go into the journal, then into the core.

Each carries the time at which its sender saw it (in job time) and, where it speaks of a round, that
round's number, so that word from an older round can be told apart and refused.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.chaos import Injection, Outcome, Trap
from holdfast.messages.checkpoints import (
    Attempt,
    CheckpointerId,
    ImageId,
    Missed,
    Sealed,
    SnapshotId,
    StoredFile,
    StoredStep,
    Wish,
)
from holdfast.messages.data import DataName, ShardFailure, Span, UsedBy
from holdfast.messages.evidence import Collective, RankCollectives
from holdfast.messages.hangs import Memory, Name, Paces, Pause, PlaceName, Proof, Stall
from holdfast.messages.health import HealthResult
from holdfast.messages.nodecheck import TestResult
from holdfast.messages.records import NodeSpec, Raised, RankProgress, Terms
from holdfast.messages.requests import AnyRequest, ChannelNumber, Number
from holdfast.messages.supply import RequestId, Sighting
from holdfast.messages.timings import RankTimings
from holdfast.messages.tuning import LoaderConfig
from holdfast.messages.units import (
    CauseId,
    Count,
    ExitCode,
    Int64,
    Listed,
    NodeCount,
    NodeId,
    Port,
    ProcessId,
    Rank,
    RoundNumber,
    Seconds,
    StepNumber,
    Text,
    Time,
    Word,
    WorldSize,
)
from holdfast.messages.usage import NodeUsage


class Event(Struct, frozen=True, kw_only=True, tag=True):
    at: Time
    cause: CauseId = ""
    """The action that the event follows from, where it follows from one."""


class JobOpened(Event, frozen=True, kw_only=True):
    """The first event of every job."""

    job: Word
    id: Word = ""
    """Drawn when the job opens, so that no other job of the same name is taken for it."""
    terms: Terms


class NodeJoined(Event, frozen=True, kw_only=True):
    """An agent is there and its node has no workers: it waits for a place in a round."""

    node: NodeId
    spec: NodeSpec
    store_port: Port
    """A port this node keeps free, for the store of a round in which it hosts rank 0."""
    replaces: NodeId = NodeId("")
    """Node of the agent whose place this one takes: that agent and its workers are gone."""


class NodeWarm(Event, frozen=True, kw_only=True):
    """The node's standbys are ready: a rank given to it would start at once."""

    node: NodeId


class NodeReady(Event, frozen=True, kw_only=True):
    """The node's workers of that round are gone; it waits for a place in the next."""

    node: NodeId
    round: RoundNumber
    store_port: Port
    slowest_stop_s: Seconds | None
    """Longest time a worker took to end by itself after SIGTERM; None when none had to."""
    ranks: Listed[RankProgress] = ()
    last: Listed[RankCollectives] = ()
    """The newest collectives of the workers that lived when they were to stop, if that was asked."""
    parked: Count = 0
    """Workers that have left their function and wait to enter it again."""
    slowest_leave_s: Seconds | None = None
    """Longest time a worker took to leave its function; None when none had to."""


class WorkersKilled(Event, frozen=True, kw_only=True):
    """The node's workers of that round were sent SIGKILL: none of them runs any code again, though one
    that is in the kernel may not be gone yet."""

    node: NodeId
    round: RoundNumber


class NodeLeaving(Event, frozen=True, kw_only=True):
    """Somebody told the launcher to stop: the node goes, but politely."""

    node: NodeId
    reason: Text
    code: ExitCode


class NodeLeft(Event, frozen=True, kw_only=True):
    """The node's last word: its workers are gone and its agent is about to end."""

    node: NodeId
    round: RoundNumber
    """The last round it was told to start; `ranks` are of that one."""
    ranks: Listed[RankProgress] = ()


class StreamEnded(Event, frozen=True, kw_only=True):
    """The node's stream broke without a last word: its agent died, or will be back in a moment."""

    node: NodeId


class LeaseEnded(Event, frozen=True, kw_only=True):
    """The node has no workers any more: its agent died, or paused them when its lease was over."""

    node: NodeId
    why: Text


class SilenceRaised(Event, frozen=True, kw_only=True):
    """From now on a node is given up only when it was not heard of for longer."""

    silence_s: Seconds


class NodeResumed(Event, frozen=True, kw_only=True):
    """The node's agent is back on a new stream and says what it is doing."""

    node: NodeId
    round: RoundNumber
    """The last round it was told to start."""
    busy: bool
    """Whether workers of that round are still there."""
    missing: Count = 0
    """Number of its events that the journal had and has lost."""


class CoordinatorRestarted(Event, frozen=True, kw_only=True):
    """The coordinator died and replayed its journal; no node is connected yet."""

    lost: Count = 0
    """Number of events since the newest snapshot that the journal could not give back."""


class ExcludeAsked(Event, frozen=True, kw_only=True):
    """A script found its node unfit: go on without it."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    reason: Text


class StopAsked(Event, frozen=True, kw_only=True):
    """A script wants the whole job to end."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    reason: Text
    code: ExitCode


class Asked(Event, frozen=True, kw_only=True):
    """A script wants an answer. Said again, with the same number, when the answer was lost."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    channel: ChannelNumber
    number: Number
    """Counts the requests of this rank's channel; the next comes only when this one is answered."""
    request: AnyRequest


class WorkerStarted(Event, frozen=True, kw_only=True):
    """The user's script began to run in the process that was given the rank."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    pid: ProcessId
    warm: bool
    """Whether the process was a standby that had rehearsed."""
    again: bool = False
    """Whether it was parked, and has entered its function again."""


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker's process is gone. Exactly one of code and signal is set."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    code: Int64 | None = None
    signal: Int64 | None = None
    oom: bool = False
    """The kernel's out-of-memory killer was seen at work while this worker died of SIGKILL."""
    progress: RankProgress
    raised: Raised | None = None
    last: Listed[Collective] = ()
    """The newest collectives that it had entered, newest first, if its script failed and said so."""
    raised_at: Time | None = None
    """When the exception left the script; the process ended later, by the time of its teardown."""
    log_tail: Text = ""


class RankRaised(Event, frozen=True, kw_only=True):
    """A restartable function raised; its process lives, and will be parked."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    progress: RankProgress
    raised: Raised
    last: Listed[Collective] = ()
    """The newest collectives that it had entered, newest first, as far as it said so."""
    log_tail: Text = ""


class RanksReturned(Event, frozen=True, kw_only=True):
    """The restartable function has returned on all ranks of the node."""

    node: NodeId
    round: RoundNumber


class Progress(Event, frozen=True, kw_only=True):
    """How far the node's workers have come; sent at each worker's first step, then now and then."""

    node: NodeId
    round: RoundNumber
    ranks: Listed[RankProgress]
    paces: Paces | None = None
    """How long things take there, when there is news."""
    timings: Listed[RankTimings] = ()
    """What each rank's steps consist of, since the last time."""


class RanksStalled(Event, frozen=True, kw_only=True):
    """Which of the node's ranks are late now: all of them, none when they moved on."""

    node: NodeId
    round: RoundNumber
    stalls: Listed[Stall]
    pauses: Listed[Pause] = ()
    """Pauses that ended by themselves since the last report."""


class VerdictReached(Event, frozen=True, kw_only=True):
    """The ranks of a round with a suspicion were examined."""

    examination: Int64
    round: RoundNumber
    guilty: Listed[Rank]
    sentence: Text
    proof: Proof | None = None
    waiting: Listed[Rank] = ()
    place: PlaceName = ""
    pause: Name = ""
    left_s: Seconds | None = None


class SupplierJoined(Event, frozen=True, kw_only=True):
    """A supplier has a stream: nodes can be asked for. It is about to be told all that is wanted."""

    platform: Word
    together: bool = False
    """Whether its nodes are taken away together, as those of one allocation are: then one that is told
    to leave speaks for all of them. Else another is asked for."""


class SupplierLeft(Event, frozen=True, kw_only=True):
    """The supplier's stream ended. It will be back; what is wanted is kept until then."""


class NodesSighted(Event, frozen=True, kw_only=True):
    """What the platform says of the job's requests."""

    sightings: Listed[Sighting]
    whole: bool = False
    """Whether this is all that the platform knows of: what is missing is gone, if it was there."""


class RequestsRefused(Event, frozen=True, kw_only=True):
    """The platform does not take requests, or takes them and then refuses."""

    requests: Listed[RequestId]
    """Empty if it is about all of them."""
    why: Text
    for_good: bool = False
    """Whether the same requests would be refused again: a queue that does not exist, no permission."""


class ScaleAsked(Event, frozen=True, kw_only=True):
    """Somebody wants another number of nodes."""

    min_nodes: NodeCount
    max_nodes: NodeCount
    spares: NodeCount | None = None
    """None to leave it as it is."""
    by: Word = ""


class NodeExcludeAsked(Event, frozen=True, kw_only=True):
    """Somebody wants the job to go on without a node, and not to let its host in again."""

    node: NodeId
    reason: Text
    by: Word = ""


class SaveAsked(Event, frozen=True, kw_only=True):
    """Somebody wants the newest snapshots in memory on storage now."""

    by: Word = ""


class JobStopAsked(Event, frozen=True, kw_only=True):
    """Somebody wants the whole job to end: a person, or a platform that takes its nodes back."""

    reason: Text
    code: ExitCode
    by: Word = ""


class JobRequeued(Event, frozen=True, kw_only=True):
    """The platform started the job again: the nodes of before are gone, and new ones come."""

    since: Time
    """When the job ended, or was last heard of."""


class HangDecided(Event, frozen=True, kw_only=True):
    """A person decides about a rank that others wait for: end it now, or never."""

    rank: Rank
    act: bool


class HangsRemembered(Event, frozen=True, kw_only=True):
    """What an earlier run of the job remembered of places where ranks pause."""

    memory: Memory


class NodeTested(Event, frozen=True, kw_only=True):
    """How a test that was ordered went."""

    node: NodeId
    check: Count
    result: TestResult


class HealthFound(Event, frozen=True, kw_only=True):
    """What the node's own checks found that is not as it should be."""

    node: NodeId
    results: Listed[HealthResult]


class NodeSampled(Event, frozen=True, kw_only=True):
    """How much of the node's machine is in use; sent now and then, when that has changed."""

    node: NodeId
    usage: NodeUsage


class SnapshotsSealed(Event, frozen=True, kw_only=True):
    """All of the node's ranks have a whole image of that step."""

    node: NodeId
    snapshot: SnapshotId
    world_size: WorldSize
    ranks: Listed[Sealed]
    wish: Wish
    attempt: Attempt = 1


class ImagesHeld(Event, frozen=True, kw_only=True):
    """The node has these images too: it got them from another, or had them from before."""

    node: NodeId
    images: Listed[ImageId]


class RankFilesWritten(Event, frozen=True, kw_only=True):
    """The node's files of that snapshot are durable, or will not be."""

    node: NodeId
    snapshot: SnapshotId
    shards: Listed[StoredFile] = ()
    error: Text = ""
    gone: bool = False
    """A newer snapshot had taken the place of an image before it could be read."""


class SnapshotMissed(Event, frozen=True, kw_only=True):
    """A rank of that node will have no image of that step."""

    node: NodeId
    rank: Rank
    snapshot: SnapshotId
    outcome: Missed
    reason: Text
    attempt: Attempt = 1


class CheckpointWritten(Event, frozen=True, kw_only=True):
    """The manifest is durable, or will not be."""

    node: NodeId
    snapshot: SnapshotId
    error: Text = ""


class StoredFound(Event, frozen=True, kw_only=True):
    """Which checkpoints are on storage, before the ranks of that round restore one."""

    node: NodeId
    round: RoundNumber
    checkpointer: CheckpointerId
    steps: Listed[StoredStep] = ()
    refused: Listed[Text] = ()
    """What is there and does not count, with why; or why nothing could be looked up."""


class ShardsReported(Event, frozen=True, kw_only=True):
    """What became of positions of a data set on this node, and how many more shards it wants."""

    node: NodeId
    round: RoundNumber
    dataset: DataName
    number: Count = 0
    """Number of the node's report on this data set in this round, from 1: see `LendShards.heard`."""
    want: Count = 0
    """Shards that it wants now, beside those it has. A later report replaces the number. It may be
    lent fewer; then it asks again when it wants more."""
    used: Listed[UsedBy] = ()
    failed: Listed[ShardFailure] = ()
    returned: Listed[Span] = ()


class FaultAsked(Event, frozen=True, kw_only=True):
    """A user requests a fault."""

    injection: Injection
    visit: Int64 = 0
    """Number of the request, which waits for an answer."""
    by: Word = ""


class FaultTold(Event, frozen=True, kw_only=True):
    """An agent reports what became of a trap."""

    node: NodeId
    round: RoundNumber
    trap: Trap
    outcome: Outcome
    step: StepNumber = StepNumber(0)
    detail: Text = ""


class TuningAsked(Event, frozen=True, kw_only=True):
    """A user wants other settings for the loaders of a data set."""

    dataset: DataName
    config: LoaderConfig
    auto: bool = False
    """Whether to search for a micro-batch from there."""
    by: Word
    visit: Count = 0
    """Number of the request, which waits for an answer."""


class EventSetAside(Event, frozen=True, kw_only=True):
    """The handler of an event raised an exception. The state is as if the event had never come."""

    number: Count
    """Of the event. Replaying the journal skips it and those up to `last`, which are given again."""
    last: Count
    what: Word
    """The event's type."""
    node: NodeId | None = None
    error: Text
    traceback: Text
    dropped: bool
    """The handler failed each time: the event is not given again."""


class EventLost(Event, frozen=True, kw_only=True):
    """Stands for an event that the journal had and cannot give back. It is read, never written."""

    error: Text


class EventsRefused(Event, frozen=True, kw_only=True):
    """Events of agents did not fit their senders: they are in no journal, only counted."""

    reason: Text
    """Type of the events, and why."""
    count: Count


class TaskFailed(Event, frozen=True, kw_only=True):
    """A background task of an agent or of the coordinator raised; it was started again."""

    node: NodeId
    """Empty for the coordinator."""
    task: Word
    error: Text
    traceback: Text
    count: Count = 1
    """Failures since the last report."""


class Tick(Event, frozen=True, kw_only=True):
    """A deadline that the core asked for has come."""


AnyEvent = (
    JobOpened
    | NodeJoined
    | NodeWarm
    | NodeReady
    | WorkersKilled
    | ExcludeAsked
    | StopAsked
    | Asked
    | NodeLeaving
    | NodeLeft
    | StreamEnded
    | LeaseEnded
    | SilenceRaised
    | NodeResumed
    | CoordinatorRestarted
    | WorkerStarted
    | WorkerExited
    | RankRaised
    | RanksReturned
    | Progress
    | RanksStalled
    | VerdictReached
    | HangDecided
    | HangsRemembered
    | SupplierJoined
    | SupplierLeft
    | NodesSighted
    | RequestsRefused
    | ScaleAsked
    | NodeExcludeAsked
    | SaveAsked
    | JobStopAsked
    | JobRequeued
    | NodeTested
    | HealthFound
    | NodeSampled
    | SnapshotsSealed
    | ImagesHeld
    | RankFilesWritten
    | CheckpointWritten
    | StoredFound
    | SnapshotMissed
    | ShardsReported
    | FaultAsked
    | FaultTold
    | TuningAsked
    | EventSetAside
    | EventLost
    | EventsRefused
    | TaskFailed
    | Tick
)
