"""One try of a pattern: a job of its own, and what became of it.

A healthy job is watched until it has ended, or until it is clear that it was not left alone. When a
script hangs it notes the moment; the journal has when the round was broken and who was named.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.job import GLANCE_EVERY_S, Job, JobError
from harness.launchers import holdfast
from harness.marks import Seconds

from detection import jobs
from detection.beside import Beside
from detection.jobs import LIMIT_S, NODES, UNBROKEN, Setting
from detection.patterns import ROWS, Pattern
from holdfast.messages.records import Incident

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SENTENCE_CHARS = 300
VERDICT_S: Seconds = 15.0
"""How long a restarted job's incident is given to say why."""


@dataclass(frozen=True)
class Try:
    number: int
    pattern: str
    kind: str
    step_ms: int
    rank: int
    """The guilty one, where one is."""
    hang_after: Seconds | None = None
    """As the flag says; None for its default."""

    @property
    def row(self) -> Pattern:
        return ROWS[self.pattern]

    @property
    def told(self) -> str:
        return f"{self.pattern}, {self.kind}, {self.step_ms} ms"

    @property
    def event(self) -> int:
        """The step after which it happens: all deadlines are learnt by then."""
        return min(40, max(9, math.ceil(2000 / self.step_ms)))

    @property
    def steps(self) -> int:
        if self.row.group != "healthy":
            return 1_000_000
        return self.event + max(3, min(20, math.ceil(1000 / self.step_ms)))


@dataclass
class Outcome:
    one: Try
    took_s: Seconds = 0.0
    exit_code: int | None = None
    restarts: int = 0
    incidents: list[str] = field(default_factory=list)
    """What the journal says broke a round."""
    findings: list[str] = field(default_factory=list)
    """What it says broke none."""
    named: int | None = None
    placed: bool = False
    """Whether the sentence has the line at which the guilty rank is."""
    detect_s: Seconds | None = None
    """From the beginning of the hang to the moment the round was broken."""
    back_s: Seconds | None = None
    """From then until every rank trained again: it had finished a step, which takes as long as steps
    do."""
    note: str = ""

    @property
    def untouched(self) -> bool:
        """Whether a healthy job was left alone, and ended well."""
        return not (self.restarts or self.incidents or self.exit_code or self.note)

    @property
    def right_rank(self) -> bool:
        row, ours = self.one.row, self.one.rank
        if row.guilty == "all":
            return self.detect_s is not None
        if row.guilty == "circle":
            return self.detect_s is not None and self.named is None
        return self.named == ours

    @property
    def why(self) -> str:
        ended = [f"exit code {self.exit_code}"] if self.exit_code else []
        return "; ".join([*self.incidents, *ended, *([self.note] if self.note else [])])

    def sample(self) -> dict[str, Any]:
        return asdict(self)


def run(setting: Setting, one: Try) -> Outcome:
    """Run the job; what goes wrong in it is noted in the outcome."""
    outcome, row = Outcome(one), one.row
    folder = setting.folder / str(one.number)
    signs = folder / "signs"
    signs.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(row.script)
    beside = Beside(row.beside, row.lasts_s, signs) if row.beside else None
    flags = ["--no-hang-detection"] if setting.unwatched else []
    flags += [f"--hang-after={one.hang_after:g}"] if one.hang_after is not None else []
    launcher = holdfast(
        *flags,
        nodes=NODES if row.group != "healthy" else 1,
        env={
            "BENCH_SIGNS": str(signs),
            "BENCH_BESIDE": beside.address if beside else "",
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")]),
        },
    )
    words = [f"--kind={one.kind}", f"--step-ms={one.step_ms}", f"--event={one.event}"]
    words += [f"--steps={one.steps}", f"--guilty={one.rank}"]
    where = replace(setting, folder=folder)
    try:
        with jobs.running(where, launcher, row.ranks, words, program) as job:
            if beside:
                beside.start()
            try:
                _watch(job, outcome) if row.group == "healthy" else _hang(job, outcome, signs)
            finally:
                _settle(job, outcome)
    except (JobError, OSError) as failure:
        outcome.note = str(failure)
    if beside and beside.failed and not outcome.why:
        outcome.note = beside.failed
    return outcome


def _settle(job: Job, outcome: Outcome) -> None:
    """What can be said of the job now, however it went."""
    job.marks.refresh()
    outcome.restarts = max(len([life for life in job.marks.lives if life.rank == 0]) - 1, 0)
    outcome.exit_code = job.exit_code()
    now = jobs.state(job)
    for incident in now.incidents if now is not None else []:
        told = f"{incident.kind} of rank {incident.rank}: {_sentence(incident)}"
        (outcome.findings if incident.kind in UNBROKEN else outcome.incidents).append(told)


def _sentence(incident: Incident) -> str:
    """What a verdict says; of an exception its last line."""
    lines = (incident.detail or incident.signature).strip().splitlines()
    return lines[-1][:SENTENCE_CHARS] if lines else ""


def _watch(job: Job, outcome: Outcome) -> None:
    """A healthy job, until it has ended or was not left alone."""
    one, row = outcome.one, outcome.one.row
    limit_s = 2 * row.lasts_s + 3 * one.steps * one.step_ms / 1000 + LIMIT_S

    def over() -> bool:
        restarted = len(job.marks.lives) > row.ranks
        return restarted or job.exit_code() is not None

    began = time.monotonic()
    job.wait_for("end of the job", over, limit_s, GLANCE_EVERY_S)
    outcome.took_s = time.monotonic() - began
    if job.exit_code() is None:
        jobs.first_incident(job, VERDICT_S)
        return
    torn = [name for name in row.whole if not _is_whole(job.folder / name)]
    if torn:
        outcome.note = f"not whole: {', '.join(torn)}"


def _is_whole(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("whole\n")


def _is_told(place: str, sentence: str) -> bool:
    """Return whether a sentence has a place: line 1 is not told by line 18."""
    end = "" if place.endswith(":") else r"(?!\d)"
    return re.search(re.escape(place) + end, sentence) is not None


def _hang(job: Job, outcome: Outcome, signs: Path) -> None:
    one = outcome.one
    everybody = range(one.row.ranks) if one.row.guilty == "all" else [one.rank]
    files = [signs / f"began.{rank}" for rank in everybody]
    before_s = 3 * one.event * one.step_ms / 1000
    job.wait_for("hang", lambda: all(f.exists() for f in files), LIMIT_S + before_s, GLANCE_EVERY_S)
    began = max(float(f.read_text()) for f in files)
    step_s = jobs.step_s(job)
    incident = jobs.first_incident(job, LIMIT_S + 2 * (one.hang_after or 60.0))
    noticed = jobs.monotonic(incident.opened_at)
    outcome.named, outcome.detect_s = incident.rank, noticed - began
    places = one.row.places
    outcome.placed = not places or any(_is_told(place, incident.detail) for place in places)
    if incident.kind != "hang":
        outcome.note = f"taken for {incident.kind}"
    outcome.back_s = job.wait_for_steps(LIMIT_S, after=began) - noticed - step_s
