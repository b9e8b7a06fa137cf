"""From memory to storage, beside training: what happens to a save after it was copied.

One thread carries: it has the keeper write this rank's part, tells the others, finishes the save if
all have told, and goes on to the next. Another listens for the verdict on each save and settles its
future. Both take the saves in the order of the calls, which is the same on all ranks; so futures are
settled in that order, and a failure anywhere is heard at once, however long others still write.

A keeper that dies fails the save that it was writing, and no other: the next one gets a new keeper.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.slots import Copy
from holdfast.checkpoint.standalone import NODE, OwnKeeper
from holdfast.checkpoint.state.capture import Position
from holdfast.checkpoint.storage import plain_directory as plain
from holdfast.checkpoint.store_meeting import Meeting, Part, Verdict, matter
from holdfast.errors import CheckpointError, HoldfastError, Refused
from holdfast.messages.actions import CommitCheckpoint, WriteShards
from holdfast.messages.checkpoints import ImageId, SnapshotId
from holdfast.messages.events import ShardsWritten, SnapshotMissed, SnapshotsSealed
from holdfast.messages.keeper import BeginRound, SealImage
from holdfast.messages.local import OpenCheckpointer
from holdfast.messages.units import Rank, RoundNumber, StepNumber

IMAGES: Final = 2
"""So many saves may be in memory at once; one more waits until the first of them is on storage."""
PATIENCE_S: Final = 30.0
PATIENCE_TIMES: Final = 10.0
"""At its end a script waits for other ranks that long, or so many times what its own part took."""
_END_S: Final = 10.0


@dataclass
class Save:
    """One save, from its copy to its verdict."""

    number: int
    at: str
    position: Position
    copy: Copy | Exception
    done: Future[str]
    attempt: int = 1
    sealed: SnapshotsSealed | None = None
    heard: SimpleQueue[Verdict] = field(default_factory=SimpleQueue)
    """From the thread that listens to the one that carries."""
    told: threading.Event = field(default_factory=threading.Event)
    """This rank has done its part, or knows that it will not."""
    took_s: float = 0.0

    def settle(self, error: str) -> None:
        with suppress(InvalidStateError):  # It is settled already, by whoever was first.
            if error:
                self.done.set_exception(CheckpointError(f"{self.at} was not saved: {error}"))
            else:
                self.done.set_result(self.at)


class Carrying:
    def __init__(self, meeting: Meeting, images: Path, checkpointer: str) -> None:
        self._meeting = meeting
        self._images = images
        self._checkpointer = checkpointer
        # Now, and not when it is first needed: an interpreter that is about to exit starts nothing.
        self._keeper: OwnKeeper | None = OwnKeeper(images)
        self._told_ranks = False
        self._alike = True
        """Whether the ranks are believed to share what they can share."""
        self._broken = ""
        self._last = 0
        self._room = threading.Semaphore(IMAGES)
        self._in_memory = 0
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._unsettled: list[Save] = []
        self._to_carry: SimpleQueue[Save | None] = SimpleQueue()
        self._to_hear: SimpleQueue[Save | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._carry_all, name="carry", daemon=True),
            threading.Thread(target=self._hear_all, name="hear", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the writer ----

    def await_room(self) -> None:
        """Return when there is memory for one more save."""
        self._room.acquire()
        with self._lock:
            self._in_memory += 1

    def take(self, save: Save) -> None:
        with self._lock:
            self._unsettled = [one for one in self._unsettled if not one.done.done()]
            self._unsettled.append(save)
            self._last = save.number
        self._to_carry.put(save)
        self._to_hear.put(save)

    @property
    def alone(self) -> bool:
        """Whether no save but the last is in memory, so that the other image is free."""
        return self._in_memory == 1

    def finish(self, for_ever: bool) -> None:
        """Wait until everything is saved; unless for ever, give up on ranks that seem to be gone."""
        for save in list(self._unsettled):
            save.told.wait()
            patience_s = max(PATIENCE_S, PATIENCE_TIMES * save.took_s)
            try:
                save.done.exception(None if for_ever else patience_s)
            except NotYet:
                self.give_up(f"rank {self._meeting.rank} waited {patience_s:.0f} s for the others")

    def give_up(self, why: str) -> None:
        """Have all that is not saved yet fail, on all ranks."""
        self._broken = self._broken or why
        for save in list(self._unsettled):
            if not save.done.done():
                with suppress(CheckpointError):
                    self._meeting.decide(matter(save.number, save.attempt), Verdict(error=why))
        self._end_keeper()
        for save in list(self._unsettled):
            with suppress(NotYet):
                save.done.exception(_END_S)
            save.settle(why)

    def close(self) -> None:
        """End, once every save is settled; what a keeper may still do is in vain."""
        self._end_keeper()
        self._to_carry.put(None)
        self._to_hear.put(None)
        for thread in self._threads:
            thread.join(_END_S)
        if not self._broken:
            with suppress(CheckpointError):
                self._meeting.leave(self._last)
        self._end_keeper()

    # ---- carrying ----

    def _carry_all(self) -> None:
        while (save := self._to_carry.get()) is not None:
            with self._fatal():
                self._carry(save)
            save.told.set()
            if self._keeper is not None and self._keeper.gone:
                self._let_go()
            with self._lock:
                self._in_memory -= 1
            self._room.release()

    def _carry(self, save: Save) -> None:
        while not self._broken:
            began = time.monotonic()
            self._attempt(save)
            save.took_s = time.monotonic() - began
            save.told.set()
            verdict = save.heard.get()
            if not verdict.again:
                break
        else:
            return
        self._meeting.forget(save.number, save.attempt)
        self._alike = verdict.alike if not verdict.error else self._alike
        if verdict.vain and not self._broken:
            with suppress(HoldfastError, OSError):  # It is in nobody's way.
                plain.discard(save.at, save.position.rank, save.position.round)

    def _attempt(self, save: Save) -> None:
        about = matter(save.number, save.attempt)
        alike = self._alike and save.attempt == 1
        try:
            part = self._write(save, alike)
        except (HoldfastError, OSError) as error:
            rank = f"rank {self._meeting.rank}: " if self._meeting.world_size > 1 else ""
            self._meeting.decide(about, Verdict(error=f"{rank}{error}", vain=True))
            return
        if save.heard.empty():  # Else it has failed elsewhere.
            parts = self._meeting.say(about, part)
            if parts is not None:
                self._meeting.decide(about, self._judged(save, alike, parts))

    def _write(self, save: Save, alike: bool) -> Part:
        """Have this rank's part written."""
        if isinstance(save.copy, Exception):
            raise CheckpointError(str(save.copy)) from save.copy
        failure = save.copy.done.exception()
        if failure is not None:
            raise CheckpointError(str(failure)) from failure
        keeper = self._living_keeper()
        rank, size = Rank(save.position.rank), save.position.world_size
        if save.sealed is None:
            seal = SealImage(
                node=NODE,
                image=ImageId(self._snapshot(save), rank, size),
                path=str(save.copy.path),
                state=save.copy.done.result(),
                wish="now",
            )
            event = keeper.ask(seal)
            if isinstance(event, SnapshotMissed):
                raise Refused(f"its image was lost: {event.reason}")
            save.sealed = event
        assert save.sealed is not None
        keeper.ask(
            OpenCheckpointer(
                checkpointer=self._checkpointer, directory=save.at, keep=b"", plain=True
            )
        )
        snapshot = self._snapshot(save)
        write = WriteShards(
            node=NODE, snapshot=snapshot, ranks=(rank,), world_size=size, alike=alike
        )
        done: ShardsWritten = keeper.ask(write)
        if done.error:
            raise CheckpointError(done.error)
        return Part(save.at, done.shards[0], save.sealed.ranks[0].shared)

    def _judged(self, save: Save, alike: bool, parts: list[Part]) -> Verdict:
        """All parts are there: make a checkpoint of them, if they are parts of one."""
        same = len({part.shared for part in parts}) == 1
        if alike and not same:
            return Verdict(again=True, alike=False)
        order = CommitCheckpoint(
            node=NODE,
            snapshot=self._snapshot(save),
            world_size=save.position.world_size,
            shards=tuple(part.shard for part in parts),
        )
        try:
            error = self._living_keeper().ask(order).error
        except CheckpointError as died:
            error = str(died)
        places = sorted({part.at for part in parts})
        if error and len(places) > 1:  # They may be one all the same, mounted here and there.
            error += f" (the ranks gave different paths: {' and '.join(places[:2])})"
        return Verdict(error=error, alike=same)

    def _snapshot(self, save: Save) -> SnapshotId:
        position = save.position
        step, round = StepNumber(position.step), RoundNumber(position.round)
        return SnapshotId(self._checkpointer, step, round)

    # ---- the keeper ----

    def _living_keeper(self) -> OwnKeeper:
        with self._starting:
            if self._broken:
                raise CheckpointError(self._broken)
            if self._keeper is None or self._keeper.gone:
                self._let_go()
                self._keeper = OwnKeeper(self._images)
                self._told_ranks = False
            if not self._told_ranks:
                ranks = (Rank(self._meeting.rank),)
                self._keeper.ask(BeginRound(ranks=ranks))
                self._told_ranks = True
            return self._keeper

    @property
    def keeper_pid(self) -> int | None:
        return None if self._keeper is None else self._keeper.pid

    def _let_go(self) -> None:
        """A keeper that died could not let go of the images that it read."""
        for path in self._images.glob("*.image"):
            with suppress(Refused):
                image = Image.open(path)
                image.unpin()
                image.close()

    def _end_keeper(self) -> None:
        with self._starting:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    # ---- listening ----

    def _hear_all(self) -> None:
        while (save := self._to_hear.get()) is not None:
            with self._fatal():
                self._hear(save)

    def _hear(self, save: Save) -> None:
        while not self._broken:
            verdict = self._meeting.hear(matter(save.number, save.attempt))
            if not verdict.again:
                break
            save.attempt += 1
            save.heard.put(verdict)
        else:
            return
        if verdict.error and self._meeting.rank == 0:
            print(f"[holdfast] {save.at} was not saved: {verdict.error}", file=sys.stderr)
        save.settle(verdict.error)
        save.heard.put(verdict)

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Nothing can be saved any more once the ranks cannot agree; nobody shall wait for it."""
        try:
            yield
        except Exception as error:
            # The edge of a thread: whatever it was, each future says it.
            self._broken = self._broken or str(error) or type(error).__name__
        if self._broken:
            for save in list(self._unsettled):
                save.settle(self._broken)
                save.heard.put(Verdict(error=self._broken))
