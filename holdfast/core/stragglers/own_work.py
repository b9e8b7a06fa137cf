"""Computes how fast a rank does its own work, from times that include waiting for other ranks.

In synchronous training all ranks take equally long for a step, however slow one of them is: the others
wait for it in the sections with collectives (backward, optimizer). There the straggler has the
*shortest* time. Workers subtract the waits that they see, and report in which sections there may be
more. All times here are those of one step.

    A section that does not wait (data, forward, what the script does between the phases) is the rank's
    own work; what it takes longer than the best rank is lost.

    A section that waits also contains work. The work of a backward pass or an optimizer step is in a
    fixed proportion to that of the forward pass, set by the model and not by the machine. The rank
    that is waited for does not wait itself, so the smallest proportion that any rank shows is that of
    the work. Each rank's hidden work is its own forward time times that proportion, and as slow as its
    forward pass. This is exact if compute is slow: a rank that takes twice as long for forward and
    backward scores 0.5, though its backward is the shortest of all.

    A backward pass does at least the work of its forward pass. If the proportion is smaller, it is not
    compute that makes the forward pass long (a rank sleeps there, or reads a file), and nothing
    follows for the backward pass. Its work is then the shortest that any rank shows, the same for all,
    as is any other hidden work. Nor is a rank to blame for what takes more than a few times its
    forward pass: that is the network.

A score is the share of a step that is left if the time that the rank lost is taken off: 0.5 for a rank
that takes twice as long and that all others wait for, wherever the time lies. A rank that loses little
of the step, because others lose more or because the network takes most of it, slows nobody down and
scores well. Medians count, so one stall in a hundred steps has no effect. A rank without a visible
section has no score, rather than a good one. If a rank is slow only in a section that waits, all ranks
report the same times, and these cannot tell which rank it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from msgspec import Struct

from holdfast.messages.timings import BACKWARD, FORWARD, OPTIMIZER, STEP, Timing
from holdfast.messages.units import Rank, Seconds

MIN_SAMPLES = 5
"""Number of samples below which a section is ignored."""
PASSES = (BACKWARD, OPTIMIZER)
"""Sections whose work is proportional to that of the forward pass."""
FORWARDS_AT_LEAST = 1.0
"""Shortest backward pass in forward passes."""
FORWARDS_AT_MOST = 3.0
"""Longest backward pass in forward passes, with activations computed again."""
EVERY_STEP = 0.75
"""A section with more samples per step than this is part of each step."""

Hidden = Literal["", "by forward", "by the best"]


class Sample(Struct):
    """One section of one rank in one window."""

    count: int = 0
    weighed_s: float = 0.0
    """Sum of medians times counts, which may exceed the limit of a single report."""
    waits: bool = False

    def add(self, timing: Timing) -> None:
        self.count += timing.count
        self.weighed_s += timing.count * timing.median_s
        self.waits |= timing.waits

    def median_s(self) -> Seconds:
        return self.weighed_s / self.count


class Work(Struct, frozen=True):
    """A rank's own work of one step in one section."""

    own_s: Seconds
    hidden: Hidden = ""
    """How hidden work was estimated: by the forward pass, whose speed it has, or by the best rank."""


class Score(Struct, frozen=True):
    """Speed of a rank, as a fraction of the best."""

    score: float
    section: str
    """Section in which most time is lost."""


Sections = dict[str, Sample]
Works = dict[str, Work]


def samples(sections: Sections) -> int:
    """Return the number of steps if they are reported, else the count of the most frequent section."""
    if STEP in sections:
        return sections[STEP].count
    return max((sample.count for sample in sections.values()), default=0)


def step_s(sections: Sections) -> Seconds:
    """Return how long a step took; 0 if that was not reported."""
    step = sections.get(STEP)
    return step.median_s() if step is not None and step.count >= MIN_SAMPLES else 0.0


def total_s(works: Works) -> Seconds:
    """Return all work of a step."""
    return sum(work.own_s for work in works.values())


