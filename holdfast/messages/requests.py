"""What a script asks the coordinator, and what it is answered.

A script's requests go over its control socket to the agent, which says for whom it asks (node, round,
rank) and carries them on as the event `Asked`; the action `Answered` is the way back. Each thread
that asks has a lane of its own, and asks on it again only when it was answered, so whoever keeps the
last answer of each lane can repeat any answer that was lost and never does anything twice.

Sizes are limited here, once for everybody: whatever keeps to them fits into one frame.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.checkpoints import Attempt, CheckpointerId, Holder, ImageId, Tier, Tried
from holdfast.messages.timings import Finding
from holdfast.messages.units import RoundNumber, Seconds, StepNumber

MAX_VALUE_BYTES = 512 << 10
"""A value of the store, and all values of one answer together (or the first, if alone)."""
MAX_MESSAGE_BYTES = 768 << 10
"""A whole request or answer, encoded. Events and actions add little to it, and a frame holds more."""
LARGE_BYTES = 16 << 10
LARGE_AT_ONCE = 4
"""How many large requests of one worker, and of one node, may be on their way at a time."""
MAX_NAME_CHARS = 256
MAX_BALLOT_CHARS = 128
MAX_LISTED = 16
"""How many different ballots a tally lists: more would grow with the world, for every rank."""
MAX_LANES = 1024
"""How many requests of one rank may be open at a time."""

Key = Annotated[str, Meta(max_length=4096)]
MAX_KEYS = 256
Keys = Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MAX_KEYS)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Lane = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
Number = Annotated[int, Meta(ge=1, le=1 << 53)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Ballot = bool | Int64 | Annotated[str, Meta(max_length=MAX_BALLOT_CHARS)]


class Request(Struct, frozen=True, kw_only=True, tag=True):
    pass


class Set(Request, frozen=True, kw_only=True):
    """Write all these keys at once. Answered: Granted."""

    items: Annotated[tuple[tuple[Key, Value], ...], Meta(min_length=1)]


class Get(Request, frozen=True, kw_only=True):
    """What is there now. Answered: Values, of as many of the first keys as fit into one answer."""

    keys: Keys


class Add(Request, frozen=True, kw_only=True):
    """Add to a number, from 0 if it is missing. Answered: Total."""

    key: Key
    amount: Int64


class CompareSet(Request, frozen=True, kw_only=True):
    """Write the key if it has the expected value, or is missing and nothing is expected. Answered:
    Values, with what the key has afterwards."""

    key: Key
    expected: Value
    desired: Value


class Append(Request, frozen=True, kw_only=True):
    """Write to the end of what is there. Answered: Total, the length in bytes."""

    key: Key
    value: Value


class WaitForKeys(Request, frozen=True, kw_only=True):
    """Answered when all keys are there: Granted."""

    keys: Keys
    timeout_s: Seconds


class CheckKeys(Request, frozen=True, kw_only=True):
    """Whether all keys are there. Answered: Truth."""

    keys: Keys


class Delete(Request, frozen=True, kw_only=True):
    """Answered: Truth, whether the key was there."""

    key: Key


class CountKeys(Request, frozen=True, kw_only=True):
    """Answered: Total."""


class JoinBarrier(Request, frozen=True, kw_only=True):
    """Answered when every rank of the round has joined: Granted."""

    name: Name
    timeout_s: Seconds | None = None


class CastVote(Request, frozen=True, kw_only=True):
    """Answered when every rank of the round has voted: Tally."""

    name: Name
    ballot: Ballot
    timeout_s: Seconds | None = None


class FindState(Request, frozen=True, kw_only=True):
    """What to restore, agreed by all ranks of the round. Answered: StateFound, again and again,
    each time with how the last one fared, until all ranks loaded one or there is no more."""

    checkpointer: CheckpointerId
    step: int | None = None
    """That one, and no other; None: the newest that verifies."""
    tried: Tried | None = None


class AwaitSave(Request, frozen=True, kw_only=True):
    """Answered when it is known how the save of that step went: SaveSettled."""

    checkpointer: CheckpointerId
    step: int
    to: Tier
    timeout_s: Seconds | None = None
    attempt: Attempt = 1


class AwaitStragglers(Request, frozen=True, kw_only=True):
    """Answered when more findings were made than that: StragglersFound."""

    after: Annotated[int, Meta(ge=0)]


StoreRequest = Set | Get | Add | CompareSet | Append | WaitForKeys | CheckKeys | Delete | CountKeys
HeldRequest = FindState | AwaitSave | AwaitStragglers
"""What is answered when something happens that has nothing to do with other requests."""
AnyRequest = StoreRequest | JoinBarrier | CastVote | HeldRequest


class ExcludeNode(Request, frozen=True, kw_only=True):
    """To the agent, which says it as the event ExcludeAsked. Answered: Granted."""

    reason: Annotated[str, Meta(max_length=2000)]


class StopJob(Request, frozen=True, kw_only=True):
    """To the agent, which says it as the event StopAsked. Answered: Granted."""

    reason: Annotated[str, Meta(max_length=2000)]
    code: Annotated[int, Meta(ge=0, le=255)]


class LocateImage(Request, frozen=True, kw_only=True):
    """To the agent: where can this image be read? Answered: ImageAt."""

    image: ImageId


ScriptRequest = AnyRequest | ExcludeNode | StopJob | LocateImage
"""All that a script may say to its agent."""


def is_large(request: ScriptRequest) -> bool:
    """Whether it carries much, or may be answered with much."""
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
    """It is so."""


class Truth(Answer, frozen=True, kw_only=True):
    so: bool


class Total(Answer, frozen=True, kw_only=True):
    number: int


class Values(Answer, frozen=True, kw_only=True):
    """What the first of the keys asked for have; None for one that is missing."""

    values: tuple[bytes | None, ...]


class Tally(Answer, frozen=True, kw_only=True):
    """How a vote went: the same for every rank that took part."""

    counts: tuple[tuple[Ballot, int], ...]
    """Ballots and how many were cast, the most frequent first, at most MAX_LISTED of them."""
    voters: int
    absent: int
    """Ranks that had ended before they voted."""

    def count(self, ballot: bool | int | str) -> int:
        """How many voted so."""
        same = (n for b, n in self.counts if type(b) is type(ballot) and b == ballot)
        return next(same, 0)

    @property
    def yes(self) -> int:
        return self.count(True)

    @property
    def no(self) -> int:
        return self.count(False)

    @property
    def all_yes(self) -> bool:
        """Whether every rank that voted said yes."""
        return self.yes == self.voters

    @property
    def unanimous(self) -> bool:
        """Whether all that voted, yes, no or anything else, voted the same."""
        return len(self.counts) == 1


class StateFound(Answer, frozen=True, kw_only=True):
    """What all ranks shall load now."""

    where: Tier | Literal["nowhere", "loaded"]
    """Nowhere: there is nothing (more) to restore. Loaded: all ranks have what they tried."""
    step: StepNumber = StepNumber(0)
    round: RoundNumber = RoundNumber(0)
    world_size: int = 0
    holders: tuple[Holder, ...] = ()
    """Of the images that this rank needs."""
    refused: tuple[str, ...] = ()
    """What was tried before, and why it was not taken."""


class SaveSettled(Answer, frozen=True, kw_only=True):
    outcome: Literal["saved", "skipped", "failed"]
    reason: str = ""


class StragglersFound(Answer, frozen=True, kw_only=True):
    total: int
    """How many findings there have been; to be asked for again with that number."""
    findings: tuple[Finding, ...]
    """The newest of them, that were not told before."""


class ImageAt(Answer, frozen=True, kw_only=True):
    path: str
    """A file on this node; empty: only at the peer that is said to have it."""
    token: str = ""
    """What a peer wants to hear."""
    tls: tuple[str, str, str] | None = None
    """Paths of certificate, key and authority."""


Reason = Literal[
    "image", "fenced", "timeout", "too large", "not a number", "too many", "joined again"
]


class Denied(Answer, frozen=True, kw_only=True):
    """It was not done."""

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
    | Denied
)
