"""Checkpoints without `holdfast run`: the script has a keeper of its own, and ranks agree by a store.

The keeper is a child process. Images live as long as the script, so what is restored comes from
storage. Where torch.distributed is initialised, the ranks meet in its store: each says there what it
has sealed, written or loaded, waits for all the others to have said theirs, and comes to the same
conclusion as they do. Without it the script is a world of one.

Each save is carried through by a thread of its own; training does not wait for it.
"""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.checkpoint.restore.load import StoredState
from holdfast.checkpoint.tickets import SaveId
from holdfast.errors import CheckpointError, RequestTimeout
from holdfast.messages.actions import CommitCheckpoint, WriteShards
from holdfast.messages.checkpoints import (
    Holder,
    ImageId,
    Missed,
    SnapshotId,
    StoredStep,
    Tier,
    Tried,
    Wish,
)
from holdfast.messages.events import (
    CheckpointWritten,
    ShardsWritten,
    SnapshotMissed,
    StoredFound,
)
from holdfast.messages.keeper import (
    FindStored,
    FromKeeper,
    KeeperAction,
    KeeperOrder,
    KeeperReply,
    KeeperTerms,
    SealImage,
    completed,
)
from holdfast.messages.local import PACKET_BYTES, OpenCheckpointer
from holdfast.messages.requests import SaveSettled, StateFound
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.wire.packets import Joiner, packets_of

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)

_GONE = "the keeper died while it wrote, or before; see above, or `dmesg` for an out-of-memory kill"

LONG = timedelta(days=365)
"""A store wants a limit; a rank that dies takes the others' world with it in any case."""
PEERS_PATIENCE_S = 600.0
"""At the script's end, for what other ranks have to write; they may have died."""
PART_S = 30.0
LOOK_EVERY_S = 1.0
KEPT_SAVES = 1000

NODE = NodeId("script")
Outcome = Literal["saved", "skipped", "failed"]


class OwnKeeper:
    """A keeper that is this process's child."""

    def __init__(self, images: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "holdfast.checkpoint.keeper", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=2)
        theirs.close()
        node = NodeId("script")
        terms = KeeperTerms(
            node=node, images=str(images), token="", job="", listener_fd=None, own=True
        )
        ours.send(_encoder.encode(terms))
        self.pid = self._process.pid
        self.gone = False
        """It has died, or was closed; another one is needed."""
        self._control = ours
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, name="keeper", daemon=True).start()

    def ask(self, action: KeeperAction) -> Any:
        """Give an order and wait for its event; CheckpointError: the keeper is gone."""
        reply = completed(action, self._reply(action), Time(0.0))
        if reply.event is None and reply.error:
            raise CheckpointError(reply.error)
        return reply.event

    def _reply(self, action: KeeperAction) -> KeeperReply:
        answer: Future[KeeperReply] = Future()
        with self._lock:
            if self.gone:
                raise CheckpointError(_GONE)
            number, self._next = self._next, self._next + 1
            self._open[number] = answer
            try:
                for packet in packets_of(KeeperOrder(number, action)):
                    self._control.send(packet)
            except OSError:
                del self._open[number]
                raise CheckpointError(_GONE) from None
        return answer.result()

    def _read(self) -> None:
        joiner = Joiner()
        while packet := self._received():
            message = joiner.message(packet, _decoder.decode)
            if isinstance(message, KeeperReply):
                with self._lock:
                    answer = self._open.pop(message.number, None)
                if answer is not None:
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
        """End it; what it was doing is given up."""
        self._process.kill()
        self._process.wait()


class _Sealed(Struct):
    """What a rank says of its image of a step."""

    shared: bytes | None = None
    """The digest of what all ranks should have alike; None when there is no such image any more."""
    error: str = ""


