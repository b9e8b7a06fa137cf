"""Snapshots and checkpoints under any sequence of events.

Nodes are modelled: each has the images that its ranks saved, the last two of each, and copies of
others'; storage has what was written. What they say is put into a bag and taken out in any order,
some of it twice, some of it long after. Ranks miss a step, nodes are lost, come back with their images
under another name, writes fail, the coordinator dies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_commits import NOW, TIERS, revived, shard, snapshot_id
from test_job_machine import JobMachine, picks

from holdfast.core.commits import restoring, waiting
from holdfast.core.commits import rules as commits
from holdfast.core.commits import state as commitbook
from holdfast.core.commits.state import CommitEffects, Commits
from holdfast.messages.actions import (
    Answered,
    AnyAction,
    CheckpointSettled,
    CommitCheckpoint,
    WriteRankFiles,
)
from holdfast.messages.checkpoints import (
    ImageId,
    Missed,
    Sealed,
    SnapshotId,
    StoredStep,
    Tier,
    Tried,
    Wish,
)
from holdfast.messages.events import (
    Asked,
    CheckpointWritten,
    ImagesHeld,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.requests import AnyRequest, AwaitSave, FindState, SaveSettled, StateFound
from holdfast.messages.units import NodeId, Rank, RoundNumber

BOOKS = ("c", "d")
WISHES: tuple[Wish, ...] = ("never", "if needed", "now", "now")
MISSED: tuple[Missed, ...] = ("skipped", "failed")
SLOTS = 2
"""Images that a rank has."""

Told = SnapshotsSealed | SnapshotMissed | ImagesHeld | RankFilesWritten | CheckpointWritten
Order = WriteRankFiles | CommitCheckpoint
Image = tuple[SnapshotId, Rank]


class Search:
    """What the ranks of a round know of a state that they want to restore."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.waiting: dict[Rank, Tried | None] = {}
        """Who has asked, and with what it asked."""
        self.offer: StateFound | None = None
        self.places: list[tuple[int, bool, int]] = []


