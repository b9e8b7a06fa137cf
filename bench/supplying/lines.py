"""One measured line of a platform: several tries, their median, and the goal."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.report import median_of, number


class Skipped(Exception):
    """This platform cannot be measured here; the message says what is missing."""


@dataclass
class Line:
    platform: str
    what: str
    unit: str = "s"
    goal: float | None = None
    """The median is to be no more than this."""
    values: list[float | None] = field(default_factory=list)
    """A value for each try; None where it failed."""
    notes: list[str] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Whether all tries went well, and the goal is reached where there is one."""
        median = median_of(self.values)
        if median is None or None in self.values:
            return False
        return self.goal is None or median <= self.goal

    def row(self) -> list[str]:
        known = [value for value in self.values if value is not None]
        goal = "-" if self.goal is None else f"<= {self.goal:g}"
        digits = 3 if self.unit == "s" else 0
        return [
            f"{self.platform}: {self.what}",
            number(median_of(known), digits),
            number(max(known, default=None), digits),
            self.unit,
            goal,
            "yes" if self.met else "no",
            f"{len(known)} of {len(self.values)}",
        ]
