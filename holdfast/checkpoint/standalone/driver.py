"""Runs the commit protocol for ranks that have no coordinator, as a thread of rank 0.

It receives the events of all ranks in one order, applies the rules of `core.commits` to each, and sends
what comes of it: actions to the ranks, and answers to those that wait for a save or a restore. It
decides nothing itself. When all ranks have left it ends; if it has to end before, it tells the others
that nothing more is saved.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from holdfast.checkpoint.standalone.store_meeting import (
    DriverSeat,
    Post,
    RankAction,
    RankEvent,
    SaveEnded,
    StoreMeeting,
)
from holdfast.core.commits import restoring, rules, waiting
from holdfast.core.commits.state import CommitEffects, Commits
from holdfast.errors import CheckpointError
from holdfast.messages.actions import (
    Answered,
    AnyAction,
    CheckpointSettled,
    CloseJob,
    CommitCheckpoint,
    WriteRankFiles,
)
from holdfast.messages.checkpoints import SnapshotId
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
from holdfast.messages.requests import AnyAnswer, AwaitSave, FindState
from holdfast.messages.units import NodeId, Rank

LINGER_S: Final = 10.0
"""At its end rank 0 waits so long for the others to leave: it may host the store."""
_REMEMBERED: Final = 16


def node_of(rank: int) -> NodeId:
    """Name the node of a rank: without a coordinator each rank is one of its own."""
    return NodeId(f"rank {rank}")


def rank_of(node: NodeId) -> Rank:
    return Rank(int(node.removeprefix("rank ")))


class CommitDriver:
    def __init__(self, meeting: StoreMeeting, complain: Callable[[str], None] | None) -> None:
        self._meeting = meeting
        self._seat = DriverSeat(meeting)
        self._complain = complain
        """Prints why a step is not on storage."""
        self._complained: tuple[SnapshotId, int] | None = None
        self._commits = Commits()
        self._asked: dict[str, tuple[Rank, Callable[[Any], SaveEnded | Answered]]] = {}
        """By asker: its rank, and what makes an action of the answer."""
        self._left: set[Rank] = set()
        self._reported: dict[Rank, int] = {}
        """The newest round of which each rank has reported a save."""
        self._out: defaultdict[int, list[RankAction]] = defaultdict(list)
        self._directories: dict[SnapshotId, set[str]] = {}
        self._for_storage: deque[SnapshotId] = deque(maxlen=_REMEMBERED)
        """The last snapshots that were meant for storage."""
        self._unused: list[SnapshotId] = []
        """Snapshots whose writing ended before a manifest was begun."""
        self._saved = False
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)
        self._thread.start()

    def linger(self) -> None:
        """Wait until all ranks have left, if anything was saved; then end."""
        if self._saved:
            self._thread.join(LINGER_S)
        if self._thread.is_alive():
            try:
                self._meeting.post(Post())
            except CheckpointError:
                return
            self._thread.join(LINGER_S)

    def _run(self) -> None:
        why = "rank 0 has ended, and the saves of all ranks with it"
        try:
            while len(self._left) < self._meeting.world_size:
                if not self._take_all():
                    break
            else:
                self._seat.clear()
        except Exception as error:
            # The edge of a thread: whatever it was, every rank is told.
            why = f"rank 0: {error or type(error).__name__}"
        close = CloseJob(code=1, reason=why)
        try:
            self._seat.deliver({rank: [close] for rank in self._present()})
        except CheckpointError:
            return  # The store is gone, and each rank finds that out by itself.

    def _take_all(self) -> bool:
        """Take the next events, and send what comes of them; False when the driver is to end."""
        posts = self._seat.collect()
        for post in posts:
            for event in post.events:
                self._take(event, post.directory)
        out, self._out = self._out, defaultdict(list)
        self._seat.deliver(out)
        return all(post.events for post in posts)

    # ---- events ----

    def _take(self, event: RankEvent, directory: str) -> None:
        if isinstance(event, SnapshotsSealed):
            self._saved = True
            self._note_wish(event)
            self._note_directory(event.snapshot, directory)
            self._pass_over(event)
            self._act_on(rules.sealed(self._commits, event))
            self._await_end(event)
        elif isinstance(event, SnapshotMissed):
            self._saved = True
            self._pass_over(event)
            self._act_on(rules.missed(self._commits, event))
            self._await_end(event)
        elif isinstance(event, RankFilesWritten):
            self._note_unused(event)
            self._act_on(rules.shards_written(self._commits, event))
        elif isinstance(event, CheckpointWritten):
            event = self._with_directories(event)
            self._act_on(rules.checkpoint_written(self._commits, event))
        elif isinstance(event, StoredFound):
            restoring.stored_found(self._commits, event)
        elif isinstance(event, Asked):
            self._ask(event)
        elif isinstance(event, NodeLeaving):
            self._act_on(rules.abandon(self._commits, event.reason))
        else:
            self._leave(event)
        if self._left:
            self._act_on(waiting.given_up(self._commits, sorted(self._left)))

    def _await_end(self, event: SnapshotsSealed | SnapshotMissed) -> None:
        """Have the rank that reports a save told how it ends."""
        id, attempt, rank = event.snapshot, event.attempt, rank_of(event.node)
        memory_only = isinstance(event, SnapshotsSealed) and event.wish != "now"
        for to in waiting.TIERS[: 1 if memory_only else 2]:
            asker = f"{rank}/{to}/{id.checkpointer}/{id.round}/{id.step}/{attempt}"
            self._asked[asker] = rank, partial(SaveEnded, id, attempt, to)
            request = AwaitSave(checkpointer=id.checkpointer, step=id.step, to=to, attempt=attempt)
            settled = waiting.await_save(self._commits, asker, request, id.round)
            if settled is not None:
                self._answer(asker, settled)

    def _pass_over(self, event: SnapshotsSealed | SnapshotMissed) -> None:
        """Give up saves that some ranks have left out: each rank reports its rounds in order."""
        id, rank = event.snapshot, rank_of(event.node)
        self._reported[rank] = max(self._reported.get(rank, 0), id.round)
        open_ = [s for s in self._commits.book(id.checkpointer).snapshots if not s.counts]
        holders = {id: {rank}} | {s.id: {r for r in s.holders if s.holders[r]} for s in open_}
        holders[id].add(rank)
        for one, there in holders.items():
            over = [
                r for r, round in self._reported.items() if round > one.round and r not in there
            ]
            if over:
                self._act_on(rules.missed(self._commits, _left_out(event, one, over[0])))

    def _note_wish(self, event: SnapshotsSealed) -> None:
        if event.wish == "now" and event.snapshot not in self._for_storage:
            self._for_storage.append(event.snapshot)

    def _ask(self, event: Asked) -> None:
        rank, asker, nodes, request = event.rank, str(event.rank), self._present(), event.request
        assert isinstance(request, FindState)
        self._asked[asker] = rank, partial(_answered, event)
        commits, reach = self._commits, _unreachable
        self._act_on(restoring.find(commits, rank, asker, request, nodes, reach, memory=False))

    def _leave(self, event: NodeLeft) -> None:
        rank = rank_of(event.node)
        self._left.add(rank)
        self._out[rank].append(CloseJob(code=0, reason="this rank has left"))
        self._act_on(rules.node_gone(self._commits, event.node))
        self._act_on(restoring.rank_ended(self._commits, self._present(), _unreachable))

    def _present(self) -> dict[Rank, NodeId]:
        ranks = map(Rank, range(self._meeting.world_size))
        return {rank: node_of(rank) for rank in ranks if rank not in self._left}

    # ---- what comes of them ----

    def _act_on(self, taken: CommitEffects) -> None:
        for action in taken.actions:
            self._send(action)
        for asker, answer in taken.answers:
            self._answer(asker, answer)

    def _send(self, action: AnyAction) -> None:
        assert isinstance(action, WriteRankFiles | CommitCheckpoint | CheckpointSettled)
        rank, snapshot = rank_of(action.node), action.snapshot
        out = self._out[rank]
        if isinstance(action, CheckpointSettled):
            if snapshot in self._unused:
                out.append(DiscardRankFiles(node=action.node, snapshot=snapshot, ranks=(rank,)))
            return
        before = out[-1] if out else None
        if isinstance(action, CommitCheckpoint) and isinstance(before, CommitCheckpoint):
            # The rules split what is too large for one message; here there is no such limit.
            out.pop()
            action = msgspec.structs.replace(action, shards=(*before.shards, *action.shards))
        out.append(action)

    def _answer(self, asker: str, answer: AnyAnswer) -> None:
        rank, made = self._asked.pop(asker)
        action = made(answer)
        self._out[rank].append(action)
        if isinstance(action, SaveEnded):
            self._complain_of(action)

    def _complain_of(self, ended: SaveEnded) -> None:
        """Tell the user once, and not once for each rank, of a step that is not on storage."""
        this = (ended.snapshot, ended.attempt)
        wanted = ended.snapshot in self._for_storage
        lost = ended.to == "storage" and ended.settled.outcome != "saved"
        if lost and wanted and this != self._complained and self._complain is not None:
            self._complained = this
            step, why = ended.snapshot.step, ended.settled.reason
            self._complain(f"step {step} is not on storage: {why}")

    def _note_unused(self, event: RankFilesWritten) -> None:
        """Remember a snapshot whose writing an error ends: its shards are of no use."""
        writing = self._commits.book(event.snapshot.checkpointer).writing
        if event.error and writing is not None and writing.snapshot == event.snapshot:
            self._unused = [*self._unused[1 - _REMEMBERED :], event.snapshot]

    def _note_directory(self, snapshot: SnapshotId, directory: str) -> None:
        self._directories.setdefault(snapshot, set()).add(directory)
        while len(self._directories) > _REMEMBERED:
            del self._directories[next(iter(self._directories))]

    def _with_directories(self, event: CheckpointWritten) -> CheckpointWritten:
        """Add to an error that the ranks gave different paths: the same directory may be mounted at
        both, so that is none by itself."""
        paths = sorted(self._directories.get(event.snapshot, ()))
        if not event.error or len(paths) < 2:
            return event
        error = f"{event.error} (the ranks gave different paths: {' and '.join(paths[:2])})"
        return msgspec.structs.replace(event, error=error)


def _left_out(
    event: SnapshotsSealed | SnapshotMissed, snapshot: SnapshotId, rank: Rank
) -> SnapshotMissed:
    return SnapshotMissed(
        at=event.at,
        node=node_of(rank),
        rank=rank,
        snapshot=snapshot,
        outcome="skipped",
        reason="has not saved it; all ranks have to save the same",
        attempt=event.attempt,
    )


def _answered(asked: Asked, answer: AnyAnswer) -> Answered:
    node, round, rank, channel = asked.node, asked.round, asked.rank, asked.channel
    number = asked.number
    return Answered(
        node=node, round=round, rank=rank, channel=channel, number=number, answer=answer
    )


def _unreachable(node: NodeId) -> None:
    """No node serves images to others here."""
