"""When a snapshot counts, how it gets to storage, and what ranks are offered to restore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from driver import Driver

from holdfast.checkpoint.storage.backends import rank_file_name
from holdfast.core import report
from holdfast.core.commits import restoring, waiting
from holdfast.core.commits import rules as commits
from holdfast.core.commits import state as commitbook
from holdfast.core.commits.state import CommitEffects, Commits
from holdfast.messages.actions import (
    Answered,
    AnyAction,
    CheckpointSettled,
    CommitCheckpoint,
    Finish,
    WriteRankFiles,
)
from holdfast.messages.checkpoints import (
    ImageId,
    Missed,
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
    ImagesHeld,
    NodeLeaving,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StopAsked,
    StoredFound,
)
from holdfast.messages.requests import AnyRequest, AwaitSave, FindState, SaveSettled, StateFound
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.wire import framing

C = "c"
SAVED = SaveSettled(outcome="saved")
FAILED = SaveSettled(outcome="failed", reason="rank 2: no memory")
NOW = Time(1.0)
TIERS: tuple[Tier, ...] = ("memory", "storage")


def snapshot_id(step: int, round: int = 1, checkpointer: str = C) -> SnapshotId:
    return SnapshotId(checkpointer, StepNumber(step), RoundNumber(round))


def shard(rank: int) -> StoredFile:
    return StoredFile(Rank(rank), f"__{rank}", 10, "t", "c")


def revived(state: Commits) -> Commits:
    """The state after a trip through the journal's snapshot."""
    return msgspec.json.decode(msgspec.json.encode(state), type=Commits)


class Scene:
    """Nodes and their ranks, and one checkpointer's book. The coordinator dies after each event."""

    def __init__(self, **slots: int) -> None:
        self.state = Commits()
        self.round = 1
        self.ranks: dict[str, list[int]] = {}
        for node, count in slots.items():
            first = sum(map(len, self.ranks.values()))
            self.ranks[node] = list(range(first, first + count))

    @property
    def size(self) -> int:
        return sum(map(len, self.ranks.values()))

    @property
    def book(self) -> commitbook.Book:
        return self.state.book(C)

    def took(self, taken: CommitEffects) -> CommitEffects:
        commits.validate(self.state)
        self.state = revived(self.state)
        return taken

    # ---- what nodes say ----

    def seal(
        self,
        node: str,
        step: int,
        wish: Wish = "now",
        round: int = 0,
        shared: bytes = b"s",
        attempt: int = 1,
    ) -> CommitEffects:
        event = SnapshotsSealed(
            at=NOW,
            node=NodeId(node),
            snapshot=snapshot_id(step, round or self.round),
            world_size=self.size,
            ranks=tuple(Sealed(Rank(rank), shared) for rank in self.ranks[node]),
            wish=wish,
            attempt=attempt,
        )
        return self.took(commits.sealed(self.state, event))

    def save(self, step: int, wish: Wish = "now", attempt: int = 1) -> CommitEffects:
        """All nodes seal that step; what came of the last one."""
        return [self.seal(node, step, wish, attempt=attempt) for node in self.ranks][-1]

    def hold(self, node: str, step: int, ranks: Iterable[int], round: int = 0) -> CommitEffects:
        id = snapshot_id(step, round or self.round)
        images = tuple(ImageId(id, Rank(rank), self.size) for rank in ranks)
        event = ImagesHeld(at=NOW, node=NodeId(node), images=images)
        return self.took(commits.held(self.state, event))

    def wrote(
        self, node: str, step: int, ranks: Iterable[int] | None = None, **more: Any
    ) -> CommitEffects:
        named = self.ranks[node] if ranks is None else ranks
        event = RankFilesWritten(
            at=NOW,
            node=NodeId(node),
            snapshot=snapshot_id(step, more.pop("round", self.round)),
            shards=() if more else tuple(map(shard, named)),
            **more,
        )
        return self.took(commits.shards_written(self.state, event))

    def committed(self, node: str, step: int, error: str = "") -> CommitEffects:
        id = snapshot_id(step, self.round)
        event = CheckpointWritten(at=NOW, node=NodeId(node), snapshot=id, error=error)
        return self.took(commits.checkpoint_written(self.state, event))

    def lose(self, node: str) -> CommitEffects:
        return self.took(commits.node_gone(self.state, NodeId(node)))

    def missed(
        self,
        rank: int,
        step: int,
        outcome: Missed = "failed",
        why: str = "no memory",
        attempt: int = 1,
    ) -> CommitEffects:
        node = next(node for node, ranks in self.ranks.items() if rank in ranks)
        event = SnapshotMissed(
            at=NOW,
            node=NodeId(node),
            rank=Rank(rank),
            snapshot=snapshot_id(step, self.round),
            outcome=outcome,
            reason=why,
            attempt=attempt,
        )
        return self.took(commits.missed(self.state, event))

    def stored(self, *steps: int, refused: tuple[str, ...] = ()) -> None:
        found = tuple(StoredStep(StepNumber(s), RoundNumber(1), self.size) for s in steps)
        event = StoredFound(
            at=NOW,
            node=NodeId("a"),
            round=RoundNumber(self.round),
            checkpointer=C,
            steps=found,
            refused=refused,
        )
        restoring.stored_found(self.state, event)

    def write(self, step: int) -> CommitEffects:
        """All nodes write their shards of that step, and the last one commits it."""
        for node in self.ranks:
            self.wrote(node, step)
        return self.committed(node, step)

    def breaks(self) -> list[AnyAction]:
        """The round is over, and the next begins."""
        actions = commits.secure(self.state)
        commits.round_over(self.state)
        commits.validate(self.state)
        self.round += 1
        return actions

    # ---- what ranks ask ----

    def wait(self, rank: int, step: int, to: Tier, attempt: int = 1) -> SaveSettled | None:
        request = AwaitSave(checkpointer=C, step=step, to=to, attempt=attempt)
        round = RoundNumber(self.round)
        return waiting.await_save(self.state, f"{rank}/{to}/{step}", request, round)

    def ask(
        self,
        rank: int,
        tried: Tried | None = None,
        step: int | None = None,
        all_ranks: bool = False,
    ) -> CommitEffects:
        nodes = {Rank(r): NodeId(node) for node, ranks in self.ranks.items() for r in ranks}
        request = FindState(checkpointer=C, step=step, tried=tried, all_ranks=all_ranks)
        reach = dict.fromkeys(nodes.values(), ("10.0.0.1", 7)).get
        taken = restoring.find(self.state, Rank(rank), f"{rank}/0", request, nodes, reach)
        return self.took(taken)

    def ask_all(self, tried: Tried | None = None, **errors: str) -> StateFound:
        """What all are answered, and the same: all say that, but for those with an error."""
        answers: list[tuple[str, Any]] = []
        for rank in range(self.size):
            error = errors.get(f"r{rank}")
            answers += self.ask(rank, Tried(error) if error else tried).answers
        assert [asker for asker, _ in answers] == [f"{rank}/0" for rank in range(self.size)]
        found = {msgspec.structs.replace(answer, holders=()) for _, answer in answers}
        assert len(found) == 1
        return answers[0][1]  # type: ignore[no-any-return]


