"""When a snapshot counts, and when a checkpoint is complete.

A snapshot counts once every rank's image of it is whole and sealed; until then nobody may go back to
it. Its way to storage is a row of steps, each begun only when all nodes have done the one before:

    sealed on all ranks ──▶ shards written ──▶ manifest written, by one node ──▶ stored
                              └── an error, or an image that is gone: failed, or skipped

One snapshot of a checkpointer is on that way at a time. While it is, a newer one may wait; a still
newer one takes its place. When a round breaks, the newest snapshot that is still complete is written
if it is newer than what is stored.

Holders come and go with nodes and replicas. Everything is named by round, so images of one step that
two rounds saved are never mixed. Once a snapshot counts, those of older rounds are history, and late
word of them changes nothing. What is restored is for `restoring` to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.commits.state import (
    KEPT_OUTCOMES,
    KEPT_SNAPSHOTS,
    Book,
    Commits,
    Outcome,
    Reach,
    Snapshot,
    Taken,
    Wait,
    Writing,
    age,
    on_their_way,
)
from holdfast.core.decisions import Asker
from holdfast.messages.actions import (
    AnyAction,
    CheckpointSettled,
    CommitCheckpoint,
    WriteShards,
)
from holdfast.messages.checkpoints import (
    WISHES,
    Holder,
    ImageId,
    Sealed,
    SnapshotId,
    Tier,
    Wish,
)
from holdfast.messages.events import (
    CheckpointWritten,
    ImagesHeld,
    ShardsWritten,
    SnapshotMissed,
    SnapshotsSealed,
)
from holdfast.messages.requests import AwaitSave, SaveSettled
from holdfast.messages.units import NodeId, Rank, RoundNumber

SHARDS_TOLD = 2000
"""In one message."""
TIERS: tuple[Tier, ...] = ("memory", "storage")

# ---- snapshots ----------------------------------------------------------------------------------


def sealed(commits: Commits, event: SnapshotsSealed) -> Taken:
    """A node's ranks have their images of a step."""
    book = commits.book(event.snapshot.checkpointer)
    taken = Taken()
    snapshot = _snapshot(book, event.snapshot, event.world_size, taken)
    if snapshot is None:
        return taken
    snapshot.attempt = max(snapshot.attempt, event.attempt)
    for one in event.ranks:
        _note_sealed(snapshot, one, event.node)
    snapshot.sealed_by[event.node] = len(event.ranks)
    snapshot.wish = max(snapshot.wish, event.wish, key=WISHES.index)
    if event.wish == "now" and not snapshot.stored:
        snapshot.sent = False  # It may have been saved again, because it could not be written.
    _reckon(book, snapshot, taken)
    return taken


def _note_sealed(snapshot: Snapshot, one: Sealed, node: NodeId) -> None:
    holders = snapshot.holders.setdefault(one.rank, [])
    if node not in holders:
        holders.insert(0, node)
    if one.shared not in snapshot.shared:
        snapshot.shared.append(one.shared)


def _snapshot(book: Book, id: SnapshotId, world_size: int, taken: Taken) -> Snapshot | None:
    """The snapshot of that name; None when history has gone past it."""
    for snapshot in book.snapshots:
        if snapshot.id == id:
            return snapshot
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


def _scatter(book: Book, snapshot: Snapshot, taken: Taken) -> None:
    """Only some nodes have saved it, and newer ones since: nothing comes of it. That is no accident,
    so it is told once a round."""
    lacking = next(r for r in range(snapshot.world_size) if not snapshot.holders.get(Rank(r)))
    why = f"rank {lacking} has not saved it; all ranks have to save the same steps"
    skipped = SaveSettled(outcome="skipped", reason=why)
    for tier in TIERS:
        _settle_save(book, tier, snapshot.id, skipped, taken, snapshot.attempt)
    if book.scattered != snapshot.id.round:
        book.scattered = snapshot.id.round
        taken.failed.append((snapshot.id, why))


