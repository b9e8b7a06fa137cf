"""Things that are told about: pieces of events and actions, and what reports are made of."""

from __future__ import annotations

from typing import Final, Literal, get_args

from msgspec import Struct, field

from holdfast.messages.chaos import Injection, Trap
from holdfast.messages.checkpoints import Holder, ImageId
from holdfast.messages.hangs import HangTerms, Paces
from holdfast.messages.losses import Loss
from holdfast.messages.supply import RequestId, SupplyTerms
from holdfast.messages.units import (
    CauseId,
    Count,
    Int64,
    Listed,
    NodeCount,
    NodeId,
    Port,
    ProcessId,
    Rank,
    RoundNumber,
    Seconds,
    Slots,
    StepNumber,
    Text,
    Time,
    Word,
)

Cause = Literal[
    "productive",
    "redo",
    "start",
    "init",
    "checkpoint",
    "evaluation",
    "detect",
    "stop",
    "rendezvous",
    "restore",
    "wait",
    "idle",
    "other",
    "finish",
    "unknown",
]
"""What a second of a rank was spent on. Every second has exactly one."""


FaultKind = Literal[
    "signal",
    "oom",
    "exit",
    "exception",
    "node",
    "leave",
    "exclude",
    "resize",
    "hang",
    "unfit",
    "suspect",
    "straggler",
    "overload",
    "ending",
    "storage",
    "data",
    "supply",
    "requeue",
    "internal",
]
"""What broke a round (a worker's death in four ways, a hang, a lost node, a change that was wanted), or
what broke none: an unfit node, a node that faults point at, a slow rank, a node with too little CPU
time for its ranks, a process that hung after its script had ended, a checkpoint that was not written,
a shard that was left out, a node that the platform
does not provide, an error of our own."""


class Script(Struct, frozen=True, kw_only=True):
    """What the nodes of a job run, as far as they can be compared."""

    name: Word
    """File name without its directory, module or command."""
    content: Word = ""
    """Digest of the file; empty where there is no single one."""
    arguments: Word = ""
    """Digest of the script's arguments."""


class Terms(Struct, frozen=True, kw_only=True):
    """What the user asked of the job; fixed when it opens."""

    min_nodes: NodeCount = 1
    max_nodes: NodeCount = 1
    node_unit: NodeCount = 1
    segment: NodeCount = 1
    """Nodes of one interconnect domain that only count together."""
    spares: NodeCount = 0
    """Nodes beyond the maximum that the user promised; they wait for a place."""
    node_check: bool = False
    """Whether nodes test each other before they get a place."""
    exclude_stragglers: bool = False
    """Whether a rank that slows the others down costs its node its place, if a spare waits."""
    hangs: HangTerms = HangTerms()
    copies: NodeCount = 1
    """Nodes that keep a copy of each other node's snapshots."""
    max_restarts: Count | None = None
    grace_s: Seconds | None = None
    """How long a worker may take to end after SIGTERM; learnt when not given."""
    last_call_s: Seconds | None = None
    """How long the first round waits for more than the minimum; learnt when not given."""
    join_limit_s: Seconds | None = None
    """How long the job waits below the minimum before it ends with 75."""
    chaos: Listed[Injection] = ()
    """Faults to inject."""
    script: Script | None = None
    """What is run."""
    supply: SupplyTerms = SupplyTerms()
    """What is asked of a platform that provides the nodes."""


class NodeSpec(Struct, frozen=True, kw_only=True):
    """What a node brings along."""

    host: Word
    """The platform's name for where it is, else the machine's."""
    address: Word
    slots: Slots
    pid: ProcessId
    role: Word = "default"
    """Role of its ranks; ranks are also counted by role."""
    store_name: Word = ""
    """Name by which ranks shall find a store on it, as the user gave it; empty for its address."""
    node_rank: Int64 | None = None
    """Where the user wants it."""
    infra_rank: Int64 | None = None
    """Where the infrastructure has it."""
    keeper_port: Port = 0
    """Where other nodes get images from it."""
    test_port: Port = 0
    """Where another node meets it for a test."""
    switch: Word = ""
    block: Word = ""
    domain: Word = ""
    """The fast interconnect it shares with others (NVLink); segments lie within one."""
    request: RequestId = ""
    """The request that the platform started it for; empty if somebody else did."""


