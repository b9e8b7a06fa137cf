"""The agent's side of snapshots: it carries orders to the keeper, and its answers to the coordinator.

    a worker's image is whole ──▶ Seal ──▶ all ranks of the node sealed ──▶ SnapshotsSealed
    WriteShards ──▶ Write ──▶ ShardsWritten          CommitCheckpoint ──▶ Commit ──▶ CheckpointWritten

The keeper is started when the first checkpointer is opened. If it dies, the next one is given every
order that was not answered, up to a few times for one and the same order: one that kills keepers is
answered with an error. Keepers that die one after the other are not started again before there is
something to do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.agent.mailbox import Mailbox
from holdfast.agent.processes import Exit, Process, ProcessTable, spawn
from holdfast.checkpoint.images import Images
from holdfast.clock import JobClock
from holdfast.messages.actions import CheckpointSettled, CommitCheckpoint, WriteShards
from holdfast.messages.checkpoints import Sealed, SnapshotId, Wish
from holdfast.messages.events import (
    AnyEvent,
    CheckpointWritten,
    ImagesHeld,
    ShardsWritten,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.keeping import (
    AnyOrder,
    AnyReply,
    Begin,
    BeginRound,
    Commit,
    Done,
    FailWrites,
    Fetch,
    FromKeeper,
    Got,
    ImageSealed,
    Look,
    Open,
    Received,
    Seal,
    ShardsDone,
    Stored,
    Write,
    Wrote,
)
from holdfast.messages.local import PACKET_BYTES, ImageWhole, OpenCheckpointer, Piece
from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer, Denied, Fetched, FetchImage
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber
from holdfast.packets import Joiner, packets_of
from holdfast.tls import TlsFiles

log = logging.getLogger("holdfast.agent")

TRIES = 3
"""So many keepers may die with one order."""
FEW_S, MANY = 60.0, 5
"""So many deaths in so short a time are too many."""
SEAL_TIMES, SEAL_FLOOR_S = 10.0, 30.0
"""A rank's end waits for its seal so many times as long as the longest took, or at least so long."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

Answering = Callable[[Any], None]


@dataclass
class _Order:
    order: AnyOrder
    answered: Answering
    tries: int = 0


