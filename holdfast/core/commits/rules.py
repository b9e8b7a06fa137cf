"""Decides when a snapshot counts, and when a checkpoint is complete.

A snapshot counts once every rank's image of it is whole and sealed; until then nobody may go back to
it. On its way to storage each step begins only when all nodes have done the one before:

    sealed on all ranks ──▶ shards written ──▶ manifest written, by one node ──▶ stored
                              └── an error: failed; an image that is gone: skipped

One snapshot of a checkpointer is on its way at a time. Meanwhile a newer one may wait, and a still
newer one takes its place. When a round breaks or the job ends, the newest snapshot that is still
complete is written if it is newer than what is stored.

Holders come and go with nodes and replicas. Everything is named by round, so images of one step that
two rounds saved are never mixed. Once a snapshot counts, those of older rounds are history, and late
reports of them change nothing. What is restored is decided in `restoring`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.commits.state import (
    KEPT_SNAPSHOTS,
    Book,
    CommitEffects,
    Commits,
    LostSave,
    Reach,
    Snapshot,
    Writing,
    age,
    on_their_way,
)
from holdfast.core.commits.waiting import (
    TIERS,
    answer_passed,
    answer_waits,
    lose,
    outcome_key,
    settle,
)
from holdfast.messages.actions import (
    AnyAction,
    CheckpointSettled,
    CommitCheckpoint,
    WriteRankFiles,
)
from holdfast.messages.checkpoints import (
    WISHES,
    Holder,
    ImageId,
    SnapshotId,
    Wish,
)
from holdfast.messages.events import (
    CheckpointWritten,
    ImagesHeld,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
)
from holdfast.messages.requests import SaveSettled
from holdfast.messages.units import NodeId, Rank, RoundNumber

SHARDS_PER_MESSAGE = 2000

# ---- snapshots ----------------------------------------------------------------------------------


def sealed(commits: Commits, event: SnapshotsSealed) -> CommitEffects:
    """Note that a node's ranks have sealed their images of a step."""
    book = commits.book(event.snapshot.checkpointer)
    taken = CommitEffects()
    snapshot = _snapshot(book, event.snapshot, event.world_size, taken)
    if snapshot is None:
        return taken
    snapshot.attempt = max(snapshot.attempt, event.attempt)
    for one in event.ranks:
        holders = snapshot.holders.setdefault(one.rank, [])
        if event.node not in holders:
            holders.insert(0, event.node)
        if one.shared not in snapshot.shared:
            snapshot.shared.append(one.shared)
    snapshot.sealed_by[event.node] = len(event.ranks)
    snapshot.wish = max(snapshot.wish, event.wish, key=WISHES.index)
    if event.wish == "now" and not snapshot.stored:
        snapshot.sent = False  # It may have been saved again, because it could not be written.
    _reckon(book, snapshot, taken)
    return taken


def _snapshot(book: Book, id: SnapshotId, world_size: int, taken: CommitEffects) -> Snapshot | None:
    """Find or add the snapshot of that name; None when a newer one counts already, or when it is
    known with another number of ranks."""
    for snapshot in book.snapshots:
        if snapshot.id == id:
            return snapshot if snapshot.world_size == world_size else None
    newest = _newest(book)
    if newest is not None and age(id) < age(newest.id):
        return None
    book.snapshots.append(Snapshot(id, world_size))
    needed = {*on_their_way(book), id, *([newest.id] if newest is not None else [])}
    spare = [s for s in book.snapshots if s.id not in needed]
    for old in spare[: max(0, len(book.snapshots) - KEPT_SNAPSHOTS)]:
        book.snapshots.remove(old)
        if not old.counts and old.id.round == id.round:
            _scatter(book, old, taken)
    return book.snapshots[-1]


def _scatter(book: Book, snapshot: Snapshot, taken: CommitEffects) -> None:
    """Give up a snapshot that only some nodes have saved, and newer ones since. The script is wrong,
    so this is reported once a round."""
    why = f"rank {_lacking(snapshot)} has not saved it; all ranks have to save the same steps"
    settle(book, TIERS, snapshot.id, "skipped", why, taken, snapshot.attempt)
    if book.scattered != snapshot.id.round:
        book.scattered = snapshot.id.round
        taken.failed.append((snapshot.id, why))


