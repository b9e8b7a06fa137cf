"""Decides what the ranks of a round restore.

All ranks ask. They are offered the newest state there is: at the same step memory before storage. Each
reports whether what it loaded verified; if one failed, all are offered the next older state, and so on.
No rank goes on before all of them have loaded the same. Then what was newer is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.core.commits.state import (
    REFUSALS_TOLD,
    Book,
    CommitEffects,
    Commits,
    Reach,
    RestoreCandidate,
    Search,
    on_their_way,
)
from holdfast.core.decisions import Asker
from holdfast.messages.checkpoints import Holder
from holdfast.messages.events import StoredFound
from holdfast.messages.requests import FindState, StateFound
from holdfast.messages.units import NodeId, Rank


def stored_found(commits: Commits, event: StoredFound) -> None:
    book = commits.book(event.checkpointer)
    book.found, book.found_refused = list(event.steps), list(event.refused)


def find(
    commits: Commits,
    rank: Rank,
    asker: Asker,
    request: FindState,
    nodes: Mapping[Rank, NodeId],
    reach: Reach,
    memory: bool = True,
) -> CommitEffects:
    """Take a rank's request to restore, or its report on what it tried; answer all ranks once all
    have spoken. Without `memory` only storage is offered."""
    book = commits.book(request.checkpointer)
    search = book.search = book.search or Search(request.step, memory)
    if request.all_ranks:
        search.all_ranks.add(rank)
    taken = CommitEffects()
    if search.current is not None and request.tried is None:
        # It begins again and does not know the offer, which the others still try.
        taken.answers.append((asker, _Offers(book, search, nodes, reach).to(rank)))
        return taken
    search.asked[rank] = asker
    error = request.tried.error if request.tried is not None else ""
    if request.step != search.step:
        error = f"it wants {_named(request.step)}, and others want {_named(search.step)}"
    if error:
        search.errors[rank] = error
    if len(search.asked) >= len(nodes):
        _go_on(book, search, nodes, reach, taken)
    return taken


def rank_ended(commits: Commits, nodes: Mapping[Rank, NodeId], reach: Reach) -> CommitEffects:
    """Stop waiting for ranks that have ended."""
    taken = CommitEffects()
    for book in commits.books.values():
        search = book.search
        if search is not None:
            for rank in [rank for rank in search.asked if rank not in nodes]:
                del search.asked[rank]
                search.errors.pop(rank, None)
            if search.asked and len(search.asked) >= len(nodes):
                _go_on(book, search, nodes, reach, taken)
    return taken


def best(book: Book) -> RestoreCandidate | None:
    """Find the state that ranks would restore if they asked now; None if there is none."""
    found = _known(book, memory=True)
    stored = book.stored
    if stored is not None:
        found.append(RestoreCandidate("storage", stored.step, stored.round, 0))
    return max(found, key=lambda one: one.place, default=None)


def _named(step: int | None) -> str:
    return "the newest" if step is None else f"step {step}"


def _go_on(
    book: Book, search: Search, nodes: Mapping[Rank, NodeId], reach: Reach, taken: CommitEffects
) -> None:
    """Conclude the search with what all ranks have loaded, or offer them the next candidate."""
    loaded = search.current if not search.errors else None
    torn = search.current is None and bool(search.errors)
    _refuse(search)
    if loaded is None and not torn:
        search.current = next(iter(_candidates(book, search)), None)
        if search.current is not None:
            _answer_all(search, taken, _Offers(book, search, nodes, reach).to)
            return
    found = StateFound(where="nowhere", refused=_refusals(book, search))
    if loaded is not None:
        found = StateFound(where="loaded")
        _forget_newer(book, loaded)
    _answer_all(search, taken, lambda rank: found)
    book.search, book.agreed = None, True


def _forget_newer(book: Book, loaded: RestoreCandidate) -> None:
    """Forget snapshots that were refused or are newer: training goes on from what was loaded."""
    for snapshot in list(book.snapshots):
        id = snapshot.id
        same = (loaded.where, loaded.step, loaded.round) == ("memory", id.step, id.round)
        if id.step >= loaded.step and not same and id not in on_their_way(book):
            book.snapshots.remove(snapshot)
    book.outcomes.clear()


def _refusals(book: Book, search: Search) -> tuple[str, ...]:
    """What was not restored, and why."""
    return tuple([*book.found_refused, *search.refused][:REFUSALS_TOLD])


def _refuse(search: Search) -> None:
    if not search.errors:
        return
    rank, error = min(search.errors.items())
    more = f" (and {len(search.errors) - 1} more ranks)" if len(search.errors) > 1 else ""
    current = search.current
    where = f"step {current.step} from {current.where}: " if current is not None else ""
    search.refused.append(f"{where}rank {rank}: {error}{more}")
    search.errors = {}


def _candidates(book: Book, search: Search) -> list[RestoreCandidate]:
    """The states older than what was tried: the newest first, and of one step memory before
    storage."""
    last = search.current
    wanted = [
        c
        for c in _known(book, search.memory)
        if search.step in (None, c.step) and (last is None or c.place < last.place)
    ]
    return sorted(wanted, key=lambda c: c.place, reverse=True)


def _known(book: Book, memory: bool) -> list[RestoreCandidate]:
    found = [
        RestoreCandidate("memory", s.id.step, s.id.round, s.world_size)
        for s in book.snapshots
        if memory and s.counts and s.alive
    ]
    found += [RestoreCandidate("storage", s.step, s.round, s.world_size) for s in book.found]
    return found


class _Offers:
    """What each rank is told of the candidate that all are to load."""

    def __init__(
        self,
        book: Book,
        search: Search,
        nodes: Mapping[Rank, NodeId],
        reach: Reach,
    ) -> None:
        assert search.current is not None
        self._current = search.current
        self._refused = _refusals(book, search)
        self._nodes, self._reach = nodes, reach
        self._all_ranks = search.all_ranks
        key = (self._current.step, self._current.round)
        self._holders: Mapping[Rank, list[NodeId]] = next(
            (s.holders for s in book.snapshots if (s.id.step, s.id.round) == key), {}
        )

    def to(self, rank: Rank) -> StateFound:
        current = self._current
        holders: tuple[Holder, ...] = ()
        if current.where == "memory":
            own = current.world_size == len(self._nodes) and rank not in self._all_ranks
            needed = [rank] if own else list(range(current.world_size))
            near = self._nodes[rank]
            holders = tuple(held for one in needed for held in self._all(Rank(one), near))
        return StateFound(
            where=current.where,
            step=current.step,
            round=current.round,
            world_size=current.world_size,
            holders=holders,
            refused=self._refused,
        )

    def _all(self, rank: Rank, near: NodeId) -> list[Holder]:
        """The nodes that have a rank's image, this one first."""
        nodes = sorted(self._holders.get(rank, []), key=lambda node: node != near)
        # A spare that had the only copy may be gone since: then the rank cannot reach it.
        reached = [(node, *where) for node in nodes if (where := self._reach(node)) is not None]
        return [Holder(rank, *one) for one in reached or [(NodeId(""), "", 0)]]


def _answer_all(search: Search, taken: CommitEffects, answer: Callable[[Rank], StateFound]) -> None:
    taken.answers += [(asker, answer(rank)) for rank, asker in search.asked.items()]
    search.asked = {}
