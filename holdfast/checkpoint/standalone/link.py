"""Connects a rank that has no agent with its keeper and with the driver.

What a rank saves is sealed by its keeper, one image after the other, so that all ranks report their
saves in the same order. From then on the rank only carries out the actions that it is sent, reports the
events that come of them, and learns how each save ended. Training waits for none of this.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch.distributed as dist

from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.checkpoint.memory.slots import Copy
from holdfast.checkpoint.restore.stored import StoredState
from holdfast.checkpoint.standalone.driver import CommitDriver, node_of
from holdfast.checkpoint.standalone.keeper_client import END_S, ScriptKeeper
from holdfast.checkpoint.standalone.store_meeting import (
    Post,
    RankAction,
    RankEvent,
    SaveEnded,
    StoreMeeting,
)
from holdfast.checkpoint.tickets import SaveId
from holdfast.clock import machine_time
from holdfast.errors import CheckpointError, RequestTimeout, UsageError
from holdfast.messages.actions import Answered, CloseJob, CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import (
    Holder,
    ImageId,
    Missed,
    SnapshotId,
    Tier,
    Tried,
    Wish,
)
from holdfast.messages.events import (
    Asked,
    CheckpointWritten,
    NodeLeaving,
    NodeLeft,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.keeper import DiscardRankFiles, FindStored, KeeperReply, SealImage
from holdfast.messages.local import OpenCheckpointer
from holdfast.messages.requests import FindState, SaveSettled, StateFound
from holdfast.messages.units import Rank, RoundNumber, StepNumber

PEERS_PATIENCE_S: Final = 600.0
PATIENCE_TIMES: Final = 10.0
"""At its end a script waits for other ranks for that long, or for that many times as long as its own
part took; they may have died."""
_KEPT_SAVES: Final = 1000

_CLOSED = "the script has ended"


@dataclass
class SaveProgress:
    """One save of this rank."""

    snapshot: SnapshotId
    attempt: int
    directory: str = ""
    """Where it goes, if it is a checkpoint of its own directory."""
    settled: dict[Tier, Future[SaveSettled]] = field(
        default_factory=lambda: {"memory": Future(), "storage": Future()}
    )
    idle: threading.Event = field(default_factory=threading.Event)
    """Set while this rank itself has nothing to do for it."""
    began: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    """How long this rank's own part took, so far."""
    tasks: int = 1
    """What this rank has to do now; the first is to seal its image."""
    over: Future[None] = field(default_factory=Future)
    """Done when all is settled, and this rank's keeper has no more to do for it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_task(self) -> None:
        with self._lock:
            self.tasks += 1
            self.idle.clear()

    def end_task(self) -> None:
        with self._lock:
            self.tasks -= 1
            self.took_s = time.monotonic() - self.began
            if self.tasks <= 0:
                self.idle.set()
        self._check_over()

    def fail(self, why: str) -> None:
        """Settle what is not settled, and stop waiting for this rank's own tasks."""
        self.idle.set()
        for tier in self.settled:
            self.settle(tier, SaveSettled(outcome="failed", reason=why))

    def settle(self, to: Tier, settled: SaveSettled) -> None:
        with suppress(InvalidStateError):  # It is settled already.
            self.settled[to].set_result(settled)
        self._check_over()

    def _check_over(self) -> None:
        if self.idle.is_set() and all(one.done() for one in self.settled.values()):
            with suppress(InvalidStateError):
                self.over.set_result(None)


