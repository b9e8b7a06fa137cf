"""What every measure is told: how much, how often, and where it may put things."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    size: int
    """Bytes of a state."""
    tries: int
    quick: bool
    disk: str
    """A folder on storage; emptied after each measure."""
    shm: str
    """A folder in shared memory; emptied after each measure."""
    cache: str
    """Where peers are installed."""

    @property
    def on_disk(self) -> Path:
        return Path(self.disk)

    @property
    def in_memory(self) -> Path:
        return Path(self.shm)

    def plain(self) -> dict[str, Any]:
        """To be given to another process."""
        return asdict(self)