def orders(taken: CommitEffects) -> dict[str, tuple[int, ...]]:
    """Who is to write which ranks' shards."""
    return {a.node: a.ranks for a in taken.actions if isinstance(a, WriteRankFiles)}


def kinds(actions: Iterable[AnyAction]) -> list[type]:
    return [type(action) for action in actions]


def offered(found: StateFound) -> tuple[str, int]:
    return found.where, found.step


@pytest.fixture
def two() -> Scene:
    return Scene(a=2, b=1)


# ---- snapshots ----------------------------------------------------------------------------------


def test_a_snapshot_counts_once_every_rank_has_sealed_it(two: Scene) -> None:
    assert two.wait(0, 10, "memory") is None
    assert two.seal("a", 10, "if needed").answers == []
    assert two.seal("b", 10, "if needed").answers == [("0/memory/10", SAVED)]
    assert two.wait(2, 10, "memory") == SAVED


def test_a_seal_that_comes_twice_changes_nothing(two: Scene) -> None:
    two.seal("a", 10)
    two.seal("a", 10)
    assert not two.book.snapshots[0].counts
    two.seal("b", 10)
    before = msgspec.json.encode(two.state)
    assert two.seal("a", 10) == CommitEffects()
    assert msgspec.json.encode(two.state) == before


def test_a_snapshot_for_memory_alone_is_not_written(two: Scene) -> None:
    assert two.save(10, "never").actions == []
    assert two.breaks() == []


def test_who_waits_for_a_step_that_a_newer_one_overtook_is_told_that_it_was_skipped(
    two: Scene,
) -> None:
    for to in ("memory", "storage"):
        assert two.wait(0, 10, to) is None
    two.seal("a", 10)
    two.seal("a", 20)
    answers = dict(two.seal("b", 20).answers)
    assert {a: s.outcome for a, s in answers.items()} == {  # type: ignore[union-attr]
        "0/memory/10": "skipped",
        "0/storage/10": "skipped",
    }


def test_a_step_that_nobody_ever_told_of_is_answered_once_a_newer_one_counts(two: Scene) -> None:
    """Its image was overwritten before any node could seal it."""
    assert two.wait(0, 10, "memory") is None
    assert [asker for asker, _ in two.save(20).answers] == ["0/memory/10"]
    late = two.wait(1, 10, "memory")
    assert late is not None
    assert late.outcome == "skipped"


def test_a_step_of_long_ago_is_answered_although_nothing_is_known_of_it(two: Scene) -> None:
    for step in range(1, 2 * commitbook.KEPT_OUTCOMES):
        two.save(step, "if needed")
    assert two.wait(0, 1, "memory") is not None


def test_a_step_saved_for_memory_and_then_again_for_storage_is_written() -> None:
    scene = Scene(a=2)
    assert scene.save(10, "if needed").actions == []
    assert scene.wait(0, 10, "storage") is None
    assert orders(scene.save(10, "now")) == {"a": (0, 1)}
    assert ("0/storage/10", SAVED) in scene.write(10).answers


def test_a_step_that_could_not_be_written_may_be_saved_again() -> None:
    scene = Scene(a=1)
    scene.save(10)
    scene.wrote("a", 10, error="disk full")
    assert orders(scene.save(10)) == {"a": (0,)}
    scene.write(10)
    assert scene.wait(0, 10, "storage") == SAVED


def test_a_late_seal_of_an_older_round_changes_nothing_once_a_newer_one_counts(two: Scene) -> None:
    two.seal("a", 30, "if needed")
    two.breaks()
    two.save(20, "if needed")
    before = msgspec.json.encode(two.state)
    assert two.seal("b", 30, round=1) == CommitEffects()
    assert two.hold("b", 30, [0, 1, 2], round=1) == CommitEffects()
    assert msgspec.json.encode(two.state) == before


def test_what_became_of_a_step_in_an_older_round_says_nothing_about_it_in_this_one(
    two: Scene,
) -> None:
    two.save(10)
    two.breaks()
    two.wrote("a", 10, round=1, error="disk full")
    assert two.wait(0, 10, "storage") is None
    assert two.wait(0, 10, "memory") is None


def test_copies_make_a_snapshot_whole_even_before_its_own_node_tells_of_it(two: Scene) -> None:
    """The one who got a copy may be heard first; what the save was meant for is not known to it."""
    two.hold("a", 10, [2])
    assert two.wait(0, 10, "memory") is None
    assert ("0/memory/10", SAVED) in two.seal("a", 10, "now").answers
    assert orders(two.seal("b", 10, "now")) == {"a": (0, 1), "b": (2,)}


def test_a_copy_that_is_heard_of_last_makes_a_snapshot_count(two: Scene) -> None:
    two.wait(0, 10, "memory")
    two.seal("a", 10, "if needed")
    assert two.hold("a", 10, [2]).answers == [("0/memory/10", SAVED)]


def test_a_snapshot_known_from_copies_alone_is_not_taken_to_be_for_storage(two: Scene) -> None:
    two.hold("a", 10, [0, 1, 2])
    assert two.breaks() == []


def test_the_newest_whole_snapshot_is_kept_however_many_are_begun_after_it(two: Scene) -> None:
    two.save(10, "if needed")
    for step in range(11, 11 + 3 * commitbook.KEPT_SNAPSHOTS):
        two.seal("a", step, "if needed")
    assert len(two.book.snapshots) == commitbook.KEPT_SNAPSHOTS
    assert offered(two.ask_all()) == ("memory", 10)


def test_as_many_snapshots_are_kept_as_there_is_room_for(two: Scene) -> None:
    for step in range(1, commitbook.KEPT_SNAPSHOTS + 3):
        two.save(step, "if needed")
    assert [s.id.step for s in two.book.snapshots] == [3, 4, 5, 6]


# ---- steps that a rank has no image of ----------------------------------------------------------


