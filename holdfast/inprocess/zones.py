"""Where kept state says what must not be left in the middle: to whoever makes the function leave."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Zones(Protocol):
    """What decides when a function may be left."""

    def begin_zone(self) -> None:
        """Postpone leaving until `end_zone`; raise the departure if leaving was asked for already."""

    def end_zone(self) -> None:
        """Allow leaving again; raise the departure if one was postponed."""

    def atomic(self) -> AbstractContextManager[None]:
        """Return a section that is finished before the function is left, or not begun."""

    def begin_shield(self) -> None:
        """Postpone leaving, but not the abort of process groups, until `end_shield`; raise the
        departure if leaving was asked for already."""

    def end_shield(self) -> None:
        """Allow leaving again; raise the departure if one was postponed."""


class _NeverLeft:
    """Zones of a function that nobody makes leave."""

    def begin_zone(self) -> None: ...

    def end_zone(self) -> None: ...

    def atomic(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_shield(self) -> None: ...

    def end_shield(self) -> None: ...


class _InstalledZones:
    zones: Zones = _NeverLeft()


def install_zones(zones: Zones | None) -> None:
    """Have zones reported there; None: to nobody."""
    _InstalledZones.zones = zones if zones is not None else _NeverLeft()


def current_zones() -> Zones:
    return _InstalledZones.zones