def _lacking(snapshot: Snapshot) -> int:
    """The first rank of whose image there is no holder."""
    return next(r for r in range(snapshot.world_size) if not snapshot.holders.get(Rank(r)))


def _reckon(book: Book, snapshot: Snapshot, taken: CommitEffects) -> None:
    """Take a snapshot further, now that more is known of it. This runs for each of 80,000 images, so
    it looks at all holders only when they may be complete."""
    if not snapshot.counts and snapshot.alive:
        _count(book, snapshot, taken)
    due = snapshot.counts and snapshot.wish == "now" and not snapshot.sent
    if due and snapshot.sealed and snapshot.alive:
        _want(book, snapshot, taken)


def _count(book: Book, snapshot: Snapshot, taken: CommitEffects) -> None:
    snapshot.counts = True
    _made_up(book, snapshot.id)
    settle(book, ("memory",), snapshot.id, "saved", "", taken)
    for other in list(book.snapshots):
        # Training went on from an older step, or a node never had the other one. But a script may
        # save before it restores: then what it wants to go back to is still of an older round.
        past = book.agreed or other.id.step <= snapshot.id.step
        outdated = (past and other.id.round < snapshot.id.round) or not other.counts
        if outdated and age(other.id) < age(snapshot.id) and other.id not in on_their_way(book):
            book.snapshots.remove(other)
            if not other.counts and other.id.round == snapshot.id.round and not other.alive:
                _scatter(book, other, taken)
    answer_passed(book, taken)


def _made_up(book: Book, id: SnapshotId) -> None:
    """Forget a lost save that this one makes up for."""
    if book.last_lost is not None and age(book.last_lost.snapshot) <= age(id):
        book.last_lost = None


def missed(commits: Commits, event: SnapshotMissed) -> CommitEffects:
    """Settle a step of which a rank has no image."""
    book, taken = commits.book(event.snapshot.checkpointer), CommitEffects()
    id, why = event.snapshot, f"rank {event.rank}: {event.reason}"
    counting = next((s for s in book.snapshots if s.id == id and s.counts), None)
    if counting is None:
        # In memory a newer snapshot is as good; one that was to go to storage is missing there.
        stored = any(s.id == id and s.wish == "now" for s in book.snapshots)
        quiet = event.outcome == "skipped" and not stored
        lose(book, TIERS, id, event.outcome, why, taken, event.attempt, quiet)
        _note_last(book, LostSave(id, event.outcome, why), taken)
    elif event.attempt > counting.attempt:
        # An earlier attempt has succeeded, and its images stay.
        counting.attempt = event.attempt
        if id not in on_their_way(book):
            lose(book, ("storage",), id, event.outcome, why, taken)
    return taken


def _note_last(book: Book, lost: LostSave, taken: CommitEffects) -> None:
    """Remember the last save, of which nothing came. A skipped one may be made up for: where only
    memory was wanted, by any other, and on storage by what this job has written of that step."""
    newest, id = _newest(book), lost.snapshot
    if newest is not None and age(newest.id) > age(id):
        return
    if lost.outcome == "skipped":
        in_memory = newest is not None and newest.wish == "never"
        if in_memory or (book.stored is not None and book.stored.step >= id.step):
            return
    book.last_lost, book.last_told = lost, lost in taken.lost_saves


def held(commits: Commits, event: ImagesHeld) -> CommitEffects:
    """Note that a node has images: copies, or those that an earlier agent of it left."""
    taken = CommitEffects()
    for image in event.images:
        book = commits.book(image.snapshot.checkpointer)
        snapshot = _snapshot(book, image.snapshot, image.world_size, taken)
        if snapshot is not None:
            holders = snapshot.holders.setdefault(image.rank, [])
            if event.node not in holders:
                holders.append(event.node)
            _reckon(book, snapshot, taken)
    return taken


# ---- to storage ---------------------------------------------------------------------------------


