"""Defines the requests of scripts to the coordinator, and the answers.

A request goes over the worker's control socket to the agent, which adds node, round and rank and
forwards it as the event `Asked`; the action `Answered` carries the answer back. Each request occupies
one *channel* of its rank, which is used again only after its last answer has arrived. So a receiver
that keeps the last answer of each channel can repeat a lost answer, and each request takes effect once.

The size limits hold everywhere: a message within them fits into one frame.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.checkpoints import Attempt, CheckpointerId, Holder, ImageId, Tier, Tried
from holdfast.messages.data import DataName, DataSpec, PackedState, Span
from holdfast.messages.losses import Loss
from holdfast.messages.records import Cause
from holdfast.messages.timings import Finding
from holdfast.messages.tuning import ConfigVersion, LoaderConfig, LoaderMeasured, NoticeNumber
from holdfast.messages.units import (
    MAX_ITEMS,
    Count,
    Int64,
    NodeCount,
    RoundNumber,
    Seconds,
    StepNumber,
)

MAX_VALUE_BYTES = 512 << 10
"""Limit of one store value, and of all values in one answer together (but for a single one)."""
MAX_MESSAGE_BYTES = 768 << 10
"""Limit of one encoded request or answer. Events and actions add little to it; a frame holds more."""
LARGE_BYTES = 16 << 10
LARGE_AT_ONCE = 4
"""Large requests that one worker, and one node, may have in flight."""
MAX_NAME_CHARS = 256
MAX_REASON = 2000
MAX_BALLOT_CHARS = 128
MAX_LISTED = 16
"""Distinct ballots that a tally lists; without a limit each rank's answer would grow with the world."""
MAX_CHANNELS = 1024
"""Requests that one rank may have open."""

Key = Annotated[str, Meta(max_length=4096)]
MAX_KEYS = 256
Keys = Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MAX_KEYS)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
ChannelNumber = Annotated[int, Meta(ge=0, lt=MAX_CHANNELS)]
Number = Annotated[int, Meta(ge=1, le=1 << 53)]
Ballot = bool | Int64 | Annotated[str, Meta(max_length=MAX_BALLOT_CHARS)]


class Request(Struct, frozen=True, kw_only=True, tag=True):
    pass


class Set(Request, frozen=True, kw_only=True):
    """Write all these keys at once. Answered: Granted."""

    items: Annotated[tuple[tuple[Key, Value], ...], Meta(min_length=1, max_length=MAX_ITEMS)]


class Get(Request, frozen=True, kw_only=True):
    """Read the present values. Answered: Values, for as many leading keys as fit into one answer."""

    keys: Keys


class Add(Request, frozen=True, kw_only=True):
    """Add to a number; a missing key counts as 0. Answered: Total."""

    key: Key
    amount: Int64


class CompareSet(Request, frozen=True, kw_only=True):
    """Write the key if it has the expected value, or is missing and `expected` is empty. Answered:
    Values, with the value afterwards."""

    key: Key
    expected: Value
    desired: Value


class Append(Request, frozen=True, kw_only=True):
    """Append to a value. Answered: Total, the length in bytes."""

    key: Key
    value: Value


class WaitForKeys(Request, frozen=True, kw_only=True):
    """Wait until all keys exist. Answered then: Granted."""

    keys: Keys
    timeout_s: Seconds


class CheckKeys(Request, frozen=True, kw_only=True):
    """Ask whether all keys exist. Answered: Truth."""

    keys: Keys


class Delete(Request, frozen=True, kw_only=True):
    """Delete a key. Answered: Truth, whether it existed."""

    key: Key


class CountKeys(Request, frozen=True, kw_only=True):
    """Count the keys. Answered: Total."""


class JoinBarrier(Request, frozen=True, kw_only=True):
    """Join a barrier. Answered when every rank of the round has joined: Granted."""

    name: Name
    timeout_s: Seconds | None = None


class CastVote(Request, frozen=True, kw_only=True):
    """Vote. Answered when every rank of the round has voted: Tally."""

    name: Name
    ballot: Ballot
    timeout_s: Seconds | None = None


class FindState(Request, frozen=True, kw_only=True):
    """Ask what to restore, agreed by all ranks of the round. Answered: StateFound.

    A rank repeats the request with the result of each attempt until all ranks have loaded the same
    state or none is left.
    """

    checkpointer: CheckpointerId
    step: Int64 | None = None
    """Step to restore; None takes the newest that verifies."""
    tried: Tried | None = None
    all_ranks: bool = False
    """Whether this rank needs the images of all ranks, even if the world has the size that it had."""


