"""Starts `holdfast run` for a test, watches it from outside, and leaves nobody behind.

A `Run` is one launcher with its own session, its own HOLDFAST_HOME and a marker in its environment.
Every process of the job inherits the marker, so whoever still has it after the job is a leak: that is
asserted after each test, and each of them is killed whatever the test did.

Conditions are watched in the journal, in /proc and in files that scripts write. Waits are bounded by
`PATIENCE_S`, which only a broken job ever uses up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast import kernel
from holdfast.coordinator.journal import replay
from holdfast.core.job import Job
from holdfast.errors import JournalError

T = TypeVar("T")

PATIENCE_S = 100.0
POLL_S = 0.01
MARKER = "HOLDFAST_TEST_ID"

# What the environment of a machine or of pytest itself must not decide for a test.
_UNWANTED = ("PET_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_", "HOLDFAST_", "PYTEST_", "MASTER_")

TRAINER = """
    import os, sys, time
    import holdfast

    rank = int(os.environ["RANK"])
    kept = f"step_{rank}"
    step = int(open(kept).read()) if os.path.exists(kept) else 0
    until = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 30
    while step < until and not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        with open(kept + ".new", "w") as file:
            file.write(str(step))
        os.replace(kept + ".new", kept)
        holdfast.progress(step)
