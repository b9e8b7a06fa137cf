"""Ranks without a coordinator agree by a store, and by the rules of the core."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.checkpoint.standalone import driver as drivers
from holdfast.checkpoint.standalone.driver import CommitDriver, node_of
from holdfast.checkpoint.standalone.store_meeting import (
    DriverSeat,
    Post,
    RankAction,
    RankEvent,
    SaveEnded,
    StoreMeeting,
)
from holdfast.errors import CheckpointError
from holdfast.messages.actions import (
    Answered,
    CloseJob,
    CommitCheckpoint,
    WriteRankFiles,
)
from holdfast.messages.checkpoints import (
    Sealed,
    SnapshotId,
    StoredFile,
    StoredStep,
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
from holdfast.messages.keeper import DiscardRankFiles
from holdfast.messages.requests import FindState, SaveSettled, StateFound
from holdfast.messages.units import Rank, RoundNumber, StepNumber, Time

NOW = Time(0.0)
ROUND = RoundNumber(1)
PROMPT_S = 60.0
SAVED = SaveSettled(outcome="saved")


def snapshot(step: int) -> SnapshotId:
    return SnapshotId("c", StepNumber(step), ROUND)


class Member:
    """A rank whose keeper is the test."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = Rank(rank)
        self.size = size
        self.meeting = StoreMeeting(store, "test", rank, size)
        self.node = node_of(rank)
        self.heard: list[RankAction] = []
        self.answers: list[StateFound] = []
        self.ended: dict[tuple[int, Tier], SaveSettled] = {}
        self._changed = threading.Condition()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        while not any(isinstance(action, CloseJob) for action in self.heard):
            actions = self.meeting.listen()
            with self._changed:
                self.heard += actions
                for action in actions:
                    if isinstance(action, Answered):
                        assert isinstance(action.answer, StateFound)
                        self.answers.append(action.answer)
                    elif isinstance(action, SaveEnded):
                        assert (action.snapshot.step, action.to) not in self.ended, "told twice"
                        self.ended[action.snapshot.step, action.to] = action.settled
                self._changed.notify_all()

    def until(self, so: Callable[[], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(so, PROMPT_S), self.heard
            return so()

    def next(self, kind: type[Any]) -> Any:
        """The next action of that kind."""

        def found() -> Any:
            return next((one for one in self.heard if isinstance(one, kind)), None)

        action = self.until(found)
        self.heard.remove(action)
        return action

    def post(self, *events: RankEvent, directory: str = "") -> None:
        self.meeting.post(Post(events, directory))

    def find(self, tried: Tried | None) -> None:
        request = FindState(checkpointer="c", tried=tried)
        rank = self.rank
        self.post(
            Asked(
                at=NOW, node=self.node, round=ROUND, rank=rank, channel=0, number=1, request=request
            )
        )

    def found(self) -> StateFound:
        self.until(lambda: self.answers)
        return self.answers.pop(0)

    def end_of(self, step: int, to: Tier = "storage") -> Any:
        return self.until(lambda: self.ended.get((step, to)))

    def seal(self, step: int, shared: bytes = b"", directory: str = "", wish: Wish = "now") -> None:
        sealed = SnapshotsSealed(
            at=NOW,
            node=self.node,
            snapshot=snapshot(step),
            world_size=self.size,
            ranks=(Sealed(self.rank, shared),),
            wish=wish,
        )
        self.post(sealed, directory=directory)

    def write(self, error: str = "") -> WriteRankFiles:
        order: WriteRankFiles = self.next(WriteRankFiles)
        assert order.ranks == (self.rank,)
        shards = () if error else (StoredFile(self.rank, f"__{self.rank}", 1, "", ""),)
        done = RankFilesWritten(
            at=NOW, node=self.node, snapshot=order.snapshot, shards=shards, error=error
        )
        self.post(done)
        return order

    def leave(self) -> None:
        self.post(NodeLeft(at=NOW, node=self.node, round=ROUND))


class World:
    def __init__(self, size: int) -> None:
        self.store = dist.HashStore()
        self.members = [Member(self.store, rank, size) for rank in range(size)]
        self.said: list[str] = []
        self.driver = CommitDriver(self.members[0].meeting, self.said.append)

    def store_step(self, step: int) -> None:
        """Save a step, to the end."""
        for member in self.members:
            member.seal(step)
        for member in self.members:
            member.write()
        (committer,) = self.committers()
        done = CheckpointWritten(at=NOW, node=committer.node, snapshot=snapshot(step))
        committer.post(done)
        for member in self.members:
            assert (member.end_of(step, "memory"), member.end_of(step)) == (SAVED, SAVED)

    def committers(self) -> list[Member]:
        def found() -> list[Member]:
            return [
                member
                for member in self.members
                if any(isinstance(one, CommitCheckpoint) for one in member.heard)
            ]

        until = time.monotonic() + PROMPT_S
        while not (some := found()):
            assert time.monotonic() < until
            time.sleep(0.002)
        for member in some:
            commit = member.next(CommitCheckpoint)
            assert [shard.rank for shard in commit.shards] == list(range(len(self.members)))
        return some


def test_a_save_is_written_by_all_committed_by_one_and_settled_for_all() -> None:
    world = World(3)
    keys = world.store.num_keys()
    for step in (1, 2):
        world.store_step(step)
    until = time.monotonic() + PROMPT_S
    while world.store.num_keys() > keys + 1:  # How many posts there were.
        assert time.monotonic() < until
        time.sleep(0.002)
    assert world.said == []


@pytest.mark.parametrize("alike", [True, False])
def test_what_ranks_share_is_written_once_if_they_sealed_the_same(alike: bool) -> None:
    world = World(2)
    for member in world.members:
        member.seal(1, b"same" if alike else bytes(member.rank + 1))
    assert [member.write().alike for member in world.members] == [alike] * 2


def test_the_first_failure_counts_and_what_others_wrote_in_vain_is_removed() -> None:
    world = World(3)
    for member in world.members:
        member.seal(1)
    world.members[2].write(error="rank 2: disk full")
    failed = SaveSettled(outcome="failed", reason="rank 2: disk full")
    for member in world.members:
        assert member.end_of(1) == failed
        assert member.next(DiscardRankFiles).snapshot == snapshot(1)
    world.members[0].write()  # It comes too late, and its file was not there to be removed.
    assert world.members[0].next(DiscardRankFiles).snapshot == snapshot(1)
    world.members[1].write(error="rank 1: disk full")
    assert world.said == ["step 1 is not on storage: rank 2: disk full"]
    world.store_step(2)


def test_a_manifest_that_could_not_be_written_leaves_the_files() -> None:
    world = World(2)
    for member in world.members:
        member.seal(1)
    for member in world.members:
        member.write()
    (committer,) = world.committers()
    gone = CheckpointWritten(at=NOW, node=committer.node, snapshot=snapshot(1), error="no")
    committer.post(gone)
    for member in world.members:
        assert member.end_of(1) == SaveSettled(outcome="failed", reason="no")
        assert not any(isinstance(action, DiscardRankFiles) for action in member.heard)


def test_ranks_that_gave_different_paths_are_told_so_if_that_fails() -> None:
    world = World(2)
    for member in world.members:
        member.seal(1, directory=f"/{member.rank}")
    for member in world.members:
        member.write()
    (committer,) = world.committers()
    gone = CheckpointWritten(at=NOW, node=committer.node, snapshot=snapshot(1), error="not there")
    committer.post(gone)
    reason = "not there (the ranks gave different paths: /0 and /1)"
    assert [member.end_of(1).reason for member in world.members] == [reason] * 2


def test_a_save_for_memory_is_told_when_it_counts_and_says_nothing_of_storage() -> None:
    world = World(2)
    for step in (1, 2):
        for member in world.members:
            member.seal(step, wish="if needed")
        for member in world.members:
            assert member.end_of(step, "memory") == SAVED
    world.store_step(3)
    assert world.said == []
    assert not any((step, "storage") in member.ended for member in world.members for step in (1, 2))


def test_a_rank_without_an_image_fails_the_save_for_all() -> None:
    world = World(2)
    first, second = world.members
    first.seal(1)
    missed = SnapshotMissed(
        at=NOW,
        node=second.node,
        rank=second.rank,
        snapshot=snapshot(1),
        outcome="failed",
        reason="no memory",
    )
    second.post(missed)
    for member in world.members:
        for tier in ("memory", "storage"):
            failed = SaveSettled(outcome="failed", reason="rank 1: no memory")
            assert member.end_of(1, tier) == failed  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["before", "after"])
def test_nobody_waits_for_a_rank_that_left_without_saving(when: str) -> None:
    world = World(3)
    for act in (lambda: world.members[0].seal(1), world.members[1].leave)[
        :: 1 if when == "after" else -1
    ]:
        act()
    reason = "rank 1 ended without saving it"
    assert world.members[0].end_of(1) == SaveSettled(outcome="skipped", reason=reason)


def test_a_rank_that_leaves_before_it_has_written_fails_the_save() -> None:
    world = World(2)
    for member in world.members:
        member.seal(1)
    world.members[0].write()
    world.members[1].leave()
    settled = world.members[0].end_of(1)
    assert settled.outcome == "failed"
    assert "rank 1 was lost with the only image of rank 1" in settled.reason


def test_a_rank_that_gives_up_fails_all_that_is_under_way() -> None:
    world = World(2)
    for step in (1, 2):
        for member in world.members:
            member.seal(step)
    for member in world.members:
        member.next(WriteRankFiles)
    second = world.members[1]
    second.post(NodeLeaving(at=NOW, node=second.node, reason="rank 1 closed its writer", code=1))
    failed = SaveSettled(outcome="failed", reason="rank 1 closed its writer")
    for member in world.members:
        assert (member.end_of(1), member.end_of(2)) == (failed, failed)
    world.store_step(3)


def test_a_restore_takes_the_newest_that_all_ranks_can_load() -> None:
    world = World(2)
    world.store_step(7)  # In memory it counts, but images are not restored without a coordinator.
    found = StoredFound(
        at=NOW,
        node=world.members[0].node,
        round=ROUND,
        checkpointer="c",
        steps=tuple(StoredStep(StepNumber(step), ROUND, 2) for step in (6, 5)),
    )
    world.members[0].post(found)
    answers: list[list[StateFound]] = []
    for tried in (None, [Tried("damaged"), Tried()], [Tried(), Tried()]):
        for member in world.members:
            member.find(tried and tried[member.rank])
        answers.append([member.found() for member in world.members])
    assert [(one.where, one.step) for one in answers[0]] == [("storage", 6)] * 2
    assert [(one.where, one.step) for one in answers[1]] == [("storage", 5)] * 2
    assert answers[1][0].refused == ("step 6 from storage: rank 0: damaged",)
    assert [one.where for one in answers[2]] == ["loaded"] * 2


def test_the_driver_waits_for_the_others_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    world.store_step(1)
    world.members[0].leave()
    threading.Timer(0.2, world.members[1].leave).start()
    began = time.monotonic()
    world.driver.linger()
    assert 0.1 < time.monotonic() - began < drivers.LINGER_S
    assert not world.driver._thread.is_alive()
    for member in world.members:
        member.listener.join(PROMPT_S)
        assert not member.listener.is_alive()


def test_a_driver_that_must_end_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "LINGER_S", 0.05)
    world = World(2)
    world.store_step(1)
    world.members[0].leave()
    world.driver.linger()
    assert "rank 0 has ended" in world.members[1].next(CloseJob).reason