@pytest.mark.parametrize("outcome", ["skipped", "failed"])
def test_nobody_waits_for_a_step_that_a_rank_missed(two: Scene, outcome: Missed) -> None:
    for rank in (0, 2):
        for to in TIERS:
            assert two.wait(rank, 10, to) is None
    assert two.wait(1, 11, "memory") is None
    two.seal("a", 10)
    missed = SaveSettled(outcome=outcome, reason="rank 2: no memory")
    answers = two.missed(2, 10, outcome).answers
    asked = {f"{rank}/{to}/10" for rank in (0, 2) for to in TIERS}
    assert dict(answers) == dict.fromkeys(asked, missed)
    assert len(answers) == len(asked)
    assert [two.wait(1, 10, to) for to in TIERS] == [missed, missed], "who asks later is told too"
    assert set(two.book.waits) == {"1/memory/11"}


def test_word_of_a_missed_step_may_come_before_anybody_has_it(two: Scene) -> None:
    two.missed(2, 10)
    two.seal("a", 10)
    answer = two.wait(0, 10, "memory")
    assert answer is not None
    assert answer.outcome == "failed"
    assert offered(two.ask_all()) == ("nowhere", 0)


def test_a_missed_step_is_neither_counted_nor_written(two: Scene) -> None:
    two.seal("a", 10)
    assert two.missed(2, 10).actions == []
    assert two.breaks() == []
    assert not commits.busy(two.state)
    assert commits.unwritten(two.state) == "failed: step 10: rank 2: no memory"


def test_a_step_that_counts_already_cannot_be_missed_any_more(two: Scene) -> None:
    """It was saved again since, and that did not work; what there is stays."""
    two.save(10, "if needed")
    assert two.wait(0, 10, "storage") is None
    assert two.missed(2, 10) == CommitEffects()
    assert two.wait(1, 10, "memory") == SAVED
    assert offered(two.ask_all()) == ("memory", 10)


def test_a_step_that_this_job_has_on_storage_may_be_skipped_after_a_restart(two: Scene) -> None:
    two.save(10)
    two.write(10)
    two.breaks()
    two.missed(2, 10, "skipped")
    assert commits.unwritten(two.state) == ""
    two.missed(2, 20, "skipped")
    assert commits.unwritten(two.state) == "was skipped: step 20: rank 2: no memory"
    two.save(30, "if needed")
    assert commits.unwritten(two.state) == ""


def test_a_missed_step_may_be_saved_again_and_counts_then(two: Scene) -> None:
    two.seal("a", 10)
    two.missed(2, 10)
    assert orders(two.save(10)) == {"a": (0, 1), "b": (2,)}
    assert [two.wait(0, 10, to) for to in TIERS] == [SAVED, None]
    two.write(10)
    assert two.wait(0, 10, "storage") == SAVED


def test_who_saves_a_step_again_does_not_hear_how_it_went_before(two: Scene) -> None:
    two.seal("a", 10)
    two.missed(2, 10)
    assert two.wait(0, 10, "memory") == FAILED
    assert [two.wait(0, 10, to, attempt=2) for to in TIERS] == [None, None]
    assert two.missed(1, 10, why="late word of the first").answers == []
    taken = two.save(10, attempt=2)
    assert taken.answers == [("0/memory/10", SAVED)]
    two.wrote("a", 10, error="disk full")
    assert two.wait(1, 10, "storage", attempt=2) == SaveSettled(
        outcome="failed", reason="disk full"
    )
    assert two.wait(1, 10, "storage", attempt=3) is None
    two.save(10, attempt=3)
    assert [answer for _, answer in two.write(10).answers] == [SAVED]


def test_a_second_attempt_that_fails_is_told_though_the_first_counts(two: Scene) -> None:
    two.save(10, "if needed")
    assert two.wait(0, 10, "storage", attempt=2) is None
    assert two.missed(2, 10, attempt=2).answers == [("0/storage/10", FAILED)]
    assert two.wait(1, 10, "memory", attempt=2) == SAVED


def test_a_second_attempt_that_fails_leaves_alone_what_is_being_written(two: Scene) -> None:
    two.save(10)
    assert two.wait(0, 10, "storage", attempt=2) is None
    assert two.missed(2, 10, attempt=2).answers == []
    assert two.write(10).answers == [("0/storage/10", SAVED)]


def test_what_only_some_nodes_save_is_told_once_and_nobody_waits_for_it(two: Scene) -> None:
    assert two.wait(0, 1, "storage") is None
    taken = [two.seal("a", step) for step in range(1, 8)]
    failed = [one for each in taken for one in each.failed]
    why = "rank 2 has not saved it; all ranks have to save the same steps"
    assert failed == [(snapshot_id(1), why)]
    answers = [one for each in taken for one in each.answers]
    assert answers == [("0/storage/1", SaveSettled(outcome="skipped", reason=why))]
    assert two.wait(0, 2, "memory") == SaveSettled(outcome="skipped", reason=why)
    two.breaks()
    for step in range(1, 8):
        taken.append(two.seal("a", step))
    assert sum(len(one.failed) for one in taken) == 2, "once a round"


def test_nobody_waits_for_what_a_rank_has_not_saved_before_its_end(two: Scene) -> None:
    two.seal("a", 10)
    assert two.wait(0, 10, "storage") is None
    assert two.wait(1, 11, "memory") is None
    skipped = SaveSettled(outcome="skipped", reason="rank 2 ended without saving it")
    answers = waiting.given_up(two.state, [Rank(2)]).answers
    assert answers == [("0/storage/10", skipped), ("1/memory/11", skipped)]
    two.save(12)
    assert two.wait(0, 12, "storage") is None
    assert waiting.given_up(two.state, [Rank(2)]) == CommitEffects(), "that one counts"


def test_a_save_before_the_restore_takes_nothing_away(two: Scene) -> None:
    """Some scripts save their first state before they ask whether there is a newer one."""
    two.save(10, "never")
    two.breaks()
    two.save(0, "never")
    assert offered(two.ask_all()) == ("memory", 10)
    assert two.ask_all(Tried()).where == "loaded"
    two.save(11, "never")
    assert [s.id.step for s in two.book.snapshots if s.id.round == 1] == []


# ---- to storage ---------------------------------------------------------------------------------


def test_shards_then_the_manifest_then_it_is_stored(two: Scene) -> None:
    taken = two.save(10)
    assert orders(taken) == {"a": (0, 1), "b": (2,)}
    assert two.wait(1, 10, "storage") is None
    assert two.wrote("b", 10).actions == []
    (commit,) = two.wrote("a", 10).actions
    assert commit == CommitCheckpoint(
        node=NodeId("a"),
        snapshot=snapshot_id(10),
        world_size=3,
        shards=(shard(0), shard(1), shard(2)),
    )
    taken = two.committed("a", 10)
    assert kinds(taken.actions) == [CheckpointSettled, CheckpointSettled]
    assert taken.answers == [("1/storage/10", SAVED)]
    assert two.book.stored == snapshot_id(10)
    assert not commits.busy(two.state)