Resumed = Literal["known", "none", "unknown"]
"""What a process knows of the step that its script resumed at: the step; that it read nothing itself to
resume from; or nothing, although it read something."""
RESUMED: Final[tuple[Resumed, ...]] = get_args(Resumed)


class RankProgress(Struct, frozen=True, kw_only=True):
    """How far one worker process has come, as its own progress page says."""

    rank: Rank
    step: StepNumber = StepNumber(0)
    steps: Count = 0
    """Steps finished by this very process; 0 means that it has not finished one."""
    resumed: Resumed = "known"
    """If not known, `step` counts from where it resumed, or from a guess."""
    first_at: Time | None = None
    last_at: Time | None = None
    checkpoint_s: Seconds = 0.0
    restore_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    """Time between finished steps that was neither a step nor booked above: see `StepTimes`."""
    step_s: Seconds | None = None
    """Usual time from one finished step to the next; None while it is unknown."""
    saves: Count = 0
    """Checkpoints this process has finished: after each is a good moment to change the world."""
    samples: Count | None = None
    """Records its script had been given by its last step, evaluations left out; None if they are not
    counted: the script has a loader of its own."""
    trained_s: Seconds = 0.0
    """Time of the steps after its first one, without saves, evaluations and pauses between them. It
    may fall once, when the usual time of a step becomes known."""
    evaluation_s: Seconds = 0.0
    loss: Loss | None = None
    """What its script told last; None if it has told none."""
    loss_age: Count = 0
    """Steps that it has finished since the one with that loss."""


class Raised(Struct, frozen=True, kw_only=True):
    """The exception that ended a worker."""

    type: Text
    message: Text
    where: Text
    traceback: Text


class Place(Struct, frozen=True, kw_only=True):
    """One node's share of a round."""

    node: NodeId
    group_rank: int
    first_rank: Rank
    slots: int
    first_role_rank: int
    """Place of its first rank among the ranks of its role."""
    role_size: int
    """Ranks of its role in the world."""


class World(Struct, frozen=True, kw_only=True):
    """A round as agreed: never edited, only followed by another."""

    round: RoundNumber
    places: tuple[Place, ...]
    size: int
    store_address: str
    store_port: int
    frozen_at: Time


class Part(Struct, frozen=True, kw_only=True):
    """What one node needs to know of a round, and no more."""

    round: RoundNumber
    first_rank: Rank
    slots: int
    group_rank: int
    group_world_size: int
    world_size: int
    first_role_rank: int
    role_size: int
    store_address: str
    store_port: int
    restarts: int
    max_restarts: int
    copies: tuple[Holder, ...] = ()
    """Nodes that keep copies of this one's images."""
    paces: Paces = Paces()
    """How long things took in earlier rounds."""
    fetch: tuple[tuple[ImageId, Holder], ...] = ()
    """Images that this node's ranks will want, and others have."""
    opened_at: Time = Time(0.0)
    """When the job began."""
    traps: tuple[Trap, ...] = ()
    """Faults to inject."""


class Incident(Struct, kw_only=True):
    """One fault, from its first sign to the first good step after it."""

    id: int
    kind: FaultKind
    node: NodeId
    rank: Rank | None
    round: RoundNumber
    step: StepNumber
    signature: str
    action: str = ""
    detail: str = ""
    rung: str = ""
    """The kind of repair that was chosen: see `core.ladder`."""
    cause: CauseId = ""
    """The event that opened it."""
    fault_at: Time
    gone_at: Time | None = None
    """When the process was gone whose script had raised at `fault_at`; None for other faults."""
    opened_at: Time
    stopped_at: Time | None = None
    frozen_at: Time | None = None
    started_at: Time | None = None
    back_at: Time | None = None
    closed_at: Time | None = None
    lost_steps: int = 0
    also: list[str] = field(default_factory=list)
    """What other ranks died of in its wake; the first hundred."""


class JobResult(Struct, frozen=True, kw_only=True):
    """How the job ended: the exit code of the launcher and the reason in one line."""

    code: int
    reason: str
    at: Time
