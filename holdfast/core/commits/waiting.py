"""Records the results of saves, and answers the ranks that wait for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from holdfast.core.commits.state import (
    KEPT_OUTCOMES,
    Book,
    CommitEffects,
    Commits,
    LostSave,
    SaveOutcome,
    SaveWait,
    on_their_way,
)
from holdfast.core.decisions import Asker
from holdfast.messages.checkpoints import Missed, SnapshotId, Tier
from holdfast.messages.requests import AwaitSave, SaveSettled
from holdfast.messages.units import Rank, RoundNumber

TIERS: tuple[Tier, ...] = ("memory", "storage")

_PASSED = SaveSettled(
    outcome="skipped", reason="a newer one was whole on all ranks before, or it is too long ago"
)


def _passed(book: Book, wait: SaveWait) -> bool:
    """Whether the save that is waited for can no longer happen."""
    newer = [s for s in book.snapshots if s.id.round == wait.round and s.id.step > wait.step]
    written = [(id.step, id.round) for id in on_their_way(book)]
    return any(s.counts for s in newer) and (wait.step, wait.round) not in written


def answer_passed(book: Book, taken: CommitEffects) -> None:
    """Answer those that wait for a save that a newer one has overtaken."""
    for wait in dict.fromkeys(book.waits.values()):
        if _passed(book, wait):
            answer_waits(book, wait, _PASSED, taken)


def await_save(
    commits: Commits, asker: Asker, request: AwaitSave, round: RoundNumber
) -> SaveSettled | None:
    """Return the result of a save; None: it is not known yet, and the asker waits."""
    book = commits.book(request.checkpointer)
    known = book.outcomes.get(outcome_key(request.to, request.step, round))
    if known is not None and known.answers(request.attempt):
        return known.settled
    wait = SaveWait(request.step, round, request.to, request.attempt)
    if _passed(book, wait):
        return _PASSED
    book.waits[asker] = wait
    return None


def waited_for(commits: Commits) -> bool:
    """Whether an asker waits for a save."""
    return any(book.waits for book in commits.books.values())


def given_up(commits: Commits, silent: Collection[Rank]) -> CommitEffects:
    """Answer those that wait for saves of ranks that have ended without them. Everything that these
    ranks saved has been reported."""
    taken = CommitEffects()
    for book in commits.books.values():
        for wait in dict.fromkeys(book.waits.values()):
            this = (wait.step, wait.round)
            found = [s for s in book.snapshots if (s.id.step, s.id.round) == this]
            holders = found[0].holders if found else {}
            lacking = next((rank for rank in silent if not holders.get(rank)), None)
            if lacking is not None and not any(s.counts for s in found):
                why = f"rank {lacking} ended without saving it"
                answer_waits(book, wait, SaveSettled(outcome="skipped", reason=why), taken)
    return taken


def forget(commits: Commits, asker: Asker) -> None:
    """Drop what an asker waited for: it asks something else now."""
    for book in commits.books.values():
        book.waits.pop(asker, None)


def outcome_key(to: Tier, step: int, round: RoundNumber) -> str:
    return f"{to}/{step}/{round}"


def settle(
    book: Book,
    tiers: Iterable[Tier],
    id: SnapshotId,
    outcome: Literal["saved", "skipped", "failed"],
    reason: str,
    taken: CommitEffects,
    attempt: int = 0,
) -> None:
    """Record the result of a save, and answer those that wait for it. Without a number, it is that of
    the last attempt."""
    attempt = attempt or max((s.attempt for s in book.snapshots if s.id == id), default=1)
    result = SaveOutcome(SaveSettled(outcome=outcome, reason=reason), attempt)
    for tier in tiers:
        key = outcome_key(tier, id.step, id.round)
        known = book.outcomes.pop(key, result)
        book.outcomes[key] = known if known.answers(attempt + 1) else result
        while len(book.outcomes) > KEPT_OUTCOMES:
            del book.outcomes[next(iter(book.outcomes))]
        for wait in dict.fromkeys(book.waits.values()):
            same = (wait.step, wait.round, wait.to) == (id.step, id.round, tier)
            if same and result.answers(wait.attempt):
                answer_waits(book, wait, result.settled, taken)


def lose(
    book: Book,
    tiers: Iterable[Tier],
    id: SnapshotId,
    outcome: Missed,
    why: str,
    taken: CommitEffects,
    attempt: int = 0,
    quiet: bool = False,
) -> None:
    """Settle a save of which nothing came. It is counted once, whoever else reports it; the first,
    second, fourth, eighth, ... of a kind is an incident, so that no job drowns in them. A quiet one is
    only counted."""
    keys = [outcome_key(tier, id.step, id.round) for tier in tiers]
    told = [known for key in keys if (known := book.outcomes.get(key)) is not None]
    if not any(one.answers(attempt or 1) for one in told):
        book.lost[outcome] = count = book.lost.get(outcome, 0) + 1
        if count & (count - 1) == 0 and not quiet:
            taken.lost_saves.append(LostSave(id, outcome, why))
    settle(book, tiers, id, outcome, why, taken, attempt)


def answer_waits(book: Book, wait: SaveWait, settled: SaveSettled, taken: CommitEffects) -> None:
    for asker in [asker for asker, one in book.waits.items() if one == wait]:
        del book.waits[asker]
        taken.answers.append((asker, settled))