@dataclass
class _Gathering:
    """A node's ranks on their way to having all the same snapshot."""

    wish: Wish
    world_size: int
    sealed: dict[Rank, Sealed] = field(default_factory=dict)


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
    _part: Part | None = None
    _checkpointers: dict[str, Open] = field(default_factory=dict)
    _orders: dict[int, _Order] = field(default_factory=dict)
    _next: int = 1
    _gathering: dict[tuple[SnapshotId, Wish], _Gathering] = field(default_factory=dict)
    """A step may be saved to memory, and again to storage before all ranks have sealed the first."""
    _sealing: dict[Rank, int] = field(default_factory=dict)
    """How many images of a rank are being sealed."""
    _longest_seal_s: float = 0.0
    _after_seals: dict[Rank, list[Callable[[], None]]] = field(default_factory=dict)
    _on_their_way: dict[str, SnapshotId] = field(default_factory=dict)
    """What goes to storage, until the coordinator says how it ended: one at a time of each
    checkpointer."""
    _settled: list[Callable[[], None]] = field(default_factory=list)
    _process: Process | None = None
    _control: socket.socket | None = None
    _mailbox: Mailbox | None = None
    _joiner: Joiner = field(default_factory=Joiner)
    _deaths: list[float] = field(default_factory=list)
    _closing: bool = False
    _hurried: bool = False

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
        self._gathering.clear()
        if self._process is not None:
            self._tell_round()
        for image, holder in part.fetch:
            order = Fetch(number=0, image=image, holder=holder, blocks=None)
            self._give(order, lambda reply: None)

    def _tell_round(self) -> None:
        part = self._part
        if part is not None:
            ranks = tuple(range(part.first_rank, part.first_rank + part.slots))
            order = BeginRound(number=0, ranks=ranks, copies=part.copies)
            self._give(order, lambda reply: None)

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
        if self._process is None:
            self._start()
        else:
            self._give(order, self._check_opened)

    def _check_opened(self, reply: AnyReply) -> None:
        if reply.error:
            self.tell(f"checkpoints cannot be kept: {reply.error}")

    def whole(self, rank: Rank, message: ImageWhole) -> None:
        """A rank's image is whole."""
        assert self._part is not None
        snapshot = SnapshotId(message.checkpointer, StepNumber(message.step), self._part.round)
        gathering = self._gathering.setdefault(
            (snapshot, message.wish), _Gathering(message.wish, self._part.world_size)
        )
        self._sealing[rank] = self._sealing.get(rank, 0) + 1
        order = Seal(number=0, path=message.path, state=message.state)
        began = time.monotonic()

        def sealed(reply: AnyReply) -> None:
            self._longest_seal_s = max(self._longest_seal_s, time.monotonic() - began)
            self._sealed(rank, snapshot, gathering, reply)

        self._give(order, sealed)

    def _sealed(
        self, rank: Rank, snapshot: SnapshotId, gathering: _Gathering, reply: AnyReply
    ) -> None:
        sealed = reply.sealed if isinstance(reply, ImageSealed) else None
        if sealed is not None:
            gathering.sealed[rank] = sealed
        else:
            log.debug("the image of rank %d was not sealed: %s", rank, reply.error)
        part = self._part
        if part is not None and len(gathering.sealed) == part.slots and sealed is not None:
            self._gathering.pop((snapshot, gathering.wish), None)
            self.report(
                SnapshotsSealed(
                    at=self.clock.now(),
                    node=self.node,
                    snapshot=snapshot,
                    world_size=gathering.world_size,
                    ranks=tuple(gathering.sealed.values()),
                    wish=gathering.wish,
                )
            )
        self._sealing[rank] -= 1
        if self._sealing[rank] == 0:
            del self._sealing[rank]
            for act in self._after_seals.pop(rank, []):
                act()

    def after_seals(self, rank: Rank, act: Callable[[], None]) -> None:
        """Do something once what the rank saved is sealed: its end must not overtake its save."""
        if rank not in self._sealing:
            act()
            return
        once = _Once(act)
        self._after_seals.setdefault(rank, []).append(once)
        limit_s = max(SEAL_FLOOR_S, SEAL_TIMES * self._longest_seal_s)
        asyncio.get_running_loop().call_later(limit_s, once)

    def look(self, round: RoundNumber, checkpointer: str, then: Callable[[], None]) -> None:
        """Tell the coordinator which checkpoints are on storage, then go on."""

        def looked(reply: Stored) -> None:
            steps = reply.steps if isinstance(reply, Stored) else ()
            self.report(
                StoredFound(
                    at=self.clock.now(),
                    node=self.node,
                    round=round,
                    checkpointer=checkpointer,
                    steps=steps,
                    error=reply.error,
                )
            )
            then()

        self._give(Look(number=0, checkpointer=checkpointer), looked)

    def fetch(self, request: FetchImage, answer: Callable[[AnyAnswer], None]) -> None:
        order = Fetch(number=0, image=request.image, holder=request.holder, blocks=request.blocks)

        def got(reply: Got) -> None:
            if reply.error or not isinstance(reply, Got):
                answer(Denied(reason="fetch", detail=reply.error))
            else:
                answer(Fetched(path=reply.path))

        self._give(order, got)

    # ---- what the coordinator says ----

    def act(self, order: WriteShards | CommitCheckpoint | CheckpointSettled) -> None:
        if isinstance(order, CheckpointSettled):
            self._settle(order)
            return
        self._on_their_way[order.snapshot.checkpointer] = order.snapshot
        if any(_same(held.order, order) for held in self._orders.values()):
            return  # Told again after a broken stream; the answer is on its way.
        if isinstance(order, WriteShards):
            write = Write(
                number=0,
                snapshot=order.snapshot,
                ranks=order.ranks,
                world_size=order.world_size,
                alike=order.alike,
            )
            self._give(write, lambda reply: self._written(order, reply))
        else:
            commit = Commit(
                number=0,
                snapshot=order.snapshot,
                world_size=order.world_size,
                shards=order.shards,
            )
            self._give(commit, lambda reply: self._committed(order, reply))

    def _settle(self, order: CheckpointSettled) -> None:
        """It may be told again after a broken stream."""
        if self._on_their_way.get(order.snapshot.checkpointer) != order.snapshot:
            return
        del self._on_their_way[order.snapshot.checkpointer]
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

    def _give(self, order: AnyOrder, answered: Answering) -> None:
        if self._process is None:
            self._start()
        numbered = msgspec.structs.replace(order, number=self._next)
        self._orders[self._next] = _Order(numbered, answered)
        self._next += 1
        self._send(numbered)

    def _send(self, order: AnyOrder) -> None:
        if self._mailbox is not None:
            self._mailbox.put(packets_of(order))

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.set_inheritable(True)
        command = [sys.executable, "-m", "holdfast.checkpoint.keeper", str(theirs.fileno())]
        fds = (theirs.fileno(), self.listener.fileno())
        pid = spawn(command, self.env, fds, (None, 2, None))
        theirs.close()
        begin = Begin(
            images=str(self.images),
            token=self.token,
            job=self.job,
            listener_fd=self.listener.fileno(),
            tls=(self.tls.cert, self.tls.key, self.tls.ca) if self.tls else None,
        )
        ours.send(_encoder.encode(begin))
        ours.setblocking(False)
        self._control, self._mailbox, self._joiner = ours, Mailbox(ours), Joiner()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._process = self.table.watch(pid)
        self._process.on_exit = self._exited
        for opened in self._checkpointers.values():
            self._give(opened, self._check_opened)
        self._tell_round()

    def _exited(self, end: Exit) -> None:
        self._read()  # What it had done, it has done.
        self._process = None
        self._stop_reading()
        if self._closing:
            return
        held, self._orders = self._orders, {}
        tries = 1 if self._too_often() else TRIES
        if tries > 1:
            log.warning("the keeper died (%s); another takes its place", end)
            self._start()
        for number, one in held.items():
            one.tries += 1
            if isinstance(one.order, Open | BeginRound):
                continue  # Whoever starts is told these first.
            if one.tries >= tries:
                one.answered(_lost(one.order, one.tries))
            else:
                self._orders[number] = one
                self._send(one.order)

    def _too_often(self) -> bool:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < FEW_S] + [now]
        if len(self._deaths) <= MANY:
            return False
        many = f"{len(self._deaths)} keepers died within a minute"
        self.tell(f"{many}; nothing is kept until the next save")
        return True

    def _read(self) -> None:
        while self._control is not None:
            try:
                packet = self._control.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._stop_reading()
                return
            message = _decoder.decode(packet)
            if isinstance(message, Piece):
                whole = self._joiner.add(message)
                if whole is None:
                    continue
                message = _decoder.decode(whole)
            self._hear(message)

    def _hear(self, message: FromKeeper) -> None:
        if isinstance(message, Received):
            images = (message.image,)
            self.report(ImagesHeld(at=self.clock.now(), node=self.node, images=images))
        elif isinstance(message, Wrote):
            self._tell_progress(message)
        elif not isinstance(message, Piece):
            held = self._orders.pop(message.number, None)
            if held is not None:
                held.answered(message)

    def _tell_progress(self, wrote: Wrote) -> None:
        if self._settled:
            done, of = wrote.done_bytes / 1e9, wrote.of_bytes / 1e9
            self.tell(f"writing step {wrote.step}: {done:.2f} of {of:.2f} GB")

    def _stop_reading(self) -> None:
        if self._control is not None:
            assert self._mailbox is not None
            self._mailbox.close()
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = self._mailbox = None

    # ---- faults that somebody asked for ----

    @property
    def pid(self) -> int:
        """The keeper's; 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def kill_keeper(self) -> bool:
        if self._process is not None:
            self._process.send(signal.SIGKILL)
        return self._process is not None

    def fail_writes(self, files: int) -> bool:
        if self._process is not None:
            self._give(FailWrites(number=0, files=files), lambda reply: None)
        return self._process is not None

    def close(self) -> None:
        """The node is done: its keeper ends."""
        self._closing = True
        self._stop_reading()
        if self._process is not None:
            self._process.send(signal.SIGKILL)


def _same(held: AnyOrder, order: WriteShards | CommitCheckpoint) -> bool:
    if isinstance(order, WriteShards):
        return (
            isinstance(held, Write)
            and held.snapshot == order.snapshot
            and set(order.ranks) <= set(held.ranks)
        )
    return isinstance(held, Commit) and held.snapshot == order.snapshot


def _lost(order: AnyOrder, deaths: int) -> AnyReply:
    many = f"{deaths} keepers" if deaths > 1 else "the keeper"
    return Done(number=order.number, error=f"{many} died of it")


class _Once:
    """Something to be done at one of two moments, whichever comes first."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
