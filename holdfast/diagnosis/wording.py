"""A verdict in one sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from holdfast.diagnosis.fronts import Front
from holdfast.diagnosis.places import telling_thread, user_frame, verb
from holdfast.messages.evidence import RankEvidence

_MAX_CLAUSES = 4


def rank_list(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0–2, 5"."""
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


def where(evidence: RankEvidence) -> str:
    """ "loader.py:88 (load_batch)": the user's line that a rank is at; empty when not known."""
    thread = telling_thread(evidence)
    frame = user_frame(thread.frames) if thread is not None else None
    if frame is None:
        return ""
    line = f":{frame.line}" if frame.line else ""
    return f"{PurePath(frame.file).name}{line} ({frame.function})"


def doing(evidence: RankEvidence) -> str:
    """What a rank that nothing ails does: "sleeps in loader.py:88 (load_batch)"."""
    thread = telling_thread(evidence)
    if thread is None or not thread.frames:
        return "is somewhere unknown: no stack could be had"
    return at(verb(thread), evidence)


def at(what: str, evidence: RankEvidence) -> str:
    """What, and in which line and section."""
    place = where(evidence)
    section = f", section {evidence.sections[-1]}" if evidence.sections else ""
    return f"{what} in {place}{section}" if place else f"{what}{section}"


def accused(evidence: Iterable[tuple[RankEvidence, str]]) -> str:
    """Whom the others wait for, and what those do; alike ones together."""
    alike: dict[tuple[str, str], list[int]] = {}
    for each, what in evidence:
        alike.setdefault((each.node, what), []).append(each.rank)
    clauses = [
        f"{rank_list(ranks)} on {node} {what if len(ranks) == 1 else plural(what)}"
        for (node, what), ranks in alike.items()
    ]
    return _joined(clauses)


def waiters(fronts: Sequence[Front], excluded: Iterable[int]) -> str:
    """Who waits in what; nobody twice."""
    told = set(excluded)
    clauses = []
    for front in fronts:
        ranks = set(front.waiting) - told
        told |= ranks
        if ranks:
            clauses.append(waits(ranks, front))
    return _joined(clauses)


def waits(ranks: Iterable[int], front: Front) -> str:
    found = sorted(ranks)
    return f"{rank_list(found)} {'waits' if len(found) == 1 else 'wait'} in {name(front)}"


def wait_somewhere(ranks: Sequence[int]) -> str:
    """For ranks of which only the stack says that they wait."""
    return f"{rank_list(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in a collective"


def name(front: Front) -> str:
    """ "all_reduce #412 of group 0"."""
    return f"{front.op} #{front.number} of group {front.group}"


def mismatch(front: Front) -> str:
    fewest_first = sorted(front.different.items(), key=lambda item: (len(item[1]), item[1]))
    said = [f"{rank_list(ranks)} in {kind}" for kind, ranks in fewest_first]
    return (
        f"collective #{front.number} of group {front.group} does not match: {_joined(said)}; they "
        "will never meet"
    )


def _joined(clauses: Sequence[str]) -> str:
    shown = list(clauses[:_MAX_CLAUSES])
    if len(clauses) > _MAX_CLAUSES:
        shown.append(f"and {len(clauses) - _MAX_CLAUSES} more")
    return "; ".join(shown)


def plural(what: str) -> str:
    first, _, rest = what.partition(" ")
    plural = {"is": "are", "has": "have"}.get(first, first.removesuffix("s"))
    return f"{plural} {rest}"