def test_ranks_write_slices_only_if_all_of_them_share_the_same(two: Scene) -> None:
    two.seal("a", 10, shared=b"one")
    (first, second) = two.seal("b", 10, shared=b"another").actions
    assert isinstance(first, WriteRankFiles)
    assert isinstance(second, WriteRankFiles)
    assert not first.alike
    assert not second.alike


def test_ranks_write_slices_only_if_it_is_known_of_all_that_they_share_the_same(two: Scene) -> None:
    """A lost node never told; its images are known from the copies that others have."""
    two.seal("a", 10, "if needed")
    two.hold("a", 10, [2])
    two.lose("b")
    (order,) = two.breaks()
    assert isinstance(order, WriteRankFiles)
    assert order.ranks == (0, 1, 2)
    assert not order.alike


def test_an_error_of_one_node_ends_the_write_for_all_and_is_told(two: Scene) -> None:
    two.save(10)
    two.wait(0, 10, "storage")
    taken = two.wrote("b", 10, error="disk full")
    failed = SaveSettled(outcome="failed", reason="disk full")
    assert taken.failed == [(snapshot_id(10), "disk full")]
    assert taken.answers == [("0/storage/10", failed)]
    assert {a.node for a in taken.actions} == {"a", "b"}  # type: ignore[union-attr]
    assert commits.unwritten(two.state) == "failed: disk full"


def test_a_manifest_that_cannot_be_written_is_told(two: Scene) -> None:
    two.save(10)
    two.wrote("a", 10)
    two.wrote("b", 10)
    assert two.committed("b", 10, error="disk full").failed == [(snapshot_id(10), "disk full")]


def test_after_a_failure_the_next_save_works_and_nothing_is_unwritten(two: Scene) -> None:
    two.save(10)
    two.wrote("a", 10, error="disk full")
    two.save(20)
    two.write(20)
    assert two.book.stored == snapshot_id(20)
    assert commits.unwritten(two.state) == ""


def test_an_image_that_is_gone_is_no_failure_and_a_newer_one_is_written_instead(two: Scene) -> None:
    two.save(10)
    two.save(20, "if needed")
    two.wait(0, 10, "storage")
    taken = two.wrote("a", 10, error="a newer one took its place", gone=True)
    assert taken.failed == []
    assert [s.outcome for _, s in taken.answers] == ["skipped"]  # type: ignore[union-attr]
    assert {a.snapshot for a in taken.actions if isinstance(a, WriteRankFiles)} == {snapshot_id(20)}


def test_while_one_is_written_only_the_newest_waits(two: Scene) -> None:
    two.save(10)
    two.save(20)
    two.wait(0, 20, "storage")
    (_, skipped) = two.save(30).answers[-1]
    assert isinstance(skipped, SaveSettled)
    assert skipped.outcome == "skipped"
    assert "step 30" in skipped.reason
    taken = two.write(10)
    assert {a.snapshot for a in taken.actions if isinstance(a, WriteRankFiles)} == {snapshot_id(30)}


def test_a_newer_snapshot_that_waits_is_not_displaced_by_an_older_one_saved_again() -> None:
    scene = Scene(a=1)
    scene.save(20)
    scene.wrote("a", 20, error="disk full")
    scene.save(25)
    scene.save(30)
    scene.save(20)
    assert scene.book.wanted == snapshot_id(30)
    again = scene.wait(0, 20, "storage")
    assert again is not None
    assert again.outcome == "skipped"


def test_a_snapshot_that_waits_for_storage_stays_though_a_new_round_saves(two: Scene) -> None:
    two.save(10)
    two.save(20)
    two.breaks()
    two.save(15, "if needed")
    for node in two.ranks:
        two.wrote(node, 10, round=1)
    event = CheckpointWritten(at=NOW, node=NodeId("b"), snapshot=snapshot_id(10))
    taken = two.took(commits.checkpoint_written(two.state, event))
    assert orders(taken) == {"a": (0, 1), "b": (2,)}


def test_a_late_answer_is_told_how_it_ended(two: Scene) -> None:
    two.save(10)
    two.wrote("a", 10, error="disk full")
    (settled,) = two.wrote("b", 10).actions
    assert isinstance(settled, CheckpointSettled)
    assert settled.error == "disk full"
    two.save(20)
    two.write(20)
    (settled,) = two.wrote("b", 20).actions
    assert isinstance(settled, CheckpointSettled)
    assert settled.error == ""


def test_a_node_that_wrote_and_was_asked_again_cannot_spoil_it(two: Scene) -> None:
    """After a broken stream it may be told again, when its image is gone already."""
    two.save(10)
    two.wrote("a", 10)
    assert two.wrote("a", 10, error="gone", gone=True) == CommitEffects()
    two.wrote("b", 10)
    assert two.committed("b", 10).failed == []


def test_only_who_was_told_to_commit_can_say_how_it_went(two: Scene) -> None:
    two.save(10)
    two.wrote("a", 10)
    assert two.committed("a", 10) == CommitEffects()
    two.wrote("b", 10)
    assert two.committed("a", 10, error="too late") == CommitEffects()
    assert two.book.writing is not None


def test_when_a_round_breaks_the_newest_whole_snapshot_is_written(two: Scene) -> None:
    two.save(10, "if needed")
    two.save(20, "if needed")
    two.seal("a", 30, "if needed")
    assert {a.snapshot for a in two.breaks()} == {snapshot_id(20)}  # type: ignore[union-attr]


def test_when_a_round_breaks_what_is_on_its_way_is_not_written_again(two: Scene) -> None:
    two.save(10)
    assert two.breaks() == []
    two.save(20)
    assert two.breaks() == []
    assert two.book.wanted == snapshot_id(20, 2)


# ---- lost nodes ---------------------------------------------------------------------------------


def test_a_node_lost_with_the_only_image_of_a_rank_ends_the_write_with_an_error(two: Scene) -> None:
    two.save(10)
    taken = two.lose("b")
    assert taken.failed == [(snapshot_id(10), "b was lost with the only image of rank 2")]
    (settled,) = taken.actions
    assert isinstance(settled, CheckpointSettled)
    assert settled.node == "a"


def test_a_node_that_has_a_copy_writes_what_a_lost_one_was_to_write() -> None:
    scene = Scene(a=1, b=2)
    scene.hold("a", 10, [1, 2])
    scene.save(10)
    taken = scene.lose("b")
    assert taken.failed == []
    assert orders(taken) == {"a": (1, 2)}
    scene.wrote("a", 10, [0])
    (commit,) = scene.wrote("a", 10, [1, 2]).actions
    assert isinstance(commit, CommitCheckpoint)


