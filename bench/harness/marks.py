"""The steps the ranks have finished, read from the files the training script writes.

One file is one *life*: one run of the script from its top, in one process, as one rank. A launcher
that brings a rank back makes a new life, whether it starts a process for it or not, so "back" is
asked of lives and means the same for every launcher. Times come from the script's own clock; how
often the bench looks changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

Seconds = float


@dataclass
class Life:
    rank: int
    pid: int
    begun: Seconds
    steps: list[int] = field(default_factory=list)
    times: list[Seconds] = field(default_factory=list)


class Marks:
    """All lives seen in a directory, in the order they were first seen."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[str, int] = {}
        self._lives: dict[str, Life] = {}
        self._closed: set[str] = set()

    @property
    def lives(self) -> list[Life]:
        return list(self._lives.values())

    def refresh(self) -> None:
        """Read what was written since the last time."""
        for path in sorted(self._directory.iterdir()):
            if path.name not in self._closed:
                self._read(path)

    def close_lives_before(self, moment: Seconds) -> None:
        """Stop reading lives that began before a moment: keeps long series of kills cheap."""
        self.refresh()
        self._closed |= {name for name, life in self._lives.items() if life.begun < moment}

    def closed(self) -> list[Path]:
        """The files of lives that are read no more."""
        return [self._directory / name for name in self._closed]

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path.name, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offsets[path.name] = self._offsets.get(path.name, 0) + len(whole) + len(newline)
        for line in whole.decode().splitlines():
            self._take(path.name, line.split())

    def _take(self, name: str, words: list[str]) -> None:
        if words[0] == "begin":
            self._lives[name] = Life(int(words[1]), int(words[2]), float(words[3]))
        else:
            self._lives[name].steps.append(int(words[0]))
            self._lives[name].times.append(float(words[1]))

    def newest(self, rank: int) -> Life | None:
        """The life that began last as this rank."""
        lives = [life for life in self._lives.values() if life.rank == rank]
        return max(lives, key=lambda life: life.begun, default=None)

    def all_stepped(self, ranks: int, after: Seconds = 0.0) -> Seconds | None:
        """When every rank had finished a step in a life begun after a moment; None if not yet."""
        firsts: dict[int, Seconds] = {}
        for life in self._lives.values():
            if life.begun > after and life.times:
                firsts[life.rank] = min(life.times[0], firsts.get(life.rank, life.times[0]))
        return max(firsts.values()) if len(firsts) == ranks else None

    def highest_step(self, until: Seconds | None = None) -> int:
        """The furthest step any rank has finished, ever or up to a moment."""
        return max(
            (
                step
                for life in self._lives.values()
                for step, at in zip(life.steps, life.times, strict=True)
                if until is None or at <= until
            ),
            default=0,
        )
