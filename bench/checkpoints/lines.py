"""What a line about checkpoints has besides: torch's figure, and how much others used the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness import lines

Seconds = float

COLUMNS = [*lines.COLUMNS, "torch's"]


@dataclass(frozen=True)
class Line(lines.Line):
    torchs: float | None = None
    """The same figure for torch's own checkpoints."""
    skipped: bool = False
    """It was left out on purpose, which is no miss."""
    others: float | None = None
    """What share of the machine's cores others used meanwhile: how much to believe of it."""

    @property
    def met(self) -> bool | None:
        return None if self.skipped else super().met

    def row(self) -> list[str]:
        *row, met = super().row()
        return [*row, "skipped" if self.skipped else met, self.amount(self.torchs)]

    def told(self) -> str:
        others = "" if self.others is None else f" [others used {100 * self.others:.0f} %]"
        return f"{super().told()}{others}"


def speed(size: int, seconds: Seconds) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s"


def milliseconds(seconds: Seconds) -> str:
    return f"{seconds * 1000:.1f} ms"


def medians(samples: Mapping[str, Sequence[Seconds]]) -> dict[str, Seconds]:
    return {name: median(found) for name, found in samples.items() if found}
