"""One line of a report: a figure, the goal it is held against, and what it was made from.

A figure is None when there was nothing to see, and `why` says why not. With a goal that is a miss; a
line without a goal is there to be read beside the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.report import Report

COLUMNS = ["measure", "figure", "goal", "met"]
DIGITS = {"%": 1, "x": 3, "ms": 1, "s": 2}


@dataclass(frozen=True)
class Line:
    what: str
    figure: float | None
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    of: int | None = None
    """Of how many; the figure is a count then."""
    seen: str = ""
    why: str = ""
    samples: Any = field(default_factory=list)
    """All that it was made from."""

    @property
    def met(self) -> bool | None:
        """Whether the goal is; None where there is none."""
        if self.at_least is None and self.at_most is None:
            return False if self.why else None
        if self.figure is None:
            return False
        least = self.at_least is None or self.figure >= self.at_least
        return least and (self.at_most is None or self.figure <= self.at_most)

    def row(self) -> list[str]:
        met = {True: "yes", False: "NO", None: "-"}[self.met]
        goals = [f">= {self.amount(self.at_least)}"] if self.at_least is not None else []
        goals += [f"<= {self.amount(self.at_most)}"] if self.at_most is not None else []
        figure = self.amount(self.figure) + (f" of {self.of}" if self.of is not None else "")
        return [self.what, figure, " and ".join(goals) or "-", met]

    def told(self) -> str:
        """What it was made from, for a person to judge."""
        return self.why or self.seen

    def amount(self, value: float | None) -> str:
        if value is None:
            return "-"
        if value == int(value) and not self.unit:
            return str(int(value))
        digits = DIGITS.get(self.unit, 3) + (abs(value) < 1 and self.unit in ("%", "s"))
        return f"{value:.{digits}f}{'' if self.unit == 'x' else ' '}{self.unit}".rstrip()


def count(what: str, good: int, of: int, **more: Any) -> Line:
    """A count that should be all of them."""
    return Line(what, float(good), at_least=float(of), of=of, **more)


def report(
    mode: str,
    found: Mapping[str, Sequence[Line]],
    load: float,
    columns: list[str] = COLUMNS,
    notes: Sequence[str] = (),
) -> Report:
    """Of the lines of each measure; `load` is what the machine's was before."""
    lines = [line for of_one in found.values() for line in of_one]
    missed = [line.what for line in lines if line.met is False]
    judged = sum(line.met is not None for line in lines)
    return Report(
        mode=mode,
        columns=columns,
        rows=[line.row() for line in lines],
        notes=[
            *(f"  {line.what}: {line.told()}" for line in lines if line.told()),
            *notes,
            f"medians; load {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end",
            f"{judged - len(missed)} of {judged} goals met"
            + (f"; missed: {', '.join(missed)}" if missed else ""),
        ],
        results=[{"measure": n, **asdict(line)} for n, of_one in found.items() for line in of_one],
        summary={name: [_gist(line) for line in of_one] for name, of_one in found.items()},
        passed=not missed,
    )


def _gist(line: Line) -> dict[str, Any]:
    whole = asdict(line)
    del whole["samples"]
    return whole | {"met": line.met}
