"""A fake Slurm: an allocation, jobs and steps in dictionaries, behind the real platform.

It takes the place of Slurm's commands and of the guards of sruns, and outlives its supplier as they do.
What the commands print has the shape that Slurm 22.05 was seen to give it. Hosts beyond the allocation
are never short, so a job that was submitted always runs in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from holdfast.cli.flags import parse_run
from holdfast.errors import PlatformError
from holdfast.messages.supply import RequestId, Sighting
from holdfast.platforms.guards import NodeStart
from holdfast.platforms.opening import NodeOrders
from holdfast.platforms.slurm import SRUN_FAILED, SlurmPlatform
from holdfast.platforms.slurm_commands import failure

ALLOCATION = "17"
JOB = "llm"
STEP_CODES = (0, 1, 7, 75, 134, 137, 143, SRUN_FAILED)
JOB_ENDS = (
    *(("FAILED", "75:0"), ("FAILED", "7:0"), ("FAILED", "0:9"), ("TIMEOUT", "0:15")),
    *(("PREEMPTED", "0:15"), ("NODE_FAIL", "0:0"), ("OUT_OF_MEMORY", "0:125")),
    *(("CANCELLED", "0:15"), ("COMPLETED", "0:0"), ("BOOT_FAIL", "0:1")),
)
AWAY = "scontrol: error: Unable to contact slurm controller (connect failure)"


@dataclass
class FakeStep:
    """An srun with its guard."""

    host: str
    code: int | None = None
    leaving: bool = False

    @property
    def alive(self) -> bool:
        return self.code is None


@dataclass
class FakeJob:
    """A job of one node beyond the allocation."""

    name: str
    state: str = "PENDING"
    code: str = "0:0"
    host: str = ""
    leaving: bool = False

    @property
    def alive(self) -> bool:
        return self.state in ("PENDING", "RUNNING")


class FakeSlurm:
    """The engine: what a supplier that is killed leaves behind."""

    def __init__(self, records: Path, hosts: int = 4) -> None:
        self.faults: Mapping[str, Callable[[Random], None]] = {
            "step ends": self._end_step,
            "host dies": self._kill_host,
            "job ends": self._end_job,
            "preempted": self._end_all,
            "controller away": self._go_away,
            "commands fail": self._fail_some,
            "half submitted": self._submit_half,
            "late sbatch": self._submit_late,
            "slow": self._be_slow,
            "silent": self._say_nothing,
            "forgets": self._forget,
        }
        self.hosts = {f"n{number}": "ALLOCATED" for number in range(1, hosts + 1)}
        self.steps: dict[RequestId, FakeStep] = {}
        self.jobs: dict[int, FakeJob] = {}
        self.run_words: list[tuple[str, ...]] = []
        self.environs: list[Mapping[str, str]] = []
        """Of commands that were given one of their own."""
        self.away = self.half = self.late = self.silent = False
        self.operator = True
        """Whether this user may drain nodes."""
        self.failures = 0
        self.delay_s = 0.0
        self.preempt_time = "None"
        self._last_id = int(ALLOCATION)
        self._hosts = hosts
        self._news: list[asyncio.Event] = []
        self.orders = NodeOrders(
            job=JOB,
            settings=parse_run(["--memory", "1MiB", __file__]),
            command=["/usr/bin/holdfast", "run"],
            environ={"SLURM_JOB_ID": ALLOCATION, "SLURM_NNODES": str(hosts), "HOLDFAST_TOKEN": "t"},
            records=records,
            lifeline=-1,
            limit_s=60.0,
        )

    # ---- an engine of the chaos harness ----

    def open(self) -> SlurmPlatform:
        self._news = []
        return SlurmPlatform(self.orders, FakeCommands(self), FakeSteps(self))

    def nodes(self) -> Sequence[RequestId]:
        steps = [name for name, step in self.steps.items() if step.alive]
        jobs = [job.name for job in self.jobs.values() if job.alive and not self._waits(job)]
        return steps + [name.removeprefix(f"holdfast-{JOB}-") for name in jobs]

    def settle(self) -> None:
        self.away = self.half = self.late = self.silent = False
        self.failures, self.delay_s = 0, 0.0
        for host in [host for host, state in self.hosts.items() if state != "ALLOCATED"]:
            del self.hosts[host]  # Another takes its place: hosts must not run out.
            self._hosts += 1
            self.hosts[f"n{self._hosts}"] = "ALLOCATED"
        for step in self.steps.values():
            if step.leaving and step.alive:
                step.code = 75
        for id, job in self.jobs.items():
            if job.leaving and job.alive:
                job.state, job.code = "CANCELLED", "0:15"
            elif job.state == "PENDING" and not self._waits(job):
                job.state, job.host = "RUNNING", f"x{id}"
        self.tell()

    def _waits(self, job: FakeJob) -> bool:
        """Whether --dependency=singleton holds a job back."""
        older = [one for one in self.jobs.values() if one.name == job.name]
        return any(one.alive for one in older[: older.index(job)])

    def tell(self) -> None:
        if not self.silent:
            for news in self._news:
                news.set()

    def listen(self) -> asyncio.Event:
        self._news.append(asyncio.Event())
        return self._news[-1]

    def submit(self, name: str) -> int:
        self._last_id += 1
        self.jobs[self._last_id] = FakeJob(name)
        return self._last_id

    # ---- faults ----

    def _alive_steps(self, rng: Random, most: int) -> list[FakeStep]:
        alive = [step for step in self.steps.values() if step.alive]
        return rng.sample(alive, min(len(alive), most))

    def _end_step(self, rng: Random) -> None:
        for step in self._alive_steps(rng, 1):
            step.code = rng.choice(STEP_CODES)
        self.tell()

    def _kill_host(self, rng: Random) -> None:
        host = rng.choice(list(self.hosts))
        self.hosts[host] = rng.choice(("DOWN", "DOWN*+DRAIN", "MIXED+NOT_RESPONDING", "DOWN+FAIL"))
        for step in self.steps.values():
            if step.alive and step.host == host:
                step.code = 143
        self.tell()

    def _end_job(self, rng: Random) -> None:
        alive = [job for job in self.jobs.values() if job.alive]
        for job in rng.sample(alive, min(len(alive), 1)):
            job.state, job.code = rng.choice(JOB_ENDS)

    def _end_all(self, rng: Random) -> None:
        for step in self._alive_steps(rng, len(self.steps)):
            step.code = 75
        self.tell()

    def _go_away(self, rng: Random) -> None:
        self.away = True

    def _fail_some(self, rng: Random) -> None:
        self.failures = rng.choice((1, 2, 5))

    def _submit_half(self, rng: Random) -> None:
        self.half = True

    def _submit_late(self, rng: Random) -> None:
        self.late = True

    def _be_slow(self, rng: Random) -> None:
        self.delay_s = rng.choice((0.1, 2.0, 8.0))

    def _say_nothing(self, rng: Random) -> None:
        self.silent = True

    def _forget(self, rng: Random) -> None:
        """Jobs that are over are not listed for ever."""
        for id in [id for id, job in self.jobs.items() if not job.alive]:
            del self.jobs[id]


class FakeSteps:
    """Guards of sruns."""

    def __init__(self, engine: FakeSlurm) -> None:
        self._engine = engine
        self._news = engine.listen()

    def seen(self) -> list[Sighting]:
        return [_sighting(name, step) for name, step in self._engine.steps.items()]

    async def start(self, starts: Sequence[NodeStart]) -> None:
        for start in starts:
            await asyncio.sleep(0.0)
            host = self._engine.hosts[start.host]
            step = FakeStep(start.host, None if host == "ALLOCATED" else SRUN_FAILED)
            self._engine.steps.setdefault(start.wish.id, step)
        self._engine.tell()

    def end(self, requests: Sequence[RequestId]) -> None:
        for request in requests:
            if request in self._engine.steps and self._engine.steps[request].alive:
                self._engine.steps[request].code = 137
                self._engine.tell()

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()

    def hosts_in_use(self) -> set[str]:
        return {step.host for step in self._engine.steps.values() if step.alive}


def _sighting(name: RequestId, step: FakeStep) -> Sighting:
    if step.code is None:
        return Sighting(request=name, status="running", host=step.host)
    status = "failed" if step.code else "succeeded"
    return Sighting(request=name, status=status, code=step.code, host=step.host)  # type: ignore[arg-type]


class FakeCommands:
    """Slurm's commands, as far as the platform uses them; anything else is an error of the test."""

    def __init__(self, engine: FakeSlurm) -> None:
        self._engine = engine

    async def run(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        engine = self._engine
        engine.run_words.append(words)
        if environ is not None:
            engine.environs.append(environ)
        await asyncio.sleep(engine.delay_s)
        if engine.away:
            raise failure(words, AWAY)
        if engine.failures:
            engine.failures -= 1
            raise PlatformError(f"{words[0]}: no answer from Slurm in 30 s")
        match words:
            case ("squeue", "--me", *_):
                return "".join(self._line(id, job) for id, job in engine.jobs.items())
            case ("squeue", "--steps", *_):
                alive = [name for name, step in engine.steps.items() if step.alive]
                lines = [f"{ALLOCATION}.{n}|{name}\n" for n, name in enumerate(alive)]
                return "".join([*lines, f"{ALLOCATION}.batch|batch\n"])
            case ("scontrol", "show", "hostnames", hostlist):
                return "\n".join(hostlist.split(","))
            case ("scontrol", "show", "node", "--oneliner", hosts):
                states = [(host, engine.hosts.get(host, "DOWN")) for host in hosts.split(",")]
                return "".join(f"NodeName={host} State={state}\n" for host, state in states)
            case ("scontrol", "show", "job", "--oneliner", id):
                return self._job(id)
            case ("scontrol", "update", *_):
                if not engine.operator:
                    raise failure(words, "slurm_update error: Invalid user id")
                return ""
            case ("sbatch", "--parsable", name, *_):
                return await self._sbatch(name.partition("=")[2])
            case ("scancel", "--quiet", *ids):
                return self._scancel(ids)
        raise AssertionError(f"the platform runs {words}")

    def _line(self, id: int, job: FakeJob) -> str:
        why = "Dependency" if self._engine._waits(job) else "Resources"
        return f"{id}|{job.state}|{why}|{job.host}|{job.name}\n"

    def _job(self, id: str) -> str:
        if id == ALLOCATION:
            hosts = ",".join(self._engine.hosts)
            return (
                f"JobId={id} JobName=llm JobState=RUNNING Account=(null) QOS=normal "
                f"TimeLimit=1-00:00:00 PreemptTime={self._engine.preempt_time} Partition=gpu "
                f"ExcNodeList=(null) NodeList={hosts} CPUs/Task=1 OverSubscribe=NO "
                "TresPerNode=gres:gpu:8 Power=\n"
            )
        job = self._engine.jobs.get(int(id))
        if job is None:
            raise failure(["scontrol"], "slurm_load_jobs error: Invalid job id specified")
        return f"JobId={id} JobName={job.name} JobState={job.state} ExitCode={job.code}\n"

    async def _sbatch(self, name: str) -> str:
        engine = self._engine
        if engine.late:  # Its process goes on when the supplier is killed.
            asyncio.get_running_loop().call_later(1.0, engine.submit, name)
            await asyncio.sleep(1.5)
            return f"{engine._last_id}\n"
        id = engine.submit(name)
        if engine.half:
            raise PlatformError("sbatch: no answer from Slurm in 30 s")
        return f"{id};cluster\n"

    def _scancel(self, words: Sequence[str]) -> str:
        for word in words:
            if word.startswith(f"{ALLOCATION}."):
                alive = [step for step in self._engine.steps.values() if step.alive]
                number = int(word.partition(".")[2])
                if number < len(alive):
                    alive[number].leaving = True
            elif word.isdecimal() and int(word) in self._engine.jobs:
                self._engine.jobs[int(word)].leaving = True
        if any(word.startswith("--signal") for word in words):  # As 22.05 does.
            raise failure(
                ["scancel"],
                "scancel: error: Kill job error on job step id 17: Invalid job id specified",
            )
        return ""