@dataclass
class _Save:
    """A step that was saved, or was to be."""

    id: SaveId
    settled: dict[Tier, Future[SaveSettled]] = field(
        default_factory=lambda: {"memory": Future(), "storage": Future()}
    )

    @property
    def name(self) -> str:
        """What all ranks call it."""
        return f"save/{self.id.checkpointer}/{self.id.step}/{self.id.attempt}"

    def settle(self, to: Tier, outcome: Outcome, reason: str = "") -> None:
        if not self.settled[to].done():
            self.settled[to].set_result(SaveSettled(outcome=outcome, reason=reason))

    def settle_both(self, outcome: Outcome, reason: str) -> bool:
        """Whether anything of it was not settled yet."""
        open_ = not all(one.done() for one in self.settled.values())
        self.settle("memory", outcome, reason)
        self.settle("storage", outcome, reason)
        return open_


class AloneLink:
    """Everything that an agent and a coordinator would do, as far as one script can."""

    def __init__(self) -> None:
        self.rank, self.world_size = _position()
        self._meeting = _Meeting.of(self.rank, self.world_size)
        self._saves_meeting = self._meeting.another()
        """Its own, because whoever waits in one lets nobody else in."""
        self._home = ImageHome(f"script-{os.getpid()}")
        self.images = self._home.path
        self._keeper = OwnKeeper(self.images)
        self._lock = threading.Lock()
        self._saves: dict[SaveId, _Save] = {}
        self._threads: list[threading.Thread] = []
        self._finds = 0
        self._refused: tuple[str, ...] = ()
        self._last: dict[str, list[StoredStep]] = {}
        self.round = min(self._meeting.tell_all("round", int(time.time() * 1000)))
        # As atexit would, but also where this is a process of `multiprocessing`; and not in a fork.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def close(self) -> None:
        """At the script's end: finish what was begun."""
        until = time.monotonic() + PEERS_PATIENCE_S
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < until and not self._given_up():
                thread.join(min(LOOK_EVERY_S, max(0.0, until - time.monotonic())))
        if not any(thread.is_alive() for thread in self._threads):
            self._meeting.part(await_others=bool(self._saves))
        self._keeper.close()
        self._home.remove()

    # ---- saving ----

    def open(
        self, checkpointer: str, directory: str, keep: bytes, copies: list[threading.Event]
    ) -> None:
        self._keeper.ask(
            OpenCheckpointer(checkpointer=checkpointer, directory=directory, keep=keep)
        )

    def replaced(self, checkpointer: str, copies: list[threading.Event]) -> bool:
        return False  # Nobody else has these images.

    def saved(self, save: SaveId, path: Path, state: int, wish: Wish) -> None:
        begun = self._begun(save)
        self._go_on(lambda before: self._carry_through(begun, path, state, wish, before))

    def missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        begun = self._begun(save)
        begun.settle_both(outcome, reason)
        self._go_on(lambda before: self._tell_missed(begun, outcome, reason, before))

    def _begun(self, save: SaveId) -> _Save:
        with self._lock:
            self._saves[save] = _Save(save)
            while len(self._saves) > KEPT_SAVES:
                del self._saves[next(iter(self._saves))]
            return self._saves[save]

    def _go_on(self, act: Callable[[Callable[[], None]], None]) -> None:
        """Do it beside training; it is given a way to wait for what was begun before."""
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            before = self._threads[-1].join if self._threads else lambda: None
            thread = threading.Thread(target=act, args=(before,), name="save", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
                return
            except RuntimeError:  # The interpreter is about to exit, and starts no more threads.
                pass
        act(before)

    def _tell_missed(
        self, save: _Save, outcome: Missed, reason: str, before: Callable[[], None]
    ) -> None:
        with suppress(CheckpointError):
            mine = _Sealed(error=reason if outcome == "failed" else "")
            self._saves_meeting.tell(f"{save.name}/sealed", mine)
        before()

    def _carry_through(
        self, save: _Save, path: Path, state: int, wish: Wish, before: Callable[[], None]
    ) -> None:
        mine = self._seal(save, path, state, wish)
        before()  # One after the other, in the same order on all ranks.
        try:
            told = self._saves_meeting.tell_all(f"{save.name}/sealed", mine)
            self._take_further(save, [msgspec.convert(one, _Sealed) for one in told], wish)
        except CheckpointError as error:
            save.settle_both("failed", str(error))

    def _seal(self, save: _Save, path: Path, state: int, wish: Wish) -> _Sealed:
        image = ImageId(self._snapshot(save), Rank(self.rank), self.world_size)
        seal = SealImage(
            node=NODE, image=image, path=str(path), state=state, wish=wish, attempt=save.id.attempt
        )
        try:
            event = self._keeper.ask(seal)
        except CheckpointError as error:
            return _Sealed(error=str(error))
        if isinstance(event, SnapshotMissed):
            return _Sealed(error=event.reason if event.outcome == "failed" else "")
        return _Sealed(event.ranks[0].shared)

    def _snapshot(self, save: _Save) -> SnapshotId:
        round = RoundNumber(self.round)
        return SnapshotId(save.id.checkpointer, StepNumber(save.id.step), round)

    def _take_further(self, save: _Save, told: list[_Sealed], wish: Wish) -> None:
        failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(told) if one.error]
        if failed:
            save.settle_both("failed", failed[0])
        elif any(one.shared is None for one in told):
            save.settle_both("skipped", "a newer one took its place")
        else:
            save.settle("memory", "saved")
            if wish != "now":
                save.settle("storage", "skipped", "it was meant for memory")
            else:
                self._store(save, alike=len({one.shared for one in told}) == 1)

    def _store(self, save: _Save, alike: bool) -> None:
        outcome, reason = self._store_all(save.name, self._snapshot(save), alike)
        if outcome != "saved" and self.rank == 0:
            print(f"[holdfast] step {save.id.step} is not on storage: {reason}", file=sys.stderr)
        save.settle("storage", outcome, reason)

    def _store_all(self, name: str, snapshot: SnapshotId, alike: bool) -> tuple[Outcome, str]:
        """Write everything, on all ranks."""
        size = self.world_size
        write = WriteShards(
            node=NODE, snapshot=snapshot, ranks=(Rank(self.rank),), world_size=size, alike=alike
        )
        try:
            mine = self._keeper.ask(write)
        except CheckpointError as error:
            mine = ShardsWritten(at=Time(0.0), node=NODE, snapshot=snapshot, error=str(error))
        written = self._saves_meeting.tell_all(f"{name}/written", mine)
        all_done = [msgspec.convert(one, ShardsWritten) for one in written]
        failed = next((one for one in all_done if one.error), None)
        if failed is not None:
            return "skipped" if failed.gone else "failed", failed.error
        answer: CheckpointWritten | None = None
        if self.rank == 0:
            shards = tuple(one.shards[0] for one in all_done)
            commit = CommitCheckpoint(node=NODE, snapshot=snapshot, world_size=size, shards=shards)
            try:
                answer = self._keeper.ask(commit)
            except CheckpointError as why:
                answer = CheckpointWritten(
                    at=Time(0.0), node=NODE, snapshot=snapshot, error=str(why)
                )
        answers = self._saves_meeting.tell_all(f"{name}/committed", answer)
        committed = msgspec.convert(answers[0], CheckpointWritten)
        return "failed" if committed.error else "saved", committed.error

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled:
        with self._lock:
            begun = self._saves.get(save)
        if begun is None:
            raise CheckpointError(f"step {save.step} was saved too long ago; nobody remembers")
        until = time.monotonic() + (LONG.total_seconds() if timeout_s is None else timeout_s)
        while True:
            try:
                left_s = max(0.0, until - time.monotonic())
                return begun.settled[to].result(min(left_s, LOOK_EVERY_S))
            except NotYet:
                if time.monotonic() >= until:
                    raise RequestTimeout(f"step {save.step} is not saved to {to} yet") from None
                self._given_up()

    def _given_up(self) -> bool:
        """Whether a rank has left without having saved what others have: then nothing comes of it,
        nor of anything after it."""
        awaited = self._saves_meeting.awaited
        rank = self._meeting.gone(awaited) if awaited else None
        if rank is None:
            return False
        with self._lock:
            saves = list(self._saves.values())
        why = f"rank {rank} ended without it; all ranks have to save the same steps"
        lost = [save for save in saves if save.settle_both("failed", why)]
        if lost:
            what = f"step {lost[0].id.step} and what came after it were not saved"
            print(f"[holdfast] rank {self.rank}: {what}: {why}", file=sys.stderr, flush=True)
        return True

    # ---- restoring ----

    def find(self, checkpointer: str, step: int | None, tried: Tried | None) -> StateFound:
        self._finds += 1
        name = f"find/{self._finds}"
        if tried is None:
            self._refused = ()
            found: StoredFound | None = None
            if self.rank == 0:
                found = self._look(checkpointer)
            listed = msgspec.convert(self._meeting.tell_all(name, found)[0], StoredFound)
            self._refused = listed.refused
            steps = [one for one in listed.steps if step in (None, one.step)]
            self._last[checkpointer] = sorted(steps, key=lambda one: one.step, reverse=True)
        else:
            told = self._meeting.tell_all(name, tried)
            errors = [msgspec.convert(one, Tried).error for one in told]
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

    def _look(self, checkpointer: str) -> StoredFound:
        round = RoundNumber(self.round)
        look = FindStored(node=NODE, round=round, checkpointer=checkpointer)
        try:
            found: StoredFound = self._keeper.ask(look)
        except CheckpointError as error:
            refused = (str(error),)
            found = StoredFound(
                at=Time(0.0), node=NODE, round=round, checkpointer=checkpointer, refused=refused
            )
        return found

    def open_image(self, image: ImageId, holder: Holder, until: ExitStack) -> StoredState:
        raise CheckpointError("without `holdfast run` no image outlives its script")

    def booked(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, step: int) -> None:
        """Nobody counts steps here."""


