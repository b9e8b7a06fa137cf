"""Healthy: what happens to a job from outside, and not by its own doing."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, between, healthy

_TRAINS_ON = between("""
    for _ in range(max(4, int(5 / run.step_s))):
        run.train()
""")

ROWS: list[Pattern] = [
    healthy(
        "suspended",
        "Every process of the job, the launcher's too, stands still for 10 s.",
        _TRAINS_ON,
        lasts_s=10,
        beside="suspend",
        alone=True,
    ),
    healthy(
        "debugger",
        "A debugger holds one rank for 10 s.",
        _TRAINS_ON,
        lasts_s=10,
        beside="debugger",
    ),
    healthy(
        "starved",
        "Six other processes want the processors for 20 s.",
        _TRAINS_ON,
        lasts_s=20,
        beside="busy",
        alone=True,
    ),
]
