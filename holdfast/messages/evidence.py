"""Evidence of why a rank makes no progress, and the verdict drawn from it.

An agent gathers one `RankEvidence` for each of its ranks; the verdict is made where all of them come
together. What could not be taken is absent (`None`, "?", an empty list) and `missing` says why: the
verdict must be able to tell "nothing there" from "could not look".

Sizes are limited, because a stack may be as deep as a script likes and a job has thousands of ranks.
`fit` makes any evidence small enough to send: it cuts stacks in the middle, where they say least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from holdfast.messages.hangs import Name, PlaceName, Proof
from holdfast.messages.units import (
    Count,
    Int64,
    Listed,
    NodeId,
    ProcessId,
    Rank,
    RoundNumber,
    Seconds,
    StepNumber,
    Text,
)

MAX_EVIDENCE_BYTES = 256 << 10
"""Limit of one rank's encoded evidence."""
MAX_COLLECTIVES = 32
MAX_MEMBERS = 8192
"""Most members of a group that are listed; those of a larger one are left out."""
MAX_PAIRS = 512
"""Most pairs of a group and a peer whose sends and receives are counted."""
ANY_PEER = -1
"""The peer of a receive from any rank."""
UNCOUNTED = -1
"""A count of calls that have no one order."""
MAX_FRAMES = 128
MAX_THREADS = 64
MAX_LOADERS = 16
"""Most data loader workers of a rank that are looked at."""
MAX_NAME_CHARS = 512
MAX_LOG_CHARS = 16 << 10

ProcessState = Literal["R", "S", "D", "T", "Z", "X", "?"]
"""The kernel's letter for a process; "?" if unknown."""

StackSource = Literal["py-spy", "py-spy python only", "faulthandler", "none"]
CollectiveState = Literal["scheduled", "started", "completed"]


class Frame(Struct, frozen=True, kw_only=True):
    """One line of a stack. A system call is a native innermost frame of the file "kernel"."""

    file: Text
    line: Int64
    function: Text
    native: bool = False


class ThreadStack(Struct, frozen=True, kw_only=True):
    """Where one thread is."""

    name: Text
    active: bool = False
    """Whether it was on a CPU."""
    holds_gil: bool = False
    trains: bool = False
    """Whether it is known to take the training steps."""
    frames: Annotated[tuple[Frame, ...], Meta(max_length=MAX_FRAMES)] = ()
    """Innermost first."""


class Collective(Struct, frozen=True, kw_only=True):
    """One operation of a process group, as recorded on one rank."""

    group: Text
    """Its name; torch gives names anew in each world that a script creates."""
    number: Int64
    """Sequence number of the group's collectives, the same on each of its ranks; of point-to-point
    operations (`send`, `recv`), of this rank only."""
    op: Text
    """Recorded name, with the backend before a colon: "gloo:all_reduce"."""
    state: CollectiveState
    ranks: Listed[Int64] = ()
    """The group's members, listed only with its newest operation; empty if unknown, and for the
    group of all ranks, "0" or "0, world 2"."""
    sizes: Text = ""
    age_s: Seconds | None = None
    """Time since the rank called it; None if unknown."""
    timeout_s: Seconds | None = None
    """The group's own timeout, after which its backend ends the waiting ranks; None if unknown."""


class PairCount(Struct, frozen=True, kw_only=True):
    """How many sends and receives, of those that no recorder notes, a rank has called."""

    group: Text
    """As that of a `Collective`."""
    peer: Int64
    """The rank to which and from which; ANY_PEER if the rank has received from any one."""
    sends: Int64 = 0
    """UNCOUNTED if these have no one order; so with receives."""
    receives: Int64 = 0


class LoaderWorker(Struct, frozen=True, kw_only=True):
    """A worker process of a rank's data loader that is not waiting for work."""

    number: Int64
    """Its place among the loader's workers, in the order of their start."""
    pid: ProcessId
    stack: ThreadStack


class RankCollectives(Struct, frozen=True, kw_only=True):
    """The newest collectives that one rank has entered, newest first."""

    rank: Rank
    last: Listed[Collective]
    place: PlaceName = ""
    """Line of the script that the rank was at; empty if unknown."""


class RankEvidence(Struct, frozen=True, kw_only=True):
    """Everything known of one rank at one moment."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    pid: ProcessId
    process_state: ProcessState = "?"
    step: StepNumber = StepNumber(0)
    sections: Listed[Text] = ()
    """Open sections, outermost first."""
    beat_age_s: Seconds | None = None
    """Time since its last heartbeat: large if another thread keeps the GIL."""
    since_step_s: Seconds | None = None
    ended: bool = False
    """Whether its script has ended, and only its process is left."""
    returned: bool = False
    """Whether its restartable function has returned, and it waits until it has on all ranks."""
    locked: bool = False
    """Whether every thread waits for a lock that only this process could release."""
    idle_s: Seconds | None = None
    """How long nothing of it has moved; None if unknown."""
    left_s: Seconds | None = None
    """If it waits for others: time until its process group would end it; None if unknown."""
    stacks: Annotated[tuple[ThreadStack, ...], Meta(max_length=MAX_THREADS)] = ()
    stack_source: StackSource = "none"
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=MAX_COLLECTIVES)] | None = None
    """Newest first. None if there was no flight recorder to read: then nothing is known, which is
    not the same as none."""
    blocked: bool = False
    """Whether its training thread was inside a call of one of them while they were read: the two
    are of one moment, which a stack is not."""
    pairs: Annotated[tuple[PairCount, ...], Meta(max_length=MAX_PAIRS)] | None = None
    """Peers with which it has called any, each in each group of its newest world. None if unknown."""
    evicted: bool = False
    """Whether the recorder has dropped older ones: it may have had some of a group that is missing."""
    world: Count = 1
    """How often its script has created its process groups, the last time included."""
    loaders: Annotated[tuple[LoaderWorker, ...], Meta(max_length=MAX_LOADERS)] = ()
    """Its data loader's busy workers, if its training thread waits for them."""
    log_tail: Text = ""
    missing: Listed[Text] = ()
    """What could not be taken, and why."""


