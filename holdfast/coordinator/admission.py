"""Decides whether an event fits the node that sends it, before it is journaled.

The decoder has checked every field by itself (`messages/units.py`). Here an event meets its sender:
an agent speaks of its own node, of rounds that the coordinator has issued, of ranks that are its own
in the round in force, and of the past. Nothing else may enter the journal, whoever knows the token.

What becomes of an event that does not fit depends on whether the job would wait for it:

    it only informs (progress, a health finding)      dropped, acknowledged, counted; the stream stays:
                                                      one bad value must not cost a node its ranks
    the job would wait for it (NodeReady, a rank's    the node is refused: it ends, and the job repairs
    end, a request of a script)                       itself as after any lost node
    it is no agent's to send, or names another node   the node is refused: its program is another one
    its type is unknown                               the same: a newer version of Holdfast sent it

Closing the stream without a refusal would only bring the agent back with the same event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from holdfast import __version__
from holdfast.core.chaos.plans import Chaos
from holdfast.core.job import Job
from holdfast.errors import BadFrame
from holdfast.messages import events
from holdfast.messages.checkpoints import SnapshotId
from holdfast.messages.events import AnyEvent
from holdfast.messages.node_ids import same_launcher
from holdfast.messages.records import RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time
from holdfast.messages.wire import Sent

AHEAD_S: Seconds = 3600.0
"""An agent's clock follows the coordinator's; nothing but an error makes it run this far ahead."""

FUTURE = "its time is in the future"
UNISSUED = "its round was never issued"
NOT_ITS_RANK = "a rank is not the node's"
NOT_IN_ROUND = "the node is not in that round"
CONTRADICTION = "its fields contradict each other"
OUT_OF_BOUNDS = "a value is out of bounds"

AGENT_EVENTS: tuple[type, ...] = (
    events.NodeJoined,
    events.NodeWarm,
    events.NodeReady,
    events.WorkersKilled,
    events.NodeLeaving,
    events.NodeLeft,
    events.ExcludeAsked,
    events.StopAsked,
    events.Asked,
    events.WorkerStarted,
    events.WorkerExited,
    events.RankRaised,
    events.RanksReturned,
    events.Progress,
    events.RanksStalled,
    events.NodeTested,
    events.HealthFound,
    events.NodeSampled,
    events.SnapshotsSealed,
    events.ImagesHeld,
    events.RankFilesWritten,
    events.SnapshotMissed,
    events.CheckpointWritten,
    events.StoredFound,
    events.ShardsReported,
    events.FaultTold,
    events.TaskFailed,
)
"""What an agent may say. All other events are the coordinator's own."""

INFORMING = frozenset(
    {
        *("NodeWarm", "Progress", "RanksStalled", "NodeTested", "HealthFound", "ImagesHeld"),
        *("FaultTold", "TaskFailed", "NodeSampled"),
    }
)
"""Events that may be dropped: nothing waits for them for ever."""

_NAMES = frozenset(kind.__name__ for kind in AGENT_EVENTS)