def test_an_event_that_the_rules_cannot_take_ends_the_driver_with_a_word() -> None:
    world = World(2)
    bad = NodeLeft(at=NOW, node="no rank", round=ROUND)  # type: ignore[arg-type]
    world.members[1].post(bad)
    for member in world.members:
        assert member.next(CloseJob).reason.startswith("rank 0: ")


# ---- the store ----


def test_two_meetings_of_the_same_ranks_are_two() -> None:
    store = dist.HashStore()
    first, second = (StoreMeeting(store, "test", 0, 1) for _ in range(2))
    seats = [DriverSeat(meeting) for meeting in (first, second)]
    first.post(Post(directory="first"))
    second.post(Post(directory="second"))
    assert [[post.directory for post in seat.collect()] for seat in seats] == [
        ["first"],
        ["second"],
    ]


def test_what_is_posted_is_read_in_the_order_of_its_numbers() -> None:
    store = dist.HashStore()
    meetings = [StoreMeeting(store, "test", rank, 3) for rank in range(3)]
    assert len({meeting.began_us for meeting in meetings}) == 1
    seat = DriverSeat(meetings[0])
    for number in range(9):
        meetings[number % 3].post(Post(directory=str(number)))
    read = seat.collect()
    meetings[1].post(Post(directory="9"))
    assert [post.directory for post in (*read, *seat.collect())] == [str(n) for n in range(10)]


def test_who_listens_keeps_nobody_from_the_store() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = StoreMeeting(server, "test", 0, 1)
    heard: Future[Any] = Future()
    threading.Thread(target=lambda: heard.set_result(meeting.listen()), daemon=True).start()
    time.sleep(0.1)
    server.set("mine", "x")
    meeting.post(Post(directory="x"))
    seat = DriverSeat(meeting)
    assert [post.directory for post in seat.collect()] == ["x"]
    seat.deliver({0: [CloseJob(code=0, reason="y")]})
    assert heard.result(60) == (CloseJob(code=0, reason="y"),)


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Dead:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(CheckpointError, match="Connection reset"):
        StoreMeeting(Dead(), "test", 0, 1)
