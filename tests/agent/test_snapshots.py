"""The agent's side of snapshots: orders to a keeper that may die, and word to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import pytest

from holdfast.agent import keeper_process as keeperprocess
from holdfast.agent import snapshots as module
from holdfast.agent.processes import Exit, ProcessTable
from holdfast.agent.snapshots import Snapshots
from holdfast.clock import JobClock
from holdfast.messages.actions import CheckpointSettled, CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import (
    Holder,
    ImageId,
    Sealed,
    SnapshotId,
    StoredFile,
    StoredStep,
    Wish,
)
from holdfast.messages.events import (
    AnyEvent,
    CheckpointWritten,
    ImagesHeld,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.keeper import (
    BeginRound,
    FetchImage,
    FindStored,
    KeeperAction,
    KeeperEvent,
    KeeperOrder,
    KeeperReply,
    KeeperTerms,
    SealImage,
    ToKeeper,
    missed_by,
)
from holdfast.messages.local import PACKET_BYTES, ImageMissed, ImageWhole, OpenCheckpointer, Piece
from holdfast.messages.records import Part
from holdfast.messages.requests import Denied, ImageAt, LocateImage
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.wire.packets import Joiner, packets_of

T = TypeVar("T")
LIMIT_S = 60.0
C = "c"
SNAPSHOT = SnapshotId(C, StepNumber(7), RoundNumber(1))


def shard(rank: int) -> StoredFile:
    return StoredFile(Rank(rank), f"__{rank}", 10, "t", "c")


SHARD = shard(0)


class Given(NamedTuple, Generic[T]):
    number: int
    action: T


class FakeKeeper:
    """The test is the keeper; its process is one that only sleeps, and can be killed."""

    def __init__(self, control: socket.socket) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        self.process.returncode = 0  # The table waits for it.
        self.control = control
        self.control.setblocking(False)
        self.told: list[KeeperAction] = []
        self._joiner = Joiner(None)

    async def packet(self) -> bytes:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.sock_recv(self.control, PACKET_BYTES), LIMIT_S)

    async def begin(self) -> KeeperTerms:
        return msgspec.msgpack.decode(await self.packet(), type=KeeperTerms)

    async def next(self, kind: type[T]) -> Given[T]:
        """The next order to do a thing of that kind."""
        while True:
            order: Any = msgspec.msgpack.decode(await self.packet(), type=ToKeeper)
            if isinstance(order, Piece):
                whole = self._joiner.add(order)
                if whole is None:
                    continue
                order = msgspec.msgpack.decode(whole, type=KeeperOrder)
            self.told.append(order.action)
            if isinstance(order.action, kind):
                return Given(order.number, order.action)

    def say(self, number: int, event: KeeperEvent | ImageAt | None = None, error: str = "") -> None:
        for packet in packets_of(KeeperReply(number, event, error)):
            self.control.send(packet)

    def seal(self, given: Given[SealImage]) -> None:
        seal = given.action
        sealed = SnapshotsSealed(
            at=Time(1.0),
            node=seal.node,
            snapshot=seal.image.snapshot,
            world_size=seal.image.world_size,
            ranks=(Sealed(seal.image.rank, b"s"),),
            wish=seal.wish,
            attempt=seal.attempt,
        )
        self.say(given.number, sealed)

    def wrote(self, given: Given[WriteRankFiles], **how: Any) -> None:
        snapshot = given.action.snapshot
        self.say(
            given.number, RankFilesWritten(at=Time(1.0), node=NodeId("n"), snapshot=snapshot, **how)
        )

    def die(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            self.die()
            os.waitpid(self.process.pid, 0)


class Stage:
    """The snapshots of a node without an agent around them."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: list[Any] = []
        self.said: list[str] = []
        self.keepers: list[FakeKeeper] = []
        self._changed = asyncio.Event()
        monkeypatch.setattr(keeperprocess, "spawn", self._spawn)
        self.snapshots = Snapshots(
            node=NodeId("n"),
            images=images,
            job="job",
            token="token",
            tls=None,
            listener=socket.create_server(("127.0.0.1", 0)),
            table=ProcessTable(),
            clock=JobClock(),
            report=self._report,
            tell=self._tell,
            env={},
        )

    def _spawn(self, command: list[str], env: object, fds: tuple[int, ...], stdio: object) -> int:
        self.keepers.append(FakeKeeper(socket.socket(fileno=os.dup(fds[0]))))
        self._changed.set()
        return self.keepers[-1].process.pid

    def _report(self, event: AnyEvent) -> None:
        self.reports.append(event)
        self._changed.set()

    def _tell(self, text: str) -> None:
        self.said.append(text)
        self._changed.set()

    async def until(self, found: Callable[[], T]) -> T:
        """The first true answer."""
        while not (answer := found()):
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), LIMIT_S)
        return answer

    async def reported(self, kind: type[T], count: int = 1) -> list[T]:
        def found() -> list[T]:
            some = [event for event in self.reports if isinstance(event, kind)]
            return some if len(some) >= count else []

        return await self.until(found)

    async def keeper(self, number: int = 1) -> FakeKeeper:
        """The keeper of that number, which has just been started."""
        found = await self.until(lambda: self.keepers[number - 1 :])
        await found[0].begin()
        return found[0]

    async def open(self, slots: int = 2) -> FakeKeeper:
        """A round in which a script has a checkpointer."""
        self.snapshots.begin_round(part(slots))
        self.snapshots.opened(OpenCheckpointer(checkpointer=C, directory="/d", keep=b""))
        keeper = await self.keeper()
        assert (await keeper.next(OpenCheckpointer)).action.directory == "/d"
        assert (await keeper.next(BeginRound)).action.ranks == tuple(range(slots))
        return keeper

    def whole(
        self, rank: int, step: int = 7, wish: Wish = "now", state: int = 2, attempt: int = 1
    ) -> None:
        self.snapshots.whole(
            Rank(rank),
            ImageWhole(
                checkpointer=C,
                path=f"/i{rank}",
                state=state,
                step=step,
                wish=wish,
                attempt=attempt,
            ),
        )

    async def seal(self, keeper: FakeKeeper, rank: int, step: int, wish: Wish = "now") -> None:
        self.whole(rank, step, wish)
        keeper.seal(await keeper.next(SealImage))
        sealed = asyncio.Event()
        self.snapshots.ended(Rank(rank), False, sealed.set)
        await asyncio.wait_for(sealed.wait(), LIMIT_S)

    async def seal_all(self, keeper: FakeKeeper, step: int) -> None:
        for rank in (0, 1):
            await self.seal(keeper, rank, step)

    def close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        self.snapshots.keeper.close()
        for keeper in self.keepers:
            keeper.close()
        self.snapshots.listener.close()


