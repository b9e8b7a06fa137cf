"""Words a verdict as one sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from holdfast.core.collectives import Difference
from holdfast.diagnosis.frames import awaits_its_loader, telling_thread, user_frame, verb
from holdfast.diagnosis.fronts import Front
from holdfast.messages.evidence import Frame, LoaderWorker, RankEvidence

_MAX_CLAUSES = 4
_MAX_PLACE_CHARS = 120
"""Limit of a place in messages."""


def rank_list(ranks: Iterable[int]) -> str:
    """Write ranks as "rank 3" or "ranks 0–2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [_span(first, last) for first, last in spans]
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'rank' if one else 'ranks'} {', '.join(words)}"


def _span(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}–{last}"


def place(evidence: RankEvidence) -> str:
    """Return the user's line that a rank is at, as "loader.py:88 (load_batch)"; empty if unknown."""
    thread = telling_thread(evidence)
    return _line(thread.frames)[:_MAX_PLACE_CHARS] if thread is not None else ""


def _line(frames: Sequence[Frame]) -> str:
    frame = user_frame(frames)
    if frame is None:
        return ""
    line = f":{frame.line}" if frame.line else ""
    return f"{PurePath(frame.file).name}{line} ({frame.function})"


def doing(evidence: RankEvidence) -> str:
    """Return what a rank without a defect does: "sleeps in loader.py:88 (load_batch)"."""
    thread = telling_thread(evidence)
    if thread is None or not thread.frames:
        return "is at an unknown place: no stack could be taken"
    if evidence.loaders and awaits_its_loader(thread):
        return _awaiting(evidence.loaders[0])
    if not place(evidence):
        return f"{verb(thread)} in native code ({thread.frames[0].function})"
    return at(verb(thread), evidence)


def _awaiting(worker: LoaderWorker) -> str:
    """Say which worker of its data loader a rank waits for, and what that does."""
    line = _line(worker.stack.frames)
    does = f", which {verb(worker.stack)} in {line}" if line else ""
    return f"waits for its data loader's worker {worker.number} (pid {worker.pid}){does}"


def at(what: str, evidence: RankEvidence) -> str:
    """Add the line and section to what a rank does."""
    line = place(evidence)
    section = f", section {evidence.sections[-1]}" if evidence.sections else ""
    return f"{what} in {line}{section}" if line else f"{what}{section}"


def stands(evidence: Sequence[RankEvidence], world_size: int) -> str:
    """Say where ranks stand, all of them or group by group; empty if that is unknown."""
    places: dict[str, list[int]] = {}
    for each in evidence:
        places.setdefault(place(each), []).append(each.rank)
    if "" in places or not places:
        return ""
    if len(places) == 1 and len(evidence) == world_size > 1:
        return f"all {world_size} ranks stand in {next(iter(places))}"
    most_first = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))
    return _joined(
        [
            f"{rank_list(ranks)} {'stands' if len(ranks) == 1 else 'stand'} in {line}"
            for line, ranks in most_first
        ]
    )


def accused(evidence: Iterable[tuple[RankEvidence, str]]) -> str:
    """Name the guilty ranks and what they do; those that do the same together."""
    alike: dict[tuple[str, str], list[int]] = {}
    for each, what in evidence:
        alike.setdefault((each.node, what), []).append(each.rank)
    clauses = [
        f"{rank_list(ranks)} on {node} {what if len(ranks) == 1 else plural(what)}"
        for (node, what), ranks in alike.items()
    ]
    return _joined(clauses)


def waiters(fronts: Sequence[Front], excluded: Iterable[int]) -> str:
    """Say which ranks wait in which operation, each rank once."""
    told = set(excluded)
    clauses = []
    for front in fronts:
        ranks = set(front.waiting) - told
        told |= ranks
        if ranks:
            clauses.append(waits(ranks, front))
    return _joined(clauses)


def waits(ranks: Iterable[int], front: Front) -> str:
    """Say that ranks wait in an operation."""
    found = sorted(ranks)
    return f"{rank_list(found)} {'waits' if len(found) == 1 else 'wait'} in {name(front)}"


def wait_somewhere(ranks: Sequence[int]) -> str:
    """Say that ranks wait, where only their stacks tell it."""
    return f"{rank_list(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in a collective"


def name(front: Front) -> str:
    """Write an operation as "all_reduce #412 of group 0"."""
    return f"{front.op} #{front.number} of group {front.group}"


def circle(evidence: Sequence[RankEvidence], fronts: Sequence[Front]) -> str:
    """Say which ranks wait for each other, and where."""
    said = []
    for each in evidence:
        front = next(front for front in fronts if each.rank in front.open)
        line = place(each).partition(" ")[0]
        said.append(f"rank {each.rank} in {name(front)}{f' ({line})' if line else ''}")
    who = rank_list(each.rank for each in evidence)
    return f"{who} wait for each other in a circle: {_joined(said, ', ')}"


def mismatch(different: Difference) -> str:
    """Say which ranks called what under one number."""
    fewest_first = sorted(different.calls.items(), key=lambda item: (len(item[1]), item[1]))
    said = [f"{rank_list(ranks)} in {kind}" for kind, ranks in fewest_first]
    return (
        f"collective #{different.number} of group {different.group} does not match: "
        f"{_joined(said)}; they will never meet"
    )


def _joined(clauses: Sequence[str], by: str = "; ") -> str:
    shown = list(clauses[:_MAX_CLAUSES])
    if len(clauses) > _MAX_CLAUSES:
        shown.append(f"and {len(clauses) - _MAX_CLAUSES} more")
    return by.join(shown)


def plural(what: str) -> str:
    """Put a phrase like "is stopped" into the plural."""
    first, _, rest = what.partition(" ")
    plural = {"is": "are", "has": "have"}.get(first, first.removesuffix("s"))
    return f"{plural} {rest}"
