"""Defines the messages between an agent and the processes on its node.

Each message is one packet on a Unix socket pair that the agent created, so there is no address to
guess and no file to leave behind. File descriptors travel with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.checkpoints import Attempt, CheckpointerId, Missed, Wish
from holdfast.messages.data import DataName, Span, Used
from holdfast.messages.records import Raised
from holdfast.messages.requests import AnyAnswer, ChannelNumber, Number, ScriptRequest
from holdfast.messages.units import Count

Entry = Literal["script", "module", "path", "command"]
"""How to start the user's code: as a file, with `-m`, `--run-path` or `--no-python`."""

PACKET_BYTES = 1 << 16
ASSIGN_FDS = 5
"""Descriptors that come with `Assign`, at most; no other order has more."""
REASON_MOST = 1000

NOT_FORKABLE = 3
"""Exit code of a nursery whose children could not use accelerators."""
UNFIT = 4
"""Exit code of a nursery that has said `UnfitImports`."""
GAVE_DEVICE_UP = 5
"""Exit code of a standby that could not take its GPU, or left it to the ranks."""


class Local(Struct, frozen=True, kw_only=True, tag=True):
    pass


class Fork(Local, frozen=True, kw_only=True):
    """Agent to nursery: fork a process. Descriptors: its end of a control socket, its rank page."""

    rehearse: bool


class Forked(Local, frozen=True, kw_only=True):
    """Nursery to agent: the process for the oldest unanswered Fork."""

    pid: int


class Warm(Local, frozen=True, kw_only=True):
    """Nursery to agent: everything is imported."""

    seconds: float
    resident_bytes: int


class ImportPlan(Struct, frozen=True):
    """What a nursery imports beside torch: see `holdfast.worker.preloading`."""

    modules: tuple[str, ...] = ()
    """In this order."""
    refused: tuple[str, ...] = ()
    """Modules that must not be imported."""
    variables: dict[str, str] = {}
    """Environment variables that ranks or their script set, so that no module may read them, with
    digests of the values that the script's process had; empty if these differ between ranks."""
    most_bytes: int = 0
    """Resident memory at which the import ends early."""


class Importing(Local, frozen=True, kw_only=True):
    """Nursery to agent: this module of the plan comes next. If the nursery dies, it is at fault."""

    module: str


class UnfitImports(Local, frozen=True, kw_only=True):
    """Nursery to agent: no process can be forked from here, because these modules were imported."""

    modules: dict[str, str]
    """Why, by module."""


class Standing(Local, frozen=True, kw_only=True):
    """Standby to agent: rehearsed and waiting."""

    device_bytes: Count | None = None
    """Memory that it holds on the GPU that it was told to take; None if it was not."""


class TakeDevice(Local, frozen=True, kw_only=True):
    """Agent to standby: take this GPU, rehearse a step on it, and hold it."""

    index: Count
    """As torch counts the GPUs that the rank sees."""
    variables: dict[str, str]
    """Environment variables that choose which GPUs those are."""
    nccl: bool
    """Whether to rehearse NCCL as well."""
    leave_bytes: Count
    """Free memory of the GPU below which the standby gives it up, by exiting."""


class Assign(Local, frozen=True, kw_only=True):
    """Agent to standby or fresh process: become this rank.

    Descriptors: stdin, stdout, stderr, a file for its stacks, and for rank 0 its store's socket.
    """

    env: dict[str, str]
    entry: Entry
    """How to start the script that is on the process's command line."""
    agent_pid: int
    local_rank: int = 0
    round: int = 0
    images: str = ""
    """Directory for this node's images."""
    flight: str = ""
    """File for a dump of the flight recorder."""
    opened_at: float = 0.0
    """When the job began, by the wall clock."""
    tell_imports: bool = False
    """Whether to send `Loaded`."""
    tell_device: bool = False
    """Whether to send `DeviceUsed`."""
    why: str = ""
    """What ended the last entry of a worker that enters its restartable function again."""


class Test(Local, frozen=True, kw_only=True):
    """Agent to standby: test this node. Descriptor, for rank 0 of a group: its store's socket."""

    rank: int
    size: int
    address: str
    port: int
    name: str
    """Store prefix: the same for all members of a group, and unique to this test."""
    limit_s: float


class Tested(Local, frozen=True, kw_only=True):
    """Standby to agent: result of a node test."""

    over: bool = True
    """False for the solo result alone, when the pair test is still to come."""

    solo_passed: bool | None = None
    solo_s: float | None = None
    passed: bool | None = None
    seconds: float | None = None
    detail: str = ""


class Began(Local, frozen=True, kw_only=True):
    """Worker to agent: the user's script starts."""

    at: float


class Stepped(Local, frozen=True, kw_only=True):
    """Worker to agent: the first step is finished; the rank page says when."""


class DeviceUsed(Local, frozen=True, kw_only=True):
    """Worker to agent: the GPU that it trains on, told after its first step."""

    index: Count
    free_bytes: Count
    total_bytes: Count
    nccl: bool = False
    """Whether it has a process group with NCCL."""
    own_settings: tuple[str, ...] = ()
    """What the script set that only counts if no GPU was touched before: variables, an allocator."""