class ScriptLink:
    """Stands in for the agent and the coordinator of a script that has none."""

    def __init__(self, meeting: StoreMeeting, complain: Callable[[str], None] | None) -> None:
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.round = meeting.began_us // 1000
        self._node = node_of(self.rank)
        self._meeting = meeting
        chosen = os.environ.get("HOLDFAST_IMAGE_DIR")
        self._home = ImageHome(f"script-{os.getpid()}", Path(chosen) if chosen else None)
        self.images = self._home.path
        self._keeper = ScriptKeeper(self._node, Rank(self.rank), self.images)
        self._driver = CommitDriver(meeting, complain) if self.rank == 0 else None
        self._lock = threading.Lock()
        self._broken = ""
        """Why nothing can be saved any more."""
        self._saves: dict[tuple[SnapshotId, int], SaveProgress] = {}
        self._seals: deque[SealImage] = deque()
        """The first of them is with the keeper."""
        self._sealed = threading.Condition(self._lock)
        """Notified when all images are sealed."""
        self._finding: Future[StateFound] | None = None
        self._last_call: multiprocessing.util.Finalize | None = None
        """Closes the link when the script ends."""
        self._listener = threading.Thread(target=self._listen, name="listen", daemon=True)
        self._listener.start()

    @classmethod
    def of_script(cls, checkpointer: str) -> ScriptLink:
        """Make a link for the Checkpointer of that name, that ends with the script."""
        # A script may have several checkpointers, some of them on some ranks only: each meets its own.
        store, rank, world_size = _script_world()
        meeting = StoreMeeting(store, f"links/{checkpointer}", rank, world_size)
        link = cls(meeting, _complain)
        # Like atexit, but also in a process of `multiprocessing`, and never in a fork.
        link._last_call = multiprocessing.util.Finalize(None, link.close, exitpriority=0)
        return link

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    # ---- the end ----

    def close(self, patience_s: float | None = PEERS_PATIENCE_S, at_exit: bool = True) -> None:
        """Finish what was begun, or give it up when other ranks seem to be gone; then leave."""
        self.finish(patience_s)
        self._keeper.close(_CLOSED)
        left = NodeLeft(at=machine_time(), node=self._node, round=RoundNumber(self.round))
        with suppress(CheckpointError):
            self._meeting.post(Post((left,)))
        self._listener.join(END_S)
        if self._driver is not None:
            if at_exit or self.world_size == 1:
                self._driver.linger()
            else:
                multiprocessing.util.Finalize(None, self._driver.linger, exitpriority=0)
        self._home.remove()

    def end(self) -> None:
        """Close the link of a Checkpointer before the script ends."""
        if self._last_call is not None:
            self._last_call.cancel()
        self.close(at_exit=False)

    def finish(self, patience_s: float | None) -> None:
        """Wait until every save is settled; None: however long other ranks take."""
        for save in list(self._saves.values()):
            while not save.over.done():
                save.idle.wait()
                limit_s, why = self._patience(patience_s, save)
                try:
                    save.over.result(limit_s)
                except NotYet:
                    if save.idle.is_set():
                        _complain(f"step {save.snapshot.step} is not saved: {why}")
                        self.abandon(why)

    def _patience(self, patience_s: float | None, save: SaveProgress) -> tuple[float | None, str]:
        """Return how long the others are waited for, and what it means if they do not come."""
        if patience_s is None:
            return None, ""
        try:
            absent = self._meeting.absent()
        except CheckpointError as error:
            return END_S, str(error)
        if absent:
            return END_S, f"rank {absent[0]} has made no such Checkpointer; all ranks have to"
        limit_s = max(patience_s, PATIENCE_TIMES * save.took_s)
        return limit_s, f"rank {self.rank} waited {limit_s:.0f} s for the others"

    def abandon(self, why: str) -> None:
        """Have everything that is not settled yet fail, on all ranks."""
        self._post(NodeLeaving(at=machine_time(), node=self._node, reason=why, code=1))
        self._keeper.close(why)
        until = time.monotonic() + END_S
        for save in list(self._saves.values()):
            for one in save.settled.values():
                with suppress(NotYet):
                    one.result(max(0.0, until - time.monotonic()))
        self._break(why)

    def _break(self, why: str) -> None:
        """Fail everything, now and from now on: the ranks can no longer agree."""
        with self._lock:
            self._broken = self._broken or why
            saves, finding = list(self._saves.values()), self._finding
            self._seals.clear()
            self._sealed.notify_all()
        for save in saves:
            save.fail(why)
        if finding is not None:
            with suppress(InvalidStateError):
                finding.set_exception(CheckpointError(why))

    # ---- saving ----

    def open(self, checkpointer: str, directory: str, keep: bytes, copies: list[Copy]) -> None:
        opening = OpenCheckpointer(checkpointer=checkpointer, directory=directory, keep=keep)
        error = self._keeper.ask(opening).error
        if error:
            raise CheckpointError(error)

    def replaced(self, checkpointer: str, copies: list[Copy]) -> bool:
        return False  # Nobody else has these images.

    def saved(self, save: SaveId, path: Path, state: int, wish: Wish) -> None:
        begun = self.begin(self._snapshot(save), save.attempt)
        self.seal(begun, path, state, wish)

    def missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        self.miss(self.begin(self._snapshot(save), save.attempt), outcome, reason)

    def _snapshot(self, save: SaveId) -> SnapshotId:
        return SnapshotId(save.checkpointer, StepNumber(save.step), RoundNumber(self.round))

    def begin(self, snapshot: SnapshotId, attempt: int, directory: str = "") -> SaveProgress:
        """Note a save, whose image is to be sealed or missed after that."""
        save = SaveProgress(snapshot, attempt, directory)
        with self._lock:
            self._saves[snapshot, attempt] = save
            if len(self._saves) > _KEPT_SAVES:
                oldest = next(iter(self._saves))
                if self._saves[oldest].over.done():
                    del self._saves[oldest]
        return save

    def seal(self, save: SaveProgress, path: Path, state: int, wish: Wish) -> None:
        """Have an image sealed that is whole; after that the driver decides what becomes of it."""
        if wish != "now":
            skipped = SaveSettled(outcome="skipped", reason="it was meant for memory")
            save.settle("storage", skipped)
        seal = SealImage(
            node=self._node,
            image=ImageId(save.snapshot, Rank(self.rank), self.world_size),
            path=str(path),
            state=state,
            wish=wish,
            attempt=save.attempt,
        )
        with self._lock:
            if not self._broken:
                self._seals.append(seal)
            first = len(self._seals) == 1
        if self._broken:
            save.fail(self._broken)
        elif first:
            self._keeper.give(seal, self._seal_answered)

    def _seal_answered(self, reply: KeeperReply) -> None:
        event = reply.event
        assert isinstance(event, SnapshotsSealed | SnapshotMissed)
        save = self._saves[event.snapshot, event.attempt]
        self._post(event, directory=save.directory)
        save.end_task()
        with self._lock:
            if self._seals:
                self._seals.popleft()
            following = self._seals[0] if self._seals else None
            if following is None:
                self._sealed.notify_all()
        if following is not None:
            self._keeper.give(following, self._seal_answered)

    def expect(self, save: SaveProgress, limit_s: float) -> None:
        """Give a save up if this rank has done its part and the others take longer than that."""

        def watch() -> None:
            save.idle.wait()
            try:
                save.settled["memory"].result(limit_s)
            except NotYet:
                why = f"waited {limit_s:.3g} s for the others; all ranks have to save the same"
                self._post(self._missed(save, "skipped", why))

        threading.Thread(target=watch, name="patience", daemon=True).start()

    def miss(self, save: SaveProgress, outcome: Missed, reason: str) -> None:
        """Report that this rank has no image of a save."""
        save.end_task()
        self._post(self._missed(save, outcome, reason))

    def _missed(self, save: SaveProgress, outcome: Missed, reason: str) -> SnapshotMissed:
        return SnapshotMissed(
            at=machine_time(),
            node=self._node,
            rank=Rank(self.rank),
            snapshot=save.snapshot,
            outcome=outcome,
            reason=reason,
            attempt=save.attempt,
        )

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled:
        known = self._saves.get((self._snapshot(save), save.attempt))
        if known is None:
            raise CheckpointError(f"step {save.step} was saved too long ago; its result is lost")
        try:
            return known.settled[to].result(timeout_s)
        except NotYet:
            raise RequestTimeout(f"step {save.step} is not saved to {to} yet") from None

    # ---- restoring ----

    def find(
        self, checkpointer: str, step: int | None, tried: Tried | None, all_ranks: bool
    ) -> StateFound:
        with self._lock:
            # What was saved before is reported before: all ranks may forget it with what they load.
            self._sealed.wait_for(lambda: not self._seals)
        events: list[RankEvent] = []
        round = RoundNumber(self.round)
        if tried is None and self.rank == 0:
            look = FindStored(node=self._node, round=round, checkpointer=checkpointer)
            found = self._keeper.ask(look).event
            assert isinstance(found, StoredFound)
            events.append(found)
        finding = self._finding = Future[StateFound]()
        asked = Asked(
            at=machine_time(),
            node=self._node,
            round=round,
            rank=Rank(self.rank),
            channel=0,
            number=1,
            request=FindState(
                checkpointer=checkpointer, step=step, tried=tried, all_ranks=all_ranks
            ),
        )
        self._post(*events, asked)
        return finding.result()

    def open_image(
        self, image: ImageId, holders: Sequence[Holder], until: ExitStack
    ) -> StoredState:
        raise CheckpointError("without `holdfast run` no image outlives its script")

    def booked(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, step: int) -> None:
        """Do nothing: without a coordinator steps are not counted."""

    # ---- the driver ----

    def _post(self, *events: RankEvent, directory: str = "") -> None:
        try:
            if not self._broken:
                self._meeting.post(Post(events, directory))
        except CheckpointError as error:
            self._break(str(error))
        if self._broken:
            self._break(self._broken)

    def _listen(self) -> None:
        try:
            while not self._closing(self._meeting.listen()):
                pass
        except Exception as error:
            # The edge of a thread: whatever it was, every save says it.
            self._break(str(error) or type(error).__name__)

    def _closing(self, actions: tuple[RankAction, ...]) -> bool:
        """Carry out actions; True when they were the last."""
        for action in actions:
            if isinstance(action, CloseJob):
                self._break(action.reason)
                return True
            if isinstance(action, Answered):
                assert isinstance(action.answer, StateFound)
                assert self._finding is not None
                self._finding.set_result(action.answer)
            elif isinstance(action, SaveEnded):
                save = self._saves.get((action.snapshot, action.attempt))
                if save is not None:
                    save.settle(action.to, action.settled)
            else:
                self._order(action)
        return False

    def _order(self, action: WriteRankFiles | CommitCheckpoint | DiscardRankFiles) -> None:
        with self._lock:
            newest_first = reversed(self._saves.values())
            save = next(one for one in newest_first if one.snapshot == action.snapshot)
        if save.directory:
            name, directory = action.snapshot.checkpointer, save.directory
            self._keeper.give(
                OpenCheckpointer(checkpointer=name, directory=directory, keep=b"", plain=True)
            )
        save.begin_task()
        self._keeper.give(action, partial(self._answered, save))

    def _answered(self, save: SaveProgress, reply: KeeperReply) -> None:
        event = reply.event
        if isinstance(event, RankFilesWritten | CheckpointWritten):
            if event.error and self.world_size > 1:
                event = msgspec.structs.replace(event, error=f"rank {self.rank}: {event.error}")
            self._post(event)
        save.end_task()


def _script_world() -> tuple[Any, int, int]:
    """Return a store that all ranks of the script share, this rank, and how many there are.

    A launcher says which rank this is before the script makes its process group. Then the ranks meet
    where the process group is going to meet; torch shares the server of that address in a process.
    """
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return dist.HashStore(), 0, 1
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"Checkpointer: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the ranks cannot meet:"
            f" {why}; make the checkpointer after torch.distributed.init_process_group()"
        ) from None
    return dist.PrefixStore("holdfast", store), rank, world_size


def _complain(text: str) -> None:
    print(f"[holdfast] {text}", file=sys.stderr, flush=True)
