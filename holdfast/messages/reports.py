"""Defines what Holdfast reports about a job.

Each struct is a JSON document, or a piece of one, that `status`, `incidents`, `goodput` or `data`
prints with `--json`. The command line, the page, the metrics and other tools all read these and nothing
else, so a figure is defined here once. Keys are added, never renamed or removed. `docs/schema/` holds
the same definitions as JSON schemas; the texts under the fields are the descriptions there.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.messages.chaos import FaultsReport
from holdfast.messages.data import OrderKind, Sharing, Task
from holdfast.messages.hangs import Proof, Sign
from holdfast.messages.losses import Loss
from holdfast.messages.records import Cause, FaultKind
from holdfast.messages.supply import ExitReason, PositionStatus, RequestId
from holdfast.messages.timings import Kind
from holdfast.messages.tuning import TuningReport
from holdfast.messages.units import (
    CauseId,
    NodeId,
    Rank,
    RoundNumber,
    Seconds,
    StepNumber,
    Time,
)
from holdfast.messages.usage import NodeUsage

JobState = Literal["gathering", "running", "stopping", "ending", "ended", "lost"]
"""A job's state as reports name it; a job is lost when no process runs it and it has not ended."""

NodeState = Literal["placed", "busy", "waiting", "testing"]
"""In the round; stopping the workers of the last round; a spare; in a node check."""

CAUSES: dict[Cause, str] = {
    "productive": "steps finished for the first time",
    "redo": "steps that a fault threw away: the one under way, and those taken again",
    "start": "from the launch, or from the round's freezing, until the script ran",
    "init": "imports and process group, until the first step",
    "checkpoint": "saving",
    "evaluation": "what the script marks so: `with holdfast.evaluating():`",
    "detect": "from the fault until it was known, with the failed process's own teardown",
    "stop": "ending the other ranks",
    "rendezvous": "agreeing on the next round",
    "restore": "loading state",
    "wait": "for nodes",
    "idle": "finished before the others",
    "other": "between steps, no training: uploads, loading, unmarked evaluation, waits for such a rank",
    "finish": "from the last step to the script's end",
    "unknown": "since the last step: not known yet, or never known",
}
"""Every cause of the ledger and what it covers, in the order of reports."""


class RankReport(Struct, frozen=True, kw_only=True):
    """One rank of the round in force."""

    rank: Rank
    """Global rank."""
    pid: int
    """Process id on the rank's node; 0 until its script runs."""
    step: StepNumber
    """Last finished step."""
    finished: bool
    """Whether the script has ended with exit code 0."""
    score: float | None
    """Speed relative to the fastest rank, 0 to 1; null while unknown."""
    own_score: float | None
    """Speed relative to the rank's own best, 0 to 1; null while unknown."""
    straggler: Kind | None
    """Which of the two scores makes the rank a straggler; null for a rank that is none."""
    steps_per_s: float | None = None
    """Steps a second in its latest minute or two of training, without evaluations, saves and stalls;
    null while unknown."""
    samples_per_s: float | None = None
    """Samples a second in the same time; null while unknown, and for a script that does not use a
    loader of `holdfast.data`."""


class NodeReport(Struct, frozen=True, kw_only=True):
    """One node and its ranks."""

    node: NodeId
    """Node id, unique for each agent process."""
    host: str
    """Host name."""
    state: NodeState
    """What the node is doing for the job."""
    ranks: list[RankReport]
    """Ranks of the round in force that run on the node."""
    overload: str | None = None
    """What keeps the CPUs from the node's ranks, in words; null for a node that is not overloaded."""
    usage: NodeUsage | None = None
    """How much of the machine is in use; null until the node has reported it."""
    usage_at: Time | None = None
    """When it was reported, in seconds since 1970. A node reports it again when it has changed."""