# ---- the other ranks ----------------------------------------------------------------------------


def _position() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _Meeting:
    """Where the ranks tell each other things, under names on which they agree."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._store = store
        """None in a world of one."""
        self.awaited: list[str] = []
        """What somebody waits for here, of each rank."""
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size

    @classmethod
    def of(cls, rank: int, world_size: int) -> _Meeting:
        if world_size == 1:
            return cls(None, "", rank, world_size)
        import torch.distributed as dist

        store: Any = dist.distributed_c10d._get_default_store()
        # A script may have several checkpointers: this is every rank's first, or second, ...
        number = store.add(f"holdfast/links/{rank}", 1)
        return cls(store, f"holdfast/{number}", rank, world_size)

    def another(self) -> _Meeting:
        """The same, by another connection."""
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return _Meeting(store, self._prefix, self._rank, self._world_size)

    def tell(self, name: str, mine: Any) -> None:
        if self._store is not None:
            with _reached():
                self._store.set(self._key(name, self._rank), _encoder.encode(mine))

    def tell_all(self, name: str, mine: Any, limit: timedelta = LONG) -> list[Any]:
        """What every rank says under that name, in the order of ranks."""
        if self._store is None:
            return [mine]
        self.tell(name, mine)
        keys = [self._key(name, rank) for rank in range(self._world_size)]
        with _reached():
            self.awaited = keys
            self._store.wait(keys, limit)
            self.awaited = []
            return [msgspec.msgpack.decode(self._store.get(key)) for key in keys]

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def gone(self, keys: list[str]) -> int | None:
        """A rank that has left without having told what is awaited of it."""
        with _reached():
            for rank, key in enumerate(keys):
                if self._store.check([self._key("bye", rank)]) and not self._store.check([key]):
                    return rank
        return None

    def part(self, await_others: bool) -> None:
        """Say that nothing more is to come. Rank 0 may have the store: it must not go before the
        others have heard the last word."""
        with suppress(CheckpointError):
            if self._rank == 0 and await_others:
                self.tell_all("bye", None, timedelta(seconds=PART_S))
            else:
                self.tell("bye", None)


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"the other ranks cannot be reached: {error}") from error