"""
"""Trains without torch: a step takes 10 ms, and a rank that comes back goes on where it was. It ends
at the step that its argument names, or when there is a file named end."""


def of_the_machine(kind: str) -> bool:
    """Whether an incident tells that this machine is busy, which no test here is about."""
    return kind == "overload"


def wait_for(found: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true answer; a failed test when there is none in time."""
    deadline = time.monotonic() + patience_s
    while not (answer := found()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(POLL_S)
    return answer


class Run:
    """One `holdfast run`, from its start to the last of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = uuid.uuid4().hex
        self.job = f"job-{self.marker[:8]}"
        self.home = folder / "home"
        self.job_home = self.home / "jobs" / self.job
        self.out_file = folder / f"{self.job}.out"
        self.err_file = folder / f"{self.job}.err"
        self.process: subprocess.Popen[bytes] | None = None
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(_UNWANTED)}
        self.env |= {"HOLDFAST_HOME": str(self.home), MARKER: self.marker}

    # ---- starting ----

    def write(self, text: str, name: str = "train.py") -> str:
        """A script in the job's working directory; its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def without_torch(self) -> None:
        """Let torch look absent, so that standbys are there at once."""
        blocked = self.folder / "blocked"
        blocked.mkdir(exist_ok=True)
        (blocked / "torch.py").write_text("raise ImportError('this test goes without torch')\n")
        paths = [str(blocked), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env["PYTHONPATH"] = os.pathsep.join(paths)

    def start(
        self,
        *words: str,
        nproc: int = 2,
        job: str | None = None,
        env: Mapping[str, str] | None = None,
        command: Iterable[str] = (sys.executable, "-m", "holdfast", "run"),
        **more: Any,
    ) -> Run:
        """`holdfast run` with these words after the number of ranks and the job's name."""
        flags = ["--nproc-per-node", str(nproc), "--job", job or self.job]
        return self.start_raw([*command, *flags, *words], env, **more)

    def start_raw(
        self, command: list[str], env: Mapping[str, str] | None = None, **more: Any
    ) -> Run:
        with open(self.out_file, "wb") as out, open(self.err_file, "wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, **(env or {})},
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **more},
            )
        return self

    def train(
        self, *flags: str, script: str = TRAINER, args: Iterable[str] = (), **more: Any
    ) -> Run:
        """Start a script of this text (the trainer unless given) without paying for torch."""
        self.without_torch()
        return self.start(*flags, self.write(script), *args, **more)

    # ---- what the user sees ----

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def code(self, patience_s: float = PATIENCE_S) -> int:
        """The launcher's exit code."""
        assert self.process is not None
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {patience_s:g} s") from None

    @property
    def out(self) -> str:
        return self.out_file.read_bytes().decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self.err_file.read_bytes().decode("utf-8", "replace")

    @property
    def own_lines(self) -> list[str]:
        """What holdfast itself said on the terminal."""
        return [line for line in self.err.splitlines() if line.startswith(("[holdfast]", "hold"))]

    def ask(self, command: str, *words: str) -> Any:
        """What `holdfast COMMAND JOB --json` says; of incidents, those that are the job's."""
        plain = (command, words) == ("incidents", ())
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", command, self.job, "--json", *words],
            env={k: v for k, v in self.env.items() if k != MARKER},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return [one for one in answer if not of_the_machine(one["kind"])] if plain else answer

    def log(self, rank: int, round: int = 1) -> bytes:
        return (self.job_home / "logs" / f"round_{round}" / f"rank_{rank}.log").read_bytes()

    # ---- watching ----

    def peek(self) -> Job | None:
        """The job as the journal has it now, without what a busy machine did to it."""
        try:
            snapshot = replay(self.job_home / "journal.db")
        except JournalError:
            return None
        if snapshot is None:
            return None
        incidents = snapshot.job.incidents
        incidents[:] = [one for one in incidents if not of_the_machine(one.kind)]
        return snapshot.job

    def until(self, found: Callable[[Job], Any], what: str) -> Job:
        """Wait until the journal tells of it."""

        def look() -> Job | None:
            job = self.peek()
            if job is not None and found(job):
                return job
            assert self.process is not None
            code = self.process.poll()
            assert code is None, f"the job ended with {code} before {what}"
            return None

        return wait_for(look, what)

    def until_stepping(self, round: int = 1, nodes: int | None = None) -> Job:
        """Wait until every rank of that round (or a later one), of so many nodes if that is said, has
        finished a step."""
        return self.until(
            lambda job: (
                job.membership.round >= round
                and job.state.name == "running"
                and not job.unstepped
                and (nodes is None or (job.world is not None and len(job.world.places) == nodes))
            ),
            f"a step of every rank in round {round}, nodes: {nodes or 'any'}",
        )

    def until_standbys(self, count: int) -> list[int]:
        """Wait until that many wait for a rank; their pids."""
        self.until_stepping()
        return wait_for(
            lambda: found if len(found := self.standbys()) >= count else [], f"{count} standbys"
        )

    def rank_pid(self, rank: int) -> int:
        job = self.peek()
        assert job is not None
        return job.ranks[rank].pid  # type: ignore[index]

    def agent(self) -> int:
        return wait_for(lambda: self._child("holdfast-agent"), "the agent")

    def coordinator(self) -> int:
        return wait_for(lambda: self._child("holdfast-coord"), "the coordinator")

    def _child(self, name: str) -> int | None:
        return next((pid for pid in kernel.children(self.pid) if _comm(pid) == name), None)

    def nursery(self) -> int:
        return wait_for(
            lambda: next((pid for pid in self._waiting() if not _has_page(pid)), 0), "the nursery"
        )

    def standbys(self) -> list[int]:
        return [pid for pid in self._waiting() if _has_page(pid)]

    def _waiting(self) -> list[int]:
        """The agent's children that have no rank."""
        agent, job = self._child("holdfast-agent"), self.peek()
        ranks = {rank.pid for rank in job.ranks.values()} if job is not None else set()
        found = kernel.children(agent) if agent else []
        return [pid for pid in found if pid not in ranks and b"holdfast.worker" in cmdline(pid)]

    # ---- acting ----

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def kill_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.rank_pid(rank)
        os.kill(pid, number)
        return pid

    def end(self) -> None:
        """Let the trainer come to its end."""
        (self.folder / "end").touch()

    # ---- leaving nobody behind ----

    def alive(self) -> dict[int, str]:
        """Every process that carries this run's marker, and its command line."""
        wanted = f"{MARKER}={self.marker}".encode()
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found[int(entry)] = cmdline(int(entry)).replace(b"\0", b" ").decode()
        return found

    def assert_nobody_left(self, patience_s: float = 20.0) -> None:
        """No process of the job lives on; they may take a moment to be gone."""
        deadline = time.monotonic() + patience_s
        while left := self.alive():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(POLL_S)

    def close(self) -> None:
        """End every process of the run, whatever state it is in."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.alive()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        if self.process is not None:
            self.process.wait(PATIENCE_S)

    def story(self) -> str:
        """All that a failed test should show."""
        parts = [f"job {self.job}, marker {self.marker}, alive {self.alive()}"]
        logs = sorted(self.job_home.glob("logs/**/*.log"))
        for path in [self.out_file, self.err_file, *logs]:
            if path.exists():
                text = path.read_bytes()[-6000:].decode("utf-8", "backslashreplace")
                parts.append(f"---- {path}\n{text}")
        return "\n".join(parts)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _has_page(pid: int) -> bool:
    """Only a process that is or will be a rank has a progress page."""
    try:
        return "holdfast-rank-page" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def gone(pid: int) -> bool:
    """Whether a process has ended: no such process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
