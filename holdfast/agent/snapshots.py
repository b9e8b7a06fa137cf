"""Connects the node's keeper with its workers and with the coordinator.

    a worker's image is whole ──▶ SealImage ──▶ all ranks of the node sealed ──▶ SnapshotsSealed
    WriteRankFiles ──▶ RankFilesWritten          CommitCheckpoint ──▶ CheckpointWritten

Actions go to the keeper and its events to the coordinator as they are. Each new keeper is first told
which checkpointers there are, and what the round is.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.agent.keeper_process import KeeperProcess
from holdfast.agent.node_snapshots import NodeSnapshots
from holdfast.agent.processes import ProcessTable
from holdfast.checkpoint.memory.images import Images
from holdfast.clock import JobClock
from holdfast.messages.actions import CheckpointSettled, CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import ImageId, Missed, SnapshotId, StoredFile
from holdfast.messages.events import (
    AnyEvent,
    CheckpointWritten,
    ImagesHeld,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
)
from holdfast.messages.keeper import (
    BeginRound,
    FailWrites,
    FetchImage,
    FindStored,
    KeeperAction,
    KeeperEvent,
    KeeperReply,
    KeeperTerms,
    SealImage,
    WriteAdvanced,
)
from holdfast.messages.local import ImageMissed, ImageWhole, OpenCheckpointer
from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer, Denied, ImageAt, LocateImage
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber
from holdfast.wire.tls import TlsFiles

SEAL_TIMES, SEAL_FLOOR_S = 10.0, 30.0
"""The end of a rank waits for its seal for that many times the longest seal so far, but at least for
the floor."""

_HURRIED = "the node was told to stop at once, before it was written"

_encoder = msgspec.msgpack.Encoder()


@dataclass
class Snapshots:
    node: NodeId
    images: Path
    """The directory of this node's images."""
    job: str
    token: str
    tls: TlsFiles | None
    listener: socket.socket
    """Where other nodes get images from; the keeper serves it."""
    table: ProcessTable
    clock: JobClock
    report: Callable[[AnyEvent], None]
    tell: Callable[[str], None]
    """Prints a line for the user."""
    env: dict[str, str]
    keeper: KeeperProcess = field(init=False)
    _part: Part | None = None
    _checkpointers: dict[str, OpenCheckpointer] = field(default_factory=dict)
    _snapshots: NodeSnapshots | None = None
    """Those of the round in force."""
    _blamed: bool = False
    """The user was told in this round that not all ranks save."""
    _sealing: dict[Rank, int] = field(default_factory=dict)
    """How many images of a rank are being sealed."""
    _longest_seal_s: float = 0.0
    _after_seals: dict[Rank, list[Callable[[], None]]] = field(default_factory=dict)
    _on_their_way: dict[str, SnapshotId] = field(default_factory=dict)
    """What goes to storage, one snapshot of each checkpointer at a time, until the coordinator says
    how it ended."""
    _shards: dict[SnapshotId, dict[Rank, StoredFile]] = field(default_factory=dict)
    """The shards known so far of what this node is to commit."""
    _settled: list[Callable[[], None]] = field(default_factory=list)
    _hurried: bool = False

    def __post_init__(self) -> None:
        terms = KeeperTerms(
            node=self.node,
            images=str(self.images),
            token=self.token,
            job=self.job,
            listener_fd=self.listener.fileno(),
            tls=self.tls.paths if self.tls else None,
        )
        self.keeper = KeeperProcess(
            terms, self.listener, self.table, self.env, self._started, self._hear, self.tell
        )

    def tell_images(self) -> None:
        """Report the images that an earlier agent left, and read where its checkpoints go."""
        for path in self.images.glob("*.opened"):
            with suppress(OSError, msgspec.DecodeError):
                opened = msgspec.msgpack.decode(path.read_bytes(), type=OpenCheckpointer)
                self._checkpointers[opened.checkpointer] = opened
        images = tuple(Images(self.images).ids())
        if images:
            self.report(ImagesHeld(at=self.clock.now(), node=self.node, images=images))

    def begin_round(self, part: Part) -> None:
        self._part = part
        self._snapshots, self._blamed = NodeSnapshots(part), False
        if self.keeper.pid:
            self._tell_round()
        for image, holder in part.fetch:
            self.keeper.give(FetchImage(image=image, holder=holder))

    def _tell_round(self) -> None:
        part = self._part
        if part is not None:
            ranks = tuple(Rank(part.first_rank + slot) for slot in range(part.slots))
            self.keeper.give(BeginRound(ranks=ranks, copies=part.copies))

    # ---- workers ----

    def opened(self, action: OpenCheckpointer) -> None:
        """Tell the keeper of a checkpointer, and keep it on disk for an agent that is restarted."""
        if self._checkpointers.get(action.checkpointer) == action:
            return
        self._checkpointers[action.checkpointer] = action
        with suppress(OSError):
            (self.images / f"{action.checkpointer}.opened").write_bytes(_encoder.encode(action))
        if self.keeper.pid:
            self.keeper.give(action, self._check_opened)
        else:
            self.keeper.start()

    def _check_opened(self, reply: KeeperReply) -> None:
        if reply.error:
            self.tell(f"checkpoints cannot be kept: {reply.error}")

    def whole(self, rank: Rank, message: ImageWhole) -> None:
        """Have a rank's image sealed."""
        snapshots = self._snapshots
        assert snapshots is not None
        self._sealing[rank] = self._sealing.get(rank, 0) + 1
        began = time.monotonic()

        def sealed(reply: KeeperReply) -> None:
            self._longest_seal_s = max(self._longest_seal_s, time.monotonic() - began)
            self._sealed(snapshots, reply)
            self._seal_ended(rank)

        seal = SealImage(
            node=self.node,
            image=ImageId(_snapshot(message, snapshots.round), rank, snapshots.world_size),
            path=message.path,
            state=message.state,
            wish=message.wish,
            attempt=message.attempt,
        )
        self.keeper.give(seal, sealed)

    def _sealed(self, snapshots: NodeSnapshots, reply: KeeperReply) -> None:
        if isinstance(reply.event, SnapshotsSealed):
            complete = snapshots.seal(reply.event)
            if complete is not None:
                self._hear(complete)
            self._give_up_lost()
        elif isinstance(reply.event, SnapshotMissed):
            snapshots.miss(reply.event.snapshot, reply.event.attempt)
            self._hear(reply.event)

    def _seal_ended(self, rank: Rank) -> None:
        self._sealing[rank] -= 1
        if self._sealing[rank] == 0:
            del self._sealing[rank]
            for act in self._after_seals.pop(rank, []):
                act()

    def missed(self, rank: Rank, message: ImageMissed) -> None:
        """Report that a rank has no image of a step that others may have."""
        assert self._snapshots is not None
        snapshot = _snapshot(message, self._snapshots.round)
        self._snapshots.miss(snapshot, message.attempt)
        self._report_missed(rank, snapshot, message.outcome, message.reason, message.attempt)

    def _give_up_lost(self) -> None:
        """Report what only some ranks have saved: nobody is to wait for it, and the user is told."""
        for one in self._snapshots.take_lost() if self._snapshots is not None else ():
            self._report_missed(one.rank, one.snapshot, "skipped", one.why, one.attempt)
            if not self._blamed:
                self._blamed = True
                self.tell(
                    f"step {one.snapshot.step} is not saved: rank {one.rank} has not saved it, and"
                    f" {one.why}; all ranks have to save the same steps"
                )

    def _report_missed(
        self, rank: Rank, snapshot: SnapshotId, outcome: Missed, reason: str, attempt: int
    ) -> None:
        self.report(
            SnapshotMissed(
                at=self.clock.now(),
                node=self.node,
                rank=rank,
                snapshot=snapshot,
                outcome=outcome,
                reason=reason,
                attempt=attempt,
            )
        )

    def ended(self, rank: Rank, well: bool, act: Callable[[], None]) -> None:
        """Note that a rank has ended; call `act` once what it saved is sealed, because the report of
        its end must not overtake that of its save."""
        snapshots = self._snapshots

        def end() -> None:
            if well and snapshots is not None:
                snapshots.end(rank)
                self._give_up_lost()
            act()

        if rank not in self._sealing:
            end()
            return
        once = _Once(end)
        self._after_seals.setdefault(rank, []).append(once)
        limit_s = max(SEAL_FLOOR_S, SEAL_TIMES * self._longest_seal_s)
        asyncio.get_running_loop().call_later(limit_s, once)

    def look(self, round: RoundNumber, checkpointer: str, then: Callable[[], None]) -> None:
        """Report which checkpoints are on storage, then call `then`."""

        def found(reply: KeeperReply) -> None:
            self._report(reply)
            then()

        find = FindStored(node=self.node, round=round, checkpointer=checkpointer)
        self.keeper.give(find, found)

    def locate(self, request: LocateImage, answer: Callable[[AnyAnswer], None]) -> None:
        """Answer where a rank can read an image."""

        def found(reply: KeeperReply) -> None:
            if isinstance(reply.event, ImageAt | Denied):
                answer(reply.event)

        self.keeper.give(request, found)

    # ---- the coordinator ----

    def act(self, action: WriteRankFiles | CommitCheckpoint | CheckpointSettled) -> None:
        if isinstance(action, CheckpointSettled):
            self._settle(action)
            return
        self._on_their_way[action.snapshot.checkpointer] = action.snapshot
        if any(_covers(given, action) for given in self.keeper.unanswered()):
            return  # Repeated after a broken stream; the answer is on its way.
        if isinstance(action, WriteRankFiles):
            self.keeper.give(action, self._report)
        else:
            self._commit(action)

    def _commit(self, action: CommitCheckpoint) -> None:
        """Collect the shards of a large world, which come in several actions; then commit them."""
        known = self._shards.setdefault(action.snapshot, {})
        known |= {shard.rank: shard for shard in action.shards}
        if len(known) == action.world_size:
            del self._shards[action.snapshot]
            shards = tuple(known[rank] for rank in sorted(known))
            self.keeper.give(msgspec.structs.replace(action, shards=shards), self._report)

    def _settle(self, action: CheckpointSettled) -> None:
        """Forget what has ended. The coordinator may repeat it after a broken stream."""
        if self._on_their_way.get(action.snapshot.checkpointer) != action.snapshot:
            return
        del self._on_their_way[action.snapshot.checkpointer]
        self._shards.pop(action.snapshot, None)
        if action.error and (self._part is None or self._part.first_rank == 0):
            goes_on = "" if self._settled else "; training goes on"
            self.tell(f"step {action.snapshot.step} is not on storage: {action.error}{goes_on}")
        self._check_settled()

    def when_settled(self, limit_s: float, act: Callable[[], None]) -> None:
        """Call `act` once nothing of this node is on its way to storage, or the time is up."""
        self._settled.append(_Once(act))
        if self._hurried:
            self._give_up(_HURRIED)
        if self._on_their_way:
            why = (
                f"storage took longer than the {limit_s:g} s of --save-deadline; save more often, or"
                " raise it together with the time that the platform gives a job to stop"
            )
            asyncio.get_running_loop().call_later(limit_s, self._give_up, why)
        self._check_settled()

    def hurry(self) -> None:
        """Stop waiting for what is on its way to storage."""
        self._hurried = True
        self._give_up(_HURRIED)

    def _give_up(self, why: str) -> None:
        """Report that this node ends before it has written what is on its way to storage."""
        at, node = self.clock.now(), self.node
        for snapshot in self._on_their_way.values():
            # Its part is one of the two, and the other is of no account.
            self.report(RankFilesWritten(at=at, node=node, snapshot=snapshot, error=why))
            self.report(CheckpointWritten(at=at, node=node, snapshot=snapshot, error=why))
        self._on_their_way.clear()
        self._check_settled()

    def _check_settled(self) -> None:
        if not self._on_their_way:
            settled, self._settled = self._settled, []
            for act in settled:
                act()

    # ---- the keeper ----

    def _started(self) -> None:
        for opened in self._checkpointers.values():
            self.keeper.give(opened, self._check_opened)
        self._tell_round()

    def _report(self, reply: KeeperReply) -> None:
        if reply.event is not None and not isinstance(reply.event, ImageAt | Denied):
            self._hear(reply.event)

    def _hear(self, event: KeeperEvent) -> None:
        if isinstance(event, WriteAdvanced):
            if self._settled:
                done, of = event.done_bytes / 1e9, event.of_bytes / 1e9
                self.tell(f"writing step {event.step}: {done:.2f} of {of:.2f} GB")
        else:
            self.report(msgspec.structs.replace(event, at=self.clock.at(event.at)))

    def fail_writes(self, files: int) -> bool:
        """Make the next files fail as on a full disk; False when there is no keeper."""
        if self.keeper.pid:
            self.keeper.give(FailWrites(files=files))
        return bool(self.keeper.pid)


def _snapshot(message: ImageWhole | ImageMissed, round: RoundNumber) -> SnapshotId:
    return SnapshotId(message.checkpointer, StepNumber(message.step), round)


def _covers(given: KeeperAction, action: WriteRankFiles | CommitCheckpoint) -> bool:
    """Whether an action that the keeper was given includes all of that one."""
    if isinstance(action, WriteRankFiles):
        return (
            isinstance(given, WriteRankFiles)
            and given.snapshot == action.snapshot
            and set(action.ranks) <= set(given.ranks)
        )
    return isinstance(given, CommitCheckpoint) and given.snapshot == action.snapshot


class _Once:
    """A function that is called at one of two moments, whichever comes first."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