def part(slots: int, round: int = 1) -> Part:
    return Part(
        round=RoundNumber(round),
        first_rank=Rank(0),
        slots=slots,
        group_rank=0,
        group_world_size=1,
        world_size=slots,
        first_role_rank=0,
        role_size=slots,
        store_address="",
        store_port=0,
        restarts=0,
        max_restarts=0,
    )


def write_shards(
    ranks: tuple[int, ...] = (0, 1), snapshot: SnapshotId = SNAPSHOT
) -> WriteRankFiles:
    return WriteRankFiles(
        node=NodeId("n"),
        snapshot=snapshot,
        ranks=tuple(map(Rank, ranks)),
        world_size=2,
        alike=True,
    )


def settled(error: str = "", snapshot: SnapshotId = SNAPSHOT) -> CheckpointSettled:
    return CheckpointSettled(node=NodeId("n"), snapshot=snapshot, error=error)


Play = Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def run(scene: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
        async def scenario() -> None:
            stage = Stage(tmp_path, monkeypatch)
            try:
                await scene(stage)
            finally:
                stage.close()

        asyncio.run(asyncio.wait_for(scenario(), 3 * LIMIT_S))

    return run


# ---- sealing ------------------------------------------------------------------------------------


def test_a_snapshot_is_told_of_once_all_ranks_of_the_node_are_sealed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.whole(0)
        stage.whole(1)
        first, second = await keeper.next(SealImage), await keeper.next(SealImage)
        keeper.seal(second)
        keeper.seal(first)
        (event,) = await stage.reported(SnapshotsSealed)
        assert event.snapshot == SNAPSHOT
        assert event.wish == "now"
        assert {one.rank for one in event.ranks} == {0, 1}

    play(scene)


def test_an_image_that_was_overwritten_before_its_seal_is_told_to_be_skipped(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open(slots=1)
        stage.whole(0, step=7)
        stage.whole(0, step=8, state=4)
        first, second = await keeper.next(SealImage), await keeper.next(SealImage)
        gone = missed_by(first.action, "skipped", "a newer one took its place", Time(1.0))
        keeper.say(first.number, gone)
        keeper.seal(second)
        (event,) = await stage.reported(SnapshotsSealed)
        assert event.snapshot.step == 8
        (missed,) = await stage.reported(SnapshotMissed)
        assert (missed.rank, missed.snapshot, missed.outcome) == (0, SNAPSHOT, "skipped")
        assert missed.reason == "a newer one took its place"

    play(scene)


def test_a_seal_that_failed_is_told_and_nobody_waits_for_the_others(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.whole(0)
        stage.whole(1)
        first, second = await keeper.next(SealImage), await keeper.next(SealImage)
        keeper.seal(first)
        keeper.say(second.number, error="no such image")
        (missed,) = await stage.reported(SnapshotMissed)
        assert (missed.rank, missed.snapshot, missed.outcome) == (1, SNAPSHOT, "failed")
        assert missed.reason == "no such image"
        assert not any(isinstance(event, SnapshotsSealed) for event in stage.reports)

    play(scene)


def test_a_rank_that_has_no_image_is_told_of_with_its_reason(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.whole(0)
        keeper.seal(await keeper.next(SealImage))
        message = ImageMissed(checkpointer=C, step=7, outcome="skipped", reason="both are read")
        stage.snapshots.missed(Rank(1), message)
        (missed,) = await stage.reported(SnapshotMissed)
        assert (missed.node, missed.rank, missed.snapshot) == ("n", 1, SNAPSHOT)
        assert (missed.outcome, missed.reason) == ("skipped", "both are read")

    play(scene)


def test_a_step_saved_for_memory_and_again_for_storage_goes_to_storage(play: Play) -> None:
    """One rank may be through with both before another has the first."""

    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        for rank in (0, 1):
            stage.whole(rank, wish="if needed")
            stage.whole(rank, wish="now", state=4, attempt=2)
        orders = [await keeper.next(SealImage) for _ in range(4)]
        for order in orders:
            keeper.seal(order)
        (event,) = await stage.reported(SnapshotsSealed)
        assert (event.wish, event.attempt) == ("now", 2)
        for step in (8, 9):
            await stage.seal_all(keeper, step)
        assert stage.said == []
        assert not any(isinstance(event, SnapshotMissed) for event in stage.reports)

    play(scene)


def test_ranks_that_differ_in_where_to_save_still_have_a_snapshot(play: Play) -> None:
    """One may have been held up before, and make good for it."""

    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        await stage.seal(keeper, 0, 7, "if needed")
        await stage.seal(keeper, 1, 7, "now")
        (event,) = await stage.reported(SnapshotsSealed)
        assert event.wish == "now"

    play(scene)


def test_a_step_that_only_some_ranks_save_is_told_when_its_image_is_gone(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        for step in (7, 8, 9, 10):
            await stage.seal(keeper, 0, step)
        missed = await stage.reported(SnapshotMissed, 2)
        assert [(one.rank, one.snapshot.step, one.outcome) for one in missed] == [
            (1, 7, "skipped"),
            (1, 8, "skipped"),
        ]
        (told,) = stage.said
        assert "step 7 is not saved: rank 1 has not saved it" in told
        assert "all ranks have to save the same steps" in told
        await stage.seal(keeper, 1, 10)
        await stage.reported(SnapshotsSealed)

    play(scene)


@pytest.mark.parametrize("first", ["save", "end"])
def test_nobody_waits_for_a_step_that_a_rank_has_not_saved_before_its_end(
    play: Play, first: str
) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        acts = [lambda: stage.seal(keeper, 0, 7), lambda: asyncio.sleep(0, end())]

        def end() -> None:
            stage.snapshots.ended(Rank(1), True, lambda: stage._report("exited"))  # type: ignore[arg-type]

        for act in acts if first == "save" else reversed(acts):
            await act()
        (missed,) = await stage.reported(SnapshotMissed)
        assert (missed.rank, missed.snapshot, missed.reason) == (1, SNAPSHOT, "ended without it")
        assert "rank 1 has not saved it" in stage.said[0]
        if first == "save":
            assert stage.reports == [missed, "exited"], "the end overtook that"

    play(scene)


def test_a_rank_that_dies_is_not_blamed_for_what_it_has_not_saved(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        await stage.seal(keeper, 0, 7)
        stage.snapshots.ended(Rank(1), False, lambda: stage._report("exited"))  # type: ignore[arg-type]
        assert (stage.reports, stage.said) == (["exited"], [])

    play(scene)


def test_a_rank_that_told_why_it_has_no_image_is_not_blamed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        message = ImageMissed(checkpointer=C, step=7, outcome="skipped", reason="both are read")
        stage.snapshots.missed(Rank(1), message)
        await stage.seal(keeper, 0, 7)
        for step in (8, 9, 10):
            await stage.seal_all(keeper, step)
        assert len(await stage.reported(SnapshotMissed)) == 1
        assert stage.said == []
        assert len(stage.snapshots._snapshots._partial) <= 3  # type: ignore[union-attr]

    play(scene)


def test_the_end_of_a_rank_does_not_overtake_its_save(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open(slots=1)
        stage.whole(0)
        order = await keeper.next(SealImage)
        stage.snapshots.ended(Rank(0), True, lambda: stage._report("exited"))  # type: ignore[arg-type]
        stage.snapshots.ended(Rank(1), True, lambda: stage._report("other"))  # type: ignore[arg-type]
        assert stage.reports == ["other"]
        keeper.seal(order)
        await stage.reported(str, 2)
        assert [type(event).__name__ for event in stage.reports[1:]] == ["SnapshotsSealed", "str"]

    play(scene)


def test_a_keeper_that_never_answers_does_not_hide_the_end_of_a_rank(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEAL_FLOOR_S", 0.01)

    async def scene(stage: Stage) -> None:
        keeper = await stage.open(slots=1)
        stage.whole(0)
        order = await keeper.next(SealImage)
        stage.snapshots.ended(Rank(0), True, lambda: stage._report("exited"))  # type: ignore[arg-type]
        await stage.reported(str)
        keeper.seal(order)
        await stage.reported(SnapshotsSealed)
        assert stage.reports.count("exited") == 1

    play(scene)


# ---- to storage ---------------------------------------------------------------------------------


def test_orders_go_to_the_keeper_and_its_answers_to_the_coordinator(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        order = msgspec.structs.replace(write_shards(), id="7.2")
        stage.snapshots.act(order)
        write = await keeper.next(WriteRankFiles)
        assert write.action == order
        keeper.wrote(write, shards=(SHARD,))
        (written,) = await stage.reported(RankFilesWritten)
        assert written.cause == "7.2"
        assert (written.shards, written.error, written.gone) == ((SHARD,), "", False)
        commit = CommitCheckpoint(
            node=NodeId("n"), snapshot=SNAPSHOT, world_size=1, shards=(SHARD,)
        )
        stage.snapshots.act(commit)
        keeper.say((await keeper.next(CommitCheckpoint)).number, error="disk full")
        (committed,) = await stage.reported(CheckpointWritten)
        assert (committed.snapshot, committed.error) == (SNAPSHOT, "disk full")

    play(scene)


def test_an_image_that_is_gone_is_told_apart_from_a_failure(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.snapshots.act(write_shards())
        keeper.wrote(await keeper.next(WriteRankFiles), error="overwritten", gone=True)
        (written,) = await stage.reported(RankFilesWritten)
        assert (written.error, written.gone) == ("overwritten", True)

    play(scene)


def test_an_order_that_is_told_again_while_it_is_carried_out_is_not_given_again(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        for ranks in ((0, 1), (0, 1), (0,), (2,)):
            stage.snapshots.act(write_shards(ranks))
        assert (await keeper.next(WriteRankFiles)).action.ranks == (0, 1)
        assert (await keeper.next(WriteRankFiles)).action.ranks == (2,)

    play(scene)


def commit_of(*ranks: int, world_size: int = 4) -> CommitCheckpoint:
    shards = tuple(shard(rank) for rank in ranks)
    return CommitCheckpoint(
        node=NodeId("n"), snapshot=SNAPSHOT, world_size=world_size, shards=shards
    )


def test_a_commit_in_several_messages_is_given_once_all_shards_are_known(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.snapshots.act(commit_of(2, 3))
        stage.snapshots.act(commit_of(2, 3))
        assert not any(
            isinstance(one, CommitCheckpoint) for one in stage.snapshots.keeper.unanswered()
        )
        stage.snapshots.act(commit_of(0, 1))
        number, commit = await keeper.next(CommitCheckpoint)
        assert commit.world_size == 4
        assert commit.shards == tuple(shard(rank) for rank in range(4))
        for ranks in ((0, 1), (2, 3)):
            stage.snapshots.act(commit_of(*ranks))  # Told again after a broken stream.
        done = CheckpointWritten(at=Time(1.0), node=NodeId("n"), snapshot=SNAPSHOT)
        keeper.say(number, done)
        await stage.reported(CheckpointWritten)
        assert not any(
            isinstance(one, CommitCheckpoint) for one in stage.snapshots.keeper.unanswered()
        )

    play(scene)


def test_a_commit_told_in_part_before_a_stream_broke_is_given_with_what_is_told_after_it(
    play: Play,
) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        for ranks in ((0, 1), (0, 1), (2, 3)):
            stage.snapshots.act(commit_of(*ranks))
        assert len((await keeper.next(CommitCheckpoint)).action.shards) == 4

    play(scene)


def test_what_was_told_of_a_commit_that_was_given_up_is_forgotten(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.snapshots.act(commit_of(0, 1))
        stage.snapshots.act(settled("it was given up"))
        stage.snapshots.act(commit_of(2, 3))
        assert not any(
            isinstance(one, CommitCheckpoint) for one in stage.snapshots.keeper.unanswered()
        )
        stage.snapshots.act(commit_of(0, 1))
        assert len((await keeper.next(CommitCheckpoint)).action.shards) == 4

    play(scene)


def test_a_commit_of_a_large_world_reaches_the_keeper(play: Play) -> None:
    """It is far more than the socket holds, and than a worker may leave unread."""

    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        many, at_once = 80_000, 2000
        for first in range(0, many, at_once):
            stage.snapshots.act(commit_of(*range(first, first + at_once), world_size=many))
        assert len((await keeper.next(CommitCheckpoint)).action.shards) == many

    play(scene)


def test_leaving_waits_until_it_is_known_how_the_write_ended(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.open()
        left: list[bool] = []
        stage.snapshots.act(write_shards())
        stage.snapshots.when_settled(LIMIT_S, lambda: left.append(True))
        assert not left
        stage.snapshots.act(settled(snapshot=SnapshotId(C, StepNumber(6), RoundNumber(1))))
        assert not left
        stage.snapshots.act(settled())
        assert left == [True]

    play(scene)


def test_leaving_does_not_wait_for_longer_than_it_may(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.open()
        left = asyncio.Event()
        stage.snapshots.act(write_shards())
        stage.snapshots.when_settled(0.01, left.set)
        await asyncio.wait_for(left.wait(), LIMIT_S)
        # It may be its part to write shards, or to write the manifest.
        told = *await stage.reported(RankFilesWritten), *await stage.reported(CheckpointWritten)
        assert all("longer than the 0.01 s of --save-deadline" in one.error for one in told)
        stage.snapshots.act(settled())

    play(scene)


def test_a_new_order_says_that_the_one_before_has_ended(play: Play) -> None:
    """Word of how it ended may be lost with a stream; but only one is on its way at a time."""

    async def scene(stage: Stage) -> None:
        await stage.open()
        newer = SnapshotId(C, StepNumber(8), RoundNumber(1))
        stage.snapshots.act(write_shards())
        stage.snapshots.act(write_shards(snapshot=newer))
        left: list[bool] = []
        stage.snapshots.when_settled(LIMIT_S, lambda: left.append(True))
        stage.snapshots.act(settled(snapshot=newer))
        assert left == [True]

    play(scene)


def test_a_node_that_is_hurried_tells_that_it_gives_up_what_it_was_to_write(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.open()
        left: list[bool] = []
        stage.snapshots.act(write_shards())
        stage.snapshots.when_settled(LIMIT_S, lambda: left.append(True))
        stage.snapshots.hurry()
        assert left == [True]
        (told,) = await stage.reported(RankFilesWritten)
        assert "told to stop at once" in told.error

    play(scene)


def test_a_checkpoint_that_was_not_written_is_said_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.open()
        stage.snapshots.act(write_shards())
        for _ in range(2):
            stage.snapshots.act(settled("disk full"))
        assert stage.said == ["step 7 is not on storage: disk full; training goes on"]

    play(scene)


# ---- restoring ----------------------------------------------------------------------------------


def test_what_is_on_storage_is_told_before_the_question_is_carried_on(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        found = (StoredStep(StepNumber(5), RoundNumber(1), 2),)
        stage.snapshots.look(RoundNumber(1), C, lambda: stage._report("carried"))  # type: ignore[arg-type]
        number, find = await keeper.next(FindStored)
        event = StoredFound(
            at=Time(1.0),
            node=find.node,
            round=find.round,
            checkpointer=find.checkpointer,
            steps=found,
            refused=("step 6: damaged",),
        )
        keeper.say(number, event)
        await stage.reported(str)
        event = stage.reports[0]
        assert isinstance(event, StoredFound)
        assert (event.steps, event.refused) == (found, ("step 6: damaged",))

    play(scene)


def test_storage_that_cannot_be_looked_at_is_told_and_not_taken_for_empty(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.snapshots.look(RoundNumber(1), C, lambda: None)
        keeper.say((await keeper.next(FindStored)).number, error="it hangs")
        (event,) = await stage.reported(StoredFound)
        assert (event.steps, event.refused) == ((), ("storage: it hangs",))

    play(scene)


def test_a_rank_is_told_where_an_image_can_be_read(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        image = ImageId(SNAPSHOT, Rank(0), 2)
        answers: list[Any] = []
        for _ in range(3):
            stage.snapshots.locate(LocateImage(image=image), answers.append)
        orders = [await keeper.next(LocateImage) for _ in range(3)]
        assert [order.action.image for order in orders] == [image] * 3
        here, elsewhere, broken = (order.number for order in orders)
        keeper.say(here, ImageAt(path="/p"))
        keeper.say(elsewhere, ImageAt(path="", token="token"))
        keeper.say(broken, error="no such directory")
        keeper.say(0, held(image))
        await stage.reported(ImagesHeld)
        assert answers == [
            ImageAt(path="/p"),
            ImageAt(path="", token="token"),
            Denied(reason="image", detail="no such directory"),
        ]

    play(scene)


def held(image: ImageId) -> ImagesHeld:
    return ImagesHeld(at=Time(1.0), node=NodeId("n"), images=(image,))


def test_images_of_the_ranks_of_a_new_round_are_fetched_before_anybody_asks(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        image = ImageId(SNAPSHOT, Rank(0), 2)
        holder = Holder(Rank(0), NodeId("m"), "10.0.0.1", 7)
        stage.snapshots.begin_round(msgspec.structs.replace(part(2), fetch=((image, holder),)))
        fetch = (await (await stage.keeper()).next(FetchImage)).action
        assert (fetch.image, fetch.holder) == (image, holder)

    play(scene)


def test_a_copy_that_another_node_gave_is_told_of(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        image = ImageId(SNAPSHOT, Rank(5), 8)
        keeper.say(0, held(image))
        (event,) = await stage.reported(ImagesHeld)
        assert event.images == (image,)
        assert event.at == stage.snapshots.clock.at(1.0), "the keeper's clock is the machine's"

    play(scene)


# ---- keepers that die ---------------------------------------------------------------------------


def test_another_keeper_is_told_of_the_checkpointers_and_given_what_was_not_answered(
    play: Play,
) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.whole(0)
        stage.snapshots.act(write_shards())
        keeper.die()
        keeper = await stage.keeper(2)
        assert (await keeper.next(OpenCheckpointer)).action.checkpointer == C
        await keeper.next(BeginRound)
        await keeper.next(SealImage)
        write = await keeper.next(WriteRankFiles)
        kinds = [OpenCheckpointer, BeginRound, SealImage, WriteRankFiles]
        assert [type(action) for action in keeper.told] == kinds
        keeper.wrote(write, shards=(SHARD,))
        await stage.reported(RankFilesWritten)

    play(scene)


def test_what_a_keeper_answered_just_before_it_died_is_not_done_again(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open()
        stage.snapshots.act(write_shards())
        write = await keeper.next(WriteRankFiles)
        asyncio.get_running_loop().remove_reader(stage.snapshots.keeper._control.fileno())  # type: ignore[union-attr]
        keeper.wrote(write, shards=(SHARD,))
        keeper.die()
        await stage.keeper(2)
        (written,) = await stage.reported(RankFilesWritten)
        assert written.shards == (SHARD,)
        assert not any(
            isinstance(one, WriteRankFiles) for one in stage.snapshots.keeper.unanswered()
        )

    play(scene)


def test_an_order_that_kills_keepers_is_answered_with_an_error_and_others_go_on(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open(slots=1)
        stage.whole(0)
        stage.snapshots.act(write_shards((0,)))
        for number in (2, 3):
            keeper.die()
            keeper = await stage.keeper(number)
        stage.snapshots.look(RoundNumber(1), C, lambda: None)
        keeper.die()
        keeper = await stage.keeper(4)
        (written,) = await stage.reported(RankFilesWritten)
        assert written.error == "3 keepers died of it"
        await keeper.next(FindStored)
        assert not any(isinstance(action, SealImage | WriteRankFiles) for action in keeper.told)
        stage.snapshots.ended(Rank(0), True, lambda: stage._report("exited"))  # type: ignore[arg-type]
        assert "exited" in stage.reports

    play(scene)


def test_keepers_that_die_again_and_again_are_not_started_until_there_is_something_to_do(
    play: Play,
) -> None:
    async def scene(stage: Stage) -> None:
        keeper = await stage.open(slots=1)
        for number in range(2, keeperprocess.DEATHS_MOST + 2):
            keeper.die()
            keeper = await stage.keeper(number)
        stage.snapshots.act(write_shards((0,)))
        keeper.die()
        (written,) = await stage.reported(RankFilesWritten)
        assert written.error == "the keeper died of it"
        assert stage.said == ["6 keepers died within a minute; nothing is kept until the next save"]
        assert len(stage.keepers) == keeperprocess.DEATHS_MOST + 1
        stage.whole(0, step=8)
        keeper = await stage.keeper(keeperprocess.DEATHS_MOST + 2)
        await keeper.next(OpenCheckpointer)
        await keeper.next(SealImage)

    play(scene)


def test_a_keeper_killed_at_the_end_is_not_replaced(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.open()
        ended = asyncio.Event()
        process = stage.snapshots.keeper._process
        assert process is not None
        exited = process.on_exit

        def on_exit(end: Exit) -> None:
            exited(end)
            ended.set()

        process.on_exit = on_exit
        stage.snapshots.keeper.close()
        await asyncio.wait_for(ended.wait(), LIMIT_S)
        assert len(stage.keepers) == 1

    play(scene)


def test_an_agent_knows_where_the_checkpoints_of_the_one_before_it_go(
    play: Play, tmp_path: Path
) -> None:
    """It may have to write what was sealed before its own ranks have opened anything."""

    async def before(stage: Stage) -> None:
        await stage.open()

    async def after(stage: Stage) -> None:
        stage.snapshots.tell_images()
        stage.snapshots.act(write_shards())
        keeper = await stage.keeper()
        assert (await keeper.next(OpenCheckpointer)).action.directory == "/d"
        await keeper.next(WriteRankFiles)

    async def torn(stage: Stage) -> None:
        stage.snapshots.tell_images()
        assert stage.snapshots._checkpointers == {}

    play(before)
    play(after)
    (tmp_path / f"{C}.opened").write_bytes(b"torn")
    play(torn)


def test_a_node_without_checkpointers_has_no_keeper(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.snapshots.begin_round(part(2))
        stage.snapshots.tell_images()
        assert stage.keepers == []
        assert stage.reports == []

    play(scene)