class CheckpointerReport(Struct, frozen=True, kw_only=True):
    """What one checkpointer has saved."""

    checkpointer: str
    """The checkpointer's name: its directory, or the name that the script gave it."""
    in_memory: StepNumber | None
    """Newest step committed in memory and still held there."""
    on_storage: StepNumber | None
    """Newest step committed to storage."""
    writing: StepNumber | None
    """Step that is being written to storage."""
    failures: int
    """Failed writes in a row."""
    skipped: int = 0
    """Saves that were skipped: storage or memory was still busy with earlier ones."""
    failed: int = 0
    """Saves that failed before they were whole in memory."""


class SuspicionReport(Struct, frozen=True, kw_only=True):
    """A job that may stand still, before anything is done about it."""

    rank: Rank | None
    """Rank that the others wait for; null if that is not known."""
    place: str
    """Line of the script that the rank is at; empty if unknown."""
    for_s: Seconds
    """Time since the first of the ranks concerned made progress."""
    waiting: list[Rank]
    """Ranks that wait for it."""
    signs: list[Sign]
    """What of the rank was seen to move."""
    still_s: Seconds
    """How long nothing of it has moved."""
    proof: Proof | None
    """What proves that it cannot continue; null if it may."""
    acts_in_s: Seconds | None
    """Time until the round is broken if nothing changes; null if only a person ends it."""
    until: str
    """What that time waits for; empty if `acts_in_s` is null."""
    sentence: str
    """What the examination of all ranks found."""
    line: str
    """All of it in one line."""


class PositionReport(Struct, frozen=True, kw_only=True):
    """One of the nodes that the job wants of its platform."""

    position: int
    """Its number; it outlives the nodes that fill it."""
    request: RequestId
    """The newest request for it."""
    status: PositionStatus
    """How far that has come."""
    for_s: Seconds
    """Time since the status became so."""
    node: NodeId | None = None
    """Node that fills it; null while none does."""
    host: str | None = None
    """The platform's name for where it is; null while unknown."""
    reason: ExitReason | None = None
    """Why the request before ended; null if there was none."""
    detail: str | None = None
    """The platform's own words on the request."""
    memory_mib: int | None = None
    """Memory that it was raised to after it ran out; null if it was not."""


class SupplyReport(Struct, frozen=True, kw_only=True):
    """What the job wants of its platform, and what has come of it."""

    platform: str
    """The platform's name."""
    connected: bool
    """Whether its supplier is there now."""
    wanted: int
    """Nodes that are wanted of it; those that somebody started by hand are not among them."""
    counts: dict[PositionStatus, int]
    """Positions by status."""
    positions: list[PositionReport]
    """The first of them, those that are not filled before the others."""
    given_up: dict[str, str]
    """Positions that are not asked for again, each with the reason."""
    cordoned: dict[str, str]
    """Hosts that are avoided because of what the platform said, each with the reason; `excluded` has
    those that the job blames."""
    refusal: str | None
    """Why the platform takes no requests now; null if it does."""
    plans: int
    """Plans that were made."""


