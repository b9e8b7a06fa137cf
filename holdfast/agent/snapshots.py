"""The agent's side of snapshots: it carries orders to the keeper, and its answers to the coordinator.

    a worker's image is whole ──▶ Seal ──▶ all ranks of the node sealed ──▶ SnapshotsSealed
    WriteShards ──▶ Write ──▶ ShardsWritten          CommitCheckpoint ──▶ Commit ──▶ CheckpointWritten

It is told to a keeper that is started again which checkpointers there are, and what the round is.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.agent.keeper_process import KeeperProcess
from holdfast.agent.node_snapshots import Gathered, Gathering
from holdfast.agent.processes import ProcessTable
from holdfast.checkpoint.memory.images import Images
from holdfast.clock import JobClock
from holdfast.messages.actions import CheckpointSettled, CommitCheckpoint, WriteShards
from holdfast.messages.checkpoints import Missed, Shard, SnapshotId
from holdfast.messages.events import (
    AnyEvent,
    CheckpointWritten,
    ImagesHeld,
    ShardsWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.keeper import (
    AnyOrder,
    AnyReply,
    Begin,
    BeginRound,
    Commit,
    FailWrites,
    Fetch,
    ImageSealed,
    Look,
    Open,
    Received,
    Seal,
    ShardsDone,
    Stored,
    Where,
    WhereFound,
    Write,
    Wrote,
)
from holdfast.messages.local import ImageMissed, ImageWhole, OpenCheckpointer
from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer, Denied, ImageAt, LocateImage
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber
from holdfast.wire.tls import TlsFiles

log = logging.getLogger("holdfast.agent")

SEAL_TIMES, SEAL_FLOOR_S = 10.0, 30.0
"""A rank's end waits for its seal so many times as long as the longest took, or at least so long."""

_encoder = msgspec.msgpack.Encoder()


