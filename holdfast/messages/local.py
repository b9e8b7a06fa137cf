"""What an agent and the processes on its node say to each other.

Each message is one packet on a Unix socket pair that the agent made, so there is no name to guess, no
file to leave behind, and the kernel says who is at the other end. File descriptors travel beside it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.checkpoints import Attempt, CheckpointerId, Missed, Wish
from holdfast.messages.records import Raised
from holdfast.messages.requests import AnyAnswer, Lane, Number, ScriptRequest

Entry = Literal["script", "module", "path", "command"]
"""How the user's code is started: a file, `-m`, `--run-path`, `--no-python`."""

PACKET_BYTES = 1 << 16
REASON_MOST = 1000


NOT_FORKABLE = 3
"""Exit code of a nursery that found out that its children could not use accelerators."""


class Program(Struct, frozen=True, kw_only=True):
    """What a worker runs."""

    entry: Entry
    script: str
    args: tuple[str, ...]


class Local(Struct, frozen=True, kw_only=True, tag=True):
    pass


class Fork(Local, frozen=True, kw_only=True):
    """Agent to nursery: make a process. With it: its end of a control socket, and its page."""

    rehearse: bool


class Forked(Local, frozen=True, kw_only=True):
    """Nursery to agent: the process of the oldest unanswered Fork."""

    pid: int


class Warm(Local, frozen=True, kw_only=True):
    """Nursery to agent: everything is imported; from now on a fork is all it takes."""

    seconds: float
    resident_bytes: int


class Standing(Local, frozen=True, kw_only=True):
    """Standby to agent: rehearsed and waiting."""


class Assign(Local, frozen=True, kw_only=True):
    """Agent to a process: become this rank. With it: stdin, stdout and stderr, a file for its stacks,
    and for rank 0 its store's socket."""

    env: dict[str, str]
    entry: Entry
    """How to start the script, which the process has on its command line."""
    agent_pid: int
    round: int = 0
    images: str = ""
    """The directory for this node's snapshots."""
    flight: str = ""
    """Where to write the flight recorder when somebody wants to see it."""


class Test(Local, frozen=True, kw_only=True):
    """Agent to a process: test this node. With it, for the first of a group: its store's socket."""

    rank: int
    size: int
    address: str
    port: int
    name: str
    """The same for both of a group, and for no other test."""
    limit_s: float


class Tested(Local, frozen=True, kw_only=True):
    """Process to agent: how it went."""

    over: bool = True
    """False: so far; the test with the other node is still to come."""

    solo_passed: bool | None = None
    solo_s: float | None = None
    passed: bool | None = None
    seconds: float | None = None
    detail: str = ""


class Began(Local, frozen=True, kw_only=True):
    """Worker to agent: the user's script begins."""

    at: float


class Stepped(Local, frozen=True, kw_only=True):
    """Worker to agent: the first step is finished; the page says when."""


class TrapSprung(Local, frozen=True, kw_only=True):
    """Worker to agent: an injected fault strikes now; the rank page says which."""


class Died(Local, frozen=True, kw_only=True):
    """Worker to agent: the script ended with an exception."""

    raised: Raised


class Done(Local, frozen=True, kw_only=True):
    """Worker to agent: the script ran to its end; only the interpreter's own end is left."""


class OpenCheckpointer(Local, frozen=True, kw_only=True):
    """Worker to agent: the script has this checkpointer."""

    checkpointer: CheckpointerId
    directory: str
    keep: bytes


class ImageWhole(Local, frozen=True, kw_only=True):
    """Worker to agent: the snapshot of that step is copied."""

    checkpointer: CheckpointerId
    path: str
    state: int
    step: int
    wish: Wish
    attempt: Attempt = 1


class ImageMissed(Local, frozen=True, kw_only=True):
    """Worker to agent: there will be no image of that step."""

    checkpointer: CheckpointerId
    step: int
    outcome: Missed
    reason: Annotated[str, Meta(max_length=REASON_MOST)]
    attempt: Attempt = 1


class Ask(Local, frozen=True, kw_only=True):
    """Worker to agent: the script wants to know this."""

    lane: Lane
    number: Number
    request: ScriptRequest


class Reply(Local, frozen=True, kw_only=True):
    """Agent to worker: the answer to that request."""

    lane: int
    number: int
    answer: AnyAnswer


class Piece(Local, frozen=True, kw_only=True):
    """Either way: part of a message that is too large for a packet (see `holdfast.wire.packets`)."""

    index: int
    of: int
    data: bytes


ToNursery = Fork
FromNursery = Forked | Warm
ToWorker = Assign | Test
FromWorker = (
    Standing
    | Began
    | Stepped
    | TrapSprung
    | Died
    | Done
    | Ask
    | OpenCheckpointer
    | ImageWhole
    | ImageMissed
    | Tested
    | Piece
)
ToScript = Reply | Piece
"""To a worker whose script runs."""