class StatusReport(Struct, frozen=True, kw_only=True):
    """Where a job stands: what `holdfast status --json` prints."""

    job: str
    """The job's name."""
    state: JobState
    """What the job is doing."""
    round: RoundNumber
    """Number of the newest round; 0 before the first."""
    world_size: int
    """Ranks of the round in force, or of the last one."""
    step: StepNumber
    """Highest step that was ever finished."""
    steps_per_s: float | None
    """Steps of the job a second in the latest minute or two of training, without evaluations, saves and
    stalls; null while the job is not running or its speed is unknown. It falls while no step is
    finished."""
    wall_s: Seconds
    """Time since the job opened, or until it ended."""
    restarts: int
    """Rounds that a fault made necessary."""
    nodes: list[NodeReport]
    """All nodes that have joined and are not lost."""
    checkpoints: list[CheckpointerReport]
    """What each checkpointer has in memory and on storage."""
    excluded: dict[str, str]
    """Hosts that may not take part any more, each with the reason."""
    faults: FaultsReport
    """Faults injected on demand."""
    last_incident: str | None
    """The newest incident in one line."""
    exit_code: int | None
    """Exit code of the launcher; null until the job is ending."""
    reason: str | None
    """Why the job ended, in one line; null until it is ending."""
    opened_at: Time
    """When the job opened, in seconds since 1970."""
    suspicion: SuspicionReport | None = None
    """What may be a hang; null while the job moves."""
    refused: dict[str, int] = field(default_factory=dict)
    """Events that did not fit the job's state or their sender and were refused: how many, by reason."""
    suspects: dict[str, str] = field(default_factory=dict)
    """Nodes that faults point at, each with the reason and what became of it."""
    failed_tasks: dict[str, int] = field(default_factory=dict)
    """Background tasks of the coordinator and the agents that raised and were started again: how often
    each."""
    no_step_s: Seconds | None = None
    """Time since a rank last finished a step, if that is longer than a step usually takes; null while
    steps are finished, before the first one, and while the job is not running."""
    samples_per_s: float | None = None
    """Samples a second of all ranks, as `steps_per_s`; null if no rank counts its samples."""
    skipped_shards: list[SkippedShard] = field(default_factory=list)
    """Shards of all data sets that failed too often and were left out."""
    speed_stable: bool = False
    """Whether every rank has trained for a minute at this world size, so that the speed can be compared
    with that of another."""
    tuning: list[TuningReport] = field(default_factory=list)
    """Settings of loaders that can be changed while the job runs."""
    supply: SupplyReport | None = None
    """The platform that provides the nodes; null if none does."""
    requeues: int = 0
    """How often the platform started the job again."""
    loss: Loss | None = None
    """Loss that the script told last in the newest round, on the lowest rank that tells one; "NaN",
    "Infinity" or "-Infinity" if it is no finite number; null if none was told in that round."""
    loss_step: StepNumber | None = None
    """Step that had this loss; null without one."""


class GoodputReport(Struct, frozen=True, kw_only=True):
    """The ledger: what `holdfast goodput --json` prints."""

    job: str
    """The job's name."""
    wall_s: Seconds
    """Time since the job opened, or until it ended."""
    ranks: int | float
    """Rank-seconds per second of wall clock: the world size, or its mean if it changed."""
    seconds: dict[Cause, Seconds]
    """Rank-seconds by cause; they add up to `wall_s` × `ranks`."""
    goodput: float
    """Share of productive seconds, 0 to 1."""
    unknown_since: Time | None = None
    """Begin of the oldest time that has no cause yet, in seconds since 1970; null if all of it has."""
    samples: int | None = None
    """Samples of steps that were finished for the first time; null if no rank counts them."""
    redone_samples: int | None = None
    """Samples of steps that were taken again."""
    samples_per_s: float | None = None
    """Samples a second of all ranks, over productive time; null while unknown."""


class IncidentReport(Struct, frozen=True, kw_only=True):
    """One fault and its repair: `holdfast incidents --json` prints a list of these."""

    id: int
    """The incident's number in its job, from 1."""
    kind: FaultKind
    """Kind of fault."""
    node: NodeId
    """Node where the fault began."""
    rank: Rank | None
    """Rank where the fault began; null when it was a whole node's."""
    round: RoundNumber
    """Round that the fault befell."""
    step: StepNumber
    """Step that the rank had finished."""
    at: Time
    """When the fault happened, in seconds since 1970."""
    signature: str
    """What failed, in words that are equal for equal failures."""
    action: str
    """What Holdfast did about it."""
    phases: dict[str, Seconds]
    """Seconds by phase of the repair (teardown, detect, stop, rendezvous, start, first_step), in order,
    as far as the repair has come; together `lost_s`. Only a script that raised has a teardown: the time
    until its process was gone."""
    lost_s: Seconds | None
    """From the fault to the first good step after it, or to what ended the incident instead; null
    while the incident is open."""
    lost_steps: int
    """Steps that had to be taken again."""
    also: list[str]
    """How other ranks died as a consequence; the first hundred."""
    detail: str
    """Traceback, verdict or other detail."""
    rung: str | None
    """The kind of repair that was chosen; null when none was, or not yet."""
    cause: str
    """The event that opened the incident: its number in the journal."""
    injected: str | None
    """The injected fault that caused the incident; null for a real one."""
    line: str
    """The incident in one line."""