def _reckon(book: Book, snapshot: Snapshot, taken: Taken) -> None:
    """See what comes of a snapshot, now that more is known of it. There may be a word of each of
    80,000 images; only the last one is worth a look at all the others."""
    if not snapshot.counts and snapshot.alive:
        _count(book, snapshot, taken)
    due = snapshot.counts and snapshot.wish == "now" and not snapshot.sent
    if due and snapshot.sealed and snapshot.alive:
        _want(book, snapshot, taken)


def _count(book: Book, snapshot: Snapshot, taken: Taken) -> None:
    snapshot.counts = True
    _settle_save(book, "memory", snapshot.id, SaveSettled(outcome="saved"), taken)
    for other in list(book.snapshots):
        # History went on from an older step, or a node never had this one. But a script may save
        # before it restores: then what it wants to go back to is still of an older round.
        past = book.agreed or other.id.step <= snapshot.id.step
        outdated = (past and other.id.round < snapshot.id.round) or not other.counts
        if outdated and age(other.id) < age(snapshot.id) and other.id not in on_their_way(book):
            book.snapshots.remove(other)
    for asker, wait in list(book.waits.items()):
        if _passed(book, wait):
            del book.waits[asker]
            taken.answers.append((asker, _PASSED))


_PASSED = SaveSettled(
    outcome="skipped", reason="a newer one was whole on all ranks before, or it is too long ago"
)


def _passed(book: Book, wait: Wait) -> bool:
    """Whether nothing will come any more of what is waited for."""
    whole = any(
        s.counts and s.id.round == wait.round and s.id.step > wait.step for s in book.snapshots
    )
    return whole and (wait.step, wait.round) not in [
        (id.step, id.round) for id in on_their_way(book)
    ]


def missed(commits: Commits, event: SnapshotMissed) -> Taken:
    """A rank has no image of a step, so nothing comes of it; nobody shall wait for it."""
    book, taken = commits.book(event.snapshot.checkpointer), Taken()
    settled = SaveSettled(outcome=event.outcome, reason=f"rank {event.rank}: {event.reason}")
    id = event.snapshot
    counting = next((s for s in book.snapshots if s.id == id and s.counts), None)
    if counting is None:
        for tier in TIERS:
            _settle_save(book, tier, id, settled, taken, event.attempt)
    elif event.attempt > counting.attempt:
        # It was saved before, and again since; what there is stays.
        counting.attempt = event.attempt
        if id not in on_their_way(book):
            _settle_save(book, "storage", id, settled, taken)
    return taken


def held(commits: Commits, event: ImagesHeld) -> Taken:
    """A node has images that another made, or that it had in an earlier life."""
    taken = Taken()
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


def _want(book: Book, snapshot: Snapshot, taken: Taken) -> None:
    snapshot.sent = True
    if snapshot.id in on_their_way(book):
        return
    book.outcomes.pop(_outcome_key("storage", snapshot.id.step, snapshot.id.round), None)
    if book.writing is None:
        _write(book, snapshot, taken)
        return
    if book.wanted is not None:
        older, newer = sorted((book.wanted, snapshot.id), key=age)
        why = f"storage is slower than the saves; step {newer.step} took its place"
        skipped = SaveSettled(outcome="skipped", reason=why)
        _settle_save(book, "storage", older, skipped, taken)
        book.wanted = newer
    else:
        book.wanted = snapshot.id


def _write(book: Book, snapshot: Snapshot, taken: Taken) -> None:
    pending: dict[NodeId, list[Rank]] = {}
    for rank, holders in sorted(snapshot.holders.items()):
        pending.setdefault(holders[0], []).append(rank)
    alike = snapshot.sealed and len(snapshot.shared) == 1
    book.writing = Writing(snapshot.id, snapshot.world_size, alike, pending, nodes=list(pending))
    taken.actions += [_write_shards(book.writing, *to) for to in pending.items()]


def _write_shards(writing: Writing, node: NodeId, ranks: Iterable[Rank]) -> WriteShards:
    return WriteShards(
        node=node,
        snapshot=writing.snapshot,
        ranks=tuple(ranks),
        world_size=writing.world_size,
        alike=writing.alike,
    )