def _want(book: Book, snapshot: Snapshot, taken: CommitEffects) -> None:
    snapshot.sent = True
    if snapshot.id in on_their_way(book):
        return
    book.outcomes.pop(outcome_key("storage", snapshot.id.step, snapshot.id.round), None)
    if book.writing is None:
        _write(book, snapshot, taken)
        return
    if book.wanted is not None:
        older, newer = sorted((book.wanted, snapshot.id), key=age)
        why = f"storage is slower than the saves; step {newer.step} took its place"
        lose(book, ("storage",), older, "skipped", why, taken)
        book.wanted = newer
    else:
        book.wanted = snapshot.id


def _write(book: Book, snapshot: Snapshot, taken: CommitEffects) -> None:
    pending: dict[NodeId, list[Rank]] = {}
    for rank, holders in sorted(snapshot.holders.items()):
        pending.setdefault(holders[0], []).append(rank)
    alike = snapshot.sealed and len(snapshot.shared) == 1
    book.writing = Writing(snapshot.id, snapshot.world_size, alike, pending, nodes=list(pending))
    taken.actions += [_write_shards(book.writing, *to) for to in pending.items()]


def _write_shards(writing: Writing, node: NodeId, ranks: Iterable[Rank]) -> WriteRankFiles:
    return WriteRankFiles(
        node=node,
        snapshot=writing.snapshot,
        ranks=tuple(ranks),
        world_size=writing.world_size,
        alike=writing.alike,
    )


def shards_written(commits: Commits, event: RankFilesWritten) -> CommitEffects:
    """Note that a node's shards are durable, or failed."""
    book = commits.book(event.snapshot.checkpointer)
    writing, taken = book.writing, CommitEffects()
    if writing is None or writing.snapshot != event.snapshot:
        error = book.ended_error if book.ended == event.snapshot else "it was given up"
        late = CheckpointSettled(node=event.node, snapshot=event.snapshot, error=error)
        taken.actions.append(late)
    elif event.node not in writing.pending:
        pass  # It has done its part before, or other nodes do it.
    elif event.error:
        _end_writing(book, event.error, taken, gone=event.gone)
    else:
        _note_written(writing, event, taken)
    return taken


def _note_written(writing: Writing, event: RankFilesWritten, taken: CommitEffects) -> None:
    asked = writing.pending.pop(event.node)
    writing.shards |= {shard.rank: shard for shard in event.shards if shard.rank in asked}
    left = [rank for rank in asked if rank not in writing.shards]
    if left:
        writing.pending[event.node] = left
    elif not writing.pending:
        writing.committer = event.node
        taken.actions += _commit(writing, event.node)


def _commit(writing: Writing, node: NodeId) -> list[CommitCheckpoint]:
    """Order the commit, with as many shards as fit in each message."""
    shards = [shard for _, shard in sorted(writing.shards.items())]
    return [
        CommitCheckpoint(
            node=node,
            snapshot=writing.snapshot,
            world_size=writing.world_size,
            shards=tuple(shards[first : first + SHARDS_PER_MESSAGE]),
        )
        for first in range(0, len(shards), SHARDS_PER_MESSAGE)
    ]


def checkpoint_written(commits: Commits, event: CheckpointWritten) -> CommitEffects:
    """Note that the manifest is durable, or failed."""
    book = commits.book(event.snapshot.checkpointer)
    writing, taken = book.writing, CommitEffects()
    asked = writing is not None and writing.snapshot == event.snapshot
    if asked and writing is not None and writing.committer == event.node:
        _end_writing(book, event.error, taken)
    return taken


def _end_writing(book: Book, error: str, taken: CommitEffects, gone: bool = False) -> None:
    writing, book.writing = book.writing, None
    assert writing is not None
    id = book.ended = writing.snapshot
    book.ended_error = error
    taken.actions += [
        CheckpointSettled(node=node, snapshot=id, error=error) for node in writing.nodes
    ]
    if not error:
        book.stored = max(id, book.stored or id)
        book.failures = 0
        next(s for s in book.snapshots if s.id == id).stored = True
        _made_up(book, id)
        settle(book, ("storage",), id, "saved", "", taken)
    elif gone:
        lose(book, ("storage",), id, "skipped", error, taken)
        newer = _unstored(book, than=id)
        if book.wanted is None and newer is not None:
            _want(book, newer, taken)
        _note_last(book, LostSave(id, "skipped", error), taken)
    else:
        book.failures += 1
        taken.failed.append((id, error))
        settle(book, ("storage",), id, "failed", error, taken)
    if book.writing is None:
        _write_wanted(book, taken)


