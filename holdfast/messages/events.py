"""Events: what happened. They come from agents over the wire, go into the journal, then into the core.

Each carries the time at which its sender saw it (in job time) and, where it speaks of a round, that
round's number, so that word from an older round can be told apart and refused.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.records import NodeSpec, Raised, RankProgress, Terms
from holdfast.messages.requests import AnyRequest, Lane, Number
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time


class Event(Struct, frozen=True, kw_only=True, tag=True):
    at: Time


class JobOpened(Event, frozen=True, kw_only=True):
    """The first event of every job."""

    job: str
    terms: Terms


class NodeJoined(Event, frozen=True, kw_only=True):
    """An agent is there and its node has no workers: it waits for a place in a round."""

    node: NodeId
    spec: NodeSpec
    store_port: int
    """A port this node keeps free, for the store of a round in which it hosts rank 0."""


class NodeWarm(Event, frozen=True, kw_only=True):
    """The node's standbys are ready: a rank given to it would start at once."""

    node: NodeId


class NodeReady(Event, frozen=True, kw_only=True):
    """The node's workers of that round are gone; it waits for a place in the next."""

    node: NodeId
    round: RoundNumber
    store_port: int
    slowest_stop_s: Seconds | None
    """Longest time a worker took to end by itself after SIGTERM; None when none had to."""
    ranks: tuple[RankProgress, ...] = ()


class NodeLeaving(Event, frozen=True, kw_only=True):
    """Somebody told the launcher to stop: the node goes, but politely."""

    node: NodeId
    reason: str
    code: int


class NodeLeft(Event, frozen=True, kw_only=True):
    """The node's last word: its workers are gone and its agent is about to end."""

    node: NodeId
    round: RoundNumber
    """The last round it was told to start; `ranks` are of that one."""
    ranks: tuple[RankProgress, ...] = ()


class StreamEnded(Event, frozen=True, kw_only=True):
    """The node's stream broke without a last word: its agent died, or will be back in a moment."""

    node: NodeId


class NodeResumed(Event, frozen=True, kw_only=True):
    """The node's agent is back on a new stream and says what it is doing."""

    node: NodeId
    round: RoundNumber
    """The last round it was told to start."""
    busy: bool
    """Whether workers of that round are still there."""


class CoordinatorRestarted(Event, frozen=True, kw_only=True):
    """The coordinator died and replayed its journal; no node is connected yet."""


class ExcludeAsked(Event, frozen=True, kw_only=True):
    """A script found its node unfit: go on without it."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    reason: str


class StopAsked(Event, frozen=True, kw_only=True):
    """A script wants the whole job to end."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    reason: str
    code: int


class Asked(Event, frozen=True, kw_only=True):
    """A script wants an answer. Said again, with the same number, when the answer was lost."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    lane: Lane
    number: Number
    """Counts the requests of this rank's lane; the next comes only when this one is answered."""
    request: AnyRequest


class WorkerStarted(Event, frozen=True, kw_only=True):
    """The user's script began to run in the process that was given the rank."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    pid: int
    warm: bool
    """Whether the process was a standby that had rehearsed."""


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker's process is gone. Exactly one of code and signal is set."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    code: int | None = None
    signal: int | None = None
    oom: bool = False
    """The kernel's out-of-memory killer was seen at work while this worker died of SIGKILL."""
    progress: RankProgress
    raised: Raised | None = None
    log_tail: str = ""


class Progress(Event, frozen=True, kw_only=True):
    """How far the node's workers have come; sent at each worker's first step, then now and then."""

    node: NodeId
    round: RoundNumber
    ranks: tuple[RankProgress, ...]


class Tick(Event, frozen=True, kw_only=True):
    """A deadline that the core asked for has come."""


AnyEvent = (
    JobOpened
    | NodeJoined
    | NodeWarm
    | NodeReady
    | ExcludeAsked
    | StopAsked
    | Asked
    | NodeLeaving
    | NodeLeft
    | StreamEnded
    | NodeResumed
    | CoordinatorRestarted
    | WorkerStarted
    | WorkerExited
    | Progress
    | Tick
)