class StoryStep(Struct, frozen=True, kw_only=True):
    """One event or action on the way from a fault to its repair: `holdfast incidents N --story`."""

    at: Time
    """When it happened, as its sender saw it; of an action, when it was decided."""
    after_s: float
    """Seconds since the fault."""
    id: CauseId
    """Number of the event in the journal, or of the event and its action."""
    cause: CauseId
    """What it follows from; empty for a first cause."""
    kind: Literal["event", "action"]
    what: str
    """Type of the event or action."""
    node: NodeId | None
    """Node that told it, or that it was for."""
    text: str


class Booking(Struct, frozen=True):
    """One entry of the ledger; a trace is drawn from all of them."""

    rank: Rank
    cause: Cause
    begin: Time
    end: Time
    round: RoundNumber
    step: StepNumber


class SpanUse(Struct, frozen=True, kw_only=True):
    """Positions of a line that were used alike."""

    start: int
    """The first of them."""
    stop: int
    """The position after the last of them."""
    times: int
    """How often the committed history has used them."""
    rounds: list[RoundNumber]
    """Rounds that used them; 0 for what was used before this job."""
    fate: Literal["used", "ahead", "skipped", "lost"]
    """Used; still to come; left out because the shard failed; or never used, though the job holds
    them to be used."""


class LineAccount(Struct, frozen=True, kw_only=True):
    """What became of an epoch, or of a partition of a stream."""

    line: int
    """Number of the epoch, from 0, or of the partition."""
    name: str
    """Name of the partition; empty for an epoch."""
    size: int | None
    """Records of the epoch; null for a partition, which has no end."""
    once: int
    """Records that were used exactly once."""
    more: int
    """Records that were used more than once."""
    lost: int
    """Records that were never used and will not be."""
    skipped: int
    """Records that were left out because their shards failed."""
    ahead: int
    """Records that are still to come; 0 for a partition."""
    spans: list[SpanUse]
    """The line, divided by how its positions were used."""


class SkippedShard(Struct, frozen=True, kw_only=True):
    """A shard that failed too often and was left out."""

    dataset: str
    """Name of the data set."""
    line: int
    """Number of the epoch, from 0, or of the partition."""
    partition: str
    """Name of the partition; empty for an epoch."""
    start: int
    """Its first position."""
    stop: int
    """The position after its last one."""
    error: str
    """The last error."""
    round: RoundNumber
    """Round in which it was given up."""


class RoundAccount(Struct, frozen=True, kw_only=True):
    """What one round contributed to the committed history of a data set."""

    round: RoundNumber
    """Number of the round."""
    resumed: StepNumber
    """Step that it went on from."""
    until: StepNumber | None
    """Step up to which it counts, from which a later round went on; null if all of it counts."""
    records: int
    """Records that it used and that count, but for those of epochs that are listed no more."""


class DataAccount(Struct, frozen=True, kw_only=True):
    """What was used of a data set in the committed history, and how often: `holdfast data audit --json`
    prints a list of these."""

    dataset: str
    """Name of the data set."""
    sharing: Sharing
    """How ranks share it."""
    task: Task
    """What it is used for."""
    exact: bool
    """Whether what was used goes back with the model."""
    epochs: int
    """Epochs to be used; 0 for no end."""
    size: int | None
    """Records of an epoch; null for a stream."""
    order: OrderKind
    """Whether positions are record numbers, or count along an order that shuffles shards or records."""
    seed: int
    """Seed of that order."""
    shard: int
    """Records of a shard."""
    sound: bool
    """Whether each record that was used was used once, and none was lost or left out."""
    whole_lines: int
    """Epochs, the first ones, of which only faults are listed."""
    lines: list[LineAccount]
    """Epochs from there on and those with a fault, or the partitions, as far as they were begun."""
    rounds: list[RoundAccount]
    """Rounds of which something counts, and the newest one."""
    skipped: list[SkippedShard]
    """Shards that were left out."""
    misfits: int
    """Records that nodes reported to have used without having been lent them; they do not count."""
