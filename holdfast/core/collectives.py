"""Compares what ranks called under one number of one process group.

Torch numbers a group's collectives alike on all of its ranks, so two ranks that called different
operations under one number will never meet there: one of them skipped an operation, took another
branch, or passed a tensor of another size. The few differ from the many; without a majority no rank
is the odd one.

A difference is *certain* only if nothing else can explain it. Every member must have entered the
number (then nothing more can come) and some must still be in it, for longer than a network needs.
Coalesced operations share a number; all_gather and all_gather_into_tensor are the same on the wire;
sizes count only for gloo's all_reduce, which waits forever or aborts, while its broadcast into a
larger tensor succeeds; and shapes do not count at all: an all_reduce of [2, 3] meets one of [6].
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from holdfast.messages.evidence import Collective
from holdfast.messages.units import Seconds

WAITED_S: Seconds = 0.5
"""A rank that has been in an operation for less may have met the others a moment later."""
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Families in which no rank finishes before all have entered. Not so all_to_all, whose parts may be
empty, nor operations with a root."""

MOST_TOLD = 4
"""Different operations that a sentence lists."""

_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_FAMILIES = SYNCHRONIZING | _ROOTED | {"all_to_all"}
_VARIANT = re.compile(r"^_|_(base|coalesced|into_tensor|tensor|single|oop)(?=_|$)")
_TENSOR = re.compile(r"([A-Za-z]*)\[([\d, ]*)\]")
_BACKENDS = frozenset({"gloo", "nccl"})


class Difference(Struct, frozen=True):
    """Different operations that ranks called under one number of a group."""

    group: str
    number: int
    calls: dict[str, tuple[int, ...]]
    """The operations and their ranks."""
    certain: bool = False
    """Whether it is proven that these ranks never meet."""

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; empty if there is none."""
        many = max(self.calls.values(), key=len)
        few = tuple(sorted(r for ranks in self.calls.values() for r in ranks if r not in many))
        return few if len(many) > len(few) else ()


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


def told(different: Difference) -> str:
    """Say which ranks called what under one number."""
    fewest_first = sorted(different.calls.items(), key=lambda item: (len(item[1]), item[1]))
    said = [f"{rank_list(ranks)} in {kind}" for kind, ranks in fewest_first]
    shown = said[:MOST_TOLD] + ([f"and {len(said) - MOST_TOLD} more"] if said[MOST_TOLD:] else [])
    return (
        f"collective #{different.number} of group {different.group} does not match: "
        f"{'; '.join(shown)}; they will never meet"
    )


def operation(noted: Collective) -> str:
    """Return an operation's name without its backend."""
    return noted.op.rpartition(":")[2]


def family(noted: Collective) -> str:
    """Return what an operation is on the wire: all_gather for all_gather_into_tensor; else empty."""
    name = operation(noted).replace("allreduce", "all_reduce").replace("allgather", "all_gather")
    plain = _VARIANT.sub("", name)
    return plain if plain in _FAMILIES else ""


def is_pair(noted: Collective) -> bool:
    """Return whether an operation is between two ranks, and so not numbered alike on all."""
    return operation(noted).startswith(("send", "recv", "p2p"))


def is_old(noted: Collective) -> bool:
    """Return whether a rank has been in an operation for so long that it waits there."""
    return noted.age_s is not None and noted.age_s >= WAITED_S


def difference(
    group: str,
    noted: Mapping[int, Sequence[Collective]],
    members: Iterable[int],
    up_to: int | None = None,
) -> Difference | None:
    """Return the first number at which ranks called different collectives."""
    by_number: dict[int, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in noted.items():
        for each in own:
            if not is_pair(each) and (up_to is None or each.number <= up_to):
                by_number[each.number][rank].append(each)
    for number in sorted(by_number):
        called = by_number[number]
        by_size = all(len(own) == 1 for own in called.values())
        kinds = {rank: _kinds(own, by_size) for rank, own in called.items()}
        if not set.intersection(*kinds.values()):
            alike: dict[frozenset[str], list[int]] = defaultdict(list)
            for rank in sorted(kinds):
                alike[frozenset(kinds[rank])].append(rank)
            calls = {_calls(called[ranks[0]]): tuple(ranks) for ranks in alike.values()}
            return Difference(group, number, calls, _is_certain(called, set(members)))
    return None


def odd_dead(
    last: Mapping[int, Sequence[Collective]], silent: Iterable[int] = ()
) -> tuple[tuple[int, ...], Difference | None]:
    """Return which of the ranks that died in a broken collective caused it, and how they differ.

    `last` are the newest collectives that dying ranks told of. `silent` are ranks that their backend
    aborted because they received what they did not expect, and which could tell nothing. A rank that
    dies so is as likely the victim: if those that told differ, the few among them did it; if at least
    two told and agree, the only silent one did. Otherwise nobody knows.
    """
    groups = sorted({each.group for own in last.values() for each in own})
    for group in groups:
        noted = {rank: [c for c in own if c.group == group] for rank, own in last.items()}
        found = difference(group, noted, last)
        if found is not None:
            return found.odd, found
    quiet = tuple(set(silent) - set(last))
    told = [rank for rank, own in last.items() if own]
    return (quiet, None) if len(quiet) == 1 and len(told) > 1 else ((), None)


def _calls(noted: Sequence[Collective]) -> str:
    """Say what a rank called under one number."""
    told = (f"{operation(each)} of {each.sizes}".removesuffix(" of ") for each in noted)
    return " and ".join(sorted(set(told)))


def _kinds(noted: Sequence[Collective], by_size: bool) -> set[str]:
    """Return what a rank called under one number: several operations if they were coalesced."""
    families = {family(each) or operation(each) for each in noted}
    if by_size and families <= {"all_reduce", "broadcast"}:
        return {f"{name} of {_elements(noted[0].sizes)}" for name in families}
    return families


def _elements(sizes: str) -> str:
    """Return how many elements of which types tensors have, whatever their shapes; else empty."""
    if sizes.endswith("..."):
        return ""
    counts: Counter[str] = Counter()
    for kind, shape in _TENSOR.findall(sizes):
        counts[kind] += math.prod(int(word) for word in shape.split(",") if word.strip())
    return ", ".join(f"{count} {kind}".strip() for kind, count in sorted(counts.items()))


def _is_certain(called: Mapping[int, Sequence[Collective]], members: set[int]) -> bool:
    ones = [own[0] for own in called.values()]
    families = {family(each) for each in ones}
    backends = {each.op.partition(":")[0] for each in ones}
    return (
        set(called) == members
        and all(len(own) == 1 for own in called.values())
        and len(backends) == 1
        and backends <= _BACKENDS
        and "" not in families
        and (len(families) > 1 or (backends == {"gloo"} and families == {"all_reduce"}))
        and any(each.state != "completed" for each in ones)
        and all(is_old(each) for each in ones)
    )