class Loaded(Local, frozen=True, kw_only=True):
    """Worker to agent: what the script had imported, and changed, before its first step."""

    modules: tuple[str, ...]
    """Installed modules, in the order of their import. Several messages if there are many."""
    variables: dict[str, str]
    """Environment variables that it set, changed or removed, with digests of their values."""


class TrapSprung(Local, frozen=True, kw_only=True):
    """Worker to agent: an injected fault strikes now; the rank page says which."""


class Died(Local, frozen=True, kw_only=True):
    """Worker to agent: the script raised an unhandled exception."""

    raised: Raised
    at: float


class ScriptFinished(Local, frozen=True, kw_only=True):
    """Worker to agent: the script ran to its end; only interpreter shutdown is left."""


class Restartable(Local, frozen=True, kw_only=True):
    """Worker to agent: its script is about to enter a function that can be left and entered again.

    Descriptor: the agent's end of a socket for `ToFunction`.
    """


class FunctionRaised(Local, frozen=True, kw_only=True):
    """Worker to agent: its restartable function raised, and is left."""

    raised: Raised
    at: float


class FunctionReturned(Local, frozen=True, kw_only=True):
    """Worker to agent: its restartable function returned; it waits for those of the other ranks."""


class LeavingPostponed(Local, frozen=True, kw_only=True):
    """Worker to agent: it will leave its function at the end of an atomic section."""


class FunctionLeft(Local, frozen=True, kw_only=True):
    """Worker to agent: it has left its function and can enter it again."""


class FunctionClosed(Local, frozen=True, kw_only=True):
    """Worker to agent: its function will not be entered again by this process."""


class Leave(Local, frozen=True, kw_only=True):
    """Agent to worker: leave the function, then say FunctionLeft. If that was done by itself in this
    round, nothing is to be done."""

    round: int
    why: str


class Release(Local, frozen=True, kw_only=True):
    """Agent to worker: the function has returned on all ranks."""


class Dismiss(Local, frozen=True, kw_only=True):
    """Agent to a parked worker: there is no place for it any more, it shall end."""

    why: str


class OpenCheckpointer(Local, frozen=True, kw_only=True):
    """Worker to agent to keeper: the script has this checkpointer."""

    checkpointer: CheckpointerId
    directory: str
    """Where its checkpoints go; empty when they stay in memory."""
    keep: bytes
    """Which checkpoints stay, as `retention` encodes it."""
    plain: bool = False
    """The directory is itself a checkpoint, replaced by each save, and has no checkpoint per step."""


class ImageWhole(Local, frozen=True, kw_only=True):
    """Worker to agent: the image of a step is complete."""

    checkpointer: CheckpointerId
    path: str
    state: int
    step: int
    wish: Wish
    attempt: Attempt = 1


class ImageMissed(Local, frozen=True, kw_only=True):
    """Worker to agent: there will be no image of a step."""

    checkpointer: CheckpointerId
    step: int
    outcome: Missed
    reason: Annotated[str, Meta(max_length=REASON_MOST)]
    attempt: Attempt = 1


class ShardError(Struct, frozen=True):
    span: Span
    error: Annotated[str, Meta(max_length=2000)]


class DataUsed(Local, frozen=True, kw_only=True):
    """Worker to agent: what became of positions of a data set."""

    dataset: DataName
    used: tuple[Used, ...] = ()
    failed: tuple[ShardError, ...] = ()
    returned: tuple[Span, ...] = ()
    """Shards that were taken and not begun."""


class Ask(Local, frozen=True, kw_only=True):
    """Worker to agent: a script's request."""

    channel: ChannelNumber
    number: Number
    request: ScriptRequest


class ScriptReply(Local, frozen=True, kw_only=True):
    """Agent to worker: the answer to a script's request."""

    channel: int
    number: int
    answer: AnyAnswer


class Piece(Local, frozen=True, kw_only=True):
    """Both ways: part of a message too large for one packet (see `holdfast.wire.packets`)."""

    index: int
    of: int
    data: bytes


ToNursery = Fork
FromNursery = Forked | Warm | Importing | UnfitImports
ToWorker = Assign | Test | TakeDevice
FromWorker = (
    Standing
    | Began
    | Stepped
    | DeviceUsed
    | Loaded
    | TrapSprung
    | Died
    | ScriptFinished
    | Restartable
    | FunctionRaised
    | FunctionReturned
    | LeavingPostponed
    | FunctionLeft
    | FunctionClosed
    | Ask
    | OpenCheckpointer
    | ImageWhole
    | ImageMissed
    | DataUsed
    | Tested
    | Piece
)
ToFunction = Leave | Release | Dismiss | Assign
"""Messages to a restartable function. Assign: enter it again, as this rank; descriptors as always."""
ToScript = ScriptReply | Piece
"""Messages to a worker whose script runs."""