@dataclass
class Keeping:
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
    """Say something to the person at the terminal."""
    env: dict[str, str]
    keeper: KeeperProcess = field(init=False)
    _part: Part | None = None
    _checkpointers: dict[str, Open] = field(default_factory=dict)
    _gathering: Gathering | None = None
    _blamed: bool = False
    """Somebody was told in this round that not all ranks save."""
    _sealing: dict[Rank, int] = field(default_factory=dict)
    """How many images of a rank are being sealed."""
    _longest_seal_s: float = 0.0
    _after_seals: dict[Rank, list[Callable[[], None]]] = field(default_factory=dict)
    _on_their_way: dict[str, SnapshotId] = field(default_factory=dict)
    """What goes to storage, until the coordinator says how it ended: one at a time of each
    checkpointer."""
    _shards: dict[SnapshotId, dict[Rank, Shard]] = field(default_factory=dict)
    """What was told of those that this node is to commit."""
    _settled: list[Callable[[], None]] = field(default_factory=list)
    _hurried: bool = False

    def __post_init__(self) -> None:
        begin = Begin(
            images=str(self.images),
            token=self.token,
            job=self.job,
            listener_fd=self.listener.fileno(),
            tls=self.tls.paths if self.tls else None,
        )
        self.keeper = KeeperProcess(
            begin, self.listener, self.table, self.env, self._started, self._hear, self.tell
        )

    # ---- what is there from before ----

    def tell_images(self) -> None:
        """An agent before this one may have left images, and word of where they are to go."""
        for path in self.images.glob("*.opened"):
            with suppress(OSError, msgspec.DecodeError):
                opened = msgspec.msgpack.decode(path.read_bytes(), type=Open)
                self._checkpointers[opened.checkpointer] = opened
        images = tuple(Images(self.images).ids())
        if images:
            self.report(ImagesHeld(at=self.clock.now(), node=self.node, images=images))

    def begin_round(self, part: Part) -> None:
        self._part = part
        self._gathering, self._blamed = Gathering(part), False
        if self.keeper.pid:
            self._tell_round()
        for image, holder in part.fetch:
            self.keeper.give(Fetch(number=0, image=image, holder=holder), lambda reply: None)

    def _tell_round(self) -> None:
        part = self._part
        if part is not None:
            ranks = tuple(range(part.first_rank, part.first_rank + part.slots))
            order = BeginRound(number=0, ranks=ranks, copies=part.copies)
            self.keeper.give(order, lambda reply: None)

    # ---- what workers say ----

    def opened(self, message: OpenCheckpointer) -> None:
        order = Open(
            number=0,
            checkpointer=message.checkpointer,
            directory=message.directory,
            keep=message.keep,
        )
        if self._checkpointers.get(message.checkpointer) == order:
            return
        self._checkpointers[message.checkpointer] = order
        with suppress(OSError):
            (self.images / f"{order.checkpointer}.opened").write_bytes(_encoder.encode(order))
        if self.keeper.pid:
            self.keeper.give(order, self._check_opened)
        else:
            self.keeper.start()

    def _check_opened(self, reply: AnyReply) -> None:
        if reply.error:
            self.tell(f"checkpoints cannot be kept: {reply.error}")

    def whole(self, rank: Rank, message: ImageWhole) -> None:
        """A rank's image is whole."""
        gathering = self._gathering
        assert gathering is not None
        self._sealing[rank] = self._sealing.get(rank, 0) + 1
        order = Seal(number=0, path=message.path, state=message.state)
        began = time.monotonic()

        def sealed(reply: AnyReply) -> None:
            self._longest_seal_s = max(self._longest_seal_s, time.monotonic() - began)
            self._sealed(rank, message, gathering, reply)

        self.keeper.give(order, sealed)

    def _sealed(
        self, rank: Rank, message: ImageWhole, gathering: Gathering, reply: AnyReply
    ) -> None:
        snapshot = _snapshot(message, gathering.round)
        sealed = reply.sealed if isinstance(reply, ImageSealed) else None
        if sealed is not None:
            all_sealed = gathering.seal(snapshot, sealed, message.wish, message.attempt)
            if all_sealed is not None:
                self._report_sealed(snapshot, gathering.world_size, all_sealed)
            self._give_up_hopeless()
        else:
            gathering.miss(snapshot, message.attempt)
            outcome: Missed = "failed" if reply.error else "skipped"
            why = reply.error or "a newer one took its place"
            self._report_missed(rank, snapshot, outcome, why, message.attempt)
        self._sealing[rank] -= 1
        if self._sealing[rank] == 0:
            del self._sealing[rank]
            for act in self._after_seals.pop(rank, []):
                act()

    def _report_sealed(self, snapshot: SnapshotId, world_size: int, gathered: Gathered) -> None:
        self.report(
            SnapshotsSealed(
                at=self.clock.now(),
                node=self.node,
                snapshot=snapshot,
                world_size=world_size,
                ranks=tuple(gathered.sealed.values()),
                wish=gathered.wish,
                attempt=gathered.attempt,
            )
        )

    def missed(self, rank: Rank, message: ImageMissed) -> None:
        """A rank has no image of a step that others may have."""
        assert self._gathering is not None
        snapshot = _snapshot(message, self._gathering.round)
        self._gathering.miss(snapshot, message.attempt)
        self._report_missed(rank, snapshot, message.outcome, message.reason, message.attempt)

    def _give_up_hopeless(self) -> None:
        """What only some ranks have saved: nobody shall wait for it, and somebody has to know."""
        for one in self._gathering.hopeless() if self._gathering is not None else ():
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
        """A rank has ended. Do something once what it saved is sealed: its end must not overtake its
        save."""
        gathering = self._gathering

        def end() -> None:
            if well and gathering is not None:
                gathering.end(rank)
                self._give_up_hopeless()
            act()

        if rank not in self._sealing:
            end()
            return
        once = _Once(end)
        self._after_seals.setdefault(rank, []).append(once)
        limit_s = max(SEAL_FLOOR_S, SEAL_TIMES * self._longest_seal_s)
        asyncio.get_running_loop().call_later(limit_s, once)

    def look(self, round: RoundNumber, checkpointer: str, then: Callable[[], None]) -> None:
        """Tell the coordinator which checkpoints are on storage, then go on."""

        def looked(reply: AnyReply) -> None:
            if not isinstance(reply, Stored):
                reply = Stored(number=0, error=reply.error)
            refused = (f"storage: {reply.error}",) if reply.error else reply.refused
            self.report(
                StoredFound(
                    at=self.clock.now(),
                    node=self.node,
                    round=round,
                    checkpointer=checkpointer,
                    steps=reply.steps,
                    refused=refused,
                )
            )
            then()

        self.keeper.give(Look(number=0, checkpointer=checkpointer), looked)

    def locate(self, request: LocateImage, answer: Callable[[AnyAnswer], None]) -> None:
        """Say where a rank can read an image."""

        def found(reply: WhereFound) -> None:
            if reply.error or not isinstance(reply, WhereFound):
                answer(Denied(reason="image", detail=reply.error))
            elif reply.path:
                answer(ImageAt(path=reply.path))
            else:
                begin = self.keeper.begin
                answer(ImageAt(path="", token=begin.token, tls=begin.tls))

        self.keeper.give(Where(number=0, image=request.image), found)

    # ---- what the coordinator says ----

    def act(self, order: WriteShards | CommitCheckpoint | CheckpointSettled) -> None:
        if isinstance(order, CheckpointSettled):
            self._settle(order)
            return
        self._on_their_way[order.snapshot.checkpointer] = order.snapshot
        if any(_same(held, order) for held in self.keeper.open_orders()):
            return  # Told again after a broken stream; the answer is on its way.
        if isinstance(order, WriteShards):
            write = Write(
                number=0,
                snapshot=order.snapshot,
                ranks=order.ranks,
                world_size=order.world_size,
                alike=order.alike,
            )
            self.keeper.give(write, lambda reply: self._written(order, reply))
        else:
            self._commit(order)

    def _commit(self, order: CommitCheckpoint) -> None:
        """Once all of a large world's shards have been told."""
        told = self._shards.setdefault(order.snapshot, {})
        told |= {shard.rank: shard for shard in order.shards}
        if len(told) == order.world_size:
            del self._shards[order.snapshot]
            commit = Commit(
                number=0,
                snapshot=order.snapshot,
                world_size=order.world_size,
                shards=tuple(told[rank] for rank in sorted(told)),
            )
            self.keeper.give(commit, lambda reply: self._committed(order, reply))

    def _settle(self, order: CheckpointSettled) -> None:
        """It may be told again after a broken stream."""
        if self._on_their_way.get(order.snapshot.checkpointer) != order.snapshot:
            return
        del self._on_their_way[order.snapshot.checkpointer]
        self._shards.pop(order.snapshot, None)
        if order.error and self._has_rank_0():
            step = order.snapshot.step
            self.tell(f"step {step} is not on storage: {order.error}; training goes on")
        self._check_settled()

    def _has_rank_0(self) -> bool:
        return self._part is None or self._part.first_rank == 0

    def _written(self, order: WriteShards, reply: AnyReply) -> None:
        self.report(
            ShardsWritten(
                at=self.clock.now(),
                node=self.node,
                snapshot=order.snapshot,
                shards=reply.shards if isinstance(reply, ShardsDone) else (),
                error=reply.error,
                gone=isinstance(reply, ShardsDone) and reply.gone,
            )
        )

    def _committed(self, order: CommitCheckpoint, reply: AnyReply) -> None:
        at, node, snapshot = self.clock.now(), self.node, order.snapshot
        self.report(CheckpointWritten(at=at, node=node, snapshot=snapshot, error=reply.error))

    def when_settled(self, limit_s: float, act: Callable[[], None]) -> None:
        """Do something once nothing of this node is on its way to storage, or the time is up."""
        once = _Once(act)
        self._settled.append(once)
        if self._hurried:
            self._on_their_way.clear()
        if self._on_their_way:
            asyncio.get_running_loop().call_later(limit_s, once)
        self._check_settled()

    def hurry(self) -> None:
        """Somebody insists: nothing is waited for any more."""
        self._hurried = True
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

    def _hear(self, message: Received | Wrote) -> None:
        if isinstance(message, Received):
            images = (message.image,)
            self.report(ImagesHeld(at=self.clock.now(), node=self.node, images=images))
        else:
            self._tell_progress(message)

    def _tell_progress(self, wrote: Wrote) -> None:
        if self._settled:
            done, of = wrote.done_bytes / 1e9, wrote.of_bytes / 1e9
            self.tell(f"writing step {wrote.step}: {done:.2f} of {of:.2f} GB")

    def fail_writes(self, files: int) -> bool:
        """Somebody wants to see what happens when the disk is full; False when nobody writes."""
        if self.keeper.pid:
            self.keeper.give(FailWrites(number=0, files=files), lambda reply: None)
        return bool(self.keeper.pid)


def _snapshot(message: ImageWhole | ImageMissed, round: RoundNumber) -> SnapshotId:
    return SnapshotId(message.checkpointer, StepNumber(message.step), round)


def _same(held: AnyOrder, order: WriteShards | CommitCheckpoint) -> bool:
    if isinstance(order, WriteShards):
        return (
            isinstance(held, Write)
            and held.snapshot == order.snapshot
            and set(order.ranks) <= set(held.ranks)
        )
    return isinstance(held, Commit) and held.snapshot == order.snapshot


class _Once:
    """Something to be done at one of two moments, whichever comes first."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
