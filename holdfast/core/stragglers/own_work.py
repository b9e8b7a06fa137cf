"""Computes how fast a rank does its own work, from times that include waiting for other ranks.

In synchronous training all ranks take equally long for a step, however slow one of them is: the others
wait for it in the sections with collectives (backward, optimizer). There the straggler has the
*shortest* time. Workers subtract the waits that they see, and report in which sections there may be
more. The time of such a section says nothing about the speed of its rank, so only three facts are used:

    A section that does not wait (data, forward, the user's own) is the rank's own work; the best
    median divided by the rank's own is its speed there.

    A section that waits also contains work. The work of a backward pass or an optimizer step is in a
    fixed proportion to that of the forward pass, set by the model and not by the machine. The rank
    that is waited for does not wait itself, so the smallest proportion that any rank shows is that of
    the work. Each rank's hidden work is its own forward time times that proportion. This is exact if
    compute is slow (a rank that takes twice as long for forward and backward scores 0.5, though its
    backward is the shortest of all), and also if only something other than compute is slow, like data.

    The work between those passes, or where no rank measures forward, is estimated by the shortest time
    that any rank reports, the same for all.

Hidden work has a weight in the score but no speed of its own. Passes are taken to run at the speed of
the forward pass, up to a few times its length; beyond that they are taken to be the network, which no
rank is to blame for. All other hidden work is taken to run at the best speed. If a rank is slow only in
a section that waits, all ranks report the same times, and these cannot tell which rank it is.

A score is the time that the rank's work would have taken at the best speed, divided by the time that it
took: the mean of the sections' ratios, weighted by time. Weights are counts times medians, so one stall
in a hundred steps has no effect. A rank without a visible section has no score, rather than a good one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from msgspec import Struct

from holdfast.messages.timings import BACKWARD, FORWARD, OPTIMIZER, STEP, Timing
from holdfast.messages.units import Rank, Seconds

MIN_SAMPLES = 5
"""Number of samples below which a section is ignored."""
PASSES = {BACKWARD, OPTIMIZER}
"""Sections whose work is proportional to that of the forward pass."""
FORWARDS_AT_MOST = 3.0
"""Longest backward pass in forward passes, with activations computed again."""

Hidden = Literal["", "by forward", "by the best"]


class Sample(Struct):
    """One section of one rank in one window."""

    count: int = 0
    weighed_s: float = 0.0
    """Sum of medians times counts, which may exceed the limit of a single report."""
    total_s: float = 0.0
    waits: bool = False

    def add(self, timing: Timing) -> None:
        self.count += timing.count
        self.weighed_s += timing.count * timing.median_s
        self.total_s += timing.total_s
        self.waits |= timing.waits

    def median_s(self) -> Seconds:
        return self.weighed_s / self.count


class Work(Struct, frozen=True):
    """A rank's own work in one section."""

    median_s: Seconds
    count: int
    hidden: Hidden = ""
    """How hidden work was estimated: by the forward pass, whose speed it has, or by the best rank."""

    def weight_s(self) -> Seconds:
        return self.median_s * self.count


class Score(Struct, frozen=True):
    """Speed of a rank, as a fraction of the best."""

    score: float
    section: str
    """Section in which most time is lost."""


Sections = dict[str, Sample]
Works = dict[str, Work]


def own_work(window: Mapping[Rank, Sections]) -> dict[Rank, Works]:
    """Return each rank's own work, without waiting."""
    parts = {rank: _parts(sections) for rank, sections in window.items()}
    waiting = {name for each in parts.values() for name, part in each.items() if part.waits}
    seen = {rank: _seen(each, waiting) for rank, each in parts.items()}
    for name in sorted(waiting):
        medians = {rank: p[name].median_s() for rank, p in parts.items() if name in p}
        shortest = min(medians.values())
        estimates = _by_forward(medians, seen) if name in PASSES or name == STEP else {}
        for rank in medians:
            hidden: Hidden = "by forward" if rank in estimates else "by the best"
            median = estimates.get(rank, shortest)
            seen[rank][name] = Work(median, parts[rank][name].count, hidden)
    return seen


def _parts(sections: Sections) -> Sections:
    """Return the sections that make up a step.

    If its passes are not reported, the time that no section covers counts as one that waits.
    """
    enough = {name: s for name, s in sections.items() if s.count >= MIN_SAMPLES}
    parts = {name: s for name, s in enough.items() if name != STEP}
    step = enough.get(STEP)
    if step is not None and not PASSES & parts.keys():
        rest = step.total_s - sum(s.total_s for name, s in sections.items() if name != STEP)
        if rest > 0:
            parts[STEP] = Sample(step.count, rest, rest, waits=True)
    return parts


def _seen(parts: Sections, waiting: set[str]) -> Works:
    visible = {name: part for name, part in parts.items() if name not in waiting}
    return {name: Work(part.median_s(), part.count) for name, part in visible.items()}


def _by_forward(medians: dict[Rank, Seconds], seen: Mapping[Rank, Works]) -> dict[Rank, Seconds]:
    """Estimate the work in a section that waits, for each rank that measures forward."""
    forward = {rank: seen[rank][FORWARD].median_s for rank in medians if FORWARD in seen[rank]}
    forward = {rank: median for rank, median in forward.items() if median > 0}
    proportion = min((medians[rank] / each for rank, each in forward.items()), default=0.0)
    return {rank: min(each * proportion, medians[rank]) for rank, each in forward.items()}


def best_of(works: Collection[Works]) -> dict[str, Seconds]:
    """Return the best median of each section that more than half of these ranks have."""
    medians: dict[str, list[Seconds]] = {}
    for each in works:
        for name, work in each.items():
            if not work.hidden:
                medians.setdefault(name, []).append(work.median_s)
    return {name: min(each) for name, each in medians.items() if 2 * len(each) > len(works)}


def score(works: Works, best: Mapping[str, Seconds]) -> Score | None:
    """Score work against the best times; None if no section can be compared."""
    ratios = {
        name: min(1.0, best[name] / work.median_s) if work.median_s > 0 else 1.0
        for name, work in works.items()
        if not work.hidden and name in best
    }
    if not ratios:
        return None
    for name, work in works.items():
        if work.hidden:
            ratios[name] = 1.0
        if work.hidden == "by forward" and FORWARD in ratios and work.median_s > 0:
            compute = min(1.0, FORWARDS_AT_MOST * works[FORWARD].median_s / work.median_s)
            ratios[name] -= (1.0 - ratios[FORWARD]) * compute
    total = sum(works[name].weight_s() for name in ratios)
    if total <= 0:
        return None
    losses = {name: (1 - ratio) * works[name].weight_s() for name, ratio in ratios.items()}
    # The first name among equals, so that the order of reports does not matter.
    worst = min(losses, key=lambda name: (-losses[name], name))
    return Score(1 - sum(losses.values()) / total, worst)
