"""One job, hundreds of faults of all kinds: it finishes, with the bits of an undisturbed run.

Two nodes with two ranks each. Faults are drawn from `KINDS` with a seed; each comes a few steps after
all ranks are back from the one before. One rank's process is spared after the first tenth, and its
node's agent with it: it must enter its function again all that time without gathering memory, threads,
files or sockets.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median

from harness import leftovers, processes
from harness.job import JobError
from harness.launchers import holdfast
from harness.lines import Line, count
from harness.marks import Seconds
from harness.report import percentile
from harness.setting import say

from restarting import resources
from restarting.jobs import RestartingJob, Setting

NODES, RANKS = 2, 4
PLACES = ("forward", "backward", "reduce", "between", "after")
SAMPLE_EVERY = 5
TELL_EVERY = 10
FEWEST_SAMPLES = 12
MOST_STEPS = 10
"""At most so many steps less one are trained between two faults."""


@dataclass
class Blow:
    """One fault, and what came of it."""

    kind: str
    seconds: Seconds
    redone: int
    replaced: int
    """Ranks that have another process than before."""
    bystanders: int
    """Those of them whose process had not been hit."""


@dataclass
class Storm:
    blows: list[Blow] = field(default_factory=list)
    samples: list[resources.Sample] = field(default_factory=list)
    lasting: dict[str, int] = field(default_factory=dict)
    """Processes that were meant to live through most of it."""
    left_behind: list[str] = field(default_factory=list)
    note: str = ""
    result: str = ""
    undisturbed: str = ""


class Blows:
    """Deals the faults, and knows who is spared."""

    def __init__(self, job: RestartingJob, setting: Setting, draw: random.Random) -> None:
        self._job = job
        self._limit = setting.limit
        self._draw = draw
        self.spared: int | None = None
        """Pid of the process that is not to be hit any more."""
        self._own_kills: list[Seconds] = []
        self.hit: set[int] = set()
        """Processes that this fault may replace."""

    def wears_out(self, kind: str) -> bool:
        """Return whether a launcher would give up: it brings its processes back so often a minute."""
        lately = [at for at in self._own_kills if at > time.monotonic() - 60.0]
        return KINDS[kind][1] in OWN_PROCESSES and len(lately) >= OWN_KILLS_A_MINUTE

    def victim(self, *but: int) -> int:
        ranks = [r for r in range(RANKS) if self._job.life(r).pid != self.spared and r not in but]
        return self._draw.choice(ranks)

    def deal(self, kind: str) -> Seconds:
        """Have the fault; return the moment of its last part."""
        self.hit = set()
        deal = KINDS[kind][1]
        if deal in OWN_PROCESSES:
            self._own_kills.append(time.monotonic())
        return deal(self)

    def _kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> Seconds:
        moment = time.monotonic()
        self.hit |= {pid, *(one.pid for one in processes.below(pid))}
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise JobError(f"process {pid} was gone before it was hit") from None
        return moment

    def raise_(self) -> Seconds:
        return self._job.order(self.victim(), f"raise@{self._draw.choice(PLACES)}")

    def kill(self) -> Seconds:
        return self._kill(self._job.life(self.victim()).pid)

    def kill_itself(self) -> Seconds:
        return self._order_to_die(f"kill@{self._draw.choice(PLACES)}")

    def _order_to_die(self, fault: str) -> Seconds:
        victim = self.victim()
        self.hit.add(self._job.life(victim).pid)
        return self._job.order(victim, fault)

    def kill_two(self) -> Seconds:
        first = self.victim()
        second = self.victim(first)
        self._kill(self._job.life(first).pid)
        return self._kill(self._job.life(second).pid)

    def stop(self) -> Seconds:
        return self._kill(self._job.life(self.victim()).pid, signal.SIGSTOP)

    def gil(self) -> Seconds:
        return self._order_to_die("gil@forward")

    def mismatch(self) -> Seconds:
        return self._job.order(self.victim(), "mismatch@reduce")

    def raise_then_kill(self) -> Seconds:
        """A rank raises; another is killed while they enter again."""
        first = self.victim()
        second = self.victim(first)
        pid = self._job.life(second).pid
        told = self._job.order(first, "raise@forward")
        self._job.wait_for(
            "entry after an exception", lambda: self._job.life(0).begun > told, self._limit
        )
        return self._kill(pid)

    def kill_then_raise(self) -> Seconds:
        """A rank is killed, and the next entry of another raises at once."""
        first = self.victim()
        second = self.victim(first)
        self._job.order(second, "raise@entry")
        return self._kill(self._job.life(first).pid)

    def agent(self) -> Seconds:
        spared = self._job.life(RANKS - 1).pid if self.spared is None else self.spared
        mine = self._job.agent_of(spared)
        agents = [pid for pid in self._job.named("holdfast-agent") if pid != mine]
        return self._kill(self._draw.choice(agents))

    def coordinator(self) -> Seconds:
        """It is killed, and a moment later a rank raises."""
        self._kill(self._job.named("holdfast-coord")[0])
        return self.raise_()

    def coordinator_meanwhile(self) -> Seconds:
        """A rank is killed, and the coordinator while the others leave."""
        moment = self.kill()
        self._kill(self._job.named("holdfast-coord")[0])
        return moment


KINDS: dict[str, tuple[int, Callable[[Blows], Seconds]]] = {
    "exception": (40, Blows.raise_),
    "SIGKILL": (15, Blows.kill),
    "SIGKILL from within": (8, Blows.kill_itself),
    "two SIGKILLs": (6, Blows.kill_two),
    "exception, then SIGKILL": (7, Blows.raise_then_kill),
    "SIGKILL, then exception": (7, Blows.kill_then_raise),
    "SIGSTOP": (5, Blows.stop),
    "GIL kept": (2, Blows.gil),
    "mismatched collective": (2, Blows.mismatch),
    "agent": (3, Blows.agent),
    "coordinator": (3, Blows.coordinator),
    "coordinator meanwhile": (2, Blows.coordinator_meanwhile),
}
"""Weight of each kind, and how it is dealt."""


OWN_PROCESSES = {Blows.agent, Blows.coordinator, Blows.coordinator_meanwhile}
OWN_KILLS_A_MINUTE = 4


def measure(setting: Setting, faults: int, seed: int) -> list[Line]:
    storm = _storm(setting, faults, seed)
    if storm.result and not storm.note:
        storm.undisturbed = _undisturbed(setting, int(storm.result.split()[0]))
    return _lines(storm, faults, seed)


def _storm(setting: Setting, faults: int, seed: int) -> Storm:
    storm = Storm()
    memory_before = leftovers.shared_memory()
    try:
        script = [f"--result={setting.folder / 'result'}", f"--saves={setting.folder / 'saves'}"]
        with setting.job(RANKS, script, holdfast(nodes=NODES)) as job:
            try:
                _deal(job, setting, storm, faults, random.Random(seed))
                job.finish(setting.limit)
                storm.result = (setting.folder / "result").read_text().strip()
            finally:
                if job.exit_code() is not None:
                    storm.left_behind = [
                        *leftovers.processes_after(set(job.pids)),
                        *leftovers.unowned_shared_memory(memory_before),
                        *leftovers.socket_files(job.folder),
                    ]
    except JobError as failure:
        storm.note = str(failure)
    return storm


def _deal(
    job: RestartingJob, setting: Setting, storm: Storm, faults: int, draw: random.Random
) -> None:
    blows = Blows(job, setting, draw)
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    job.wait_for_steps(setting.limit)
    for number in range(faults):
        if number == faults // 10:
            blows.spared = job.life(RANKS - 1).pid  # Its agent has never been killed.
            agent = job.agent_of(blows.spared)
            storm.lasting = {"rank": blows.spared, "its agent": agent or 0}
        if number % SAMPLE_EVERY == 0:
            storm.samples.append(resources.sample())
        kind = draw.choices(kinds, weights)[0]
        while blows.wears_out(kind):
            kind = draw.choices(kinds, weights)[0]
        _train_a_while(job, draw.randrange(MOST_STEPS), setting.limit)
        before = [job.life(rank) for rank in range(RANKS)]
        moment = blows.deal(kind)
        try:
            stepped = job.wait_for_steps(setting.limit, after=moment)
        except JobError as failure:
            raise JobError(f"fault {number + 1}, {kind}: {failure}") from None
        reached = max(life.steps[-1] for life in before)
        lives = [job.life(rank) for rank in range(RANKS)]
        pids = [life.pid for life in before]
        replaced = [pid for life, pid in zip(lives, pids, strict=True) if life.pid != pid]
        bystanders = len(set(replaced) - blows.hit)
        redone = max(0, reached + 1 - min(life.steps[0] for life in lives))
        storm.blows.append(Blow(kind, stepped - moment, redone, len(replaced), bystanders))
        if bystanders or redone:
            say(f"fault {number + 1}, {kind}: {storm.blows[-1]}")
        _forget_lives(job, min(life.begun for life in lives))
        if (number + 1) % TELL_EVERY == 0:
            lately = median(blow.seconds for blow in storm.blows[-TELL_EVERY:])
            say(f"{number + 1} of {faults} faults, lately back in {lately:.3f} s")


def _train_a_while(job: RestartingJob, steps: int, limit: Seconds) -> None:
    until = job.life(0).steps[-1] + steps
    job.wait_for(f"step {until}", lambda: job.life(0).steps[-1] >= until, limit)


def _forget_lives(job: RestartingJob, before: Seconds) -> None:
    """Remove the files of entries that are over, so that looking stays cheap."""
    job.marks.close_lives_before(before)
    for path in job.marks.closed():
        path.unlink(missing_ok=True)


def _undisturbed(setting: Setting, steps: int) -> str:
    result = setting.folder / "undisturbed"
    script = [f"--steps={steps}", "--pause-ms=0", f"--result={result}"]
    say(f"an undisturbed run of {steps} steps")
    try:
        with setting.job(RANKS, script) as job:
            job.wait_for_exit(setting.limit + steps * 0.1)
        return result.read_text().strip()
    except JobError as failure:
        return str(failure)


def _lines(storm: Storm, faults: int, seed: int) -> list[Line]:
    by_kind: dict[str, list[Blow]] = defaultdict(list)
    for blow in storm.blows:
        by_kind[blow.kind].append(blow)
    bystanders = sum(blow.bystanders for blow in storm.blows)
    seen = f"seed {seed}" + (f"; {storm.note}" if storm.note else "")
    lines = [count("faults survived", len(storm.blows), faults, seen=seen)]
    same = bool(storm.result) and storm.result == storm.undisturbed
    bits = f"{storm.result or 'no result'}; undisturbed: {storm.undisturbed or 'not run'}"
    lines.append(Line("final parameters bit-equal", float(same), at_least=1.0, seen=bits))
    for kind in KINDS:
        if mine := by_kind.get(kind):
            lines.append(_of_kind(kind, mine))
    lines.append(
        Line(
            "processes replaced that were not hit",
            float(bystanders),
            seen="could not leave in time; perhaps gloo lost a send, see docs/inprocess.md"
            * bool(bystanders),
        )
    )
    redone = sum(blow.redone for blow in storm.blows)
    lines.append(Line("steps redone", float(redone), at_most=0.0))
    lines += _flat(storm)
    behind = ", ".join(storm.left_behind)
    lines.append(Line("left behind", float(len(storm.left_behind)), at_most=0.0, seen=behind))
    return lines


def _of_kind(kind: str, blows: list[Blow]) -> Line:
    times = [blow.seconds for blow in blows]
    seen = (
        f"{len(blows)} times, p90 {percentile(times, 90):.2f} s, max {max(times):.2f} s;"
        f" steps redone at most {max(blow.redone for blow in blows)};"
        f" processes replaced {min(b.replaced for b in blows)}–{max(b.replaced for b in blows)}"
    )
    samples = [asdict(blow) for blow in blows]
    return Line(f"back after: {kind}", median(times), "s", seen=seen, samples=samples)


def _flat(storm: Storm) -> list[Line]:
    """Growth of the processes that lived long enough to tell."""
    found = {one.pid: one for one in resources.growth(storm.samples, FEWEST_SAMPLES)}
    lines = []
    for name, pid in storm.lasting.items():
        one = found.get(pid)
        if one is None:
            lines.append(Line(f"{name}: growth", None, why="it did not live long enough to tell"))
            continue
        seen = f"over {one.samples} samples, {SAMPLE_EVERY} faults apart"
        lines += [
            Line(f"{name}: memory grown", one.rss_mib, "MiB", at_most=8.0, seen=seen),
            Line(f"{name}: threads grown", one.threads, at_most=1.0),
            Line(f"{name}: files grown", one.files, at_most=2.0),
            Line(f"{name}: sockets grown", one.sockets, at_most=2.0),
        ]
    if len(storm.samples) >= 6:
        counts = [len(sample) for sample in storm.samples]
        lines.append(Line("processes grown", resources.grown(counts), at_most=1.0, samples=counts))
    return lines