class AwaitSave(Request, frozen=True, kw_only=True):
    """Wait until the outcome of a save is known. Answered then: SaveSettled."""

    checkpointer: CheckpointerId
    step: Int64
    to: Tier
    timeout_s: Seconds | None = None
    attempt: Attempt = 1


class AwaitStragglers(Request, frozen=True, kw_only=True):
    """Wait until there are more findings than `after`. Answered then: StragglersFound."""

    after: Count


class OpenData(Request, frozen=True, kw_only=True):
    """Use a data set in this round. Answered: DataOpened, once it is known what was used of it.

    Every rank asks, once a round. For data that is exact and shared by leases, that is known when the
    ranks have begun afresh, or when one of them has restored the whole state.
    """

    spec: DataSpec
    resumed: Literal["fresh", "part", "whole"]
    """What this rank restored: nothing, its own part of the state, or the state of all ranks."""
    used: PackedState = b""
    """What was used by then, unless `resumed` is "part"."""
    step: StepNumber = StepNumber(0)
    """The step that this rank goes on from."""


class AwaitTuning(Request, frozen=True, kw_only=True):
    """Wait for a change of a loader's settings. Answered then: TuningNotice.

    A rank asks once when it opens the loader, which is answered at once, and then always. Asking with
    the number of a notice acknowledges it.
    """

    dataset: DataName
    opening: Count
    """Counts the loaders of this data set that the rank has opened in this round, from 1."""
    after: NoticeNumber = 0
    """The newest notice that the rank has."""
    at: StepNumber = StepNumber(0)
    """The last boundary between steps of the loader that the rank has passed."""
    step_s: Seconds | None = None
    """How long steps take."""
    own: LoaderConfig = LoaderConfig()
    """The script's own settings."""
    most: Count = 0
    """The largest micro-batch that leaves results as they are; 0 if any change would change them."""
    auto: bool = False
    """Whether the script wants the micro-batch to be searched for."""
    for_s: Seconds | None = None
    """Time after which the rank wants an answer even if there is no news."""
    measured: LoaderMeasured | None = None


class SettleTuning(Request, frozen=True, kw_only=True):
    """Ask, at the boundary that a notice names, whether all ranks apply it there. Answered: Truth."""

    dataset: DataName
    number: NoticeNumber


class ChangeNodes(Request, frozen=True, kw_only=True):
    """Want another number of nodes for the job. Answered: Granted, or Denied if it is impossible."""

    min_nodes: NodeCount
    max_nodes: NodeCount
    spares: NodeCount | None = None
    """None to leave it as it is."""


class ReadAccount(Request, frozen=True, kw_only=True):
    """Ask how the job has fared so far. Answered: JobAccount, at once."""


StoreRequest = Set | Get | Add | CompareSet | Append | WaitForKeys | CheckKeys | Delete | CountKeys
HeldRequest = (
    FindState
    | AwaitSave
    | AwaitStragglers
    | OpenData
    | AwaitTuning
    | SettleTuning
    | ChangeNodes
    | ReadAccount
)
"""Requests that are answered by something other than another request."""
AnyRequest = StoreRequest | JoinBarrier | CastVote | HeldRequest


class ExcludeNode(Request, frozen=True, kw_only=True):
    """Exclude this node. The agent sends it as the event ExcludeAsked. Answered: Granted."""

    reason: Annotated[str, Meta(max_length=2000)]


