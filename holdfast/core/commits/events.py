"""What agents report of snapshots and checkpoints, and what scripts ask about them.

`commits.rules` decides; here its word meets the rest of the job: open requests, incidents, and the
end, which waits until the last checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field

from holdfast.core.commits import restoring, rules, waiting
from holdfast.core.commits.replica_placement import placement
from holdfast.core.commits.state import Address, Book, CommitEffects, Commits, LostSave, Reach
from holdfast.core.decisions import (
    NOT_A_MEMBER,
    AnswerRequest,
    Asker,
    Effect,
    EndJob,
    Note,
    Refused,
)
from holdfast.core.faults import Fault
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS, LIVE, Ended, Ending, Running
from holdfast.core.view import View
from holdfast.messages.checkpoints import Holder, SnapshotId
from holdfast.messages.events import (
    Asked,
    CheckpointWritten,
    ImagesHeld,
    NodeResumed,
    RankFilesWritten,
    SaveAsked,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
    StreamEnded,
    WorkerExited,
)
from holdfast.messages.exits import EXIT_FAILED
from holdfast.messages.records import JobResult, Place, World
from holdfast.messages.requests import AwaitSave, FindState
from holdfast.messages.units import NodeId, Rank, Time

ESCALATES_AFTER = 3
"""Checkpoints in a row that could not be written, after which the incident says so with emphasis."""

NOT_CONCERNED = Refused(reason="the node is a member, or has no images")
OTHER_ROUND = Refused(reason="the snapshot is of another round")


class CommitsMachine(Commits, Machine):
    copies: dict[NodeId, list[NodeId]] = field(default_factory=dict)
    """Which nodes keep copies of whose images, in the newest round."""
    last_write: str | None = None
    """Set once all ranks ended with 0: how the last save was lost; empty if it was not."""

    # ---- events ----

    @on(StreamEnded, *ALWAYS)
    def on_stream_ended(self, job: View, event: StreamEnded, now: Time) -> Effects | Refused:
        """Note that a node which was sent away is gone, with its images and what it was to write."""
        if job.membership.has(event.node) or event.node not in rules.nodes(self):
            return NOT_CONCERNED
        return self._take_in(job, rules.node_gone(self, event.node))

    @on(SnapshotsSealed, *ALWAYS)
    def on_sealed(self, job: View, event: SnapshotsSealed, now: Time) -> Effects | Refused:
        if not job.membership.has(event.node):
            return NOT_A_MEMBER
        if event.snapshot.round > job.membership.round:
            return OTHER_ROUND
        effects = self._take_in(job, rules.sealed(self, event))
        if job.world is None:
            effects += rules.secure(self)  # It was sealed just when the round broke.
        return effects

    @on(SnapshotMissed, *ALWAYS)
    def on_missed(self, job: View, event: SnapshotMissed, now: Time) -> Effects | Refused:
        if not job.membership.has(event.node):
            return NOT_A_MEMBER
        if event.snapshot.round != job.membership.round:
            return OTHER_ROUND
        return self._take_in(job, rules.missed(self, event))

    @on(ImagesHeld, *ALWAYS)
    def on_held(self, job: View, event: ImagesHeld, now: Time) -> Effects | Refused:
        if not job.membership.has(event.node):
            return NOT_A_MEMBER
        effects = self._take_in(job, rules.held(self, event))
        if any(image.snapshot.round < job.membership.round for image in event.images):
            effects += rules.secure(self)  # Back with its images, after the round broke.
        return effects

    @on(RankFilesWritten, *ALWAYS)
    def on_rank_files_written(self, job: View, event: RankFilesWritten, now: Time) -> Effects:
        return self._take_in(job, rules.shards_written(self, event))

    @on(CheckpointWritten, *ALWAYS)
    def on_checkpoint_written(self, job: View, event: CheckpointWritten, now: Time) -> Effects:
        return self._take_in(job, rules.checkpoint_written(self, event))

    @on(SaveAsked, *LIVE, refusal="the job is ending")
    def on_save_asked(self, job: View, event: SaveAsked, now: Time) -> Effects:
        """Write what is newest in memory, as when a round breaks."""
        return rules.secure(self)

    @on(StoredFound, *ALWAYS)
    def on_stored_found(self, job: View, event: StoredFound, now: Time) -> Effects | Refused:
        if event.round != job.membership.round:
            return OTHER_ROUND
        restoring.stored_found(self, event)
        return NONE

    # ---- moments ----

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        """A script wants to restore, or to know how a save went."""
        request = event.request
        if isinstance(request, AwaitSave):
            waiting.forget(self, asker)
            settled = waiting.await_save(self, asker, request, event.round)
            if settled is not None:
                return [AnswerRequest(asker=asker, answer=settled)]
            return self._take_in(job, self._given_up(job))
        if isinstance(request, FindState):
            waiting.forget(self, asker)
            present, reach = _present(job), _reach(job)
            taken = restoring.find(self, event.rank, asker, request, present, reach)
            return self._take_in(job, taken)
        return NONE

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        """A rank ended with 0: nobody who restores waits for it, nor for what it has not saved."""
        if event.code != 0 or not isinstance(job.state, Running):
            return NONE
        if job.unfinished == 0:
            lost = self._take_in(job, rules.end_round(self, job.membership.round))
            return [*lost, *rules.secure(self), *self._finish()]
        restored = restoring.rank_ended(self, _present(job), _reach(job))
        return [*self._take_in(job, restored), *self._take_in(job, self._given_up(job))]

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.copies = _place_copies(job, world)
        self.last_write = None
        return NONE

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        ranks = [Rank(r) for r in range(place.first_rank, place.first_rank + place.slots)]
        fetch = rules.wanted_images(self, ranks, place.node, world.size, _reach(job))
        copies = tuple(_holder(job, node) for node in self.copies.get(place.node, ()))
        return {"copies": copies, "fetch": fetch}

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        rules.round_over(self)
        return rules.secure(self)

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        rules.round_over(self)
        return rules.secure(self) if secure else NONE

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        # If the world lost a member while its last checkpoint was written, there is another round.
        return self._take_in(job, rules.node_gone(self, node), may_finish=not placed)

    def coordinator_restarted(self, job: View, now: Time) -> Effects:
        gone = [node for node in rules.nodes(self) if not job.membership.has(node)]
        return [e for node in gone for e in self._take_in(job, rules.node_gone(self, node))]

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        return rules.remind(self, event.node)

    def validate(self, job: View) -> None:
        rules.validate(self)

    # ---- for the rest of the job ----

    def _take_in(self, job: View, taken: CommitEffects, may_finish: bool = True) -> list[Effect]:
        """Turn what the rules decided into effects."""
        answers = [AnswerRequest(asker=asker, answer=answer) for asker, answer in taken.answers]
        effects: list[Effect] = [*taken.actions, *answers]
        effects += [self._failure(job, snapshot, error) for snapshot, error in taken.failed]
        effects += [self._loss(lost) for lost in taken.lost_saves]
        through = job.world is not None and job.unfinished == 0
        if self.last_write is not None and through and may_finish:
            effects += self._finish()
        return effects

    def _finish(self) -> list[Effect]:
        """End the job, whose ranks all ended with 0, once its last checkpoint is written or failed."""
        self.last_write = rules.unwritten(self)
        if rules.busy(self):
            return []
        if self.last_write:
            told = [self._loss(lost, last=True) for lost in rules.take_untold(self)]
            reason = f"finished, but the last save {self.last_write}"
            return [*told, EndJob(code=EXIT_FAILED, reason=reason, secure=False)]
        return [EndJob(code=0, reason="finished")]

    def _given_up(self, job: View) -> CommitEffects:
        """Find what it is in vain to wait for, because all ranks of a node have ended without it.
        Where only some have, the node's agent reports it."""
        if not waiting.waited_for(self) or job.unfinished == len(job.ranks):
            return CommitEffects()
        present = set(_present(job).values())
        silent = [rank for rank, state in job.ranks.items() if state.node not in present]
        return waiting.given_up(self, silent)

    def _failure(self, job: View, snapshot: SnapshotId, error: str) -> Note:
        """Record a checkpoint that could not be written: it breaks no round, but is not missed."""
        book = self.book(snapshot.checkpointer)
        failures = book.failures
        action = "training goes on; the next save tries again"
        if isinstance(job.state, Ending | Ended) or (job.world is not None and not job.unfinished):
            action = f"the job ends without it; {_newest_stored(book)} on storage"
        elif failures >= ESCALATES_AFTER:
            action = (
                f"{failures} saves in a row could not be written; training goes on without them"
            )
        return Note(
            kind="storage",
            round=snapshot.round,
            step=snapshot.step,
            signature=f"step {snapshot.step} was not written to storage",
            detail=error,
            action=action,
        )

    def _loss(self, lost: LostSave, last: bool = False) -> Note:
        """Record a save of which nothing came; the last one is not made up for."""
        book, id = self.book(lost.snapshot.checkpointer), lost.snapshot
        words = "was skipped" if lost.outcome == "skipped" else "was not saved"
        goes_on = "it was the last save, so the job ends with 1" if last else "training goes on"
        return Note(
            kind="storage",
            round=id.round,
            step=id.step,
            signature=f"step {id.step} {words}",
            detail=lost.why,
            action=f"{goes_on}; {book.lost.get(lost.outcome, 1)} saves {lost.outcome} so far",
        )


