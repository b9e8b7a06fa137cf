"""Healthy: what happens to a job from outside, and not by its own doing."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, between, healthy

ROWS: list[Pattern] = [
    healthy(
        "suspended",
        "Every process of the job, the launcher's too, stands still for 10 s.",
        between("pass"),
        lasts_s=10,
        beside="suspend",
        alone=True,
    ),
    healthy(
        "debugger",
        "A debugger holds one rank for 10 s.",
        between("pass"),
        lasts_s=10,
        beside="debugger",
    ),
    healthy(
        "starved",
        "Six other processes want the processors for 20 s.",
        between("pass"),
        lasts_s=20,
        beside="busy",
        alone=True,
    ),
]