class StackGroup(Struct, frozen=True, kw_only=True):
    """Ranks at the same place."""

    ranks: tuple[Rank, ...]
    headline: str
    frames: tuple[Frame, ...]


class Verdict(Struct, frozen=True, kw_only=True):
    """Why the job makes no progress."""

    guilty: tuple[Rank, ...]
    """Ranks that the others wait for; empty if unknown."""
    sentence: str
    groups: tuple[StackGroup, ...] = ()
    """Largest first."""
    proof: Proof | None = None
    """What proves that the job cannot continue; None if it may."""
    waiting: tuple[Rank, ...] = ()
    """Ranks that wait for others."""
    place: PlaceName = ""
    """Where the first guilty rank is, as a line of the user's code; or the first of a circle."""
    pause: Name = ""
    """The section that names what it does there, open or known by the frameworks' own names
    ("checkpoint", "evaluation"); empty if none does."""
    left_s: Seconds | None = None
    """Time until the first waiting rank's process group would end it; None if unknown."""


def cut(frames: Sequence[Frame], limit: int = MAX_FRAMES) -> tuple[Frame, ...]:
    """Shorten a stack to both of its ends, with a note on what was between."""
    if len(frames) <= limit:
        return tuple(frames)
    inner = limit // 2
    outer = limit - inner - 1
    left_out = len(frames) - inner - outer
    note = Frame(file="", line=0, function=f"... {left_out} frames left out ...")
    return (*frames[:inner], note, *frames[len(frames) - outer :])


def fit(evidence: RankEvidence) -> RankEvidence:
    """Shorten evidence until it may be sent."""
    fitted = msgspec.structs.replace(
        evidence,
        sections=tuple(_short(name) for name in evidence.sections[:16]),
        collectives=_fewer(evidence.collectives),
        pairs=_short_pairs(evidence.pairs),
        log_tail=evidence.log_tail[-MAX_LOG_CHARS:],
        missing=tuple(_short(reason) for reason in evidence.missing[:16]),
    )
    for threads, frames in ((MAX_THREADS, MAX_FRAMES), (32, 64), (16, 32), (8, 16), (1, 8)):
        fitted = msgspec.structs.replace(
            fitted,
            stacks=_smaller(evidence.stacks, threads, frames),
            loaders=_fewer_loaders(evidence.loaders, frames),
        )
        if len(msgspec.msgpack.encode(fitted)) <= MAX_EVIDENCE_BYTES:
            return fitted
    return msgspec.structs.replace(
        fitted, stacks=(), loaders=(), collectives=None, pairs=None, log_tail="", sections=()
    )


def _smaller(stacks: Iterable[ThreadStack], threads: int, frames: int) -> tuple[ThreadStack, ...]:
    """Return that many threads, the training thread, the main thread and active ones first."""
    wanted = sorted(
        stacks,
        key=lambda t: (not t.trains, t.name != "MainThread", not t.holds_gil, not t.active),
    )
    return tuple(
        msgspec.structs.replace(
            thread,
            name=_short(thread.name),
            frames=tuple(_short_frame(frame) for frame in cut(thread.frames, frames)),
        )
        for thread in wanted[:threads]
    )


def _fewer_loaders(loaders: Sequence[LoaderWorker], frames: int) -> tuple[LoaderWorker, ...]:
    return tuple(
        msgspec.structs.replace(one, stack=_smaller([one.stack], 1, frames)[0])
        for one in loaders[:MAX_LOADERS]
    )


def _fewer(collectives: tuple[Collective, ...] | None) -> tuple[Collective, ...] | None:
    if collectives is None:
        return None
    return tuple(
        msgspec.structs.replace(
            each,
            group=_short(each.group),
            op=_short(each.op),
            sizes=_short(each.sizes),
            ranks=each.ranks if len(each.ranks) <= MAX_MEMBERS else (),
        )
        for each in collectives[:MAX_COLLECTIVES]
    )


def _short_pairs(pairs: tuple[PairCount, ...] | None) -> tuple[PairCount, ...] | None:
    """Return the counts with the names that `_fewer` gives their groups; a part of them is none."""
    if pairs is None or len(pairs) > MAX_PAIRS:
        return None
    return tuple(msgspec.structs.replace(each, group=_short(each.group)) for each in pairs)


def _short_frame(frame: Frame) -> Frame:
    if len(frame.file) <= MAX_NAME_CHARS and len(frame.function) <= MAX_NAME_CHARS:
        return frame
    return msgspec.structs.replace(
        frame, file=frame.file[-MAX_NAME_CHARS:], function=_short(frame.function)
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 3] + "..."
