"""One line of the report: a figure, the goal it is held against, and what it was made from.

A figure is None when there was nothing to see, and `why` says why not. With a goal that is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DIGITS = {"s": 2, "%": 2, "ms": 1}
COLUMNS = ["measured", "figure", "goal", "met"]


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
    samples: list[Any] = field(default_factory=list)
    """All that it was made from."""

    @property
    def met(self) -> bool | None:
        """Whether the goal is; None where there is none."""
        if self.at_least is None and self.at_most is None:
            return None
        if self.figure is None:
            return False
        least = self.at_least is None or self.figure >= self.at_least
        return least and (self.at_most is None or self.figure <= self.at_most)

    def row(self) -> list[str]:
        met = {True: "yes", False: "NO", None: "-"}[self.met]
        goals = [f">= {self._amount(self.at_least)}"] if self.at_least is not None else []
        goals += [f"<= {self._amount(self.at_most)}"] if self.at_most is not None else []
        figure = self._amount(self.figure) + (f" of {self.of}" if self.of is not None else "")
        return [self.what, figure, " and ".join(goals) or "-", met]

    def _amount(self, value: float | None) -> str:
        if value is None:
            return "-"
        digits = DIGITS.get(self.unit, 3)
        text = str(int(value)) if value == int(value) and not self.unit else f"{value:.{digits}f}"
        return f"{text} {self.unit}".rstrip()


def count(what: str, good: int, of: int, **more: Any) -> Line:
    """A count that should be all of them."""
    return Line(what, float(good), at_least=float(of), of=of, **more)