class CommitsMachine(RuleBasedStateMachine):
    @initialize(nodes=st.integers(1, 3), slots=st.integers(1, 2))
    def open(self, nodes: int, slots: int) -> None:
        self.state = Commits()
        self.slots = slots
        self.born = 0
        self.images: dict[NodeId, list[Image]] = {}
        """What each living node has, oldest first."""
        self.said: dict[NodeId, set[Image]] = {}
        """What each living node was heard to have."""
        self.bag: list[Told] = []
        self.heard: list[Told] = []
        self.orders: list[Order] = []
        self.sealed: dict[Image, bytes] = {}
        self.durable: set[Image] = set()
        self.manifests: dict[str, dict[SnapshotId, int]] = {book: {} for book in BOOKS}
        self.saved: list[SnapshotId] = []
        self.waits: dict[str, tuple[SnapshotId, Tier]] = {}
        self.round = 0
        self.sizes: dict[int, int] = {}
        self.asked = 0
        self.attempt = 1
        self.begin_round([self.new_node() for _ in range(nodes)])

    def new_node(self) -> NodeId:
        self.born += 1
        node = NodeId(f"n{self.born}")
        self.images[node], self.said[node] = [], set()
        return node

    def begin_round(self, nodes: Iterable[NodeId]) -> None:
        self.round += 1
        places = [node for node in nodes for _ in range(self.slots)]
        self.world = {Rank(rank): node for rank, node in enumerate(places)}
        self.sizes[self.round] = len(self.world)
        self.step = dict.fromkeys(BOOKS, max(0, self.round % 3 * 2))
        self.searches: dict[str, Search] = {}
        self.waits = {}
        self.missed: set[SnapshotId] = set()
        """What some rank has no image of; of this round."""

    def id(self, book: str, step: int) -> SnapshotId:
        return snapshot_id(step, self.round, book)

    # ---- in and out ----

    def took(self, taken: CommitEffects, restoring: str = "") -> None:
        commits.validate(self.state)
        for action in taken.actions:
            self.check_action(action)
        for asker, answer in taken.answers:
            if isinstance(answer, SaveSettled):
                self.check_settled(*self.waits.pop(asker), answer)
        found = [(a, f) for a, f in taken.answers if isinstance(f, StateFound)]
        if found:
            self.check_found(restoring, found)

    def check_action(self, action: AnyAction) -> None:
        assert isinstance(action, WriteRankFiles | CommitCheckpoint | CheckpointSettled)
        writing = self.state.book(action.snapshot.checkpointer).writing
        if isinstance(action, CheckpointSettled):
            assert writing is None or writing.snapshot != action.snapshot
            return
        assert action.node in self.images, "an order to a node that is gone"
        assert action.snapshot not in self.saved, "what is stored is written again"
        if isinstance(action, WriteRankFiles):
            known = self.said[action.node]
            assert all((action.snapshot, rank) in known for rank in action.ranks)
            if action.alike:
                digests = {self.sealed[action.snapshot, Rank(r)] for r in range(action.world_size)}
                assert len(digests) == 1, "ranks that differ write slices"
        else:
            ranks = [one.rank for one in action.shards]
            assert ranks == list(range(action.world_size))
            assert all((action.snapshot, rank) in self.durable for rank in ranks), "too early"
        self.orders.append(action)

    def check_settled(self, id: SnapshotId, to: Tier, settled: SaveSettled) -> None:
        if settled.outcome == "saved" and to == "memory":
            assert any(image[0] == id for image in self.sealed)
        if settled.outcome == "saved" and to == "storage":
            assert id in self.manifests[id.checkpointer], "not on storage, though it was said to be"
        if settled.outcome != "saved":
            assert settled.reason, "skipped or failed without a reason"

    def hear(self, event: Told) -> None:
        if not self.admitted(event):
            return
        stale = self.stale(event)
        before = msgspec.json.encode(self.state) if stale else b""
        if isinstance(event, SnapshotsSealed):
            self.said[event.node] |= {(event.snapshot, one.rank) for one in event.ranks}
            taken = commits.sealed(self.state, event)
        elif isinstance(event, ImagesHeld):
            self.said[event.node] |= {(image.snapshot, image.rank) for image in event.images}
            taken = commits.held(self.state, event)
        elif isinstance(event, SnapshotMissed):
            taken = commits.missed(self.state, event)
        elif isinstance(event, RankFilesWritten):
            taken = commits.shards_written(self.state, event)
        else:
            taken = commits.checkpoint_written(self.state, event)
            if not stale and not event.error:
                self.note_saved(event.snapshot)
        assert not stale or msgspec.json.encode(self.state) == before, (
            "stale word changed something"
        )
        self.heard.append(event)
        self.took(taken)
        if isinstance(event, SnapshotMissed) and not stale:
            book = self.state.book(event.snapshot.checkpointer)
            waiting = [id for id, _ in self.waits.values()]
            on_its_way = event.snapshot in commitbook.on_their_way(book)
            assert on_its_way or event.snapshot not in waiting, "somebody waits for what nobody has"

    def admitted(self, event: Told) -> bool:
        """As the job does: it hears nothing of nodes that are no members any more."""
        if isinstance(event, SnapshotMissed) and event.snapshot.round != self.round:
            return False
        about_images = isinstance(event, SnapshotsSealed | SnapshotMissed | ImagesHeld)
        return event.node in self.images or not about_images

    def stale(self, event: Told) -> bool:
        """Whether it speaks of what is history, or of a write that is over."""
        if isinstance(event, ImagesHeld):
            return all(self.past(image.snapshot) for image in event.images)
        if isinstance(event, SnapshotsSealed):
            return self.past(event.snapshot)
        if isinstance(event, SnapshotMissed):
            known = self.state.book(event.snapshot.checkpointer).snapshots
            counting = [s for s in known if s.counts and s.id == event.snapshot]
            return bool(counting) and event.attempt <= counting[0].attempt
        writing = self.state.book(event.snapshot.checkpointer).writing
        return writing is None or writing.snapshot != event.snapshot

    def past(self, id: SnapshotId) -> bool:
        book = self.state.book(id.checkpointer)
        newest = [s.id for s in book.snapshots if s.counts and s.alive]
        known = [s.id for s in book.snapshots]
        return id not in known and any(other.round > id.round for other in newest)

    def note_saved(self, id: SnapshotId) -> None:
        book = self.state.book(id.checkpointer)
        if book.ended == id and not book.ended_error:
            assert id not in self.saved, "one snapshot was committed twice"
            assert id in self.manifests[id.checkpointer]
            self.saved.append(id)

    # ---- saving ----

    @rule(
        book=st.sampled_from(BOOKS), wish=st.sampled_from(WISHES), torn=picks, alike=st.booleans()
    )
    def save(self, book: str, wish: Wish, torn: int, alike: bool) -> None:
        self.step[book] += 1
        id = self.id(book, self.step[book])
        gone = Rank(torn // 4 % len(self.world)) if torn % 4 == 0 else None
        for node in sorted(set(self.world.values())):
            ranks = [rank for rank, where in self.world.items() if where == node]
            for rank in ranks:
                if rank != gone:
                    self.keep(node, (id, rank))
                    self.sealed[id, rank] = b"s" if alike else str(rank).encode()
            if gone in ranks:
                assert gone is not None
                self.miss(gone, id, MISSED[torn // 8 % 2])
                self.missed.add(id)
                continue
            self.bag.append(
                SnapshotsSealed(
                    at=NOW,
                    node=node,
                    snapshot=id,
                    world_size=len(self.world),
                    ranks=tuple(Sealed(rank, self.sealed[id, rank]) for rank in ranks),
                    wish=wish,
                )
            )

    def miss(self, rank: Rank, id: SnapshotId, outcome: Missed, attempt: int = 1) -> None:
        self.bag.append(
            SnapshotMissed(
                at=NOW,
                node=self.world[rank],
                rank=rank,
                snapshot=id,
                outcome=outcome,
                reason="no memory",
                attempt=attempt,
            )
        )

    @rule(book=st.sampled_from(BOOKS), number=picks, outcome=st.sampled_from(MISSED))
    def save_again(self, book: str, number: int, outcome: Missed) -> None:
        """A step is saved once more, and a rank fails; what it had of it may be there or not."""
        id = self.id(book, self.step[book])
        if any(image[0] == id for image in self.sealed):
            self.attempt += 1
            self.miss(Rank(number % len(self.world)), id, outcome, self.attempt)

    def keep(self, node: NodeId, image: Image) -> None:
        id, rank = image
        mine = [
            i for i in self.images[node] if (i[0].checkpointer, i[1]) == (id.checkpointer, rank)
        ]
        for old in mine[: max(0, len(mine) - SLOTS + 1)]:
            self.images[node].remove(old)
        if image not in self.images[node]:
            self.images[node].append(image)

    @rule(number=picks, to=picks)
    def copy(self, number: int, to: int) -> None:
        """An image is copied to another node, which tells of it; the one it is of may not have."""
        there = [(node, image) for node, images in self.images.items() for image in images]
        if there:
            _, image = there[number % len(there)]
            other = list(self.images)[to % len(self.images)]
            self.keep(other, image)
            self.tell_images(other, [image])

    def tell_images(self, node: NodeId, images: Iterable[Image]) -> None:
        told = tuple(ImageId(id, rank, self.sizes[id.round]) for id, rank in images)
        self.bag.append(ImagesHeld(at=NOW, node=node, images=told))

    @rule(book=st.sampled_from(BOOKS), wish=st.sampled_from(WISHES), count=st.integers(1, 3))
    def save_whole(self, book: str, wish: Wish, count: int) -> None:
        for _ in range(count):
            self.save(book, wish, 1, True)
        self.deliver_all()

    @rule(book=st.sampled_from(BOOKS), wish=st.sampled_from(WISHES), torn=picks, rank=picks)
    def save_and_wait(self, book: str, wish: Wish, torn: int, rank: int) -> None:
        self.save(book, wish, torn, True)
        for to in TIERS:
            self.await_save(rank, book, 0, to)

    @rule(number=picks, twice=st.booleans())
    def deliver(self, number: int, twice: bool) -> None:
        if self.bag:
            event = self.bag.pop(number % len(self.bag))
            self.hear(event)
            if twice:
                self.hear(event)

    @rule()
    def deliver_all(self) -> None:
        while self.bag:
            self.hear(self.bag.pop(0))

    @rule(back=st.integers(1, 20))
    def deliver_again(self, back: int) -> None:
        if self.heard:
            self.hear(self.heard[-min(back, len(self.heard))])

    @rule(number=picks, how=st.sampled_from(["well", "well", "well", "error", "gone"]))
    def carry_out(self, number: int, how: str) -> None:
        if not self.orders:
            return
        order = self.orders.pop(number % len(self.orders))
        if order.node not in self.images:
            return
        if isinstance(order, CommitCheckpoint):
            error = "disk full" if how == "error" else ""
            if not error:
                self.manifests[order.snapshot.checkpointer].setdefault(
                    order.snapshot, order.world_size
                )
            self.bag.append(
                CheckpointWritten(at=NOW, node=order.node, snapshot=order.snapshot, error=error)
            )
            return
        images = [(order.snapshot, rank) for rank in order.ranks]
        there = all(image in self.images[order.node] for image in images)
        if how == "well" and there:
            self.durable |= set(images)
            shards = tuple(shard(rank) for rank in order.ranks)
            event = RankFilesWritten(
                at=NOW, node=order.node, snapshot=order.snapshot, shards=shards
            )
        else:
            event = RankFilesWritten(
                at=NOW, node=order.node, snapshot=order.snapshot, error=how, gone=how != "error"
            )
        self.bag.append(event)

    @rule(count=st.integers(1, 6))
    def carry_out_well(self, count: int) -> None:
        for _ in range(count):
            self.carry_out(0, "well")
            self.deliver_all()

    @rule(number=picks)
    def remind(self, number: int) -> None:
        """A stream broke and is back: the node is told again."""
        node = list(self.images)[number % len(self.images)]
        self.orders = [order for order in self.orders if order.node != node]
        self.took(CommitEffects(actions=commits.remind(self.state, node)))

    @rule(
        rank=picks, book=st.sampled_from(BOOKS), back=st.integers(-1, 3), to=st.sampled_from(TIERS)
    )
    def await_save(self, rank: int, book: str, back: int, to: Tier) -> None:
        id = self.id(book, max(1, self.step[book] - back))
        self.asked += 1
        asker = f"{rank}/{self.asked}"
        request = AwaitSave(checkpointer=book, step=id.step, to=to)
        settled = waiting.await_save(self.state, asker, request, RoundNumber(self.round))
        if settled is not None:
            self.check_settled(id, to, settled)
        else:
            self.waits[asker] = (id, to)

    # ---- nodes come and go, the coordinator dies ----

    @rule(number=picks)
    def lose(self, number: int) -> None:
        self.end(list(self.images)[number % len(self.images)])
        self.break_round()

    @rule(number=picks)
    def restart_agent(self, number: int) -> None:
        """A node comes back under another name, with what it had in memory."""
        node = list(self.images)[number % len(self.images)]
        images = self.images[node]
        self.end(node)
        again = self.new_node()
        self.images[again] = images
        if images:
            self.tell_images(again, images)
        self.break_round()

    def end(self, node: NodeId) -> None:
        del self.images[node], self.said[node]
        self.orders = [order for order in self.orders if order.node != node]
        before = {
            name: book.writing.snapshot
            for name, book in self.state.books.items()
            if book.writing is not None
        }
        taken = commits.node_gone(self.state, node)
        failed = dict(taken.failed)
        for name, id in before.items():
            writing = self.state.book(name).writing
            if writing is None or writing.snapshot != id:
                assert "was lost" in failed[id], "a write ended in silence"
            else:
                assert id not in failed
                self.check_pending(writing)
        assert taken.lost == node
        self.took(taken)

    def check_pending(self, writing: commitbook.Writing) -> None:
        for node, ranks in writing.pending.items():
            assert all((writing.snapshot, rank) in self.said[node] for rank in ranks)

    @rule()
    def break_round(self) -> None:
        actions = commits.secure(self.state)
        commits.round_over(self.state)
        self.took(CommitEffects(actions=actions))
        while len(self.images) < 1:
            self.new_node()
        self.begin_round(self.images)

    @rule()
    def join(self) -> None:
        if len(self.images) < 4:
            self.new_node()

    @rule()
    def restart_coordinator(self) -> None:
        again = revived(self.state)
        assert msgspec.json.encode(again) == msgspec.json.encode(self.state)
        self.state = again

    # ---- restoring ----

    @rule(book=st.sampled_from(BOOKS), step=st.none() | st.integers(1, 6), error=st.booleans())
    def look(self, book: str, step: int | None, error: bool) -> None:
        """Rank 0 is about to restore: somebody looks at storage."""
        if book in self.searches:
            return
        self.searches[book] = Search(step)
        by_step = {id.step: (id, size) for id, size in sorted(self.manifests[book].items())}
        steps = tuple(StoredStep(id.step, id.round, size) for id, size in by_step.values())
        event = StoredFound(
            at=NOW,
            node=self.world[Rank(0)],
            round=RoundNumber(self.round),
            checkpointer=book,
            steps=() if error else steps,
            refused=("storage: stale mount",) if error else (),
        )
        restoring.stored_found(self.state, event)

    @rule(book=st.sampled_from(BOOKS), number=picks, well=st.booleans(), anew=st.booleans())
    def find(self, book: str, number: int, well: bool, anew: bool) -> None:
        search = self.searches.get(book)
        rank = Rank(number % len(self.world))
        if search is None or rank in search.waiting:
            return
        tried = None
        if search.offer is not None and not anew:
            tried = Tried("" if well else "torn")
        if search.offer is None or not anew:
            search.waiting[rank] = tried
        request = FindState(checkpointer=book, step=search.step, tried=tried)
        reach = dict.fromkeys(self.images, ("10.0.0.1", 7)).get
        taken = restoring.find(self.state, rank, f"{rank}/0", request, self.world, reach)
        if len(search.waiting) == len(self.world):
            assert len(taken.answers) == len(self.world), "all have spoken and are not answered"
        self.took(taken, book)

    @rule(book=st.sampled_from(BOOKS), step=st.none() | st.integers(1, 6), refuse=st.integers(0, 3))
    def restore(self, book: str, step: int | None, refuse: int) -> None:
        """All ranks restore, and refuse what they are offered so many times."""
        self.look(book, step, False)
        for turn in range(refuse + 2):
            for rank in self.world:
                self.find(book, rank, turn > refuse, False)

    def check_found(self, book: str, answers: list[tuple[str, StateFound]]) -> None:
        search = self.searches[book]
        plain = {msgspec.structs.replace(found, holders=()) for _, found in answers}
        assert len(plain) == 1, "ranks are told different things"
        (found,) = plain
        if len(search.waiting) < len(self.world):
            assert len(answers) == 1, "some ranks go on before all have spoken"
            assert search.offer is not None
            assert found == search.offer
            return
        assert {asker for asker, _ in answers} == {f"{rank}/0" for rank in self.world}
        well = search.offer is not None and not any(t and t.error for t in search.waiting.values())
        assert (found.where == "loaded") == well
        search.waiting = {}
        if found.where == "loaded":
            self.step_back(book)
        if found.where in ("loaded", "nowhere"):
            del self.searches[book]
            return
        place = (found.step, found.where == "memory", found.round)
        assert search.step in (None, found.step)
        assert all(place < before for before in search.places), "not from newest to older"
        search.places.append(place)
        search.offer = found
        if found.where == "memory":
            self.check_holders(book, found, [answer for _, answer in answers])

    def step_back(self, book: str) -> None:
        """Steps may be saved again in this round; what was said of the first time is not repeated."""
        self.missed = {id for id in self.missed if id.checkpointer != book}
        named = [e for e in self.heard if isinstance(e, SnapshotsSealed | ImagesHeld)]
        for event in named:
            ids = (
                [image.snapshot for image in event.images]
                if isinstance(event, ImagesHeld)
                else [event.snapshot]
            )
            if any(id.checkpointer == book for id in ids):
                self.heard.remove(event)

    def check_holders(self, book: str, found: StateFound, answers: list[StateFound]) -> None:
        id = snapshot_id(found.step, found.round, book)
        assert all((id, Rank(rank)) in self.sealed for rank in range(found.world_size)), "torn"
        for holder in (holder for answer in answers for holder in answer.holders):
            assert (id, holder.rank) in self.said[holder.node]

    # ---- in the end ----

    @precondition(lambda self: hasattr(self, "state"))
    @invariant()
    def little_is_kept(self) -> None:
        for book in self.state.books.values():
            assert len(book.snapshots) <= commitbook.KEPT_SNAPSHOTS
            assert len(book.outcomes) <= commitbook.KEPT_OUTCOMES
            assert set(book.waits) <= set(self.waits)

    def settle(self) -> None:
        for _ in range(1000):
            if not self.bag and not self.orders:
                return
            self.deliver_all()
            if self.orders:
                self.carry_out(0, "well")
        raise AssertionError("it never comes to rest")

    def teardown(self) -> None:
        """Left alone, everything comes to an end, and whoever waits is answered."""
        if not hasattr(self, "state"):
            return
        self.settle()
        assert not {id for id, _ in self.waits.values()} & self.missed, "nobody will ever have it"
        for book in BOOKS:
            self.save(book, "now", 1, True)
        self.settle()
        assert not commits.busy(self.state)
        assert not self.waits, "somebody waits for ever"
        for book in BOOKS:
            assert self.id(book, self.step[book]) in self.saved
            for _ in range(20 * len(self.world)):
                for rank in self.world:
                    self.find(book, rank, False, False)
            assert book not in self.searches, "a search never ends"


TestCommitsMachine = CommitsMachine.TestCase
TestCommitsMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


CHECKPOINT_ACTIONS = (WriteRankFiles, CommitCheckpoint, CheckpointSettled, Answered)
REQUESTS: list[AnyRequest] = [
    AwaitSave(checkpointer="c", step=2, to="memory"),
    AwaitSave(checkpointer="c", step=3, to="storage", timeout_s=0.5),
    FindState(checkpointer="c"),
    FindState(checkpointer="c", tried=Tried()),
    FindState(checkpointer="c", tried=Tried("torn")),
]


class SavingMachine(JobMachine):
    """The whole job, with scripts that save and restore in all of its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[Order] = []

    def deliver(self, action: AnyAction) -> None:
        if isinstance(action, Order):
            self.orders.append(action)
        elif not isinstance(action, CHECKPOINT_ACTIONS):
            super().deliver(action)

    @rule(number=picks, step=st.integers(1, 6), wish=st.sampled_from(WISHES))
    def seal(self, number: int, step: int, wish: Wish) -> None:
        picked = self.pick(number)
        if picked is None or picked[1].part is None:
            return
        node, agent, _ = picked
        part = agent.part
        assert part is not None
        ranks = range(part.first_rank, part.first_rank + part.slots)
        self.take(
            SnapshotsSealed(
                at=self.at(0),
                node=node,
                snapshot=snapshot_id(step, agent.round),
                world_size=part.world_size,
                ranks=tuple(Sealed(Rank(rank), b"s") for rank in ranks),
                wish=wish,
            )
        )

    @rule(number=picks, step=st.integers(1, 6), outcome=st.sampled_from(MISSED))
    def miss(self, number: int, step: int, outcome: Missed) -> None:
        picked = self.pick(number)
        if picked is None or picked[1].part is None:
            return
        node, agent, rank = picked
        id = snapshot_id(step, agent.round)
        self.take(
            SnapshotMissed(
                at=self.at(0), node=node, rank=rank, snapshot=id, outcome=outcome, reason="why"
            )
        )
        book = self.job.of(Commits).books.get(id.checkpointer)
        if book is not None and id not in [one.id for one in book.snapshots if one.counts]:
            waiting = [(wait.step, wait.round) for wait in book.waits.values()]
            assert (id.step, id.round) not in waiting, "somebody waits for what nobody has"

    @rule(step=st.integers(1, 6), wish=st.sampled_from(WISHES))
    def everybody_seals(self, step: int, wish: Wish) -> None:
        for number in range(sum(len(agent.steps) for agent in self.agents.values())):
            self.seal(number, step, wish)

    @rule(number=picks, error=st.sampled_from(["", "", "", "disk full"]), gone=st.booleans())
    def carry_out(self, number: int, error: str, gone: bool) -> None:
        if not self.orders:
            return
        order = self.orders.pop(number % len(self.orders))
        about: Any = {"at": self.at(0), "node": order.node, "snapshot": order.snapshot}
        if isinstance(order, CommitCheckpoint):
            self.take(CheckpointWritten(**about, error=error))
        else:
            shards = () if error else tuple(shard(rank) for rank in order.ranks)
            self.take(
                RankFilesWritten(**about, shards=shards, error=error, gone=bool(error and gone))
            )

    @rule()
    def carry_out_all(self) -> None:
        for _ in range(20):
            self.carry_out(0, "", False)

    @rule(number=picks, channel=st.integers(0, 1), count=st.integers(1, 6), what=picks)
    def ask_for_state(self, number: int, channel: int, count: int, what: int) -> None:
        picked = self.pick(number)
        if picked is not None:
            node, agent, rank = picked
            self.take(
                Asked(
                    at=self.at(0),
                    node=node,
                    round=agent.round,
                    rank=rank,
                    channel=channel,
                    number=count,
                    request=REQUESTS[what % len(REQUESTS)],
                )
            )

    @rule(channel=st.integers(0, 1), count=st.integers(1, 6), what=picks)
    def everybody_asks_for_state(self, channel: int, count: int, what: int) -> None:
        for number in range(sum(len(agent.steps) for agent in self.agents.values())):
            self.ask_for_state(number, channel, count, what)

    @precondition(lambda self: hasattr(self, "driver"))
    @invariant()
    def a_job_whose_ranks_have_all_ended_ends_or_writes(self) -> None:
        job = self.job
        if job.world is not None and job.unfinished == 0 and job.result is None:
            assert commits.busy(job.of(Commits)), "nobody will ever end this job"


TestSavingMachine = SavingMachine.TestCase
TestSavingMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