class Unfit(Struct, frozen=True):
    """An event that was refused: its number, its type, and why."""

    number: int
    what: str
    reason: str
    detail: str = ""

    @property
    def tolerable(self) -> bool:
        """Whether the job can do without the event, so that its node may stay."""
        return self.what in INFORMING

    @property
    def line(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"it sent a {self.what} that was refused: {self.reason}{detail}"


class _Envelope(Struct, tag=Sent.__name__):
    number: int
    event: msgspec.Raw


class _Tagged(Struct):
    type: str


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_tags = msgspec.msgpack.Decoder(_Tagged)


def unreadable(body: bytes, error: BadFrame) -> Unfit:
    """Find out which event did not decode; raise BadFrame if it is none that an agent sends."""
    try:
        envelope = _envelopes.decode(body)
        what = _tags.decode(envelope.event).type
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise error from None
    if what not in _NAMES:
        raise BadFrame(
            f"it sent a {what:.80}, which no agent of holdfast {__version__} sends;"
            " run the same version on all nodes"
        )
    return Unfit(envelope.number, what, OUT_OF_BOUNDS, str(error))


def forgery(node: NodeId, event: AnyEvent) -> str | None:
    """Say why an event cannot come from that node's agent, whatever the job's state."""
    if type(event) not in AGENT_EVENTS:
        return f"it sent a {type(event).__name__}, which is the coordinator's own to say"
    if getattr(event, "node", node) != node:
        return f"it sent a {type(event).__name__} in the name of another node"
    return None


def misfit(job: Job, node: NodeId, known: RoundNumber, event: AnyEvent, now: Time) -> str | None:
    """Say why an event does not fit its sender; None if it does.

    `known` is the round that the node's greeting named: it may be newer than the journal's, if the
    journal lost it.
    """
    latest = now + AHEAD_S
    if event.at > latest:
        return FUTURE
    kind = type(event)
    round = _round_of(event)
    if round > max(known, job.membership.round):
        return UNISSUED
    check = _CHECKS.get(kind)
    if check is not None and not check(job, event):
        return CONTRADICTION
    progress = _PROGRESS.get(kind)
    if progress is not None and any(_ahead(one, latest) for one in progress(event)):
        return FUTURE
    ranks = _RANKS.get(kind)
    if ranks is None or job.world is None or round != job.world.round:
        return None  # Word of an older round: the core knows it by its number.
    if node not in job.membership.placed:
        return NOT_IN_ROUND
    known_ranks = job.ranks
    for rank in ranks(event):
        state = known_ranks.get(rank)
        if state is None or state.node != node:
            return NOT_ITS_RANK
    return None


# ---- what an event speaks of ---------------------------------------------------------------------


def _round_of(event: Any) -> int:
    if isinstance(event, events.ImagesHeld):
        return max((image.snapshot.round for image in event.images), default=0)
    snapshot = getattr(event, "snapshot", event)
    return getattr(snapshot, "round", 0)


def _ahead(progress: RankProgress, latest: float) -> bool:
    return (progress.first_at or 0.0) > latest or (progress.last_at or 0.0) > latest


def _own_rank(event: Any) -> Iterable[Rank]:
    return (event.rank,)


def _listed_ranks(event: Any) -> Iterable[Rank]:
    return [one.rank for one in event.ranks]


_PROGRESS: dict[type, Callable[[Any], Iterable[RankProgress]]] = {
    events.NodeReady: lambda event: event.ranks,
    events.NodeLeft: lambda event: event.ranks,
    events.Progress: lambda event: event.ranks,
    events.WorkerExited: lambda event: (event.progress,),
    events.RankRaised: lambda event: (event.progress,),
}

_RANKS: dict[type, Callable[[Any], Iterable[Rank]]] = {
    events.NodeLeft: _listed_ranks,
    events.ExcludeAsked: _own_rank,
    events.StopAsked: _own_rank,
    events.Asked: _own_rank,
    events.WorkerStarted: _own_rank,
    events.WorkerExited: _own_rank,
    events.RankRaised: _own_rank,
    events.RanksReturned: lambda event: (),
    events.Progress: lambda event: [one.rank for one in (*event.ranks, *event.timings)],
    events.RanksStalled: lambda event: [one.rank for one in event.stalls],
    events.SnapshotsSealed: _listed_ranks,
    events.SnapshotMissed: _own_rank,
    events.StoredFound: lambda event: (),
    events.ShardsReported: lambda event: [one.rank for one in (*event.used, *event.failed)],
}


def _one_end(job: Job, event: events.WorkerExited) -> bool:
    return (event.code is None) != (event.signal is None) and event.progress.rank == event.rank


def _fitting_images(job: Job, event: events.ImagesHeld) -> bool:
    return all(
        image.rank < image.world_size and _of_its_world(job, image.snapshot, image.world_size)
        for image in event.images
    )


def _fitting_seals(job: Job, event: events.SnapshotsSealed) -> bool:
    ranks, size = {one.rank for one in event.ranks}, event.world_size
    distinct = 0 < len(ranks) == len(event.ranks)
    return distinct and max(ranks) < size and _of_its_world(job, event.snapshot, size)


def _of_its_world(job: Job, snapshot: SnapshotId, world_size: int) -> bool:
    world = job.world
    return world is None or world.round != snapshot.round or world.size == world_size


def _known_fault(job: Job, event: events.FaultTold) -> bool:
    plans = job.of(Chaos).plans
    number = event.trap.injection
    return number <= len(plans) and plans[number - 1].injection.kind == event.trap.kind


def _replaces_its_own(job: Job, event: events.NodeJoined) -> bool:
    return not event.replaces or same_launcher(event.replaces, event.node)


def _sound_spans(job: Job, event: events.ShardsReported) -> bool:
    spans = [one.used.span for one in event.used] + [one.span for one in event.failed]
    in_order = all(one.used.first_step <= one.used.last_step for one in event.used)
    return in_order and all(span.start < span.stop for span in (*spans, *event.returned))


_CHECKS: dict[type, Callable[[Job, Any], bool]] = {
    events.NodeJoined: _replaces_its_own,
    events.WorkerExited: _one_end,
    events.RankRaised: lambda job, event: event.progress.rank == event.rank,
    events.ImagesHeld: _fitting_images,
    events.SnapshotsSealed: _fitting_seals,
    events.FaultTold: _known_fault,
    events.ShardsReported: _sound_spans,
    events.NodeTested: lambda job, event: event.result.node == event.node,
}