def _newest_stored(book: Book) -> str:
    stored = [one.step for one in book.found] + [book.stored.step if book.stored else -1]
    return f"step {max(stored)} is the newest" if max(stored) >= 0 else "nothing is"


def _present(job: View) -> dict[Rank, NodeId]:
    return {rank: state.node for rank, state in job.ranks.items() if not state.finished}


def _reach(job: View) -> Reach:
    """Where a node's keeper is to be found."""

    def of(node: NodeId) -> Address | None:
        found = job.membership.find(node)
        return None if found is None else (found.spec.address, found.spec.keeper_port)

    return of


def _holder(job: View, node: NodeId) -> Holder:
    spec = job.membership.placed[node].spec
    return Holder(Rank(0), node, spec.address, spec.keeper_port)


def _place_copies(job: View, world: World) -> dict[NodeId, list[NodeId]]:
    """Choose which nodes keep copies of which others' images."""
    nodes = [place.node for place in world.places]
    specs = [job.membership.placed[node].spec for node in nodes]
    domains = [f"{spec.block}/{spec.switch}" for spec in specs]
    hosts = [spec.host for spec in specs]
    placed = placement(len(nodes), 1 + job.terms.copies, 1, domains, hosts)
    return {node: [nodes[i] for i in peers] for node, peers in zip(nodes, placed, strict=True)}