def shards_written(commits: Commits, event: ShardsWritten) -> Taken:
    """A node's shards are durable, or failed."""
    book = commits.book(event.snapshot.checkpointer)
    writing, taken = book.writing, Taken()
    if writing is None or writing.snapshot != event.snapshot:
        error = book.ended_error if book.ended == event.snapshot else "it was given up"
        late = CheckpointSettled(node=event.node, snapshot=event.snapshot, error=error)
        taken.actions.append(late)
    elif event.node not in writing.pending:
        pass  # It did its part before, or others do it.
    elif event.error:
        _end_writing(book, event.error, taken, gone=event.gone)
    else:
        _note_written(writing, event, taken)
    return taken


def _note_written(writing: Writing, event: ShardsWritten, taken: Taken) -> None:
    asked = writing.pending.pop(event.node)
    writing.shards |= {shard.rank: shard for shard in event.shards if shard.rank in asked}
    left = [rank for rank in asked if rank not in writing.shards]
    if left:
        writing.pending[event.node] = left
    elif not writing.pending:
        writing.committer = event.node
        taken.actions += _commit(writing, event.node)


def _commit(writing: Writing, node: NodeId) -> list[CommitCheckpoint]:
    """All shards, as many at a time as fit into a message."""
    shards = [shard for _, shard in sorted(writing.shards.items())]
    return [
        CommitCheckpoint(
            node=node,
            snapshot=writing.snapshot,
            world_size=writing.world_size,
            shards=tuple(shards[first : first + SHARDS_TOLD]),
        )
        for first in range(0, len(shards), SHARDS_TOLD)
    ]


def checkpoint_written(commits: Commits, event: CheckpointWritten) -> Taken:
    """The manifest is durable, or failed."""
    book = commits.book(event.snapshot.checkpointer)
    writing, taken = book.writing, Taken()
    asked = writing is not None and writing.snapshot == event.snapshot
    if asked and writing is not None and writing.committer == event.node:
        _end_writing(book, event.error, taken)
    return taken


def _end_writing(book: Book, error: str, taken: Taken, gone: bool = False) -> None:
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
        _settle_save(book, "storage", id, SaveSettled(outcome="saved"), taken)
    elif gone:
        _settle_save(book, "storage", id, SaveSettled(outcome="skipped", reason=error), taken)
        newer = _unstored(book, than=id)
        if book.wanted is None and newer is not None:
            _want(book, newer, taken)
    else:
        book.failures += 1
        taken.failed.append((id, error))
        _settle_save(book, "storage", id, SaveSettled(outcome="failed", reason=error), taken)
    if book.writing is None:
        _write_wanted(book, taken)


def _write_wanted(book: Book, taken: Taken) -> None:
    id, book.wanted = book.wanted, None
    snapshot = next((s for s in book.snapshots if s.id == id), None)
    if snapshot is not None and snapshot.alive:
        _write(book, snapshot, taken)
    elif id is not None:
        why = "an image of it was lost before it could be written"
        skipped = SaveSettled(outcome="skipped", reason=why)
        _settle_save(book, "storage", id, skipped, taken)


def _newest(book: Book, wishes: Iterable[Wish] = WISHES) -> Snapshot | None:
    """The newest snapshot that counts and is all there, of those with such a wish."""
    alive = [s for s in book.snapshots if s.counts and s.alive and s.wish in wishes]
    return max(alive, key=lambda s: age(s.id), default=None)


def _unstored(book: Book, than: SnapshotId | None) -> Snapshot | None:
    """The newest snapshot that may go to storage, if it is newer than that."""
    newest = _newest(book, ("if needed", "now"))
    if newest is None or newest.stored or (than is not None and newest.id.step <= than.step):
        return None
    return newest


def secure(commits: Commits) -> list[AnyAction]:
    """Something went wrong: write the newest snapshots that storage does not have."""
    taken = Taken()
    for book in commits.books.values():
        newest = _unstored(book, book.stored)
        if newest is not None:
            _want(book, newest, taken)
    return taken.actions


def busy(commits: Commits) -> bool:
    """Whether something is on its way to storage."""
    return any(b.writing is not None for b in commits.books.values())


def unwritten(commits: Commits) -> str:
    """Why the last checkpoint of one of the checkpointers is not on storage; empty if all are."""
    return next((book.ended_error for book in commits.books.values() if book.failures), "")


