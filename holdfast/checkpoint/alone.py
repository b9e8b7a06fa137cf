"""Checkpoints without `holdfast run`: the script has a keeper of its own, and ranks agree by a store.

The keeper is a child process. Images live as long as the script, so what is restored comes from
storage. Where torch.distributed is initialised, the ranks meet in its store: each says there what it
has sealed, written or loaded, waits for all the others to have said theirs, and comes to the same
conclusion as they do. Without it the script is a world of one.

Each save is carried through by a thread of its own; training does not wait for it.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from holdfast.errors import CheckpointError, RequestTimeout
from holdfast.imagehome import ImageHome
from holdfast.messages.checkpoints import (
    Holder,
    ImageId,
    Shard,
    SnapshotId,
    StoredStep,
    Tier,
    Tried,
    Wish,
)
from holdfast.messages.keeping import (
    AnyOrder,
    Begin,
    Commit,
    FromKeeper,
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
from holdfast.messages.local import PACKET_BYTES, Piece
from holdfast.messages.requests import SaveSettled, StateFound
from holdfast.messages.units import RoundNumber, StepNumber
from holdfast.packets import Joiner, packets_of

T = TypeVar("T", bound=Struct)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

_GONE = "the keeper died while it wrote, or before; see above, or `dmesg` for an out-of-memory kill"

LONG = timedelta(days=365)
"""A store wants a limit; a rank that dies takes the others' world with it in any case."""


class OwnKeeper:
    """A keeper that is this process's child."""

    def __init__(self, images: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "holdfast.checkpoint.keeper", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=2)
        theirs.close()
        begin = Begin(images=str(images), token="", job="", listener_fd=None)
        ours.send(_encoder.encode(begin))
        self.pid = self._process.pid
        self.gone = False
        """It has died, or was closed; another one is needed."""
        self._control = ours
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, name="keeper", daemon=True).start()

    def ask(self, order: AnyOrder) -> Any:
        """Give an order and wait for its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if self.gone:
                raise CheckpointError(_GONE)
            number, self._next = self._next, self._next + 1
            self._open[number] = answer
            try:
                for packet in packets_of(msgspec.structs.replace(order, number=number)):
                    self._control.send(packet)
            except OSError:
                raise CheckpointError(_GONE) from None
        return answer.result()

    def _read(self) -> None:
        joiner = Joiner()
        while packet := self._received():
            message = _decoder.decode(packet)
            if isinstance(message, Piece):
                whole = joiner.add(message)
                if whole is None:
                    continue
                message = _decoder.decode(whole)
            if not isinstance(message, Received | Wrote | Piece):
                with self._lock:
                    answer = self._open.pop(message.number)
                answer.set_result(message)
        with self._lock:
            self.gone = True
            unanswered = list(self._open.values())
            self._open.clear()
        for answer in unanswered:
            answer.set_exception(CheckpointError(_GONE))

    def _received(self) -> bytes:
        try:
            return self._control.recv(PACKET_BYTES)
        except OSError:
            return b""

    def close(self) -> None:
        """Have it end; what it was doing is given up."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait()