def test_a_node_that_writes_in_place_of_a_lost_one_is_told_how_it_ended() -> None:
    scene = Scene(a=1, b=1)
    scene.hold("spare", 10, [1])
    scene.save(10)
    scene.lose("b")
    scene.wrote("spare", 10, [1])
    scene.wrote("a", 10)
    assert {action.node for action in scene.committed("a", 10).actions} == {"a", "spare"}  # type: ignore[union-attr]


def test_nobody_can_say_that_a_shard_is_written_that_others_were_to_write(two: Scene) -> None:
    two.save(10)
    assert two.wrote("a", 10, [0, 1, 2]).actions == []
    (commit,) = two.wrote("b", 10).actions
    assert isinstance(commit, CommitCheckpoint)


def test_what_a_lost_node_was_to_write_is_written_when_it_is_back_with_its_images(
    two: Scene,
) -> None:
    two.save(10)
    two.wrote("a", 10)
    two.lose("b")
    assert two.book.writing is None
    assert orders(two.hold("again", 10, [2])) == {"a": (0, 1), "again": (2,)}


def test_another_node_commits_when_the_committer_is_lost(two: Scene) -> None:
    two.save(10)
    two.wrote("a", 10)
    two.wrote("b", 10)
    (commit,) = two.lose("b").actions
    assert isinstance(commit, CommitCheckpoint)
    assert commit.node == "a"
    two.committed("a", 10)
    assert two.book.stored == snapshot_id(10)


def test_a_committer_lost_without_another_ends_the_write_with_an_error() -> None:
    scene = Scene(a=2)
    scene.save(10)
    scene.wrote("a", 10)
    assert scene.lose("a").failed == [(snapshot_id(10), "a was lost before it wrote the manifest")]


def test_a_node_with_a_new_stream_is_told_again_what_it_is_to_do_or_how_it_ended(
    two: Scene,
) -> None:
    two.save(10)
    two.wrote("a", 10)
    assert commits.remind(two.state, NodeId("a")) == []
    (order,) = commits.remind(two.state, NodeId("b"))
    assert isinstance(order, WriteRankFiles)
    two.wrote("b", 10)
    (commit,) = commits.remind(two.state, NodeId("b"))
    assert isinstance(commit, CommitCheckpoint)
    two.committed("b", 10)
    (settled,) = commits.remind(two.state, NodeId("a"))
    assert settled == CheckpointSettled(node=NodeId("a"), snapshot=snapshot_id(10))


