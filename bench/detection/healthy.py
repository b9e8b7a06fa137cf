"""Scripts that are healthy, whatever it looks like: is any of them restarted?

Each row is run with plain all_reduce, DDP and FSDP2, and with steps of 20 ms, 200 ms and 2 s; with
--quick in one of these variants, another for each row. A try is good if its job was never restarted,
ended with 0, has no incident that broke a round, and left the files whole that it wrote.
"""

from __future__ import annotations

import time

from harness.lines import Line, count
from harness.setting import say

from detection import pool, trial
from detection.jobs import Setting
from detection.patterns import KINDS, ROWS, STEPS_MS, Pattern
from detection.trial import Outcome, Try


def measure(setting: Setting) -> list[Line]:
    tries = plan(setting)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    shared = [one for one in tries if not one.row.alone]
    # The longest first, so that no long one is left to run by itself in the end.
    shared.sort(key=lambda one: -_expected_s(one))
    alone = [one for one in tries if one.row.alone]
    for outcome in pool.run(lambda one: trial.run(setting, one), shared, alone, setting.jobs):
        outcomes.append(outcome)
        verdict = "untouched" if outcome.untouched else f"NOT LEFT ALONE: {outcome.why}"
        say(f"healthy {len(outcomes)} of {len(tries)}: {outcome.one.told}: {verdict}")
    return _lines(outcomes, time.monotonic() - began)


def plan(setting: Setting) -> list[Try]:
    rows = [row for row in ROWS.values() if row.group == "healthy"]
    rows = [row for row in rows if not setting.patterns or row.name in setting.patterns]
    variants = [
        (row, kind, step_ms)
        for number, row in enumerate(rows)
        for kind, step_ms in _variants(setting, row, number)
    ]
    return [
        Try(number, row.name, kind, step_ms, rank=number % row.ranks)
        for number, (row, kind, step_ms) in enumerate(variants)
    ]


def _variants(setting: Setting, row: Pattern, number: int) -> list[tuple[str, int]]:
    kinds = [kind for kind in setting.kinds or KINDS if kind in row.kinds]
    steps = setting.steps_ms or STEPS_MS
    every = [(kind, step_ms) for kind in kinds for step_ms in steps]
    return [every[number % len(every)]] if setting.quick and every else every


def _expected_s(one: Try) -> float:
    return one.row.lasts_s + one.steps * one.step_ms / 1000


def _lines(outcomes: list[Outcome], took_s: float) -> list[Line]:
    lines = []
    for name in dict.fromkeys(outcome.one.pattern for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.one.pattern == name]
        bad = [f"{o.one.kind}, {o.one.step_ms} ms: {o.why}" for o in mine if not o.untouched]
        samples = [outcome.sample() for outcome in mine]
        good = len(mine) - len(bad)
        seen = "; ".join(bad)
        lines.append(count(f"{name}: left alone", good, len(mine), seen=seen, samples=samples))
    touched = sum(not outcome.untouched for outcome in outcomes)
    told = f"{len(outcomes)} jobs in {took_s:.0f} s"
    slow = [finding for outcome in outcomes for finding in outcome.findings]
    return [
        *sorted(lines, key=lambda line: line.met is not False),
        Line("healthy jobs that were not left alone", float(touched), at_most=0.0, seen=told),
        Line("other findings in them", float(len(slow)), seen="; ".join(slow[:5])),
    ]
