"""One line of the report: a figure, the goal it is held against, and what it was made from.

A figure is None when there was nothing to see, and `why` says why not. With a goal that is a miss,
unless it was left out on purpose; a line without a goal is there to be read beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Seconds = float

DIGITS = {"%": 1, "x": 3, "ms": 1, "s": 3}
COLUMNS = ["measure", "figure", "goal", "met", "torch's"]


@dataclass(frozen=True)
class Line:
    what: str
    figure: float | None
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    torchs: float | None = None
    """The same figure for torch's own checkpoints."""
    seen: str = ""
    why: str = ""
    skipped: bool = False
    samples: dict[str, list[Seconds]] = field(default_factory=dict)
    """All that was timed for it, in the order of the tries."""
    others: float | None = None
    """What share of the machine's cores others used meanwhile: how much to believe of it."""

    @property
    def met(self) -> bool | None:
        """Whether the goal is; None where there is none."""
        if self.skipped or (self.at_least is None and self.at_most is None):
            return None if self.skipped or not self.why else False
        if self.figure is None:
            return False
        least = self.at_least is None or self.figure >= self.at_least
        return least and (self.at_most is None or self.figure <= self.at_most)

    def row(self) -> list[str]:
        met = {True: "yes", False: "NO", None: "-" if not self.skipped else "skipped"}[self.met]
        goal = "-"
        if self.at_least is not None:
            goal = f">= {self._amount(self.at_least)}"
        if self.at_most is not None:
            goal = f"<= {self._amount(self.at_most)}"
        figure, torchs = self._amount(self.figure), self._amount(self.torchs)
        return [self.what, figure, goal, met, torchs]

    def told(self) -> str:
        """What it was made from, for a person to judge."""
        others = "" if self.others is None else f" [others used {100 * self.others:.0f} %]"
        return f"{self.why or self.seen}{others}"

    def _amount(self, value: float | None) -> str:
        if value is None:
            return "-"
        digits = DIGITS.get(self.unit, 2)
        unit = "x" if self.unit == "x" else f" {self.unit}"
        return f"{value:.{digits}f}{unit}".rstrip()


def speed(size: int, seconds: Seconds) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s"


def milliseconds(seconds: Seconds) -> str:
    return f"{seconds * 1000:.1f} ms"


def medians(samples: Mapping[str, Sequence[Seconds]]) -> dict[str, Seconds]:
    return {name: median(found) for name, found in samples.items() if found}