def test_a_large_world_is_committed_in_several_messages(
    two: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message with all shards would be too large for a frame."""
    monkeypatch.setattr(commits, "SHARDS_PER_MESSAGE", 2)
    two.save(10)
    two.wrote("a", 10)

    def told(actions: list[AnyAction]) -> list[tuple[str, int, tuple[StoredFile, ...]]]:
        assert all(isinstance(action, CommitCheckpoint) for action in actions)
        return [(a.node, a.world_size, a.shards) for a in actions]  # type: ignore[union-attr]

    shards = [(shard(0), shard(1)), (shard(2),)]
    assert told(two.wrote("b", 10).actions) == [("b", 3, some) for some in shards]
    assert told(commits.remind(two.state, NodeId("b"))) == [("b", 3, some) for some in shards]
    assert told(two.lose("b").actions) == [("a", 3, some) for some in shards]
    two.committed("a", 10)
    assert two.book.stored == snapshot_id(10)


def test_as_many_shards_as_are_told_at_once_fit_into_a_frame() -> None:
    scene = Scene(a=commits.SHARDS_PER_MESSAGE + 1)
    scene.save(10)
    named = rank_file_name(scene.size, 999_999, 0xFFFFF)
    shards = tuple(
        StoredFile(Rank(r), named, 1 << 50, "t" * 32, "c" * 32) for r in range(scene.size)
    )
    event = RankFilesWritten(at=NOW, node=NodeId("a"), snapshot=snapshot_id(10), shards=shards)
    actions = scene.took(commits.shards_written(scene.state, event)).actions
    assert [len(action.shards) for action in actions] == [commits.SHARDS_PER_MESSAGE, 1]  # type: ignore[union-attr]
    assert len(framing.encode(actions[0])) < framing.MAX_FRAME_BYTES / 2


def test_images_of_an_earlier_life_of_a_node_can_be_restored(two: Scene) -> None:
    two.save(10, "if needed")
    two.lose("b")
    two.breaks()
    two.ranks = {"a": [0, 1], "c": [2]}
    assert offered(two.ask_all()) == ("nowhere", 0)
    two.hold("c", 10, [2], round=1)
    found = two.ask_all()
    assert offered(found) == ("memory", 10)
    assert [holder.node for holder in found.holders] == ["a"]


# ---- restoring ----------------------------------------------------------------------------------


def test_nothing_is_offered_before_all_ranks_ask(two: Scene) -> None:
    two.save(10, "if needed")
    assert two.ask(0).answers == []
    assert two.ask(2).answers == []
    assert len(two.ask(1).answers) == 3


def test_the_newest_is_offered_first_and_of_one_step_memory_before_storage(two: Scene) -> None:
    two.stored(10, 20)
    two.save(20, "if needed")
    bad = Tried("bad")
    assert offered(two.ask_all()) == ("memory", 20)
    assert offered(two.ask_all(bad)) == ("storage", 20)
    assert offered(two.ask_all(bad)) == ("storage", 10)
    last = two.ask_all(bad)
    assert offered(last) == ("nowhere", 0)
    assert last.refused == (
        "step 20 from memory: rank 0: bad (and 2 more ranks)",
        "step 20 from storage: rank 0: bad (and 2 more ranks)",
        "step 10 from storage: rank 0: bad (and 2 more ranks)",
    )


def test_one_rank_that_cannot_load_it_is_enough(two: Scene) -> None:
    two.save(10, "if needed")
    two.save(20, "if needed")
    two.ask_all()
    found = two.ask_all(Tried(), r2="torn")
    assert offered(found) == ("memory", 10)
    assert found.refused == ("step 20 from memory: rank 2: torn",)
    assert two.ask_all(Tried()).where == "loaded"


def test_a_rank_that_begins_again_is_told_again_and_nobody_goes_on_without_it(two: Scene) -> None:
    two.save(10, "if needed")
    two.ask_all()
    for rank in (0, 1):
        assert two.ask(rank, Tried()).answers == []
    ((asker, again),) = two.ask(2).answers
    assert asker == "2/0"
    assert isinstance(again, StateFound)
    assert offered(again) == ("memory", 10)
    assert len(two.ask(2, Tried()).answers) == 3


def holders(answers: Iterable[tuple[str, Any]]) -> dict[str, list[int]]:
    """Whose images each asker was told the holders of."""
    return {asker: [one.rank for one in found.holders] for asker, found in answers}


def test_a_rank_that_needs_all_images_is_told_who_has_them_and_others_are_not(two: Scene) -> None:
    two.save(10, "if needed")
    two.save(20, "if needed")
    for rank in (0, 1):
        two.ask(rank)
    assert holders(two.ask(2, all_ranks=True).answers) == {"0/0": [0], "1/0": [1], "2/0": [0, 1, 2]}
    for rank in (0, 1):
        two.ask(rank, Tried("bad"))
    older = two.ask(2, Tried(), all_ranks=True).answers
    assert holders(older) == {"0/0": [0], "1/0": [1], "2/0": [0, 1, 2]}


def test_a_rank_that_begins_again_is_told_of_all_images_if_it_needs_them(two: Scene) -> None:
    two.save(10, "if needed")
    two.ask_all()
    assert holders(two.ask(2, all_ranks=True).answers) == {"2/0": [0, 1, 2]}


def test_ranks_that_want_different_steps_are_refused(two: Scene) -> None:
    two.stored(10, 20)
    two.ask(0)
    two.ask(1, step=10)
    answers = two.ask(2).answers
    assert len(answers) == 3
    for _, found in answers:
        assert isinstance(found, StateFound)
        assert found.where == "nowhere"
        assert found.refused == ("rank 1: it wants step 10, and others want the newest",)


def test_a_wanted_step_is_the_only_one_offered(two: Scene) -> None:
    two.stored(10, 20)
    answers = [two.ask(rank, step=10).answers for rank in range(3)][-1]
    assert {offered(found) for _, found in answers} == {("storage", 10)}  # type: ignore[arg-type]
    answers = [two.ask(rank, Tried("bad"), step=10).answers for rank in range(3)][-1]
    assert {offered(found) for _, found in answers} == {("nowhere", 0)}  # type: ignore[arg-type]


def test_storage_that_cannot_be_looked_at_is_said_and_is_not_the_same_as_empty(two: Scene) -> None:
    two.stored(refused=("storage: stale mount",))
    assert two.ask_all().refused == ("storage: stale mount",)
    two.save(10, "if needed")
    found = two.ask_all()
    assert offered(found) == ("memory", 10)
    assert found.refused == ("storage: stale mount",)


def test_what_storage_refuses_is_told_with_whatever_is_restored(two: Scene) -> None:
    two.stored(10, refused=("step 30 from storage: damaged",))
    two.save(20, "if needed")
    found = two.ask_all()
    assert (offered(found), found.refused) == (("memory", 20), ("step 30 from storage: damaged",))
    found = two.ask_all(Tried("torn"))
    assert offered(found) == ("storage", 10)
    assert found.refused == (
        "step 30 from storage: damaged",
        "step 20 from memory: rank 0: torn (and 2 more ranks)",
    )
    two.ask_all(Tried())
    two.stored(10)
    assert two.ask_all().refused == (), "what was refused then is gone now"


def test_what_becomes_known_during_a_search_is_not_offered_after_something_older(
    two: Scene,
) -> None:
    two.save(10, "if needed")
    two.seal("a", 20, "if needed")
    two.ask_all()
    two.seal("b", 20, "if needed")
    assert two.ask_all(Tried("bad")).where == "nowhere"


def test_what_was_refused_is_neither_offered_again_nor_written(two: Scene) -> None:
    two.stored(10)
    two.save(20, "if needed")
    two.ask_all()
    assert offered(two.ask_all(Tried("bad"))) == ("storage", 10)
    two.ask_all(Tried())
    assert two.breaks() == []
    assert offered(two.ask_all()) == ("storage", 10)


def test_after_a_step_back_within_a_round_newer_saves_count_again(two: Scene) -> None:
    two.stored(10)
    two.save(20, "if needed")
    for tried in (None, Tried()):
        for rank in range(3):
            two.ask(rank, tried, step=10)
    assert two.wait(0, 20, "memory") is None
    two.save(11, "if needed")
    assert offered(two.ask_all()) == ("memory", 11)


def test_a_rank_of_a_smaller_or_larger_world_is_told_of_all_images(two: Scene) -> None:
    two.save(10, "if needed")
    two.breaks()
    two.ranks = {"a": [0], "b": [1]}
    found = two.ask_all()
    assert found.world_size == 3
    assert [(holder.rank, holder.node) for holder in found.holders] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
    ]


def test_an_image_is_had_from_the_own_node_where_it_has_one(two: Scene) -> None:
    two.save(10, "if needed")
    two.hold("b", 10, [0, 1])
    two.breaks()
    two.ranks = {"a": [0], "b": [1, 2]}
    answers = [two.ask(rank).answers for rank in range(3)][-1]
    holders = [found.holders[0].node for _, found in answers]  # type: ignore[union-attr]
    assert holders == ["a", "b", "b"]


def test_every_node_that_has_an_image_is_named_the_own_one_first(two: Scene) -> None:
    two.save(10, "if needed")
    two.hold("b", 10, [0, 1])
    answers = [two.ask(rank).answers for rank in range(3)][-1]
    holders = [[h.node for h in found.holders] for _, found in answers]  # type: ignore[union-attr]
    assert holders == [["a", "b"], ["a", "b"], ["b"]]


def test_a_spare_that_had_the_only_copy_may_go_in_the_middle_of_a_search(two: Scene) -> None:
    two.seal("a", 10, "if needed")
    two.hold("spare", 10, [2])
    two.ask_all()
    two.lose("spare")
    ((_, found),) = two.ask(2).answers
    assert isinstance(found, StateFound)
    assert found.holders[0].node == ""


def test_nodes_that_start_ranks_are_told_which_images_to_get_from_whom(two: Scene) -> None:
    two.save(10, "never")
    reach = {NodeId("a"): ("10.0.0.1", 7), NodeId("b"): ("10.0.0.2", 8)}.get
    wanted = commits.wanted_images(two.state, [Rank(1), Rank(2)], NodeId("a"), 3, reach)
    assert [(image.rank, holder.node, holder.port) for image, holder in wanted] == [(2, "b", 8)]


# ---- as part of a job ---------------------------------------------------------------------------


class Saver(Driver):
    """A job whose ranks save and restore."""

    def seal(self, node: str, step: int, wish: Wish = "now") -> list[AnyAction]:
        ranks = [rank for rank, state in self.job.ranks.items() if state.node == node]
        return self.take(
            SnapshotsSealed(
                at=self.at,
                node=NodeId(node),
                snapshot=snapshot_id(step, self.round),
                world_size=len(self.job.ranks),
                ranks=tuple(Sealed(rank, b"s") for rank in ranks),
                wish=wish,
            )
        )

    def wrote(self, node: str, step: int, error: str = "", gone: bool = False) -> list[AnyAction]:
        ranks = [rank for rank, state in self.job.ranks.items() if state.node == node]
        return self.take(
            RankFilesWritten(
                at=self.at,
                node=NodeId(node),
                snapshot=snapshot_id(step, self.round),
                shards=() if error else tuple(map(shard, ranks)),
                error=error,
                gone=gone,
            )
        )

    def missed(
        self, rank: int, step: int, outcome: Missed = "failed", round: int = 0
    ) -> list[AnyAction]:
        return self.take(
            SnapshotMissed(
                at=self.at,
                node=self.node_of(rank),
                rank=Rank(rank),
                snapshot=snapshot_id(step, round or self.round),
                outcome=outcome,
                reason="no memory",
            )
        )

    def committed(self, node: str, step: int, error: str = "") -> list[AnyAction]:
        id = snapshot_id(step, self.round)
        return self.take(CheckpointWritten(at=self.at, node=NodeId(node), snapshot=id, error=error))

    def ask(
        self, rank: int, request: AnyRequest, number: int = 1, channel: int = 0
    ) -> list[AnyAction]:
        return self.take(
            Asked(
                at=self.at,
                node=self.node_of(rank),
                round=self.round,
                rank=Rank(rank),
                channel=channel,
                number=number,
                request=request,
            )
        )

    def finish_all(self) -> list[AnyAction]:
        return [self.exit(rank, step=9, code=0) for rank in list(self.job.ranks)][-1]


@pytest.fixture
def job() -> Saver:
    driver = Saver()
    driver.running("a", slots=2, step=4)
    return driver


def await_save(step: int, to: Tier = "storage", timeout_s: float | None = None) -> AwaitSave:
    return AwaitSave(checkpointer=C, step=step, to=to, timeout_s=timeout_s)


def told(actions: Iterable[AnyAction]) -> list[Any]:
    return [action.answer for action in actions if isinstance(action, Answered)]


def test_the_end_of_a_job_waits_for_the_last_checkpoint(job: Saver) -> None:
    job.seal("a", 10)
    assert job.finish_all() == []
    assert job.wrote("a", 10) != []
    actions = job.committed("a", 10)
    assert [a.code for a in actions if isinstance(a, Finish)] == [0]


def test_a_job_whose_last_checkpoint_cannot_be_written_ends_with_1_and_the_reason(
    job: Saver,
) -> None:
    job.seal("a", 10)
    job.finish_all()
    (finish,) = [a for a in job.wrote("a", 10, "disk full") if isinstance(a, Finish)]
    assert finish.code == 1
    assert "the last save failed: disk full" in finish.reason


def test_a_job_whose_last_but_one_checkpoint_could_not_be_written_ends_with_0(job: Saver) -> None:
    job.seal("a", 10)
    job.seal("a", 11)
    job.finish_all()
    assert [a for a in job.wrote("a", 10, "disk full") if isinstance(a, Finish)] == []
    job.wrote("a", 11)
    assert [a.code for a in job.committed("a", 11) if isinstance(a, Finish)] == [0]


def test_a_checkpoint_that_cannot_be_written_is_an_incident_and_breaks_nothing(job: Saver) -> None:
    job.seal("a", 10)
    job.wrote("a", 10, "disk full")
    (incident,) = job.job.incidents
    assert (incident.kind, incident.step, incident.detail) == ("storage", 10, "disk full")
    assert job.job.state.name == "running"
    assert job.job.recovery.open_incident is None


def test_a_checkpoint_that_a_stopped_job_could_not_write_is_not_said_to_be_tried_again(
    job: Saver,
) -> None:
    job.seal("a", 10)
    job.wrote("a", 10)
    job.committed("a", 10)
    job.seal("a", 20)
    leaving = NodeLeaving(at=job.at, node=NodeId("a"), reason="stopped by SIGTERM", code=75)
    job.take(leaving)
    job.wrote("a", 20, "storage took longer than the 25 s of --save-deadline")
    incident = job.job.incidents[-1]
    assert (incident.kind, incident.step) == ("storage", 20)
    assert "--save-deadline" in incident.detail
    assert incident.action == "the job ends without it; step 10 is the newest on storage"


def test_a_job_whose_last_save_failed_ends_with_1_and_the_reason(job: Saver) -> None:
    job.missed(1, 10)
    (finish,) = [a for a in job.finish_all() if isinstance(a, Finish)]
    assert finish.code == 1
    assert "the last save failed: step 10: rank 1: no memory" in finish.reason


def test_a_save_that_failed_is_made_up_for_by_a_later_one(job: Saver) -> None:
    job.missed(1, 10)
    job.seal("a", 11, "never")
    assert [a.code for a in job.finish_all() if isinstance(a, Finish)] == [0]


def test_a_job_whose_last_save_was_skipped_ends_with_1_and_an_incident(job: Saver) -> None:
    job.seal("a", 10)
    job.wrote("a", 10)
    job.committed("a", 10)
    job.missed(1, 20, outcome="skipped")
    assert job.job.incidents == [], "a newer save may make up for it"
    (finish,) = [a for a in job.finish_all() if isinstance(a, Finish)]
    assert finish.code == 1
    assert "the last save was skipped: step 20: rank 1: no memory" in finish.reason
    (incident,) = job.job.incidents
    assert (incident.kind, incident.step, incident.detail) == ("storage", 20, "rank 1: no memory")


def test_a_last_save_is_an_incident_however_many_were_lost_before(job: Saver) -> None:
    for step in (10, 11, 12):
        job.missed(1, step)
    (finish,) = [a for a in job.finish_all() if isinstance(a, Finish)]
    assert finish.code == 1
    assert [incident.step for incident in job.job.incidents] == [10, 11, 12]


def test_a_last_save_that_a_rank_ended_without_ends_the_job_with_1() -> None:
    """The ranks of the other node have it."""
    job = Saver(min_nodes=2, max_nodes=2)
    job.running("a", "b", slots=1, step=4)
    job.seal("a", 10)
    finished = [action for rank in (0, 1) for action in job.exit(rank, step=9, code=0)]
    finish = next(action for action in finished if isinstance(action, Finish))
    assert finish.code == 1
    assert "the last save was skipped: step 10: rank 1 ended without saving it" in finish.reason
    assert [incident.step for incident in job.job.incidents] == [10]


def test_a_last_save_whose_step_another_job_has_committed_ends_the_job_with_1(job: Saver) -> None:
    job.seal("a", 10)
    job.finish_all()
    taken = job.wrote("a", 10, "step 10 was committed already", gone=True)
    (finish,) = [action for action in taken if isinstance(action, Finish)]
    assert finish.code == 1
    assert [incident.step for incident in job.job.incidents] == [10]


def test_a_last_save_to_memory_alone_may_be_skipped(job: Saver) -> None:
    job.seal("a", 10, "never")
    job.missed(1, 20, outcome="skipped")
    assert [a.code for a in job.finish_all() if isinstance(a, Finish)] == [0]


def test_saves_of_which_nothing_came_are_incidents_and_in_the_status(job: Saver) -> None:
    """However many there are: the first, the second, the fourth and so on are told."""
    for step in range(10, 16):
        job.missed(0, step)
        job.missed(1, step)
    found = job.job.incidents
    assert [(one.kind, one.step) for one in found] == [("storage", step) for step in (10, 11, 13)]
    assert found[0].detail == "rank 0: no memory"
    (shown,) = report.status(job.job, job.at, alive=True).checkpoints
    assert (shown.failed, shown.skipped) == (6, 0)
    assert job.job.state.name == "running"


def test_a_checkpoint_that_slow_storage_left_no_time_for_is_an_incident(job: Saver) -> None:
    for step in (10, 11, 12):
        job.seal("a", step)
    (incident,) = job.job.incidents
    assert incident.signature == "step 11 was skipped"
    assert "storage is slower than the saves" in incident.detail
    assert report.status(job.job, job.at, alive=True).checkpoints[0].skipped == 1


def test_a_snapshot_that_a_newer_one_replaced_in_memory_is_counted_and_no_incident(
    job: Saver,
) -> None:
    for step in (10, 11, 12):
        job.missed(1, step, "skipped")
    assert job.job.incidents == []
    assert report.status(job.job, job.at, alive=True).checkpoints[0].skipped == 3


def test_the_newest_snapshot_is_written_when_the_ranks_have_ended(job: Saver) -> None:
    job.seal("a", 10, "if needed")
    (order,) = job.finish_all()
    assert isinstance(order, WriteRankFiles)
    job.wrote("a", 10)
    assert [a.code for a in job.committed("a", 10) if isinstance(a, Finish)] == [0]


def test_the_newest_snapshot_is_written_when_a_script_stops_the_job(job: Saver) -> None:
    job.seal("a", 10, "if needed")
    asked = StopAsked(
        at=job.at, node=NodeId("a"), round=job.round, rank=Rank(0), reason="converged", code=0
    )
    assert [a for a in job.take(asked) if isinstance(a, WriteRankFiles)] != []


def test_a_snapshot_sealed_just_after_its_round_broke_is_written(job: Saver) -> None:
    job.exit(0, step=4, signal=9)
    (order,) = job.seal("a", 10, "if needed")
    assert isinstance(order, WriteRankFiles)


def test_a_node_lost_while_the_last_checkpoint_is_written_ends_the_round_and_not_the_job(
    job: Saver,
) -> None:
    """Its agent is started again, and has what it is to write."""
    job.seal("a", 10)
    job.finish_all()
    job.lose("a")
    assert job.job.result is None
    job.join("b")
    images = tuple(ImageId(snapshot_id(10), Rank(rank), 2) for rank in (0, 1))
    (order,) = job.take(ImagesHeld(at=job.at, node=NodeId("b"), images=images))
    assert isinstance(order, WriteRankFiles)
    assert order.node == "b"


def test_a_snapshot_that_comes_back_with_its_node_after_its_round_broke_is_written(
    job: Saver,
) -> None:
    job.seal("a", 10, "if needed")
    job.lose("a")
    job.join("b")
    images = tuple(ImageId(snapshot_id(10), Rank(rank), 2) for rank in (0, 1))
    (order,) = job.take(ImagesHeld(at=job.at, node=NodeId("b"), images=images))
    assert isinstance(order, WriteRankFiles)


def test_a_job_whose_last_checkpoint_failed_before_its_ranks_ended_ends_with_1(job: Saver) -> None:
    job.seal("a", 10)
    job.wrote("a", 10, "disk full")
    actions = job.finish_all()
    if any(isinstance(action, WriteRankFiles) for action in actions):  # One more try, why not.
        actions = job.wrote("a", 10, "disk full")
    assert [action.code for action in actions if isinstance(action, Finish)] == [1]


def test_who_searches_does_not_wait_for_a_rank_that_has_ended(job: Saver) -> None:
    job.ask(0, FindState(checkpointer=C))
    assert [type(answer) for answer in told(job.exit(1, step=4, code=0))] == [StateFound]


def test_a_new_round_after_all_ranks_had_ended_is_not_ended_by_its_first_save() -> None:
    job = Saver(min_nodes=2, max_nodes=3)
    job.running("a", "b", slots=1, step=4)
    job.seal("a", 10)
    job.seal("b", 10)
    job.finish_all()
    job.wrote("b", 10)
    job.join("c", 1)
    job.lose("b")
    job.all_ready()
    if job.job.world is None:
        job.after(60).tick()
    assert job.job.result is None
    job.start_all()
    for node in ("a", "c"):
        job.seal(node, 11, "if needed")
    assert job.job.state.name == "running"


def test_who_waited_in_vain_is_not_answered_for_what_it_asks_next(job: Saver) -> None:
    """Its channel is in use again; the old question's answer must not be taken for the new one's."""
    (denied,) = told(job.ask(0, await_save(10, timeout_s=0.0)))
    assert denied.reason == "timeout"
    job.ask(0, FindState(checkpointer=C), number=2)
    job.seal("a", 10)
    job.wrote("a", 10)
    assert told(job.committed("a", 10)) == []
    answers = told(job.ask(1, FindState(checkpointer=C)))
    assert [type(answer) for answer in answers] == [StateFound, StateFound]


def test_waiting_for_one_checkpointer_is_not_answered_by_another(job: Saver) -> None:
    job.ask(0, await_save(10, timeout_s=0.0))
    job.ask(0, AwaitSave(checkpointer="other", step=10, to="storage"), number=2)
    job.seal("a", 10)
    job.wrote("a", 10)
    assert told(job.committed("a", 10)) == []


def test_who_waits_is_told_what_another_rank_missed_in_this_round_and_in_no_other(
    job: Saver,
) -> None:
    job.ask(0, await_save(10, "memory"))
    job.ask(1, await_save(10, "storage"))
    assert job.missed(1, 10, round=job.round + 1) == []
    failed = SaveSettled(outcome="failed", reason="rank 1: no memory")
    assert told(job.missed(1, 10)) == [failed, failed]
    assert job.job.state.name == "running"


def test_a_broken_round_ends_all_waiting_and_searching(job: Saver) -> None:
    job.ask(0, await_save(10))
    job.ask(1, FindState(checkpointer=C))
    answers = told(job.exit(0, step=4, signal=9))
    assert [answer.reason for answer in answers] == ["fenced", "fenced"]
    book = job.job.of(Commits).book(C)
    assert not book.waits
    assert book.search is None
