"""Who is called slow: a rank at half speed and only it, and nobody where only the machine is busy.

One of four ranks takes twice as long for its own work, by itself or by `holdfast chaos slow` in a
script whose time lies between the phases. Then healthy ranks train beside six processes that compute
for ever; whoever is called slow there is a false finding. Who is flagged is read from `holdfast
status --json`, as a user would; findings are counted in the journal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.job import Job, JobError
from harness.launchers import holdfast
from harness.lines import Line, count
from harness.setting import say

from detection import jobs
from detection.jobs import LIMIT_S, NODES, RANKS, Setting
from holdfast.core.stragglers.events import StragglersMachine
from holdfast.core.stragglers.windows import WINDOW_S, WINDOWS

SLOW_RANK = 2
WATCH_S = 15.0
"""How long to go on after it was flagged, to see that nobody else is."""
FLAGGED_WITHIN_S = 2 * WINDOWS * WINDOW_S
BUSY = 6
"""Processes that compute for ever, beside the job."""
HEALTHY_S = 3 * WINDOWS * WINDOW_S
"""How long a healthy job is watched: for three findings in a row, if they were wrong."""
HEALTHY = (
    ["--step-ms=20"],
    ["--step-ms=20", "--sharded"],
    ["--step-ms=1"],
    ["--step-ms=100", "--sharded"],
    ["--step-ms=100", "--pauses=0.02"],
)


def measure(setting: Setting) -> list[Line]:
    own = ["--step-ms=50", f"--slow-rank={SLOW_RANK}", "--slow=2"]
    between = ["--step-ms=2", "--between-ms=50"]
    return [
        *_slowed(setting, "DDP", own),
        *_slowed(setting, "FSDP", [*own, "--sharded"]),
        *_slowed(setting, "chaos slow, time between phases", between, inject=True),
        *_healthy(setting),
    ]


# ---- a slow rank ----


def _slowed(setting: Setting, what: str, script: list[str], inject: bool = False) -> list[Line]:
    scores: list[float] = []
    took_s: float | None = None
    others: set[int] = set()
    looks, flagged, why = 0, 0, ""
    try:
        with jobs.running(setting, holdfast(nodes=NODES), RANKS, script) as job:
            jobs.wait_until_warm(job)
            if inject:
                _command(job, "chaos", job.name, "slow", "--rank", str(SLOW_RANK), "--json")
            began = time.monotonic()
            until = began + LIMIT_S
            while time.monotonic() < until:
                ranks = _ranks(job)
                slow = {rank for rank, shown in ranks.items() if shown.get("straggler")}
                others |= slow - {SLOW_RANK}
                if SLOW_RANK in slow and took_s is None:
                    took_s = time.monotonic() - began
                    until = time.monotonic() + (3.0 if setting.quick else WATCH_S)
                if took_s is not None:
                    looks += 1
                    flagged += SLOW_RANK in slow
                    scores.append(float(ranks[SLOW_RANK]["score"]))
    except JobError as failure:
        why = str(failure)
    score = sorted(scores)[len(scores) // 2] if scores else None
    seen = f"others flagged: {sorted(others) or 'none'}"
    return [
        Line(f"{what}: score of a rank at half speed", score, at_least=0.4, at_most=0.6, why=why),
        Line(f"{what}: other ranks flagged", float(len(others)), at_most=0.0, seen=seen, why=why),
        count(f"{what}: looks at which it stayed flagged", flagged, max(1, looks)),
        Line(
            f"{what}: seconds until it was flagged",
            took_s,
            at_most=FLAGGED_WITHIN_S,
            why=why or ("" if took_s is not None else "it never was"),
        ),
    ]


def _ranks(job: Job) -> dict[int, dict[str, Any]]:
    """Each rank as `holdfast status` shows it."""
    nodes = json.loads(_command(job, "status", job.name, "--json"))["nodes"]
    return {rank["rank"]: rank for node in nodes for rank in node["ranks"]}


def _command(job: Job, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        env={"HOLDFAST_HOME": str(job.folder / "home"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        raise JobError(f"holdfast {words[0]}: {done.stderr.strip()[-200:]}")
    return done.stdout


# ---- nobody is slow ----


def _healthy(setting: Setting) -> list[Line]:
    false: list[str] = []
    runs, why = 0, ""
    with _busy(BUSY):
        for number in range(setting.tries):
            script = HEALTHY[number % len(HEALTHY)]
            try:
                found = _findings(setting, script)
            except JobError as failure:
                why = str(failure)
                continue
            runs += 1
            false += [f"{' '.join(script)}: {one}" for one in found]
            say(f"slow: healthy run {number + 1} of {setting.tries}: {len(found)} findings")
    seen = f"in {runs} runs beside {BUSY} busy processes" + "".join(f"; {one}" for one in false)
    return [
        Line("healthy runs under load", float(runs), at_least=float(setting.tries), why=why),
        Line("false findings in them", float(len(false)), at_most=0.0, seen=seen, samples=false),
    ]


def _findings(setting: Setting, script: list[str]) -> list[str]:
    """What is found about the ranks of a healthy job while it is watched."""
    with jobs.running(setting, holdfast(nodes=NODES), RANKS, script) as job:
        jobs.wait_until_warm(job)
        until = time.monotonic() + HEALTHY_S

        def over() -> bool:
            return time.monotonic() > until or job.exit_code() is not None

        job.wait_for("end of the watch", over, HEALTHY_S + LIMIT_S, look_every_s=0.5)
        state = jobs.state(job)
        if state is None or job.exit_code() is not None:
            raise JobError(f"the job did not last: {job.exit_code()}")
    found = state.of(StragglersMachine).findings
    told = [f"rank {one.rank} {one.kind} {one.score:.2f} in {one.section}" for one in found.newest]
    return told or [one.signature for one in state.incidents if one.kind == "straggler"]


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Processes beside the job that take all the CPU time that they get."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
