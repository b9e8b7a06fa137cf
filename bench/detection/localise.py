"""Which nodes are sick: every single fault, and pairs of faults, in simulated clusters.

A sick node passes its solo test and fails every collective: the hardest kind, because its partner is as
suspect as it is. One that is named is `faulty`; whoever is healthy must never be.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from itertools import combinations, islice

from harness.lines import Line, count

from detection.jobs import Setting
from holdfast.core.nodecheck import trials as checks
from holdfast.messages import nodecheck as records
from holdfast.messages.units import NodeId

SIZES = range(3, 65)
PAIRS_AT_MOST = 300
"""For each size; where there are more, as many by chance."""


def measure(setting: Setting) -> list[Line]:
    sizes = list(SIZES)[:: 8 if setting.quick else 1]
    single = [(n, {sick}) for n in sizes for sick in range(n)]
    double = [(n, set(pair)) for n in sizes for pair in _pairs(n, random.Random(n))]
    exact = sum(faulty(n, sick) == sick for n, sick in single)
    results = [(sick, faulty(n, sick)) for n, sick in double]
    both = sum(named == sick for sick, named in results)
    blamed = sum(not named <= sick for sick, named in results)
    sizes_told = f"N = {sizes[0]} to {sizes[-1]}"
    return [
        count("single fault localised", exact, len(single), seen=f"each node of {sizes_told}"),
        Line(
            "healthy nodes blamed, two faults",
            float(blamed),
            at_most=0.0,
            seen=f"{len(double)} pairs, {sizes_told}",
        ),
        Line("two faults localised", float(both), of=len(double), seen="the rest: undetermined"),
    ]


def _pairs(n: int, chance: random.Random) -> Iterable[tuple[int, int]]:
    everything = list(combinations(range(n), 2))
    chance.shuffle(everything)
    return islice(everything, PAIRS_AT_MOST)


def faulty(n: int, sick: Collection[int]) -> set[int]:
    """Whom a check of n nodes names."""
    check = checks.begin(NodeId(str(i)) for i in range(n))
    while (planned := checks.plan(check)) is not None:
        for number, group in enumerate(planned.groups):
            passed = not any(int(node) in sick for node in group)
            for node in group:
                paired = {"passed": passed, "seconds": 1.0} if len(group) == 2 else {}
                result = records.TestResult(
                    node=node,
                    round=planned.number,
                    group=number,
                    solo_passed=True,
                    solo_s=1.0,
                    **paired,  # type: ignore[arg-type]
                )
                checks.take(check, result)
    return {int(v.node) for v in checks.verdicts(check) if v.verdict == "faulty"}
