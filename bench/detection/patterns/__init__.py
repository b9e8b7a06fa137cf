"""The rows: what training scripts do, as data. A user's false alarm becomes one more of them."""

from __future__ import annotations

from detection.patterns import (
    alone,
    ending,
    loading,
    machine,
    proven,
    silent,
    transfers,
    uneven,
)
from detection.patterns.pattern import KINDS, STEPS_MS, Pattern

__all__ = ["KINDS", "MODULES", "ROWS", "STEPS_MS", "Pattern"]

MODULES = (alone, transfers, loading, uneven, machine, ending, proven, silent)
ROWS: dict[str, Pattern] = {row.name: row for module in MODULES for row in module.ROWS}