class AloneLink:
    """Everything that an agent and a coordinator would do, as far as one script can."""

    def __init__(self) -> None:
        self._store = _default_store()
        self.rank, self.world_size = _position()
        self._home = ImageHome(f"script-{os.getpid()}")
        self.images = self._home.path
        self._keeper = OwnKeeper(self.images)
        self._meetings = 0
        self._settled: dict[tuple[str, int, Tier], Future[SaveSettled]] = {}
        self._saving: list[threading.Thread] = []
        self._last: dict[str, list[StoredStep]] = {}
        self._lock = threading.Lock()
        self.round = self._agree("round", int(time.time() * 1000), min)
        atexit.register(self.close)

    def close(self) -> None:
        """At the script's end: finish what was begun."""
        for thread in self._saving:
            thread.join()
        self._keeper.close()
        self._home.remove()

    # ---- agreeing ----

    def _tell_all(self, name: str, mine: Any) -> list[Any]:
        """What every rank says under that name, in the order of ranks."""
        if self._store is None:
            return [mine]
        self._store.set(f"holdfast/{name}/{self.rank}", _encoder.encode(mine))
        keys = [f"holdfast/{name}/{rank}" for rank in range(self.world_size)]
        self._store.wait(keys, LONG)
        return [msgspec.msgpack.decode(self._store.get(key)) for key in keys]

    def _agree(self, name: str, mine: int, how: Callable[[list[int]], int]) -> int:
        return how(self._tell_all(name, mine))

    # ---- saving ----

    def open(self, checkpointer: str, directory: str, keep: bytes) -> None:
        order = Open(number=0, checkpointer=checkpointer, directory=directory, keep=keep)
        reply = self._keeper.ask(order)
        if reply.error:
            raise CheckpointError(reply.error)

    def saved(self, checkpointer: str, path: Path, state: int, step: int, wish: Wish) -> None:
        with self._lock:
            tiers: tuple[Tier, ...] = ("memory", "storage")
            for tier in tiers:
                self._settled[checkpointer, step, tier] = Future()
        before = self._saving[-1] if self._saving else None
        carry = threading.Thread(
            target=self._carry_through,
            args=(checkpointer, path, state, step, wish, before),
            name=f"save-{step}",
        )
        self._saving = [t for t in self._saving if t.is_alive()]
        self._saving.append(carry)
        carry.start()

    def _carry_through(
        self,
        checkpointer: str,
        path: Path,
        state: int,
        step: int,
        wish: Wish,
        before: threading.Thread | None,
    ) -> None:
        sealed: ImageSealed = self._keeper.ask(Seal(number=0, path=str(path), state=state))
        if before is not None:
            before.join()  # One after the other, in the same order on all ranks.
        self._meetings += 1
        name = f"{self.round}/{self._meetings}"
        shared = sealed.sealed.shared if sealed.sealed is not None else None
        digests = self._tell_all(f"{name}/sealed", shared)
        if None in digests:
            self._settle(checkpointer, step, "memory", "skipped", "a newer one took its place")
            self._settle(checkpointer, step, "storage", "skipped", "a newer one took its place")
            return
        self._settle(checkpointer, step, "memory", "saved", "")
        if wish != "now":
            self._settle(checkpointer, step, "storage", "skipped", "it was meant for memory")
            return
        snapshot = SnapshotId(checkpointer, StepNumber(step), RoundNumber(self.round))
        error = self._store_all(name, snapshot, alike=len(set(digests)) == 1)
        self._settle(checkpointer, step, "storage", "failed" if error else "saved", error)
        if error and self.rank == 0:
            print(f"[holdfast] step {step} is not on storage: {error}", file=sys.stderr)

    def _store_all(self, name: str, snapshot: SnapshotId, alike: bool) -> str:
        """Write everything, on all ranks; why not, if not."""
        order = Write(
            number=0,
            snapshot=snapshot,
            ranks=(self.rank,),
            world_size=self.world_size,
            alike=alike,
        )
        done: ShardsDone = self._keeper.ask(order)
        written = self._tell_all(f"{name}/written", done)
        all_done = [msgspec.convert(one, ShardsDone) for one in written]
        error = next((one.error for one in all_done if one.error), "")
        if error:
            return error
        answer = ""
        if self.rank == 0:
            shards: tuple[Shard, ...] = tuple(one.shards[0] for one in all_done)
            commit = Commit(number=0, snapshot=snapshot, world_size=self.world_size, shards=shards)
            answer = self._keeper.ask(commit).error
        return str(self._tell_all(f"{name}/committed", answer)[0])

    def _settle(self, checkpointer: str, step: int, to: Tier, outcome: Any, reason: str) -> None:
        with self._lock:
            settled = self._settled[checkpointer, step, to]
        settled.set_result(SaveSettled(outcome=outcome, reason=reason))

    def wait(self, checkpointer: str, step: int, to: Tier, timeout_s: float | None) -> SaveSettled:
        with self._lock:
            settled = self._settled[checkpointer, step, to]
        try:
            return settled.result(timeout_s)
        except TimeoutError:
            raise RequestTimeout(f"step {step} is not saved to {to} yet") from None

    # ---- restoring ----

    def find(self, checkpointer: str, step: int | None, tried: Tried | None) -> StateFound:
        self._meetings += 1
        name = f"{self.round}/{self._meetings}/find"
        if tried is None:
            self._refused: tuple[str, ...] = ()
            found: Stored | None = None
            if self.rank == 0:
                found = self._keeper.ask(Look(number=0, checkpointer=checkpointer))
            first = self._tell_all(name, found)[0]
            listed = msgspec.convert(first, Stored)
            if listed.error:
                return StateFound(where="nowhere", refused=(listed.error,))
            steps = [one for one in listed.steps if step in (None, one.step)]
            self._last[checkpointer] = sorted(steps, key=lambda one: one.step, reverse=True)
        else:
            errors = [msgspec.convert(one, Tried).error for one in self._tell_all(name, tried)]
            if not any(errors):
                return StateFound(where="loaded")
            rank, why = next((r, e) for r, e in enumerate(errors) if e)
            gone = self._last[checkpointer].pop(0)
            self._refused += (f"step {gone.step} from storage: rank {rank}: {why}",)
        left = self._last[checkpointer]
        if not left:
            return StateFound(where="nowhere", refused=self._refused)
        return StateFound(
            where="storage",
            step=left[0].step,
            round=left[0].round,
            world_size=left[0].world_size,
            refused=self._refused,
        )

    def fetch(self, image: ImageId, holder: Holder) -> Path:
        raise CheckpointError("without `holdfast run` there are no images to fetch")

    def booked(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, step: int) -> None:
        """Nobody counts steps here."""


def _position() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _default_store() -> Any:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()