def _write_wanted(book: Book, taken: CommitEffects) -> None:
    id, book.wanted = book.wanted, None
    snapshot = next((s for s in book.snapshots if s.id == id), None)
    if snapshot is not None and snapshot.alive:
        _write(book, snapshot, taken)
    elif id is not None:
        why = "an image of it was lost before it could be written"
        lose(book, ("storage",), id, "skipped", why, taken)
        _note_last(book, LostSave(id, "skipped", why), taken)


def _newest(book: Book, wishes: Iterable[Wish] = WISHES) -> Snapshot | None:
    """The newest snapshot with such a wish that counts and is alive."""
    alive = [s for s in book.snapshots if s.counts and s.alive and s.wish in wishes]
    return max(alive, key=lambda s: age(s.id), default=None)


def _unstored(book: Book, than: SnapshotId | None) -> Snapshot | None:
    """The newest snapshot that may go to storage, if it is newer than that one."""
    newest = _newest(book, ("if needed", "now"))
    if newest is None or newest.stored or (than is not None and newest.id.step <= than.step):
        return None
    return newest


def secure(commits: Commits) -> list[AnyAction]:
    """Write the newest snapshots that storage does not have: the round broke, or the job ends."""
    taken = CommitEffects()
    for book in commits.books.values():
        newest = _unstored(book, book.stored)
        if newest is not None:
            _want(book, newest, taken)
    return taken.actions


def securable(commits: Commits) -> dict[str, SnapshotId]:
    """Name what `secure` would write, by checkpointer."""
    newest = {name: _unstored(book, book.stored) for name, book in commits.books.items()}
    return {name: found.id for name, found in newest.items() if found is not None}


def busy(commits: Commits) -> bool:
    """Whether a snapshot is on its way to storage."""
    return any(b.writing is not None for b in commits.books.values())


def unwritten(commits: Commits) -> str:
    """How the last save of a checkpointer was lost; empty if all went well."""
    for book in commits.books.values():
        if book.failures:
            return f"failed: {book.ended_error}"
        if book.last_lost is not None:
            words = "was skipped" if book.last_lost.outcome == "skipped" else "failed"
            return f"{words}: step {book.last_lost.snapshot.step}: {book.last_lost.why}"
    return ""


def end_round(commits: Commits, round: RoundNumber) -> CommitEffects:
    """Give up what only some nodes had saved when all ranks have ended."""
    taken = CommitEffects()
    for book in commits.books.values():
        for snapshot in [s for s in book.snapshots if s.id.round == round and s.sealed_by]:
            if not snapshot.counts and not snapshot.alive:
                book.snapshots.remove(snapshot)
                why = (
                    f"rank {_lacking(snapshot)} ended without saving it; all ranks have to save it"
                )
                lose(book, TIERS, snapshot.id, "skipped", why, taken, snapshot.attempt)
                _note_last(book, LostSave(snapshot.id, "skipped", why), taken)
    return taken


def take_untold(commits: Commits) -> list[LostSave]:
    """Return the last saves of which nothing came and of which there is no incident yet."""
    untold = []
    for book in commits.books.values():
        if book.last_lost is not None and not book.last_told:
            book.last_told = True
            untold.append(book.last_lost)
    return untold


# ---- nodes -------------------------------------------------------------------------------


def node_gone(commits: Commits, node: NodeId) -> CommitEffects:
    """Note the loss of a node, and of the images that only it had."""
    taken = CommitEffects(lost=node)
    for book in commits.books.values():
        for snapshot in book.snapshots:
            for holders in snapshot.holders.values():
                if node in holders:
                    holders.remove(node)
        if book.writing is not None:
            _replace_writer(book, book.writing, node, taken)
    return taken


def nodes(commits: Commits) -> list[NodeId]:
    """Return the nodes that have images, or have to write some of them to storage."""
    found: set[NodeId] = set()
    for book in commits.books.values():
        found.update(node for s in book.snapshots for some in s.holders.values() for node in some)
        if book.writing is not None:
            found.update(book.writing.pending, book.writing.nodes)
    return sorted(found)