class StopJob(Request, frozen=True, kw_only=True):
    """Stop the job. The agent sends it as the event StopAsked. Answered: Granted."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)]
    code: Annotated[int, Meta(ge=0, le=255)]


class LocateImage(Request, frozen=True, kw_only=True):
    """Ask the agent where an image can be read. Answered: ImageAt."""

    image: ImageId


class TakeShards(Request, frozen=True, kw_only=True):
    """Take shards that were lent to this node. The agent answers: ShardsTaken, once it has any."""

    dataset: DataName
    count: Annotated[int, Meta(ge=1, le=1024)]


ScriptRequest = AnyRequest | ExcludeNode | StopJob | LocateImage | TakeShards
"""Every request that a script may send to its agent."""


def is_large(request: ScriptRequest) -> bool:
    """Return whether the request or its answer may carry much data."""
    if isinstance(request, Get | CompareSet):
        return True
    if isinstance(request, Append):
        return len(request.value) > LARGE_BYTES
    if isinstance(request, Set):
        return sum(len(value) for _, value in request.items) > LARGE_BYTES
    return False


class Answer(Struct, frozen=True, kw_only=True, tag=True):
    pass


class Granted(Answer, frozen=True, kw_only=True):
    """Fulfilled, with nothing to return."""


class Truth(Answer, frozen=True, kw_only=True):
    so: bool


class Total(Answer, frozen=True, kw_only=True):
    number: int


class Values(Answer, frozen=True, kw_only=True):
    """Values of the leading keys of a request; None for a missing key."""

    values: tuple[bytes | None, ...]


class Tally(Answer, frozen=True, kw_only=True):
    """Result of a vote, the same for every rank that took part."""

    counts: tuple[tuple[Ballot, int], ...]
    """Ballots with their numbers of votes, the most frequent first, 16 ballots at most."""
    voters: int
    """Number of ranks that voted."""
    absent: int
    """Number of ranks that had exited before they voted."""

    def count(self, ballot: bool | int | str) -> int:
        """Return the number of votes for `ballot`."""
        same = (n for b, n in self.counts if type(b) is type(ballot) and b == ballot)
        return next(same, 0)

    @property
    def yes(self) -> int:
        """Number of votes for True."""
        return self.count(True)

    @property
    def no(self) -> int:
        """Number of votes for False."""
        return self.count(False)

    @property
    def all_yes(self) -> bool:
        """Whether every rank that voted did so with True."""
        return self.yes == self.voters

    @property
    def unanimous(self) -> bool:
        """Whether all ranks that voted cast the same ballot."""
        return len(self.counts) == 1


class StateFound(Answer, frozen=True, kw_only=True):
    """State that all ranks are to load next."""

    where: Tier | Literal["nowhere", "loaded"]
    """Nowhere: nothing (more) to restore. Loaded: all ranks have loaded what they tried."""
    step: StepNumber = StepNumber(0)
    round: RoundNumber = RoundNumber(0)
    world_size: int = 0
    holders: tuple[Holder, ...] = ()
    """All holders of the images that this rank needs, the nearest of each first."""
    refused: tuple[str, ...] = ()
    """States that were tried before, each with the reason for its refusal."""


class SaveSettled(Answer, frozen=True, kw_only=True):
    outcome: Literal["saved", "skipped", "failed"]
    reason: str = ""


class StragglersFound(Answer, frozen=True, kw_only=True):
    total: int
    """Number of findings so far; the `after` of the next request."""
    findings: tuple[Finding, ...]
    """Findings that this rank has not been sent before."""


class ImageAt(Answer, frozen=True, kw_only=True):
    path: str
    """File on this node; empty if only other nodes have the image."""
    token: str = ""
    """Token for other nodes."""
    tls: tuple[str, str, str] | None = None
    """Paths of certificate, key and certificate authority."""


class DataOpened(Answer, frozen=True, kw_only=True):
    used: PackedState
    """What was used of the data set before this round."""


class ShardsTaken(Answer, frozen=True, kw_only=True):
    """Shards for this rank; none if the data set is finished."""

    spans: tuple[Span, ...]


class TuningNotice(Answer, frozen=True, kw_only=True):
    """What a rank is told of a loader's settings; with the number that it knows: there is no news."""

    number: NoticeNumber
    at_step: StepNumber | None = None
    """The boundary at which to ask whether the settings hold from there on; 0: they are in force. None
    asks only where the rank is."""
    version: ConfigVersion = 0
    config: LoaderConfig = LoaderConfig()
    measure: bool = False
    """Whether speed and memory with these settings are wanted."""


class JobAccount(Answer, frozen=True, kw_only=True):
    """How the job has fared so far."""

    step: StepNumber
    """Highest step that was ever finished: it never goes back."""
    seconds: dict[Cause, Seconds]
    """Rank-seconds by cause."""
    restarts: int
    """Rounds that a fault made necessary."""
    incidents: int
    steps_per_s: float | None
    samples_per_s: float | None
    world_size: int
    loss: Loss | None = None
    """What the script told last in the newest round; None if it has told none."""


Reason = Literal[
    "image",
    "fenced",
    "timeout",
    "too large",
    "not a number",
    "too many",
    "joined again",
    "data set",
    "nodes",
]


class Denied(Answer, frozen=True, kw_only=True):
    """Refused or timed out."""

    reason: Reason
    detail: str


AnyAnswer = (
    Granted
    | Truth
    | Total
    | Values
    | Tally
    | StateFound
    | SaveSettled
    | StragglersFound
    | ImageAt
    | DataOpened
    | ShardsTaken
    | TuningNotice
    | JobAccount
    | Denied
)