def own_work(window: Mapping[Rank, Sections]) -> dict[Rank, Works]:
    """Return each rank's own work, without waiting."""
    taken = {rank: _taken(sections) for rank, sections in window.items()}
    waiting = {name for each in window.values() for name, one in each.items() if one.waits}
    waiting.add(STEP)
    works = {
        rank: {name: Work(took_s) for name, took_s in each.items() if name not in waiting}
        for rank, each in taken.items()
    }
    for name in sorted(waiting):
        hidden = {rank: each[name] for rank, each in taken.items() if name in each}
        shortest = min(hidden.values(), default=0.0)
        estimates = _by_forward(name, hidden, works)
        for rank in hidden:
            how: Hidden = "by forward" if rank in estimates else "by the best"
            works[rank][name] = Work(estimates.get(rank, shortest), how)
    return works


def _taken(sections: Sections) -> dict[str, Seconds]:
    """Return the time of each section in one step.

    If its passes are not reported, the time that no section covers counts as one more.
    """
    steps = _followed(sections)
    taken = {
        name: sample.median_s() * _per_step(sample.count, steps)
        for name, sample in sections.items()
        if name != STEP and sample.count >= MIN_SAMPLES
    }
    rest_s = step_s(sections) - sum(taken.values())
    if rest_s > 0 and not set(PASSES) & taken.keys():
        taken[STEP] = rest_s
    return taken


def _followed(sections: Sections) -> int:
    """Return how many steps were followed: of short ones only some are."""
    steps = samples(sections)
    return min(steps, sections[OPTIMIZER].count) if OPTIMIZER in sections else steps


def _per_step(count: int, steps: int) -> float:
    """Return how often a section comes in a step; a report may split one step in two."""
    often = count / steps if steps else 1.0
    return float(round(often)) if often > EVERY_STEP else often


def _by_forward(
    name: str, hidden: Mapping[Rank, Seconds], works: Mapping[Rank, Works]
) -> dict[Rank, Seconds]:
    """Estimate the work in a section that waits, for each rank that measures forward."""
    misled = any(one[BACKWARD].hidden == "by the best" for one in works.values() if BACKWARD in one)
    if name not in (*PASSES, STEP) or misled:
        return {}
    forward = {rank: works[rank][FORWARD].own_s for rank in hidden if FORWARD in works[rank]}
    forward = {rank: own_s for rank, own_s in forward.items() if own_s > 0}
    proportion = min((hidden[rank] / own_s for rank, own_s in forward.items()), default=0.0)
    if name != OPTIMIZER and proportion < FORWARDS_AT_LEAST:
        return {}
    return {rank: min(own_s * proportion, hidden[rank]) for rank, own_s in forward.items()}


def best_of(works: Collection[Works]) -> dict[str, Seconds]:
    """Return the best time of each section that more than half of these ranks have."""
    times: dict[str, list[Seconds]] = {}
    for each in works:
        for name, work in each.items():
            if not work.hidden:
                times.setdefault(name, []).append(work.own_s)
    return {name: min(each) for name, each in times.items() if 2 * len(each) > len(works)}


def score(works: Works, best: Mapping[str, Seconds], step_s: Seconds) -> Score | None:
    """Score work of a step that took so long against the best times; None if nothing compares."""
    losses = {
        name: max(0.0, work.own_s - best[name])
        for name, work in works.items()
        if not work.hidden and name in best
    }
    taken_s = max(step_s, total_s(works))
    if not losses or taken_s <= 0:
        return None
    if losses.get(FORWARD):
        forward_s = works[FORWARD].own_s
        for name, work in works.items():
            if work.hidden == "by forward":
                compute_s = min(work.own_s, FORWARDS_AT_MOST * forward_s)
                losses[name] = losses[FORWARD] / forward_s * compute_s
    # The first name among equals, so that the order of reports does not matter.
    worst = min(losses, key=lambda name: (-losses[name], name))
    return Score(max(0.0, 1 - sum(losses.values()) / taken_s), worst)