def _replace_writer(book: Book, writing: Writing, node: NodeId, taken: CommitEffects) -> None:
    """Have other nodes write what a lost node was to write, if they have the images."""
    if node in writing.nodes:
        writing.nodes.remove(node)
    snapshot = next(s for s in book.snapshots if s.id == writing.snapshot)
    if writing.committer == node:
        others = sorted(writing.nodes)
        if not others:
            snapshot.sent = False  # Its agent may come back, with all its images.
            _end_writing(book, f"{node} was lost before it wrote the manifest", taken)
            return
        writing.committer = others[0]
        taken.actions += _commit(writing, others[0])
    moved: dict[NodeId, list[Rank]] = {}
    for rank in writing.pending.pop(node, []):
        holders = snapshot.holders[rank]
        if not holders:
            snapshot.sent = False
            _end_writing(book, f"{node} was lost with the only image of rank {rank}", taken)
            return
        moved.setdefault(holders[0], []).append(rank)
    for other, ranks in moved.items():
        writing.pending.setdefault(other, []).extend(ranks)
        if other not in writing.nodes:
            writing.nodes.append(other)
        taken.actions.append(_write_shards(writing, other, ranks))


def wanted_images(
    commits: Commits,
    ranks: Iterable[Rank],
    node: NodeId,
    world_size: int,
    reach: Reach,
) -> tuple[tuple[ImageId, Holder], ...]:
    """Find the images that a node's ranks will want to restore, and that only other nodes have."""
    found = []
    for book in commits.books.values():
        newest = _newest(book)
        if newest is None or newest.world_size != world_size:
            continue
        for rank in ranks:
            holders = newest.holders[rank]
            where = reach(holders[0])
            if node not in holders and where is not None:
                address, port = where
                image = ImageId(newest.id, rank, world_size)
                found.append((image, Holder(rank, holders[0], address, port)))
    return tuple(found)


def remind(commits: Commits, node: NodeId) -> list[AnyAction]:
    """Repeat to a node with a new stream what it may not have heard."""
    actions: list[AnyAction] = []
    for book in commits.books.values():
        writing = book.writing
        if book.ended is not None and (writing is None or writing.snapshot != book.ended):
            ended, error = book.ended, book.ended_error
            actions.append(CheckpointSettled(node=node, snapshot=ended, error=error))
        if writing is not None and node in writing.pending:
            actions.append(_write_shards(writing, node, writing.pending[node]))
        if writing is not None and writing.committer == node:
            actions += _commit(writing, node)
    return actions


def round_over(commits: Commits) -> None:
    """Forget the requests of a round's ranks, which end with it."""
    for book in commits.books.values():
        book.waits.clear()
        book.outcomes.clear()
        book.search, book.agreed = None, False


def abandon(commits: Commits, why: str) -> CommitEffects:
    """Fail everything that is not settled yet."""
    taken, failed = CommitEffects(), SaveSettled(outcome="failed", reason=why)
    for book in commits.books.values():
        if book.wanted is not None:
            wanted, book.wanted = book.wanted, None
            settle(book, ("storage",), wanted, "failed", why, taken)
        if book.writing is not None:
            _end_writing(book, why, taken)
        book.snapshots = [s for s in book.snapshots if s.counts]
        for wait in dict.fromkeys(book.waits.values()):
            answer_waits(book, wait, failed, taken)
    return taken


def validate(commits: Commits) -> None:
    """Re-check every invariant."""
    for name, book in commits.books.items():
        ids = [s.id for s in book.snapshots]
        assert len(set(ids)) == len(ids), "a snapshot is kept twice"
        assert all(id.checkpointer == name for id in ids)
        if book.writing is not None:
            assert book.writing.snapshot in ids, "what is written is not known"
            ranks = [r for pending in book.writing.pending.values() for r in pending]
            assert sorted(ranks + list(book.writing.shards)) == list(
                range(book.writing.world_size)
            ), "a shard is written by nobody, or by two"
            assert (book.writing.committer is not None) == (not ranks), "committed too early"
        else:
            assert book.wanted is None, "nobody writes what is wanted"
        if book.search is not None:
            assert set(book.search.errors) <= set(book.search.asked), "a rank erred in silence"