# ---- who is there -------------------------------------------------------------------------------


def node_gone(commits: Commits, node: NodeId) -> Taken:
    """A node is lost, and with it what only it had."""
    taken = Taken(lost=node)
    for book in commits.books.values():
        for snapshot in book.snapshots:
            for holders in snapshot.holders.values():
                if node in holders:
                    holders.remove(node)
        if book.writing is not None:
            _replace_writer(book, book.writing, node, taken)
    return taken


def _replace_writer(book: Book, writing: Writing, node: NodeId, taken: Taken) -> None:
    """Have others write what a lost node was to write, if they can."""
    if node in writing.nodes:
        writing.nodes.remove(node)
    snapshot = next(s for s in book.snapshots if s.id == writing.snapshot)
    if writing.committer == node:
        others = sorted(writing.nodes)
        if not others:
            snapshot.sent = False  # Its agent may be back in a moment, with all its images.
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
    """What the ranks that a node is about to start will want to restore, and others have."""
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
    """A node has a new stream: tell it again what it may not have heard."""
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
    """What the ranks of a round asked for ends with it."""
    for book in commits.books.values():
        book.waits.clear()
        book.outcomes.clear()
        book.search, book.agreed = None, False


# ---- waiting for a save -------------------------------------------------------------------------


def await_save(
    commits: Commits, asker: Asker, request: AwaitSave, round: RoundNumber
) -> SaveSettled | None:
    """How that save went; None: it is not known yet, and the asker waits."""
    book = commits.book(request.checkpointer)
    known = book.outcomes.get(_outcome_key(request.to, request.step, round))
    if known is not None and known.answers(request.attempt):
        return known.settled
    wait = Wait(request.step, round, request.to, request.attempt)
    if _passed(book, wait):
        return _PASSED
    book.waits[asker] = wait
    return None


def waited_for(commits: Commits) -> bool:
    """Whether anybody waits for a save."""
    return any(book.waits for book in commits.books.values())


def given_up(commits: Commits, silent: Collection[Rank]) -> Taken:
    """These ranks have ended, and their nodes have told all that they saved: nobody waits for what
    they have not."""
    taken = Taken()
    for book in commits.books.values():
        for wait in dict.fromkeys(book.waits.values()):
            found = [
                s for s in book.snapshots if (s.id.step, s.id.round) == (wait.step, wait.round)
            ]
            holders = found[0].holders if found else {}
            lacking = next((rank for rank in silent if not holders.get(rank)), None)
            if lacking is not None and not any(s.counts for s in found):
                why = f"rank {lacking} ended without saving it"
                skipped = SaveSettled(outcome="skipped", reason=why)
                _answer_waits(book, wait, skipped, taken)
    return taken


def forget(commits: Commits, asker: Asker) -> None:
    """Whoever waited there does not any more, and asks something else now."""
    for book in commits.books.values():
        book.waits.pop(asker, None)


def _outcome_key(to: Tier, step: int, round: RoundNumber) -> str:
    return f"{to}/{step}/{round}"


def _settle_save(
    book: Book, to: Tier, id: SnapshotId, settled: SaveSettled, taken: Taken, attempt: int = 0
) -> None:
    """Say how a save went; the last attempt at it, unless told which."""
    attempt = attempt or max((s.attempt for s in book.snapshots if s.id == id), default=1)
    key, outcome = _outcome_key(to, id.step, id.round), Outcome(settled, attempt)
    known = book.outcomes.pop(key, outcome)
    book.outcomes[key] = known if known.answers(attempt + 1) else outcome
    while len(book.outcomes) > KEPT_OUTCOMES:
        del book.outcomes[next(iter(book.outcomes))]
    for wait in dict.fromkeys(book.waits.values()):
        same = (wait.step, wait.round, wait.to) == (id.step, id.round, to)
        if same and outcome.answers(wait.attempt):
            _answer_waits(book, wait, settled, taken)


def _answer_waits(book: Book, wait: Wait, settled: SaveSettled, taken: Taken) -> None:
    for asker in [asker for asker, one in book.waits.items() if one == wait]:
        del book.waits[asker]
        taken.answers.append((asker, settled))


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
