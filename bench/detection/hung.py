"""Scripts that hang: is the right rank named with its line, how soon, and when do all train again?

What can be proven is to be repaired within two seconds, but for a call that keeps the GIL (its row
says). What only shows no sign of life is to be repaired after `--hang-after`, and not before. Tries
go through ranks, kinds and lengths of steps. Those of proven hangs run one at a time: tenths of a
second count.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from harness.lines import Line, count
from harness.setting import say

from detection import pool, trial
from detection.jobs import Setting
from detection.patterns import KINDS, ROWS
from detection.trial import Outcome, Try

STEPS_MS = (20, 200, 1000)
BACK_S = 1.0
HANG_AFTER_S, DEFAULT_S = 8.0, 60.0
EARLY_S, LATE_S, LATE_STEPS = 0.5, 4.0, 3
"""How far from `--hang-after` is still in time: signs are looked for ten times a second, a hang is
confirmed by a second look, and what a loader has fetched already lasts for some steps."""

PEERS = [
    Line("DLRover's limit for any hang", 600.0, "s", seen="as documented; not run here"),
    Line("NVRx's limit for any hang", 2700.0, "s", seen="45 to 60 min as documented; not run here"),
]


def measure_proven(setting: Setting) -> list[Line]:
    outcomes = _run(replace(setting, jobs=1), plan(setting, "proven", None))
    lines = [line for mine in _by_row(outcomes) for line in _proven(mine)]
    return [*lines, *_back(outcomes)]


def measure_silent(setting: Setting) -> list[Line]:
    short = plan(setting, "silent", HANG_AFTER_S)
    by_default = plan(setting, "silent", None)[:1]
    outcomes = _run(setting, short + by_default)
    shortened = [outcome for outcome in outcomes if outcome.one.hang_after is not None]
    plain = [outcome for outcome in outcomes if outcome.one.hang_after is None]
    lines = [line for mine in _by_row(shortened) for line in _silent(mine, HANG_AFTER_S)]
    return [*lines, *_silent(plain, DEFAULT_S), *_back(outcomes), *PEERS]


def plan(setting: Setting, group: str, hang_after: float | None) -> list[Try]:
    rows = [row for row in ROWS.values() if row.group == group]
    rows = [row for row in rows if not setting.patterns or row.name in setting.patterns]
    kinds, steps = setting.kinds or KINDS, setting.steps_ms or STEPS_MS
    tries = []
    for turn in range(setting.tries):
        for number, row in enumerate(rows):
            at = turn + number
            kind, step_ms = kinds[at % len(kinds)], steps[at // len(kinds) % len(steps)]
            rank = at % row.ranks
            tries.append(Try(len(tries), row.name, kind, step_ms, rank, hang_after))
    return tries


def _run(setting: Setting, tries: list[Try]) -> list[Outcome]:
    tries = [replace(one, number=number) for number, one in enumerate(tries)]
    outcomes: list[Outcome] = []
    for outcome in pool.run(lambda one: trial.run(setting, one), tries, [], setting.jobs):
        outcomes.append(outcome)
        say(f"{outcome.one.row.group} {len(outcomes)} of {len(tries)}: {_told(outcome)}")
    return outcomes


def _told(outcome: Outcome) -> str:
    one = outcome.one
    if outcome.detect_s is None:
        return f"{one.told}, rank {one.rank}: {outcome.why}"
    rank = "right rank" if outcome.right_rank else f"WRONG RANK ({outcome.named})"
    place = "" if outcome.placed else " and WRONG PLACE"
    back = "-" if outcome.back_s is None else f"{outcome.back_s:.2f} s"
    return (
        f"{one.told}, rank {one.rank}: {rank}{place} after {outcome.detect_s:.2f} s, back {back}"
        f" later; {outcome.why}"
    )


def _by_row(outcomes: list[Outcome]) -> list[list[Outcome]]:
    names = dict.fromkeys(outcome.one.pattern for outcome in outcomes)
    return [[o for o in outcomes if o.one.pattern == name] for name in names]


def _named(mine: list[Outcome], title: str) -> Line:
    right = [outcome for outcome in mine if outcome.right_rank and outcome.placed]
    wrong = [f"rank {o.one.rank}: {o.why}" for o in mine if o not in right]
    seen = "; ".join(wrong) or (right[0].why if right else "")
    samples = [outcome.sample() for outcome in mine]
    return count(
        f"{title}: right rank and place", len(right), len(mine), seen=seen, samples=samples
    )


def _proven(mine: list[Outcome]) -> list[Line]:
    name = mine[0].one.pattern
    took = [outcome.detect_s for outcome in mine if outcome.detect_s is not None]
    seen = f"median {median(took):.2f} s" if took else ""
    why = "" if len(took) == len(mine) else "not every try was noticed"
    worst = max(took) if took and not why else None
    return [
        _named(mine, name),
        Line(
            f"{name}: longest until broken",
            worst,
            "s",
            at_most=ROWS[name].within_s,
            seen=seen,
            why=why,
        ),
    ]


def _silent(mine: list[Outcome], after_s: float) -> list[Line]:
    if not mine:
        return []
    title = f"{mine[0].one.pattern}, {after_s:g} s"
    took = [outcome.detect_s for outcome in mine if outcome.detect_s is not None]
    in_time = sum(_in_time(outcome, after_s) for outcome in mine)
    seen = f"{min(took):.2f} to {max(took):.2f} s" if took else ""
    return [_named(mine, title), count(f"{title}: then, not before", in_time, len(mine), seen=seen)]


def _in_time(outcome: Outcome, after_s: float) -> bool:
    late_s = LATE_S + LATE_STEPS * outcome.one.step_ms / 1000
    took_s = outcome.detect_s
    return took_s is not None and after_s - EARLY_S <= took_s <= after_s + late_s


def _back(outcomes: list[Outcome]) -> list[Line]:
    back = [outcome.back_s for outcome in outcomes if outcome.back_s is not None]
    if not outcomes:
        return []
    worst = f"worst {max(back):.2f} s" if back else ""
    figure = median(back) if back else None
    return [Line("back after that", figure, "s", at_most=BACK_S, seen=worst)]
